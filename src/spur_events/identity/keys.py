"""Nkeys: made, kept in files of mode 0600, read back. The only module that imports nkeys.

`claims` signs and checks with them, `site` decides which there are. A seed leaves this package in
credentials files alone; nothing prints one.
"""

import base64
import secrets
from enum import IntEnum
from pathlib import Path

import nacl.exceptions
import nacl.signing
import nkeys

from spur_events import errors

_CHECKSUM_LENGTH = 2


class Kind(IntEnum):
    """What a key is for, by the byte that its public form begins with."""

    OPERATOR = nkeys.PREFIX_BYTE_OPERATOR
    ACCOUNT = nkeys.PREFIX_BYTE_ACCOUNT
    USER = nkeys.PREFIX_BYTE_USER
    SERVER = nkeys.PREFIX_BYTE_SERVER


class Key:
    """A key pair. Its text form never shows the seed."""

    def __init__(self, seed: str) -> None:
        self.seed = seed
        self._pair = nkeys.from_seed(bytearray(seed, "ascii"))  # type: ignore[no-untyped-call]
        self.public: str = self._pair.public_key.decode("ascii")

    def __repr__(self) -> str:
        return f"Key({self.public})"

    def sign(self, data: bytes) -> bytes:
        """Return the signature of data."""
        return bytes(self._pair.sign(data))


def make(kind: Kind) -> Key:
    """Return a new key."""
    seed = nkeys.encode_seed(secrets.token_bytes(32), kind)  # type: ignore[no-untyped-call]
    return Key(seed.decode("ascii"))


def read(path: Path) -> Key:
    """Return the key whose seed a file holds.

    Raises:
        MisconfiguredError: naming the file, never showing what is in it.
    """
    try:
        return Key(path.read_text("ascii").strip())
    except (OSError, ValueError, nkeys.NkeysError) as error:
        why = error.strerror if isinstance(error, OSError) else "that is not the seed of an nkey"
        raise errors.MisconfiguredError(
            f"the key file {path} cannot be used: {why}; 'spur-events nats init' made it, restore it"
        ) from None


def is_signed(public: str, data: bytes, signature: bytes) -> bool:
    """Return whether the holder of a public key signed data."""
    try:
        # A kind's byte, 32 bytes of key, a checksum that the signature makes needless.
        raw = base64.b32decode(public + "=" * (-len(public) % 8))[1:-_CHECKSUM_LENGTH]
        nacl.signing.VerifyKey(raw).verify(data, signature)
    except (ValueError, TypeError, nacl.exceptions.CryptoError):
        return False
    return True


def is_public(kind: Kind, text: str) -> bool:
    """Return whether text is a public key of a kind."""
    try:
        raw = base64.b32decode(text)
    except (ValueError, TypeError):
        return False
    return len(raw) == 1 + 32 + _CHECKSUM_LENGTH and raw[0] == kind
