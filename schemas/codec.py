"""The one way between domain models and bytes on the bus.

Every message is protobuf, with two headers: its type, so that a reader never guesses, and its encoding where
it was compressed because it would not fit in the server's max payload. A reader refuses what it cannot
understand with `CodecError`; unknown fields of a newer version are ignored, as protobuf does.
"""

import zlib
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from spur_events.schemas import tres
from spur_events.schemas.accounts import AccountState, Allocation, Deletion, Frozen, Member, Revision
from spur_events.schemas.events import AccountChanged, Actor, Change, ChangeKind, Recheck, RecheckReason
from spur_events.schemas.pb import events_pb2, state_pb2, status_pb2
from spur_events.schemas.status import AccountStatus, Phase, RelayStatus

TYPE_HEADER = "Spur-Type"
ENCODING_HEADER = "Content-Encoding"
DEFLATE = "deflate"

#: A compressed message may not grow beyond this: a few bytes must not fill a reader's memory.
MAX_DECODED_BYTES = 64 * 1024 * 1024

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

Headers = dict[str, str]
M = TypeVar("M", bound=Frozen)


class CodecError(ValueError):
    """Bytes that are not what their headers say; the message says what was wrong."""


class TooLargeError(ValueError):
    """A message that exceeds the server's max payload even when it is compressed."""


def encode(model: Frozen, max_payload: int | None = None) -> tuple[bytes, Headers]:
    """Return the bytes and headers of a model, compressed if it would exceed `max_payload` bytes.

    Raises:
        TooLargeError: if the model does not fit even then.
    """
    name = type(model).__name__
    data = _WRITERS[name](model).SerializeToString(deterministic=True)
    headers = {TYPE_HEADER: name}
    # Headers count towards the payload; ours are far below a kilobyte.
    room = None if max_payload is None else max_payload - 1024
    if room is not None and len(data) > room:
        size = len(data)
        data = zlib.compress(data, 9)
        headers[ENCODING_HEADER] = DEFLATE
        if len(data) > room:
            raise TooLargeError(
                f"{name} of {size} bytes is {len(data)} bytes when compressed, more than the server's max_payload"
                f" of {max_payload}; raise max_payload in the NATS server's configuration"
            )
    return data, headers


def decode(kind: type[M], data: bytes, headers: Mapping[str, str] | None) -> M:
    """Return the model of type `kind` that `encode` wrote.

    Raises:
        CodecError: if the headers name another type or encoding, or the bytes are not such a message.
    """
    given = (headers or {}).get(TYPE_HEADER, "")
    if given != kind.__name__:
        raise CodecError(
            f"expected a message of type {kind.__name__}, got {given or 'none in its headers'!r}"
        )
    encoding = (headers or {}).get(ENCODING_HEADER, "")
    if encoding == DEFLATE:
        data = _inflate(data)
    elif encoding:
        raise CodecError(f"unknown content encoding {encoding!r}")
    message_type, reader = _READERS[kind.__name__]
    message = message_type()
    try:
        message.ParseFromString(data)
        model = reader(message)
    except (DecodeError, ValueError, KeyError, OverflowError) as error:
        raise CodecError(f"{kind.__name__} cannot be parsed: {error}") from error
    if not isinstance(model, kind):  # pragma: no cover - the tables below pair them
        raise CodecError(f"{kind.__name__} has no reader")
    return model


def _inflate(data: bytes) -> bytes:
    inflater = zlib.decompressobj()
    try:
        plain = inflater.decompress(data, MAX_DECODED_BYTES)
    except zlib.error as error:
        raise CodecError(f"compressed bytes are damaged: {error}") from error
    if inflater.unconsumed_tail:
        raise CodecError(f"message is larger than {MAX_DECODED_BYTES} bytes when decompressed")
    if not inflater.eof:
        raise CodecError("compressed bytes end too early")
    return plain


def _ms(at: datetime) -> int:
    return (at - _EPOCH) // timedelta(milliseconds=1)


def _at(ms: int) -> datetime:
    return _EPOCH + timedelta(milliseconds=ms)


def _required(value: str, field: str) -> str:
    if not value:
        raise ValueError(f"{field} is empty")
    return value


def _write_revision(revision: Revision) -> state_pb2.Revision:
    return state_pb2.Revision(epoch=revision.epoch, number=revision.number)


def _read_revision(message: state_pb2.Revision) -> Revision:
    return Revision(message.epoch, message.number)


def _write_state(state: AccountState) -> state_pb2.AccountState:
    message = state_pb2.AccountState(
        installation=state.installation,
        revision=_write_revision(state.revision),
        name=state.name,
        incarnation=state.incarnation,
        description=state.description,
        organization=state.organization,
        parent=state.parent,
        members=[
            state_pb2.Member(name=m.name, generation=m.generation, is_default=m.is_default)
            for m in state.members
        ],
    )
    if state.deletion is not None:
        message.deletion.CopyFrom(state_pb2.Deletion(at_unix_ms=_ms(state.deletion.at), by=state.deletion.by))
    if state.allocation is not None:
        message.allocation.problem = state.allocation.problem
        for name, value in state.allocation.limits.items():
            if value is None:
                message.allocation.limits[name].cleared = True
            else:
                message.allocation.limits[name].value = value
        message.allocation.SetInParent()
    return message


def _read_state(message: state_pb2.AccountState) -> AccountState:
    allocation = None
    if message.HasField("allocation"):
        limits: tres.Limits = {}
        for name, limit in sorted(message.allocation.limits.items()):
            kind = limit.WhichOneof("kind")
            if kind is None:
                raise ValueError(f"limit {name} has neither a value nor 'cleared'")
            limits[name] = limit.value if kind == "value" else None
        allocation = Allocation(limits=limits, problem=message.allocation.problem)
    deletion = None
    if message.HasField("deletion"):
        deletion = Deletion(at=_at(message.deletion.at_unix_ms), by=message.deletion.by)
    return AccountState(
        installation=_required(message.installation, "installation"),
        revision=_read_revision(message.revision),
        name=message.name,
        incarnation=message.incarnation,
        deletion=deletion,
        description=message.description,
        organization=message.organization,
        parent=message.parent,
        allocation=allocation,
        members=tuple(
            Member(name=m.name, generation=m.generation, is_default=m.is_default) for m in message.members
        ),
    )


def _write_changed(event: AccountChanged) -> events_pb2.AccountChanged:
    return events_pb2.AccountChanged(
        installation=event.installation,
        revision=_write_revision(event.revision),
        name=event.name,
        part=event.part,
        parts=event.parts,
        changes=[
            events_pb2.Change(
                id=c.id,
                kind=events_pb2.ChangeKind.Value(f"CHANGE_KIND_{c.kind.name}"),
                user=c.user,
                before=c.before,
                after=c.after,
                actor=events_pb2.Actor(
                    database_user=c.actor.database_user,
                    os_user=c.actor.os_user,
                    application=c.actor.application,
                ),
                at_unix_ms=_ms(c.at),
            )
            for c in event.changes
        ],
    )


def _read_changed(message: events_pb2.AccountChanged) -> AccountChanged:
    return AccountChanged(
        installation=_required(message.installation, "installation"),
        revision=_read_revision(message.revision),
        name=message.name,
        part=message.part,
        parts=message.parts,
        changes=tuple(
            Change(
                id=c.id,
                kind=ChangeKind[events_pb2.ChangeKind.Name(c.kind).removeprefix("CHANGE_KIND_")],
                user=c.user,
                before=c.before,
                after=c.after,
                actor=Actor(
                    database_user=c.actor.database_user,
                    os_user=c.actor.os_user,
                    application=c.actor.application,
                ),
                at=_at(c.at_unix_ms),
            )
            for c in message.changes
        ),
    )


def _write_recheck(event: Recheck) -> events_pb2.Recheck:
    return events_pb2.Recheck(
        installation=event.installation,
        slug=event.slug,
        reason=events_pb2.RecheckReason.Value(f"RECHECK_REASON_{event.reason.name}"),
    )


def _read_recheck(message: events_pb2.Recheck) -> Recheck:
    return Recheck(
        installation=_required(message.installation, "installation"),
        slug=_required(message.slug, "slug"),
        reason=RecheckReason[events_pb2.RecheckReason.Name(message.reason).removeprefix("RECHECK_REASON_")],
    )


def _write_status(status: AccountStatus) -> status_pb2.AccountStatus:
    message = status_pb2.AccountStatus(
        cluster=status.cluster,
        name=status.name,
        installation=status.installation,
        wanted=_write_revision(status.wanted),
        phase=status_pb2.Phase.Value(f"PHASE_{status.phase.name}"),
        reason=status.reason,
        message=status.message,
        since_unix_ms=_ms(status.since),
        namespace=status.namespace,
        namespace_uid=status.namespace_uid,
        namespace_version=status.namespace_version,
        objects=status.objects,
        not_enforced=status.not_enforced,
        over_quota=status.over_quota,
        attempts=status.attempts,
        retry_at_unix_ms=0 if status.retry_at is None else _ms(status.retry_at),
        state_sequence=status.state_sequence,
    )
    if status.applied is not None:
        message.applied.CopyFrom(_write_revision(status.applied))
    return message


def _read_status(message: status_pb2.AccountStatus) -> AccountStatus:
    return AccountStatus(
        cluster=_required(message.cluster, "cluster"),
        name=message.name,
        installation=_required(message.installation, "installation"),
        wanted=_read_revision(message.wanted),
        applied=_read_revision(message.applied) if message.HasField("applied") else None,
        phase=Phase[status_pb2.Phase.Name(message.phase).removeprefix("PHASE_")],
        reason=message.reason,
        message=message.message,
        since=_at(message.since_unix_ms),
        namespace=message.namespace,
        namespace_uid=message.namespace_uid,
        namespace_version=message.namespace_version,
        objects=dict(message.objects),
        not_enforced=tuple(message.not_enforced),
        over_quota=tuple(message.over_quota),
        attempts=message.attempts,
        retry_at=_at(message.retry_at_unix_ms) if message.retry_at_unix_ms else None,
        state_sequence=message.state_sequence,
    )


def _write_relay(status: RelayStatus) -> status_pb2.RelayStatus:
    return status_pb2.RelayStatus(
        installation=status.installation,
        epoch=status.epoch,
        host=status.host,
        pid=status.pid,
        at_unix_ms=_ms(status.at),
        revision=status.revision,
        refused=status.refused,
    )


def _read_relay(message: status_pb2.RelayStatus) -> RelayStatus:
    return RelayStatus(
        installation=_required(message.installation, "installation"),
        epoch=message.epoch,
        host=message.host,
        pid=message.pid,
        at=_at(message.at_unix_ms),
        revision=message.revision,
        refused=dict(message.refused),
    )


_WRITERS: dict[str, Callable[..., Message]] = {
    "AccountState": _write_state,
    "AccountChanged": _write_changed,
    "Recheck": _write_recheck,
    "AccountStatus": _write_status,
    "RelayStatus": _write_relay,
}
_READERS: dict[str, tuple[type[Message], Callable[..., Frozen]]] = {
    "AccountState": (state_pb2.AccountState, _read_state),
    "AccountChanged": (events_pb2.AccountChanged, _read_changed),
    "Recheck": (events_pb2.Recheck, _read_recheck),
    "AccountStatus": (status_pb2.AccountStatus, _read_status),
    "RelayStatus": (status_pb2.RelayStatus, _read_relay),
}
