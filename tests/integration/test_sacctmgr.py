"""`sacctmgr` as people start it: a process, on a real database. What it stores, and what it refuses."""

import json
import os
import pty
import pwd
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

SACCTMGR = Path(sys.executable).with_name("sacctmgr")
ME = pwd.getpwuid(os.getuid()).pw_name

Result = subprocess.CompletedProcess[str]
Run = Callable[..., Result]


@pytest.fixture
def db(database_url: str) -> Iterator[psycopg.Connection[dict[str, Any]]]:
    with psycopg.connect(database_url, autocommit=True, row_factory=dict_row) as connection:
        yield connection


@pytest.fixture
def run(database_url: str) -> Run:
    def start(*words: str, url: str = database_url) -> Result:
        return subprocess.run(
            [SACCTMGR, *words],
            env={"PATH": os.environ["PATH"], "SPUR_EVENTS_DATABASE_URL": url, "SUDO_USER": "mallory"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return start


@pytest.fixture
def ok(run: Run) -> Run:
    def start(*words: str) -> Result:
        result = run(*words)
        assert result.returncode == 0, result.stderr
        assert result.stderr == ""
        return result

    return start


def rows(db: psycopg.Connection[dict[str, Any]], query: str) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in db.execute(query.encode())]


def everything(db: psycopg.Connection[dict[str, Any]]) -> list[list[tuple[Any, ...]]]:
    tables = ("accounts", "users", "associations", "txn", "spur_events.outbox", "spur_events.memberships")
    return [rows(db, f"select * from {table} order by 1, 2") for table in tables]


def refused(result: Result, code: int, *parts: str) -> None:
    assert result.returncode == code, result.stderr
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr
    for part in parts:
        assert part in result.stderr


def test_the_five_minutes_of_the_readme(ok: Run, db: psycopg.Connection[dict[str, Any]]) -> None:
    ok("-i", "add", "account", "name=physics", "description=Physics", "grptres=cpu=64,mem=131072,gres/gpu=8")
    ok("-i", "add", "user", "name=alice", "account=physics")
    assert rows(
        db,
        "select name, description, parent_account, fairshare_weight, max_running_jobs, grp_tres from accounts",
    ) == [("physics", "Physics", None, 1, None, "cpu=64,mem=131072,gres/gpu=8")]
    assert rows(db, "select name, account, admin_level, default_account from users") == [
        ("alice", "physics", "none", "physics")
    ]
    assert "physics" in ok("show", "account").stdout
    assert ok("-nP", "show", "user", "format=user,account,admin").stdout == "alice|physics|None\n"
    ok("-i", "modify", "account", "physics", "set", "grptres=cpu=128")
    ok("-i", "delete", "user", "name=alice", "account=physics")
    ok("-i", "delete", "account", "name=physics")
    assert rows(db, "select * from accounts") == []
    assert rows(db, "select kind, account, user_name from spur_events.outbox order by id") == [
        ("account_added", "physics", ""),
        ("member_added", "physics", "alice"),
        ("account_changed", "physics", ""),
        ("member_removed", "physics", "alice"),
        ("account_deleted", "physics", ""),
    ]


def test_the_actor_is_who_we_are_and_not_who_we_say(ok: Run, db: psycopg.Connection[dict[str, Any]]) -> None:
    ok("-i", "add", "account", "physics")
    assert rows(db, "select database_user, os_user, application from spur_events.outbox") == [
        (db.info.user, ME, "sacctmgr")
    ]
    assert rows(
        db, "select actor, actor_uid, verified, action, entity_type, entity_name, outcome from txn"
    ) == [(ME, os.getuid(), False, "add", "account", "physics", "success")]


def test_modify_is_a_patch(ok: Run, db: psycopg.Connection[dict[str, Any]]) -> None:
    """C18."""
    ok("-i", "add", "account", "a", "desc=D", "org=O", "grptres=cpu=4,mem=100", "fairshare=3", "maxjobs=5")
    columns = "select description, organization, fairshare_weight, max_running_jobs, grp_tres from accounts"
    ok("-i", "modify", "account", "a", "set", "fairshare=2")
    assert rows(db, columns) == [("D", "O", 2, 5, "cpu=4,mem=100")]
    assert len(rows(db, "select * from spur_events.outbox")) == 1
    ok("-i", "modify", "account", "a", "set", "maxjobs=-1", "desc=", "fairshare=-1")
    assert rows(db, columns) == [("", "O", 1, None, "cpu=4,mem=100")]


def test_limits_are_merged_one_by_one(ok: Run, db: psycopg.Connection[dict[str, Any]]) -> None:
    """C15, C19: zero, cleared and absent stay apart."""
    ok("-i", "add", "account", "name=zero,none,cleared")
    ok("-i", "modify", "account", "zero", "set", "grptres=cpu=4,gres/gpu=0")
    ok("-i", "modify", "account", "cleared", "set", "grptres=gpu=8,cpu=4")
    ok("-i", "modify", "account", "cleared", "set", "grptres=gres/gpu=-1")
    stored = "select name, grp_tres from accounts order by name"
    assert rows(db, stored) == [("cleared", "cpu=4"), ("none", None), ("zero", "cpu=4,gres/gpu=0")]
    ok("-i", "modify", "account", "cleared", "set", "grptres=cpu=-1")
    assert rows(db, stored)[0] == ("cleared", "cpu=-1")


def test_malformed_stored_limits_are_replaced_whole_and_said(
    ok: Run, db: psycopg.Connection[dict[str, Any]]
) -> None:
    ok("-i", "add", "account", "a", "grptres=mem=5")
    db.execute("update accounts set grp_tres = 'cpu=lots,mem=5'")
    result = ok("-i", "modify", "account", "a", "set", "grptres=cpu=4")
    assert "'cpu=lots,mem=5' was malformed" in result.stdout
    assert "replaced whole by 'cpu=4'" in result.stdout
    assert rows(db, "select grp_tres from accounts") == [("cpu=4",)]


def test_names_are_stored_in_lower_case(ok: Run, run: Run, db: psycopg.Connection[dict[str, Any]]) -> None:
    """C25."""
    ok("-i", "add", "account", "name=TEST")
    ok("-i", "add", "user", "name=Alice", "account=test")
    refused(run("-i", "add", "account", "Test"), 1, "Already existing", "'test'")
    assert rows(db, "select name, account from users") == [("alice", "test")]
    assert ok("-nP", "show", "account", "tEst", "format=account").stdout == "test\n"


@pytest.mark.parametrize(
    "name", ["_lab", "-lab", "lab-", "9lab", "___", "a.b", "a b", "*", ">", "a..b", "ä", "😀"]
)
def test_odd_names_are_stored_as_they_are(ok: Run, db: psycopg.Connection[dict[str, Any]], name: str) -> None:
    """C24, C27: each has a namespace of its own, so none needs to be refused."""
    ok("-i", "add", "account", f"name={name}")
    ok("-i", "add", "user", f"name={name}", f"account={name}")
    assert rows(db, "select name, account from users") == [(name, name)]
    ok("-i", "delete", "account", f"name={name}")
    assert rows(db, "select name from accounts") == []


BAD = [
    (2, ["add", "account", "x", "color=red"], ["'color'", "known are"]),
    (2, ["add", "cluster", "x"], ["'cluster'", "account, user"]),
    (2, ["add", "account", "x", "grptres=cpu=abc"], ["'cpu=abc'", "whole number"]),
    (2, ["add", "account", "x", "grptres=cpu=-5"], ["'cpu=-5'", "cpu=-1"]),
    (2, ["add", "account", "x", "grptres=cpu=1.5"], ["'cpu=1.5'"]),
    (2, ["add", "account", "x", "grptres=cpu="], ["'cpu='", "no value"]),
    (2, ["add", "account", "x", "grptres="], ["grptres=", "cpu=-1"]),
    (2, ["add", "account", "x", "grptres=mem=1G"], ["'mem=1G'", "MB", "mem=1024"]),
    (2, ["add", "account", "x", "grptres=cpu=4,cpu=8"], ["'cpu=8'", "twice"]),
    (2, ["add", "account", "x", "grptres=foo=3"], ["'foo=3'", "known are"]),
    (2, ["add", "account", "x", "grptres=cpu=99999999999999999999"], ["64 bits"]),
    (2, ["add", "account", "x", "desc=a", "desc=b"], ["twice"]),
    (2, ["add", "account", "x", "fairshare=99999999999"], ["out of range", "2147483647"]),
    (2, ["add", "account", "name="], ["name="]),
    (2, ["add", "account", "name=,"], ["empty"]),
    (2, ["add", "account", "name=" + "x" * 256], ["256", "255"]),
    (2, ["add", "user", "name=" + "x" * 256, "account=bio"], ["256", "255"]),
    (2, ["add", "account", "name=a\nb"], ["U+000A"]),
    (2, ["add", "user", "name=u"], ["account=NAME"]),
    (2, ["add", "user", "name=u", "account=nope"], ["'nope'", "sacctmgr add account name=nope"]),
    (2, ["add", "user", "name=u", "account=bio,nope"], ["'nope'"]),
    (1, ["add", "user", "name=alice", "account=bio"], ["Already existing", "'alice'"]),
    (1, ["add", "account", "bio"], ["Already existing", "'bio'", "modify"]),
    (2, ["add", "account", "x", "parent=nope"], ["unknown parent account 'nope'"]),
    (2, ["modify", "account", "bio", "set", "parent=lab"], ["below itself"]),
    (2, ["modify", "account", "bio", "set", "parent=bio"], ["below itself"]),
    (1, ["modify", "account", "bio,nope", "set", "desc=x"], ["'nope'", "Nothing modified"]),
    (2, ["modify", "account", "bio", "set", "name=biology"], ["cannot be renamed"]),
    (1, ["modify", "user", "alice", "set", "defaultaccount=lab"], ["not in account 'lab'"]),
    (1, ["modify", "user", "nobody", "set", "adminlevel=operator"], ["'nobody'", "Nothing modified"]),
    (1, ["delete", "account", "nope"], ["'nope'", "Nothing deleted"]),
    (1, ["delete", "account", "bio"], ["parent of 'lab'", "Nothing deleted"]),
    (1, ["delete", "user", "nobody"], ["'nobody'", "Nothing deleted"]),
    (1, ["delete", "user", "alice", "account=lab"], ["not in account 'lab'", "Nothing deleted"]),
    (2, ["delete", "user"], ["no name"]),
]


@pytest.mark.parametrize(("code", "words", "parts"), BAD, ids=[" ".join(words)[:60] for _, words, _ in BAD])
def test_bad_input_stores_nothing(
    run: Run, db: psycopg.Connection[dict[str, Any]], code: int, words: list[str], parts: list[str]
) -> None:
    db.execute(
        "insert into accounts (name, parent_account, grp_tres) values ('bio', null, 'cpu=1'), ('lab', 'bio', null)"
    )
    db.execute("insert into users (name, account, default_account) values ('alice', 'bio', 'bio')")
    before = everything(db)
    refused(run("-i", *words), code, *parts)
    assert everything(db) == before


def test_name_that_is_not_utf8_is_refused(database_url: str) -> None:
    result = subprocess.run(
        [os.fsencode(SACCTMGR), b"-i", b"add", b"account", b"name=\xff"],
        env={"SPUR_EVENTS_DATABASE_URL": database_url, "LC_ALL": "C.UTF-8"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 2
    assert b"U+DCFF" in result.stderr


def test_longest_name_and_quotes_are_stored(ok: Run, db: psycopg.Connection[dict[str, Any]]) -> None:
    name = "x" * 255
    ok("-i", "add", "account", f"name={name}", "description='; drop table users; -- %s")
    assert rows(db, "select name, description from accounts") == [(name, "'; drop table users; -- %s")]


def test_without_terminal_and_without_i_nothing_is_done(
    run: Run, db: psycopg.Connection[dict[str, Any]]
) -> None:
    before = everything(db)
    refused(run("add", "account", "x"), 2, "-i")
    refused(run("-ir", "add", "account", "x"), 2, "-r")
    assert everything(db) == before


@pytest.mark.parametrize(("answer", "stored", "code"), [("y\n", [("x",)], 0), ("N\n", [], 1), ("\n", [], 1)])
def test_question_on_a_terminal(
    database_url: str,
    db: psycopg.Connection[dict[str, Any]],
    answer: str,
    stored: list[tuple[str]],
    code: int,
) -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [SACCTMGR, "add", "account", "x"],
        env={"SPUR_EVENTS_DATABASE_URL": database_url},
        stdin=theirs,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        os.close(theirs)
        os.write(ours, answer.encode())
        output = process.communicate(timeout=60)[0]
    os.close(ours)
    assert process.returncode == code
    assert "Adding Account(s)\n  x\n" in output
    assert "Would you like to commit changes? (You have 30 seconds to decide)\n(N/y): " in output
    assert ("Changes Discarded" in output) == (code == 1)
    assert rows(db, "select name from accounts") == stored


def test_removing_the_default_account_moves_it(ok: Run, db: psycopg.Connection[dict[str, Any]]) -> None:
    """C48."""
    ok("-i", "add", "account", "name=physics,bio")
    ok("-i", "add", "user", "alice", "account=physics,bio", "adminlevel=operator")
    defaults = "select account, default_account, admin_level from users order by account"
    assert rows(db, defaults) == [("bio", None, "operator"), ("physics", "physics", "operator")]
    assert "now 'bio'" in ok("-i", "delete", "user", "alice", "account=physics").stdout
    assert rows(db, defaults) == [("bio", "bio", "operator")]
    ok("-i", "add", "user", "alice", "account=physics")
    assert rows(db, defaults) == [("bio", "bio", "operator"), ("physics", None, "operator")]
    ok("-i", "modify", "user", "alice", "set", "defaultaccount=physics", "adminlevel=none")
    assert rows(db, defaults) == [("bio", None, "none"), ("physics", "physics", "none")]
    ok("-i", "delete", "account", "physics")
    assert rows(db, defaults) == [("bio", "bio", "none")]
    ok("-i", "delete", "user", "alice")
    assert rows(db, defaults) == []


def test_user_can_be_added_with_another_default(ok: Run, db: psycopg.Connection[dict[str, Any]]) -> None:
    ok("-i", "add", "account", "name=a,b,c")
    ok("-i", "add", "user", "u", "account=a")
    result = ok("-i", "add", "user", "u,v", "account=a,b", "defaultaccount=b")
    assert "Already existing user 'u' in 'a', left as it is" in result.stdout
    assert rows(db, "select name, account, default_account from users order by 1, 2") == [
        ("u", "a", None),
        ("u", "b", "b"),
        ("v", "a", None),
        ("v", "b", "b"),
    ]
    ok("-i", "add", "user", "u", "account=c", "defaultaccount=a")
    assert rows(db, "select account from users where name = 'u' and default_account is not null") == [("a",)]


def test_deleting_an_account_takes_members_and_associations_along(
    ok: Run, db: psycopg.Connection[dict[str, Any]]
) -> None:
    ok("-i", "add", "account", "a")
    ok("-i", "add", "account", "b", "parent=a")
    ok("-i", "add", "user", "u", "account=a,b")
    db.execute("insert into associations (user_name, account) values ('u', 'a'), ('u', 'b')")
    ok("-i", "delete", "account", "b")
    assert rows(db, "select account from associations") == [("a",)]
    ok("-i", "add", "account", "b", "parent=a")
    ok("-i", "delete", "account", "name=a,b")  # a parent together with its children
    assert everything(db)[:3] == [[], [], []]


def test_some_of_several_exist(ok: Run, db: psycopg.Connection[dict[str, Any]]) -> None:
    ok("-i", "add", "account", "a", "desc=first")
    assert "Already existing account 'a'" in ok("-i", "add", "account", "a,b", "desc=second").stdout
    assert rows(db, "select name, description from accounts order by 1") == [("a", "first"), ("b", "second")]


def test_show_filters_and_json(ok: Run) -> None:
    ok("-i", "add", "account", "name=a,b", "grptres=cpu=4")
    ok("-i", "add", "user", "u", "account=a,b")
    ok("-i", "add", "user", "v", "account=b")
    shown = json.loads(ok("--json", "show", "account", "b").stdout)
    assert [(account["name"], account["members"], account["limits"]) for account in shown["accounts"]] == [
        ("b", ["u", "v"], {"cpu": 4})
    ]
    assert json.loads(ok("--json", "show", "user", "account=a").stdout) == {
        "users": [{"name": "u", "default_account": "a", "admin_level": "none", "accounts": ["a", "b"]}]
    }
    assert ok("-nP", "show", "user", "nobody").stdout == ""
    assert (
        ok("-nP", "show", "account", "withassoc", "format=account,user").stdout == "a|\na|u\nb|\nb|u\nb|v\n"
    )


def test_database_not_reachable(run: Run) -> None:
    for words in (["-i", "add", "account", "x"], ["show", "account"]):
        result = run(*words, url="postgresql://u:secret@127.0.0.1:1/spur")
        refused(result, 1, "127.0.0.1:1", "SPUR_EVENTS_DATABASE_URL")
        assert "secret" not in result.stderr


def test_database_url_that_is_none(run: Run) -> None:
    refused(run("show", "account", url="hello"), 1, "SPUR_EVENTS_DATABASE_URL")


def test_database_that_is_not_migrated(run: Run, empty_database_url: str) -> None:
    for words in (["-i", "add", "account", "x"], ["show", "account"]):
        refused(run(*words, url=empty_database_url), 1, "spur-events db migrate")


def test_role_without_rights_is_told(
    run: Run, db: psycopg.Connection[dict[str, Any]], database_url: str
) -> None:
    role = f"reader_{db.info.dbname}"
    db.execute(f"create role {role} login password 'x'".encode())
    try:
        url = f"postgresql://{role}:x@{db.info.host}:{db.info.port}/{db.info.dbname}"
        refused(run("-i", "add", "account", "x", url=url), 1, "permission denied", "lacks a right")
    finally:
        db.execute(f"drop role {role}".encode())
    assert database_url


def test_help_needs_no_database(run: Run) -> None:
    for words in (["--help"], ["help"], ["-h"]):
        result = run(*words, url="")
        assert result.returncode == 0
        assert "Usage: sacctmgr" in result.stdout
    assert run("--version", url="").stdout.startswith("sacctmgr (spur-events) ")


def test_help_imports_neither_driver_nor_settings() -> None:
    code = (
        "import sys; from spur_events.producers.sacctmgr import main; main.run(['--help']);"
        "heavy = ('psycopg', 'pydantic', 'nats', 'kubernetes_asyncio', 'typer');"
        "print([name for name in heavy if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.endswith("[]\n")


def test_many_commands_at_once_leave_one_default_each(
    database_url: str, ok: Run, db: psycopg.Connection[dict[str, Any]]
) -> None:
    ok("-i", "add", "account", "name=a,b,c,d")
    processes = [
        subprocess.Popen(
            [SACCTMGR, "-i", "add", "user", "name=u,v", f"account={account}"],
            env={"SPUR_EVENTS_DATABASE_URL": database_url},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        for account in "abcd"
    ]
    assert [process.wait(60) for process in processes] == [0, 0, 0, 0]
    assert rows(
        db, "select name, count(*), count(default_account) as defaults from users group by name order by 1"
    ) == [
        ("u", 4, 1),
        ("v", 4, 1),
    ]
