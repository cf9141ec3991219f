"""What an answer says of an item of a plan: carried out, kept, or failed."""

from datetime import UTC, datetime

import pytest

from spur_events.consumers import answers
from spur_events.schemas.accounts import Revision
from spur_events.schemas.resync import Action, Item
from spur_events.schemas.status import AccountStatus, Phase


def ended(action: Action, phase: Phase, message: str = "") -> tuple[str, bool, bool]:
    item = Item(action=action, slug="bio", namespace="spur-acct-bio")
    status = AccountStatus(
        cluster="c",
        name="bio",
        installation="i",
        wanted=Revision(1, 1),
        phase=phase,
        message=message,
        since=datetime.now(UTC),
        namespace="spur-acct-bio",
    )
    found = answers._ended(item, status)
    return found.outcome, found.carried_out, found.failed


@pytest.mark.parametrize("action", [Action.PRUNE, Action.PRUNE_UNEXPLAINED])
def test_a_deletion_is_carried_out_only_if_the_namespace_goes(action: Action) -> None:
    assert ended(action, Phase.PRUNED) == ("pruned", True, False)
    assert ended(action, Phase.TERMINATING, "held") == ("terminating: held", True, False)
    assert ended(action, Phase.CLOSED, "why") == ("kept: why", False, False)
    # The account was made again meanwhile.
    assert ended(action, Phase.APPLIED) == ("kept: applied", False, False)
    assert ended(action, Phase.CONFLICT, "why") == ("conflict: why", False, True)


@pytest.mark.parametrize("action", [Action.CREATE, Action.CHANGE, Action.REVOKE, Action.CLOSE])
def test_a_change_is_carried_out_if_the_account_is_as_wanted(action: Action) -> None:
    for phase in (Phase.APPLIED, Phase.CLOSED, Phase.INVALID, Phase.PRUNED, Phase.PAUSED):
        assert ended(action, phase)[1:] == (True, False)
    for phase in (Phase.FAILED, Phase.DEGRADED, Phase.CONFLICT, Phase.TERMINATING):
        assert ended(action, phase, "why") == (f"{phase.lower()}: why", False, True)
