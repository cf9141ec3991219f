"""Who somebody without credentials is: the auth callout service, by MUNGE (design rule 17).

nats-server asks whenever a client comes without a JWT of its own. The client's password is a MUNGE credential; its
UID, as this machine's user database names it, is the user. The answer is a JWT of account USERS, signed with the key of
a role that may do no more than ask for that user's kubeconfigs, and it ends after a while. What is refused is told
to the log with its reason, never with the credential, and to the client without.

`services.auth` runs it. Keys and claims are of `identity`, the checking of credentials of `munge`.
"""

import asyncio
import json
import logging
import pwd
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spur_events import errors, jetstream, munge, settings
from spur_events.identity import claims, keys, roles
from spur_events.jetstream import callout, signin
from spur_events.schemas import names

log = logging.getLogger(__name__)

PART = "auth"
_AUDIENCE = "nats-authorization-request"
#: Each is a process for a moment.
_AT_ONCE = 8


class RefusedError(errors.PermanentError):
    """Why somebody is not let in, for the log."""


@dataclass(frozen=True, kw_only=True)
class Keys:
    """What the service signs with: `site` put it into the folder of SPUR_EVENTS_AUTH_KEYS."""

    answers: keys.Key
    user: keys.Key
    user_admin: keys.Key
    accounts: dict[str, str]

    @classmethod
    def read(cls, folder: Path | None) -> "Keys":
        """Read the folder.

        Raises:
            MisconfiguredError: if it cannot be used.
        """
        hint = "set SPUR_EVENTS_AUTH_KEYS to the folder 'auth' that 'spur-events nats init' made"
        if folder is None:
            raise errors.MisconfiguredError(f"the auth service has no keys; {hint}")
        try:
            accounts: dict[str, str] = json.loads((folder / "accounts.json").read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise errors.MisconfiguredError(
                f"{folder}/accounts.json cannot be read: {error}; {hint}"
            ) from error
        return cls(
            answers=keys.read(folder / f"{roles.AUTH}.answers.nk"),
            user=keys.read(folder / f"{roles.USERS}.{roles.USER}.nk"),
            user_admin=keys.read(folder / f"{roles.USERS}.{roles.USER_ADMIN}.nk"),
            accounts=accounts,
        )


class Auth:
    """The service of one process; any number may run, also on several machines."""

    def __init__(self, config: settings.Settings, bus: jetstream.Bus) -> None:
        self._config = config
        self._bus = bus
        self._keys = Keys.read(config.auth.keys)
        self.ready = asyncio.Event()

    async def run(self) -> None:
        """Answer until cancelled.

        Raises:
            SpurEventsError: if munged is of no use at the start.
        """
        socket = self._config.nats.munge_socket
        await munge.decode(await asyncio.to_thread(munge.encode, signin.MUNGE_PAYLOAD, socket), socket)
        async with callout.answering(self._bus, self.answer, _AT_ONCE):
            self.ready.set()
            log.info("auth takes requests", extra={"admins": len(self._config.auth.admins)})
            await asyncio.Event().wait()

    async def answer(self, question: bytes) -> bytes | None:
        """Return the answer to a server's question; None where nobody asked that could use one."""
        try:
            asked = self._question(question)
        except (claims.InvalidError, RefusedError, AttributeError, TypeError, ValueError) as error:
            log.warning("not a question of the server", extra={"reason": str(error)})
            return None
        options = asked["nats"].get("connect_opts") or {}
        where = (asked["nats"].get("client_info") or {}).get("host", "")
        try:
            name = await self._who(options)
        except (RefusedError, munge.ForeignError) as error:
            log.warning("refused", extra={"reason": str(error), "client": where})
            return self._refusal(asked, "refused")
        except errors.SpurEventsError as error:
            log.error("cannot check who that is", extra={"reason": str(error), "client": where})  # noqa: TRY400
            return self._refusal(asked, "cannot check now")
        except Exception:  # whoever comes next must be answered
            log.exception("unexpected", extra={"client": where})
            return self._refusal(asked, "cannot check now")
        log.info("signed in", extra={"user": name, "client": where})
        return self._let_in(asked, name)

    def _question(self, question: bytes) -> dict[str, Any]:
        """Return what a server asks, if it is a server and asks that."""
        asked = claims.read(question.decode("ascii", "replace"))
        content = asked["nats"]
        server = str((content.get("server_id") or {}).get("id"))
        if asked.get("aud") != _AUDIENCE or content.get("type") != "authorization_request":
            raise RefusedError("it is not an authorization request")
        if asked["iss"] != server or not keys.is_public(keys.Kind.SERVER, server):
            raise RefusedError("it is not signed by the server that it names")
        if asked.get("sub") != self._keys.accounts[roles.AUTH]:
            raise RefusedError("it is about another account")
        if not keys.is_public(keys.Kind.USER, str(content.get("user_nkey"))):
            raise RefusedError("it names no user key")
        if int(asked.get("exp") or 0) < time.time():
            raise RefusedError("it waited too long: the server has given up on it")
        return asked

    async def _who(self, options: dict[str, Any]) -> str:
        """Return the name of the user whom the client proves to be."""
        # A token where the client also has the sentinel's credentials file (nats-server before 2.11).
        credential = str(options.get("pass") or options.get("auth_token") or "")
        if not credential:
            raise RefusedError("no MUNGE credential")
        proof = await munge.decode(credential, self._config.nats.munge_socket)
        if proof.payload != signin.MUNGE_PAYLOAD.encode():
            raise RefusedError("a MUNGE credential made for something else")
        try:
            # It may ask a directory over the network.
            name = (await asyncio.to_thread(pwd.getpwuid, proof.uid)).pw_name
        except KeyError:
            raise RefusedError(f"UID {proof.uid} has no name on this machine") from None
        claimed = str(options.get("user") or "")
        if claimed not in ("", name):
            raise RefusedError(f"UID {proof.uid} is {name!r}, and asks for another name")
        return name

    def _let_in(self, asked: dict[str, Any], name: str) -> bytes:
        admin = name in self._config.auth.admins
        role, key = (roles.USER_ADMIN, self._keys.user_admin) if admin else (roles.USER, self._keys.user)
        token = claims.user(
            key,
            asked["nats"]["user_nkey"],
            account=self._keys.accounts[roles.USERS],
            name=names.slug(name),
            tags=(f"{roles.ROLE_TAG}{role}",),
            expires=int(time.time()) + self._config.auth.session_s,
        )
        return self._answer(asked, {"jwt": token})

    def _refusal(self, asked: dict[str, Any], reason: str) -> bytes:
        return self._answer(asked, {"error": reason})

    def _answer(self, asked: dict[str, Any], content: dict[str, Any]) -> bytes:
        answer = claims.sign(
            self._keys.answers,
            subject=asked["nats"]["user_nkey"],
            audience=asked["iss"],
            kind="authorization_response",
            content={**content, "issuer_account": self._keys.accounts[roles.AUTH]},
        )
        return answer.encode("ascii")
