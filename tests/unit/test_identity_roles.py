"""The declaration of accounts and roles: whole, and never more than is written down."""

import re

import pytest

from spur_events import cli
from spur_events.identity import roles
from spur_events.jetstream import signin, topology
from spur_events.schemas import subjects

ALL = [role for account in roles.accounts().values() for role in account["roles"]]
_TEMPLATE = re.compile(r"\{\{([^}]*)\}\}")


def subjects_of(role: str) -> list[str]:
    permissions = roles.permissions(role)
    return [entry for side in ("pub", "sub") for entry in permissions[side].get("allow", [])]


def test_every_part_has_a_role_and_no_role_is_declared_twice() -> None:
    assert len(ALL) == len(set(ALL))
    assert set(roles.PARTS) <= set(ALL)
    assert {str(part) for part in cli.Part} - {"all"} <= set(ALL)


@pytest.mark.parametrize("role", ALL)
def test_nothing_is_allowed_by_an_empty_list(role: str) -> None:
    """To the server an empty list of what is allowed means everything."""
    for side in ("pub", "sub"):
        permissions = roles.permissions(role)[side]
        assert permissions.get("allow") or permissions.get("deny") == [">"]


@pytest.mark.parametrize("role", ALL)
def test_no_role_may_everything(role: str) -> None:
    too_much = {">", "*", "*.>", "$JS.>", "$JS.API.>", "$KV.>", "$SYS.>", "spur.>", "_INBOX.>", "_R_.>"}
    assert not too_much & set(subjects_of(role))
    assert not any("@" in entry for entry in subjects_of(role)), "a group is left"


@pytest.mark.parametrize("role", [role for role in ALL if role != "sentinel"])
def test_everybody_reads_the_own_inbox_alone(role: str) -> None:
    inboxes = [entry for entry in roles.permissions(role)["sub"]["allow"] if "INBOX" in entry]
    assert inboxes == [f"{signin.INBOX}{{{{name()}}}}.>"]


@pytest.mark.parametrize("part", roles.PARTS)
def test_a_parts_user_has_the_tags_that_its_template_asks_for(part: str) -> None:
    asked = {inner for entry in subjects_of(part) for inner in _TEMPLATE.findall(entry)}
    tags = roles.tags(part, "alpha", 4)
    given = {tag.partition(":")[0] for tag in tags}
    assert {inner[4:-1] for inner in asked if inner.startswith("tag(")} == given - {"role"}
    assert tags[0] == f"role:{part}"
    assert (roles.user_name(part, "alpha") == part) == (part not in roles.OF_A_CLUSTER)


def test_the_durables_of_a_cluster_are_named_one_by_one() -> None:
    durables = [tag for tag in roles.tags("apply", "alpha", 3) if tag.startswith("durable:")]
    assert durables == [f"durable:{subjects.durable('alpha', number)}" for number in range(3)]


def test_nobody_asks_for_direct_answers_where_somebody_but_the_relay_writes() -> None:
    """See Bus.get: the server would copy what a part wrote there to wherever it likes."""
    direct = {entry for role in ALL for entry in subjects_of(role) if ".DIRECT.GET." in entry}
    assert direct
    assert all(entry.startswith("$JS.API.DIRECT.GET.KV_spur-accounts.") for entry in direct)
    writers = [role for role in ALL for entry in subjects_of(role) if entry.startswith("$KV.spur-accounts")]
    assert writers == ["relay"]


def test_the_streams_are_those_of_the_topology() -> None:
    streams = {stream["name"] for stream in topology.declared()["streams"]}
    assert set(roles.declared()["groups"]["all-streams"]) == streams


def test_what_signin_reads_is_what_a_plain_user_carries() -> None:
    assert f"{roles.ROLE_TAG}{roles.USER}" == signin.USER_TAG
