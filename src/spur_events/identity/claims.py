"""NATS JWTs, version 2: written, signed, read (https://docs.nats.io/running-a-nats-service/configuration/securing_nats/auth_intro/jwt).

`site` makes the claims of operator, accounts and users with it, consumers.auth reads requests and writes
answers. What a claim should say is their business. Nothing here knows our subjects.
"""

import base64
import hashlib
import json
import time
from typing import Any

from spur_events import errors
from spur_events.identity import keys

_HEADER = {"typ": "JWT", "alg": "ed25519-nkey"}
_PARTS = 3
_UNLIMITED = -1


class InvalidError(errors.PermanentError):
    """A JWT that is none, or that its issuer did not sign."""


def sign(
    issuer: keys.Key,
    *,
    subject: str,
    kind: str,
    content: dict[str, Any],
    name: str = "",
    audience: str = "",
    expires: int = 0,
    issued: int = 0,
) -> str:
    """Return a signed JWT; `expires` and `issued` are Unix time, 0 for never and for now."""
    claim: dict[str, Any] = {
        "iat": issued or int(time.time()),
        "iss": issuer.public,
        "sub": subject,
        "nats": {**content, "type": kind, "version": 2},
    }
    if name:
        claim["name"] = name
    if audience:
        claim["aud"] = audience
    if expires:
        claim["exp"] = expires
    digest = hashlib.new("sha512_256", _json(claim)).digest()
    claim["jti"] = base64.b32encode(digest).decode("ascii").rstrip("=")
    signed = f"{_encode(_json(_HEADER))}.{_encode(_json(claim))}"
    return f"{signed}.{_encode(issuer.sign(signed.encode('ascii')))}"


def read(token: str) -> dict[str, Any]:
    """Return the claim of a JWT that its issuer signed. Who may be an issuer, the caller knows.

    Raises:
        InvalidError: if it is not that.
    """
    parts = token.split(".")
    try:
        if len(parts) != _PARTS:
            raise ValueError("not three parts")  # noqa: TRY301 - one text for all that is malformed
        header, claim = json.loads(_decode(parts[0])), json.loads(_decode(parts[1]))
        signature = _decode(parts[2])
    except ValueError as error:
        raise InvalidError(f"that is not a JWT: {error}") from None
    if not isinstance(claim, dict) or not isinstance(claim.get("nats"), dict) or header != _HEADER:
        raise InvalidError("that is not a JWT of NATS, version 2")
    if not keys.is_signed(str(claim.get("iss")), f"{parts[0]}.{parts[1]}".encode("ascii"), signature):
        raise InvalidError("the JWT's signature is not its issuer's")
    return claim


def operator(key: keys.Key, *, name: str, system_account: str) -> str:
    """Return the JWT of an operator, which the server trusts."""
    return sign(
        key, subject=key.public, kind="operator", name=name, content={"system_account": system_account}
    )


def account(
    issuer: keys.Key,
    public: str,
    *,
    name: str,
    jetstream: bool,
    scopes: list[dict[str, Any]],
    signing_keys: list[str],
    exports: list[dict[str, Any]],
    imports: list[dict[str, Any]],
    authorization: dict[str, Any],
    revocations: dict[str, int],
    issued: int,
) -> str:
    """Return the JWT of an account. `scopes` are signing keys with the template of what their users may do."""
    unlimited = ["subs", "data", "payload", "imports", "exports", "conn", "leaf"]
    store = ["mem_storage", "disk_storage", "streams", "consumer"]
    limits: dict[str, Any] = {**dict.fromkeys(unlimited, _UNLIMITED), "wildcards": True}
    limits |= dict.fromkeys(store, _UNLIMITED if jetstream else 0)
    content: dict[str, Any] = {"limits": limits, "signing_keys": [*signing_keys, *scopes]}
    content |= {"exports": exports, "imports": imports}
    if authorization:
        content["authorization"] = authorization
    if revocations:
        content["revocations"] = revocations
    return sign(issuer, subject=public, kind="account", name=name, content=content, issued=issued)


def scope(public: str, role: str, permissions: dict[str, Any]) -> dict[str, Any]:
    """Return a scoped signing key: its users have just these permissions, whatever their own JWT says."""
    template = {**permissions, "subs": _UNLIMITED, "data": _UNLIMITED, "payload": _UNLIMITED}
    return {"kind": "user_scope", "key": public, "role": role, "template": template}


def user(
    issuer: keys.Key,
    public: str,
    *,
    account: str,
    name: str,
    tags: tuple[str, ...] = (),
    permissions: dict[str, Any] | None = None,
    expires: int = 0,
    bearer: bool = False,
) -> str:
    """Return the JWT of a user. With a scoped key as the issuer it must bring no `permissions` of its own."""
    content: dict[str, Any] = {"issuer_account": account}
    if permissions is not None:
        content |= {**permissions, "subs": _UNLIMITED, "data": _UNLIMITED, "payload": _UNLIMITED}
    if tags:
        content["tags"] = list(tags)
    if bearer:
        content["bearer_token"] = True
    if issuer.public == account:
        del content["issuer_account"]
    return sign(issuer, subject=public, kind="user", name=name, content=content, expires=expires)


def credentials(token: str, key: keys.Key) -> str:
    """Return the content of a credentials file, in the form that all NATS clients read."""
    return (
        "-----BEGIN NATS USER JWT-----\n"
        f"{token}\n"
        "------END NATS USER JWT------\n"
        "\n"
        "************************* IMPORTANT *************************\n"
        "Whoever has this file is this user. Keep it secret.\n"
        "\n"
        "-----BEGIN USER NKEY SEED-----\n"
        f"{key.seed}\n"
        "------END USER NKEY SEED------\n"
    )


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode("utf-8")


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode("ascii").rstrip("=")


def _decode(text: str) -> bytes:
    # `urlsafe_b64decode` skips what does not belong; the server does not.
    standard = text.translate(str.maketrans("-_", "+/")) + "=" * (-len(text) % 4)
    return base64.b64decode(standard, validate=True)
