"""Who gets a token, by what was read: every question with its yes and its noes."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from spur_events.consumers.plan import access, marks
from spur_events.schemas import accounts, names
from spur_events.schemas.access import GuardState, KubeconfigRequest, RefusalCode
from spur_events.schemas.accounts import AccountState, Deletion, Member, Revision
from spur_events.schemas.status import AccountStatus, Phase, RelayStatus

NOW = datetime(2026, 12, 1, 12, tzinfo=UTC)
ME = "installation"


def state(**changes: Any) -> AccountState:
    given: dict[str, Any] = {
        "installation": ME,
        "revision": Revision(1, 5),
        "name": "physics",
        "incarnation": "i",
        "members": (Member(name="alice", generation="g"), Member(name="Bob", generation="h")),
    }
    return AccountState(**(given | changes))


def beat(age_s: float, installation: str = ME) -> RelayStatus:
    at = NOW - timedelta(seconds=age_s)
    return RelayStatus(installation=installation, epoch=1, host="h", pid=1, at=at, revision=1)


def status(phase: Phase, wanted: int = 5, applied: int = 5) -> AccountStatus:
    return AccountStatus(
        cluster="west",
        name="physics",
        installation=ME,
        wanted=Revision(1, wanted),
        applied=Revision(1, applied),
        phase=phase,
        reason="why",
        since=NOW,
        namespace="spur-acct-physics",
    )


def mine(*found: str, default: str = "") -> list[access.Membership]:
    return [access.Membership(name=name, is_default=name == default) for name in found]


def code_of(error: pytest.ExceptionInfo[access.DeniedError]) -> RefusalCode:
    return error.value.refusal.code


@pytest.mark.parametrize("user", ["", "Alice", "a.b", "a b", "*", ">", "-a", "a" * 54, "ä", "a\n"])
def test_what_is_no_slug_is_nobody(user: str) -> None:
    with pytest.raises(access.DeniedError) as error:
        access.check_request(user, KubeconfigRequest())
    assert code_of(error) is RefusalCode.BAD_REQUEST


@pytest.mark.parametrize("user", ["alice", "a", "9", names.slug("Alice.Smith"), "a" * 53])
def test_slugs(user: str) -> None:
    access.check_request(user, KubeconfigRequest(account="x" * 256))


def test_a_relay_that_lives() -> None:
    for age_s in (0, 59.9, -59):
        access.check_relay(beat(age_s), ME, NOW)


@pytest.mark.parametrize(
    ("found", "words"),
    [(None, "never"), (beat(60.5), "60 s ago"), (beat(1, "other"), "never"), (beat(-61), "clock")],
)
def test_a_relay_that_does_not(found: RelayStatus | None, words: str) -> None:
    with pytest.raises(access.DeniedError, match=words) as error:
        access.check_relay(found, ME, NOW)
    assert code_of(error) is RefusalCode.RELAY_SILENT


@pytest.mark.parametrize(
    ("found", "wanted", "chosen"),
    [
        (mine("bio"), "", "bio"),
        (mine("bio", "lab", default="lab"), "", "lab"),
        (mine("bio", "lab", default="lab"), "bio", "bio"),
        (mine("bio", "lab"), "LAB", "lab"),
        (mine("Phys Lab"), names.slug("Phys Lab"), "Phys Lab"),
        # A name goes before a slug, and what is written so before what would be stored so.
        (mine("LAB", "lab"), "LAB", "LAB"),
    ],
)
def test_the_account_that_is_meant(found: list[access.Membership], wanted: str, chosen: str) -> None:
    assert access.choose("alice", found, wanted).name == chosen


@pytest.mark.parametrize(
    ("found", "wanted", "code"),
    [
        ([], "", RefusalCode.UNKNOWN_USER),
        ([], "lab", RefusalCode.UNKNOWN_USER),
        (mine("bio"), "lab", RefusalCode.NOT_A_MEMBER),
        (mine("bio", "lab"), "", RefusalCode.ACCOUNT_NEEDED),
    ],
)
def test_no_account_is_meant(found: list[access.Membership], wanted: str, code: RefusalCode) -> None:
    with pytest.raises(access.DeniedError) as error:
        access.choose("alice", found, wanted)
    assert code_of(error) is code


def test_the_member() -> None:
    assert access.member_in(state(), names.slug("Bob"), "physics", ME).generation == "h"


@pytest.mark.parametrize(
    ("found", "code"),
    [
        (None, RefusalCode.NOT_A_MEMBER),
        (state(members=()), RefusalCode.NOT_A_MEMBER),
        (state(deletion=Deletion(at=NOW, by="root")), RefusalCode.NOT_A_MEMBER),
        (state(installation="other"), RefusalCode.MISCONFIGURED),
    ],
)
def test_no_member(found: AccountState | None, code: RefusalCode) -> None:
    with pytest.raises(access.DeniedError) as error:
        access.member_in(found, "alice", "physics", ME)
    assert code_of(error) is code


@pytest.mark.parametrize(
    ("found", "ready"),
    [
        (None, False),
        (status(Phase.APPLIED), True),
        (status(Phase.APPLIED, wanted=6, applied=6), True),
        (status(Phase.APPLIED, wanted=4, applied=4), False),
        (status(Phase.INVALID), True),
        (status(Phase.CLOSED), True),
        (status(Phase.PAUSED, applied=3), True),
        (status(Phase.PAUSED, wanted=4), False),
        (status(Phase.APPLIED, applied=4), False),
        *[
            (status(phase), False)
            for phase in (Phase.PENDING, Phase.DEGRADED, Phase.CONFLICT, Phase.TERMINATING, Phase.FAILED)
        ],
    ],
)
def test_how_far_the_cluster_is(found: AccountStatus | None, ready: bool) -> None:
    if ready:
        access.check_applied(state(), found, "west")
        return
    with pytest.raises(access.DeniedError) as error:
        access.check_applied(state(), found, "west")
    assert code_of(error) is RefusalCode.NOT_READY
    assert error.value.refusal.temporary


def live(**changes: Any) -> access.Live:
    labels = marks.labels(ME, "physics")
    given: dict[str, Any] = {
        "namespace": {"metadata": {"labels": labels}},
        "service_account": {
            "metadata": {"uid": "u", "labels": labels, "annotations": {marks.GENERATION: "g"}}
        },
        "quota": {"spec": {"hard": {"pods": "1"}}, "status": {"hard": {"pods": "1"}, "used": {"pods": "0"}}},
    }
    return access.Live(**(given | changes))


ALICE = accounts.Member(name="alice", generation="g")
_LABELS = marks.labels(ME, "physics")


def test_what_is_in_the_cluster() -> None:
    assert access.check_live(live(), state(), ALICE, "west") == "u"


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"namespace": None}, RefusalCode.NOT_READY),
        ({"namespace": {"metadata": {"labels": marks.labels("other", "physics")}}}, RefusalCode.NOT_READY),
        ({"namespace": {"metadata": {"labels": _LABELS, "deletionTimestamp": "x"}}}, RefusalCode.NOT_READY),
        ({"quota": None}, RefusalCode.NOT_READY),
        ({"quota": {"spec": {"hard": {"pods": "1"}}}}, RefusalCode.NOT_READY),
        ({"service_account": None}, RefusalCode.SERVICE_ACCOUNT),
        *[
            ({"service_account": {"metadata": {"uid": "u"} | metadata}}, RefusalCode.SERVICE_ACCOUNT)
            for metadata in (
                {},
                {"labels": _LABELS},
                {"labels": _LABELS, "annotations": {marks.GENERATION: "old"}},
                {"labels": {}, "annotations": {marks.GENERATION: "g"}},
                {
                    "labels": marks.labels(ME, "bio"),
                    "annotations": {marks.GENERATION: "g"},
                },
                {
                    "labels": _LABELS,
                    "annotations": {marks.GENERATION: "g"},
                    "deletionTimestamp": "x",
                },
            )
        ],
    ],
)
def test_what_is_missing_in_the_cluster(changes: dict[str, Any], code: RefusalCode) -> None:
    with pytest.raises(access.DeniedError) as error:
        access.check_live(live(**changes), state(), ALICE, "west")
    assert code_of(error) is code
    assert error.value.refusal.temporary


@pytest.mark.parametrize("found", [one for one in GuardState if one is not GuardState.IN_FORCE])
def test_without_the_guard_nothing(found: GuardState) -> None:
    access.check_guard(GuardState.IN_FORCE, "", "west")
    with pytest.raises(access.DeniedError) as error:
        access.check_guard(found, "", "west")
    assert code_of(error) is RefusalCode.GUARD_MISSING


@pytest.mark.parametrize(
    ("asked", "default", "longest", "given"),
    [(0, 3600, 86400, 3600), (0, 3600, 600, 600), (600, 3600, 86400, 600), (2**63, 3600, 86400, 86400)],
)
def test_lifetimes(asked: int, default: int, longest: int, given: int) -> None:
    assert access.lifetime_s(asked, default, longest) == given


@pytest.mark.parametrize("asked", [1, 60, 599])
def test_lifetimes_that_are_too_short(asked: int) -> None:
    with pytest.raises(access.DeniedError, match="600 s") as error:
        access.lifetime_s(asked, 3600, 86400)
    assert code_of(error) is RefusalCode.LIFETIME
