"""Who we are to the NATS server: from the settings and the part that connects. `bus` and `caller` use it."""

import base64
import json
import os
import pwd
from pathlib import Path
from typing import Any

from spur_events import errors, munge
from spur_events.schemas import names
from spur_events.settings import Nats

#: The part that a command of an administrator acts as.
ADMIN = "admin"
#: Stands in a MUNGE credential that is made to sign in here: consumers.auth takes no other.
MUNGE_PAYLOAD = "spur-events: sign in to NATS"
#: What all inboxes of ours begin with.
INBOX = "_INBOX_"
#: What the JWT of a plain user carries.
USER_TAG = "role:user"


def credentials(settings: Nats, part: str) -> Path | None:
    """Return the credentials file of a part.

    Raises:
        MisconfiguredError: if it is not there.
    """
    given = settings.credentials
    if given is None:
        return None
    try:
        path = given / f"{part}.creds" if given.is_dir() else given
        found = path.is_file()
    except OSError as error:  # a folder on the way that is somebody else's
        raise errors.MisconfiguredError(
            f"NATS credentials {given} cannot be used: {error.strerror}; check SPUR_EVENTS_NATS_CREDENTIALS"
        ) from error
    if not found:
        raise errors.MisconfiguredError(
            f"NATS credentials {path} do not exist; check SPUR_EVENTS_NATS_CREDENTIALS, or make them with"
            " 'spur-events nats'"
        )
    return path


def claims(path: Path) -> dict[str, Any]:
    """Return what the JWT in a credentials file says; nobody has checked it: the server will.

    Raises:
        MisconfiguredError: if there is none in it.
    """
    try:
        lines = [line.strip() for line in path.read_text("ascii").splitlines()]
        payload = next(line for line in lines if line.count(".") == 2).split(".")[1]  # noqa: PLR2004 - of a JWT
        found: dict[str, Any] = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    except (OSError, ValueError, StopIteration) as error:
        raise errors.MisconfiguredError(
            f"NATS credentials {path} cannot be used: {str(error) or 'there is no JWT in it'}; check"
            " SPUR_EVENTS_NATS_CREDENTIALS"
        ) from error
    return found


def options(settings: Nats, part: str) -> dict[str, Any]:
    """Return the driver's options that say who connects, and which inboxes are its own.

    Raises:
        MisconfiguredError: if the credentials cannot be used.
    """
    if settings.munge:
        return _munge_options(settings, part)
    path = credentials(settings, part)
    if path is not None:
        return {
            "user_credentials": str(path),
            "inbox_prefix": inbox_prefix(str(claims(path).get("name", part))),
        }
    found: dict[str, Any] = {"inbox_prefix": inbox_prefix(part)}
    if settings.user:
        found |= {"user": settings.user, "password": settings.password.get_secret_value()}
    return found


def _munge_options(settings: Nats, part: str) -> dict[str, Any]:
    user = pwd.getpwuid(os.geteuid()).pw_name
    munge.encode(MUNGE_PAYLOAD, settings.munge_socket)  # what is wrong with munge is told now, as it is

    def credential() -> str:
        """Make another at each connection: each is good once."""
        try:
            return munge.encode(MUNGE_PAYLOAD, settings.munge_socket)
        except errors.MisconfiguredError as error:
            raise OSError(str(error)) from error  # the driver then tries again

    found: dict[str, Any] = {"inbox_prefix": inbox_prefix(names.slug(user))}
    sentinel = credentials(settings, part)
    if sentinel is not None:  # for nats-server before 2.11, which knows no default sentinel
        return found | {"user_credentials": str(sentinel), "token": credential}
    return found | {"user": user, "password": credential}


def hint(settings: Nats) -> str:
    """Return what to check when the server refuses us."""
    if settings.munge:
        return "that 'spur-events run auth' runs, and that munged has the same key here and there; its log says why"
    return "SPUR_EVENTS_NATS_CREDENTIALS, or SPUR_EVENTS_NATS_MUNGE where users need no file"


def identity(settings: Nats, part: str) -> str | None:
    """Return the slug of the plain user that we sign in as; None for a service or an administrator.

    Raises:
        MisconfiguredError: if the credentials cannot be used.
    """
    if settings.munge:
        return names.slug(pwd.getpwuid(os.geteuid()).pw_name)
    path = credentials(settings, part)
    if path is not None:
        found = claims(path)
        is_user = USER_TAG in ((found.get("nats") or {}).get("tags") or ())
        return str(found["name"]) if is_user and found.get("name") else None
    return None


def inbox_prefix(name: str) -> str:
    """Return what the inboxes of a part or a user begin with: nobody else may listen there."""
    return f"{INBOX}{name}"
