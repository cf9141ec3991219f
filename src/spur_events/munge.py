"""MUNGE: proof of an operating-system user to whoever shares the cluster's key. The only module that runs its programs.

`encode` makes a proof for this process's user (jetstream.signin), `decode` checks one (consumers.auth). A credential
is good once: munged remembers those that it decoded. What a credential is for stands in its payload: both sides of a
protocol must agree on it, so that none made for another service is taken here.
"""

import asyncio
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from spur_events import errors

#: Seconds that a credential is good: long enough for a busy machine, short for a thief.
LIFETIME_S = 60
_TIMEOUT_S = 5.0
_MAX_CREDENTIAL = 4096
_FORM = re.compile(r"MUNGE:[A-Za-z0-9+/=:]+:", re.ASCII)
_UID = re.compile(r"^UID:\s+(?:.*\()?(\d+)\)?$", re.MULTILINE)
_REASON = re.compile(r"^(?:\w+: Error: |STATUS:\s+)(.*)$", re.MULTILINE)
#: From here on the credential is at fault, below it munged or the call (munge.h, munge_err_t).
_FIRST_CREDENTIAL_ERROR = 8
_PACKAGE = "install the package 'munge'"


class ForeignError(errors.PermanentError):
    """A credential that proves nothing: the message says why, and never holds it."""


@dataclass(frozen=True, kw_only=True)
class Proof:
    """Whose a credential is, and what she put into it."""

    uid: int
    payload: bytes


def encode(payload: str, socket: Path | None) -> str:
    """Return a fresh credential of this process's user.

    Raises:
        MisconfiguredError: if munge is not installed, or munged does not answer.
    """
    command = ["munge", f"--string={payload}", f"--ttl={LIFETIME_S}", *_at(socket)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    except FileNotFoundError as error:
        raise errors.MisconfiguredError(f"there is no program 'munge' on PATH: {_PACKAGE}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise errors.MisconfiguredError(f"munge does not answer: {error}") from error
    if done.returncode != 0:
        raise errors.MisconfiguredError(
            f"no MUNGE credential to sign in with: {_said(done.stderr)}; check that munged runs on this machine"
        )
    return done.stdout.strip()


async def decode(credential: str, socket: Path | None) -> Proof:
    """Return what a credential proves; it is used up then.

    Raises:
        ForeignError: if it is none, was used before, is too old, or of another key.
        UnreachableError: if munged does not answer.
    """
    if len(credential) > _MAX_CREDENTIAL or not _FORM.fullmatch(credential):
        raise ForeignError("that is not a MUNGE credential")
    command = ["unmunge", "--keys=STATUS,UID", *_at(socket)]
    pipe = asyncio.subprocess.PIPE
    try:
        running = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
    except OSError as error:
        raise errors.MisconfiguredError(f"unmunge cannot be run: {error.strerror}; {_PACKAGE}") from error
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            output, complaint = await running.communicate(credential.encode("ascii"))
    except TimeoutError as error:
        raise errors.UnreachableError(f"munged did not answer within {_TIMEOUT_S:.0f} s") from error
    finally:
        if running.returncode is None:
            running.kill()
            await running.wait()
    # Metadata, a blank line, the payload: what stands in a payload cannot pose as metadata.
    head, _, payload = output.partition(b"\n\n")
    metadata = head.decode("utf-8", "replace")
    if running.returncode:
        kind = ForeignError if running.returncode >= _FIRST_CREDENTIAL_ERROR else errors.UnreachableError
        raise kind(_said(complaint.decode("utf-8", "replace") + metadata))
    found = _UID.findall(metadata)
    if len(found) != 1:
        raise ForeignError("unmunge names no UID")
    return Proof(uid=int(found[0]), payload=payload)


def _at(socket: Path | None) -> list[str]:
    return [f"--socket={socket}"] if socket is not None else []


def _said(text: str) -> str:
    """Return the reason alone from what munge or unmunge wrote."""
    found = _REASON.findall(text)
    return str(found[-1]).strip() if found else "it failed and said nothing"
