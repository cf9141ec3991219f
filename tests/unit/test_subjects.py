"""Names on the bus: stable for ever, and valid whatever an account is called."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spur_events.schemas import names, subjects
from spur_events.schemas.accounts import Revision
from spur_events.schemas.events import AccountChanged, Recheck, RecheckReason

_TOKENS = re.compile(r"[a-z0-9-]+(\.[a-z0-9-]+)*", re.ASCII)


@pytest.mark.parametrize(
    ("slug", "sixteen", "seven"),
    [("physics", 1, 1), ("bio", 3, 4), ("a", 10, 4), ("x--abcdefghij234567", 8, 5)],
)
def test_partitions_never_change(slug: str, sixteen: int, seven: int) -> None:
    """Another partition for an account would give it two writers during an upgrade."""
    assert (subjects.partition(slug, 16), subjects.partition(slug, 7)) == (sixteen, seven)


@given(st.text(), st.integers(1, 256))
def test_subjects_of_any_account_are_plain_tokens_that_its_partition_listens_to(
    name: str, partitions: int
) -> None:
    slug = names.slug(name)
    number = subjects.partition(slug, partitions)
    assert 0 <= number < partitions
    filters = [text.removesuffix(">") for text in subjects.partition_filters("west", number)]
    for subject in (subjects.change(slug, partitions), subjects.recheck("west", slug, partitions)):
        assert _TOKENS.fullmatch(subject)
        assert any(subject.startswith(start) for start in filters)
        assert subjects.slug_of(subject) == slug
    assert subjects.slug_of(subjects.status_key("west", slug)) == slug


def test_a_partition_does_not_listen_to_one_whose_number_begins_alike() -> None:
    assert all(text.endswith(".1.>") for text in subjects.partition_filters("west", 1))


@given(st.text())
def test_the_slug_in_a_payload_is_that_of_its_subject(name: str) -> None:
    slug = names.slug(name)
    changed = AccountChanged(installation="i", revision=Revision(1, 1), name=name, changes=())
    recheck = Recheck(installation="i", slug=slug, reason=RecheckReason.RETRY)
    assert subjects.slug_in(changed) == subjects.slug_in(recheck) == slug


@pytest.mark.parametrize("cluster", ["a", "west-1", "0", "x" * 63])
def test_durable_names_are_valid(cluster: str) -> None:
    """No dots, spaces, wildcards or path separators (https://docs.nats.io/nats-concepts/jetstream/consumers)."""
    assert subjects.is_cluster_name(cluster)
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,255}", subjects.durable(cluster, 255))


@pytest.mark.parametrize(
    "cluster", ["", "A", "a.b", "a b", "*", ">", "-a", "a-", "x" * 64, "relay", "a\n", "ä"]
)
def test_what_could_not_be_a_subject_token_is_no_cluster_name(cluster: str) -> None:
    assert not subjects.is_cluster_name(cluster)
