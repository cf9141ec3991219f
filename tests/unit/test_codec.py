"""Models to bytes and back: nothing is lost, and damaged bytes are one kind of error."""

import contextlib
import zlib
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from spur_events.schemas import codec
from spur_events.schemas.accounts import AccountState, Allocation, Deletion, Frozen, Member, Revision
from spur_events.schemas.events import AccountChanged, Actor, Change, ChangeKind, Recheck, RecheckReason
from spur_events.schemas.status import AccountStatus, Phase, RelayStatus

# What PostgreSQL can store: no NUL, no lone surrogates.
_text = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30)
_some = st.text("abcz09-", min_size=1, max_size=20)
_numbers = st.integers(0, 2**63 - 1)
_revisions = st.builds(Revision, _numbers, _numbers)
# The bus carries milliseconds; 0 stands for "no retry" and no clock says 1970.
_times = st.integers(1, 253402300799999).map(
    lambda ms: datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=ms)
)
_limits = st.dictionaries(
    st.sampled_from(["cpu", "mem", "gres/gpu", "gres/gpu:a100"]), _numbers | st.none()
).map(lambda limits: dict(sorted(limits.items())))
_states = st.builds(
    AccountState,
    installation=_some,
    revision=_revisions,
    name=_text,
    incarnation=_text,
    deletion=st.none() | st.builds(Deletion, at=_times, by=_text),
    description=_text,
    organization=_text,
    parent=_text,
    allocation=st.none() | st.builds(Allocation, limits=_limits, problem=_text),
    members=st.lists(
        st.builds(Member, name=_text, generation=_text, is_default=st.booleans()), max_size=4
    ).map(tuple),
)
_changes = st.builds(
    Change,
    id=_numbers,
    kind=st.sampled_from(ChangeKind),
    user=_text,
    before=_text,
    after=_text,
    actor=st.builds(Actor, database_user=_text, os_user=_text, application=_text),
    at=_times,
)
_small = st.integers(0, 2**31 - 1)
_events = st.builds(
    AccountChanged,
    installation=_some,
    revision=_revisions,
    name=_text,
    changes=st.lists(_changes, max_size=3).map(tuple),
    part=_small,
    parts=_small,
)
_rechecks = st.builds(Recheck, installation=_some, slug=_some, reason=st.sampled_from(RecheckReason))
_statuses = st.builds(
    AccountStatus,
    cluster=_some,
    name=_text,
    installation=_some,
    wanted=_revisions,
    applied=st.none() | _revisions,
    phase=st.sampled_from(Phase),
    reason=_text,
    message=_text,
    since=_times,
    namespace=_text,
    namespace_uid=_text,
    namespace_version=_text,
    objects=st.dictionaries(_text, _text, max_size=3),
    not_enforced=st.lists(_text, max_size=3).map(tuple),
    over_quota=st.lists(_text, max_size=3).map(tuple),
    attempts=_small,
    retry_at=st.none() | _times,
    state_sequence=_numbers,
)
_heartbeats = st.builds(
    RelayStatus,
    installation=_some,
    epoch=_numbers,
    host=_text,
    pid=_small,
    at=_times,
    revision=_numbers,
    refused=st.dictionaries(_text, _text, max_size=3),
)
_models = st.one_of(_states, _events, _rechecks, _statuses, _heartbeats)

_STATE = AccountState(installation="i", revision=Revision(1, 7), name="bio", incarnation="n")


def again(model: Frozen, max_payload: int | None = None) -> Frozen:
    data, headers = codec.encode(model, max_payload)
    return codec.decode(type(model), data, headers)


@given(_models)
def test_every_model_survives_the_bus(model: Frozen) -> None:
    assert again(model) == model


@given(_states)
def test_every_model_survives_compression(state: AccountState) -> None:
    long = state.model_copy(update={"description": "x" * 5000})
    data, headers = codec.encode(long, 3000)
    assert headers[codec.ENCODING_HEADER] == "deflate"
    assert len(data) < 3000
    assert codec.decode(AccountState, data, headers) == long


@given(_models)
def test_equal_models_are_equal_bytes(model: Frozen) -> None:
    assert codec.encode(model) == codec.encode(again(model))


@pytest.mark.parametrize(
    "allocation",
    [
        None,
        Allocation(),
        Allocation(limits={"cpu": 0}),
        Allocation(limits={"cpu": None}),
        Allocation(limits={"cpu": 1}),
        Allocation(problem="bad"),
    ],
)
def test_zero_cleared_absent_and_never_given_stay_apart(allocation: Allocation | None) -> None:
    """Design rule 5, case C19."""
    state = _STATE.model_copy(update={"allocation": allocation})
    found = again(state)
    assert isinstance(found, AccountState)
    assert found.allocation == allocation
    assert codec.encode(state) not in [
        codec.encode(_STATE.model_copy(update={"allocation": other}))
        for other in (None, Allocation(), Allocation(limits={"cpu": 0}), Allocation(limits={"cpu": None}))
        if other != allocation
    ]


def test_a_small_message_is_not_compressed() -> None:
    assert codec.ENCODING_HEADER not in codec.encode(_STATE, 1024 * 1024)[1]


def test_what_does_not_fit_even_compressed_is_refused_with_the_remedy() -> None:
    members = tuple(Member(name=f"user{number}", generation=f"{number * 7919}") for number in range(5000))
    with pytest.raises(codec.TooLargeError, match="raise max_payload"):
        codec.encode(_STATE.model_copy(update={"members": members}), 4096)


_KINDS: list[type[Frozen]] = [AccountState, AccountChanged, Recheck, AccountStatus, RelayStatus]


@pytest.mark.parametrize("kind", _KINDS)
@given(data=st.binary(max_size=200), deflated=st.booleans())
@example(data=b"", deflated=False)
@example(data=b"", deflated=True)
def test_any_bytes_are_a_model_or_a_codec_error(kind: type[Frozen], data: bytes, deflated: bool) -> None:
    headers = {codec.TYPE_HEADER: kind.__name__} | ({codec.ENCODING_HEADER: "deflate"} if deflated else {})
    with contextlib.suppress(codec.CodecError):
        assert isinstance(codec.decode(kind, data, headers), kind)


@given(model=_models, spot=st.integers(0), put=st.integers(0, 255), cut=st.booleans(), deflated=st.booleans())
def test_damaged_bytes_are_a_model_or_a_codec_error(
    model: Frozen, spot: int, put: int, cut: bool, deflated: bool
) -> None:
    data, headers = codec.encode(model)
    if deflated:
        data, headers = zlib.compress(data), {**headers, codec.ENCODING_HEADER: "deflate"}
    spot %= max(len(data), 1)
    damaged = data[:spot] if cut else data[:spot] + bytes([put]) + data[spot + 1 :]
    with contextlib.suppress(codec.CodecError):
        codec.decode(type(model), damaged, headers)


@pytest.mark.parametrize("headers", [None, {}, {codec.TYPE_HEADER: "Recheck"}, {codec.TYPE_HEADER: "Novel"}])
def test_another_type_is_refused_by_name(headers: dict[str, str] | None) -> None:
    with pytest.raises(codec.CodecError, match="expected a message of type AccountState"):
        codec.decode(AccountState, codec.encode(_STATE)[0], headers)


def test_an_unknown_encoding_is_refused_by_name() -> None:
    data, headers = codec.encode(_STATE)
    with pytest.raises(codec.CodecError, match="'zstd'"):
        codec.decode(AccountState, data, {**headers, codec.ENCODING_HEADER: "zstd"})


def test_a_decompression_bomb_is_refused() -> None:
    bomb = zlib.compress(bytes(codec.MAX_DECODED_BYTES + 1), 9)
    assert len(bomb) < 100_000
    headers = {codec.TYPE_HEADER: "AccountState", codec.ENCODING_HEADER: "deflate"}
    with pytest.raises(codec.CodecError, match="larger than"):
        codec.decode(AccountState, bomb, headers)


def test_compressed_bytes_that_end_early_are_refused() -> None:
    headers = {codec.TYPE_HEADER: "AccountState", codec.ENCODING_HEADER: "deflate"}
    with pytest.raises(codec.CodecError, match="end too early"):
        codec.decode(AccountState, zlib.compress(codec.encode(_STATE)[0])[:-5], headers)


@pytest.mark.parametrize(
    ("model", "field"),
    [
        (_STATE, "installation"),
        (Recheck(installation="i", slug="bio", reason=RecheckReason.RETRY), "slug"),
    ],
)
def test_a_message_without_what_it_needs_is_refused_by_the_field(model: Frozen, field: str) -> None:
    values: dict[str, Any] = {field: ""}
    data, headers = codec.encode(model.model_copy(update=values))
    with pytest.raises(codec.CodecError, match=f"{field} is empty"):
        codec.decode(type(model), data, headers)


def test_fields_of_a_newer_version_are_ignored() -> None:
    data, headers = codec.encode(_STATE)
    newer = data + bytes([0xFA, 0x3E, 0x03]) + b"new"  # field 1007, length-delimited
    assert codec.decode(AccountState, newer, headers) == _STATE
