"""Kubernetes names for accounts and users (design rule 8).

`slug` is injective over all strings and stable for ever: a change here renames namespaces at every site.
A name that is a safe label already is its own slug; every other name, and a name that looks like a slug
with a hash, gets a hash of the original name as its suffix. The original name travels in payloads and in
an annotation; the slug alone stands in subjects, keys and object names.
"""

import base64
import hashlib
import re

NAMESPACE_PREFIX = "spur-acct-"
SERVICE_ACCOUNT_PREFIX = "spur-user-"

#: RFC 1123 label: what a namespace name and a label value may hold
#: (https://kubernetes.io/docs/concepts/overview/working-with-objects/names/#dns-label-names).
MAX_LABEL_LENGTH = 63
MAX_SLUG_LENGTH = MAX_LABEL_LENGTH - len(NAMESPACE_PREFIX)

_HASH_LENGTH = 16  # base32 characters: 80 bits
_SAFE = re.compile(r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?", re.ASCII)
_HASHED = re.compile(rf".*--[a-z2-7]{{{_HASH_LENGTH}}}", re.ASCII | re.DOTALL)
_UNSAFE_RUN = re.compile(r"[^a-z0-9]+", re.ASCII)


def slug(name: str) -> str:
    """Return the label-safe form of an account or user name, at most 53 characters, never empty."""
    if len(name) <= MAX_SLUG_LENGTH and _SAFE.fullmatch(name) and not _HASHED.fullmatch(name):
        return name
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()
    suffix = base64.b32encode(digest).decode("ascii").lower()[:_HASH_LENGTH]
    room = MAX_SLUG_LENGTH - len("--") - _HASH_LENGTH
    # "x" stands in where nothing of the name is usable: a label must not begin with a hyphen.
    base = _UNSAFE_RUN.sub("-", name.lower()).strip("-")[:room].strip("-") or "x"
    return f"{base}--{suffix}"


def is_slug(text: str) -> bool:
    """Return whether a text may be the slug of some name: as a token of a subject it may be anything."""
    return len(text) <= MAX_SLUG_LENGTH and _SAFE.fullmatch(text) is not None


def namespace(account: str) -> str:
    """Return the namespace of an account, by the account's original name."""
    return NAMESPACE_PREFIX + slug(account)


def namespace_of_slug(account_slug: str) -> str:
    """Return the namespace of an account, by the account's slug."""
    return NAMESPACE_PREFIX + account_slug


def service_account(user: str) -> str:
    """Return the ServiceAccount name of a member, by the user's original name."""
    return SERVICE_ACCOUNT_PREFIX + slug(user)
