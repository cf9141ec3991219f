"""Tables as Slurm prints them, parsable text, JSON."""

import json

from spur_events.producers import changes
from spur_events.producers.sacctmgr import columns, commands, output

ACCOUNTS = [
    changes.Account(
        name="physics",
        description="Physics\x1b[31m",
        organization="",
        parent="",
        grptres="cpu=64,mem=131072",
        fairshare=1,
        max_jobs=None,
        members=("alice",),
    ),
    changes.Account(
        name="a-name-longer-than-ten",
        description="",
        organization="",
        parent="physics",
        grptres="cpu=x",
        fairshare=2,
        max_jobs=7,
        members=(),
    ),
]


def table(format_: str, style: commands.Style = commands.Style.TABLE, *, header: bool = True) -> list[str]:
    fields = columns.account_fields(format_, associations=False)
    found = output.account_rows(ACCOUNTS, associations=False)
    return output.table(fields, found, commands.Options(style=style, header=header))


def test_table_is_laid_out_as_slurm_does() -> None:
    assert table("account,descr%-11,maxjobs") == [
        "   Account Descr       MaxJobs ",
        "---------- ----------- ------- ",
        "   physics Physics?[3+         ",
        "a-name-lo+                   7 ",
    ]


def test_no_header() -> None:
    assert table("account%22", header=False) == ["               physics ", "a-name-longer-than-ten "]


def test_parsable_styles_cut_nothing() -> None:
    assert table("account,parent", commands.Style.PARSABLE) == [
        "Account|Par Name|",
        "physics|root|",
        "a-name-longer-than-ten|physics|",
    ]
    assert table("account,share", commands.Style.PARSABLE2, header=False) == [
        "physics|1",
        "a-name-longer-than-ten|2",
    ]


def test_associations_follow_their_account() -> None:
    rows = output.account_rows(ACCOUNTS, associations=True)
    assert [(row["account"], row.get("user", "")) for row in rows] == [
        ("physics", ""),
        ("physics", "alice"),
        ("a-name-longer-than-ten", ""),
    ]
    user = changes.User(name="u", default_account="a", admin_level="none", accounts=("a", "b"))
    assert [row["account"] for row in output.user_rows([user], associations=True)] == ["a", "b"]
    assert [row["accounts"] for row in output.user_rows([user], associations=False)] == ["a,b"]


def test_json_tells_malformed_from_absent() -> None:
    first, second = json.loads(output.accounts_json(ACCOUNTS))["accounts"]
    assert first["limits"] == {"cpu": 64, "mem": 131072}
    assert first["parent"] is None
    assert second["limits"] is None
    assert second["grptres"] == "cpu=x"
