"""The one way between domain models and bytes on the bus.

Every message is protobuf, with two headers: its type, so that a reader never guesses, and its encoding where
it was compressed because it would not fit in the server's max payload. A reader refuses what it cannot
understand with `CodecError`; unknown fields of a newer version are ignored, as protobuf does.
"""

import zlib
from collections.abc import Mapping
from typing import TypeVar

from google.protobuf.message import DecodeError

from spur_events.schemas import messages
from spur_events.schemas.accounts import Frozen

TYPE_HEADER = "Spur-Type"
ENCODING_HEADER = "Content-Encoding"
DEFLATE = "deflate"

#: A compressed message may not grow beyond this: a few bytes must not fill a reader's memory.
MAX_DECODED_BYTES = 64 * 1024 * 1024

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
    data = messages.WRITERS[name](model).SerializeToString(deterministic=True)
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
    message_type, reader = messages.READERS[kind.__name__]
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
