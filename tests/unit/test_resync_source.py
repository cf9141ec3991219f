"""When the source of a resync is in doubt, and what is said then (design rule 12)."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest

from spur_events.consumers.source import Source
from spur_events.schemas.accounts import AccountState, Deletion
from spur_events.schemas.resync import Checkpoint, Contents
from spur_events.schemas.status import RelayStatus

_NOW = datetime.now(UTC)


def source(accounts: int, tombstones: int = 0, *, age_s: float = 1.0, **changes: Any) -> Source:
    """Return a source that is in order, but for the changes in its checkpoint."""
    gone = Deletion(at=_NOW, by="x")
    states = {}
    for number in range(accounts + tombstones):
        state = AccountState(
            installation="i",
            revision=(1, number + 1),
            name=f"a{number}",
            incarnation="x",
            members=(),
            deletion=gone if number >= accounts else None,
        )
        states[state.slug] = state
    contents = Contents(states.values())
    checkpoint = Checkpoint(
        installation="i",
        epoch=1,
        revision=accounts + tombstones,
        database_accounts=accounts,
        bucket_accounts=accounts,
        tombstones=tombstones,
        digest=contents.digest,
        at=_NOW,
        audited_at=_NOW,
    )
    beat = RelayStatus(
        installation="i",
        epoch=1,
        host="h",
        pid=1,
        at=_NOW - timedelta(seconds=age_s),
        revision=1,
    )
    return Source(
        states=states,
        contents=contents,
        checkpoint=checkpoint.model_copy(update=changes),
        relay=beat,
        installation="i",
        read_at=_NOW,
    )


@pytest.mark.parametrize(
    ("make", "ours", "others"),
    [
        (partial(source, 5), 5, 0),
        (partial(source, 5), 0, 9),
        (partial(source, 0), 0, 0),
        (partial(source, 0, 2), 2, 0),
        # Its last accounts were deleted; the cluster is shared.
        (partial(source, 0, 2), 2, 9),
        (partial(source, 0, 2), 0, 9),
    ],
)
def test_no_doubt(make: Callable[[], Source], ours: int, others: int) -> None:
    assert make().doubt(ours, others, override=False) == ""


@pytest.mark.parametrize(
    ("make", "ours", "others", "said"),
    [
        (partial(source, 0), 5, 0, "source has 0 accounts, cluster has 5 namespaces of accounts;"),
        (
            partial(source, 0),
            0,
            5,
            "source has 0 accounts, cluster has 5 namespaces of accounts (5 of them not this",
        ),
        (partial(source, 0, 1), 5, 0, "source has 0 accounts, cluster has 5 namespaces of accounts;"),
        (
            partial(source, 10, database_accounts=1, unexplained=tuple(f"a{n}" for n in range(9))),
            10,
            0,
            "the bucket has 10 and the cluster 10 namespaces: 9 accounts are gone without a recorded deletion (a0, a1,",
        ),
    ],
)
def test_an_empty_or_partial_database_names_numbers_and_the_way_out(
    make: Callable[[], Source], ours: int, others: int, said: str
) -> None:
    text = make().doubt(ours, others, override=False)
    assert text.startswith("nothing was deleted: ")
    assert said in text
    assert "'spur-events resync --prune-unexplained'" in text
    assert "SPUR_EVENTS_DATABASE_URL" in text
    assert make().doubt(ours, others, override=True) == ""


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (partial(source, 2, digest="0"), "torn or restored"),
        (partial(source, 2, installation="j"), "the checkpoint is of installation j, this is i"),
        (partial(source, 2, age_s=61), "last heard of 61 s ago"),
    ],
)
def test_no_override_helps_against_a_torn_bucket_or_a_silent_relay(
    make: Callable[[], Source], said: str
) -> None:
    for override in (False, True):
        text = make().doubt(2, 0, override=override)
        assert text.startswith("nothing was deleted: ")
        assert said in text
