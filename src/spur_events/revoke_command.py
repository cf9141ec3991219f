"""`spur-events revoke`: a new generation of a user's memberships, and the wait until every cluster has it.

Needs the database to say it and NATS to see it carried out, by `run relay` and `run apply`.
"""

import asyncio
import getpass
import os
import time
from collections.abc import Sequence

import typer

from spur_events import errors, jetstream, postgres, settings
from spur_events.producers import revocation, rows
from spur_events.schemas import names, subjects
from spur_events.schemas.accounts import AccountState, Revision
from spur_events.schemas.status import SETTLED, AccountStatus, Phase

APPLICATION = "spur-events revoke"
_POLL_S = 0.05
#: Phases in which the binding and the ServiceAccounts are as wanted, whatever else is not.
_CARRIED_OUT = SETTLED | {Phase.PAUSED, Phase.PENDING}
_ACCESS_KINDS = {"Namespace", "RoleBinding", "ServiceAccount"}


def revoke(config: settings.Settings, user: str, account: str | None, timeout_s: float) -> None:
    """Revoke, wait for the clusters (not at all with a time-out of 0) and say what was done.

    Raises:
        PermanentError: if the user is not a member there.
        TimedOutError: naming what is left; it is carried out as soon as the parts run.
    """
    actor = rows.Actor(os_user=getpass.getuser(), uid=os.getuid())
    with postgres.connect(config.database, APPLICATION) as connection:
        revoked = revocation.revoke(connection, actor, user, account)
    for one in revoked:
        typer.echo(f"revoked: {one.user} in {one.account}")
    if timeout_s > 0:
        asyncio.run(wait(config, revoked, timeout_s))


async def wait(config: settings.Settings, revoked: Sequence[revocation.Revoked], timeout_s: float) -> None:
    """Return when every cluster that has the accounts has carried the revocations out; say so for each.

    Raises:
        TimedOutError: naming what is left.
    """
    began_s = time.monotonic()
    async with jetstream.connect(config.nats, APPLICATION) as bus:
        left = dict.fromkeys(revoked, "the relay has not published it")
        told: set[str] = set()
        while left:
            for one in list(left):
                left[one], done = await _look(bus, one)
                if not left[one]:
                    del left[one]
                for line in sorted(set(done) - told):
                    told.add(line)
                    typer.echo(f"{line} ({time.monotonic() - began_s:.1f} s)")
            if left and time.monotonic() - began_s > timeout_s:
                waiting = "; ".join(f"{one.user} in {one.account}: {why}" for one, why in left.items())
                raise errors.TimedOutError(
                    f"revoked in the database, but not carried out everywhere within {timeout_s:g} s: {waiting}."
                    " It will be as soon as the parts run: see 'spur-events status'"
                )
            await asyncio.sleep(_POLL_S if left else 0)
    if told:
        typer.echo("an API server may take a token that it saw before for up to 10 s more")


async def _look(bus: jetstream.Bus, one: revocation.Revoked) -> tuple[str, list[str]]:
    """Return what a revocation still waits for, empty if for nothing, and a line for each cluster that has it."""
    slug = names.slug(one.account)
    entry = await bus.get(subjects.ACCOUNTS_BUCKET, slug, AccountState, newest=True)
    if entry is None:
        return "the relay has not published it", []
    generations = {member.name: member.generation for member in entry.value.members}
    if one.user in generations and generations[one.user] != one.generation:
        return "the relay has not published it", []
    waiting, done = [], []
    keys = await bus.keys(subjects.STATUS_BUCKET, subjects.status_key("*", slug))
    for key in sorted(keys):
        found = await bus.get(subjects.STATUS_BUCKET, key, AccountStatus, newest=True)
        if found is None:
            continue
        if why := _missing(found.value, entry.value.revision):
            waiting.append(f"cluster {found.value.cluster} {why}")
        elif found.value.phase is Phase.CONFLICT:
            done.append(f"nothing to do on {found.value.cluster}: {found.value.message}")
        else:
            paused = "; it is paused there, and she gets no other until that ends"
            done.append(
                f"every token of {one.user} in {one.account} is dead on {found.value.cluster}"
                f"{paused if found.value.phase is Phase.PAUSED else ''}"
            )
    return ", ".join(waiting), done


def _missing(status: AccountStatus, revision: Revision) -> str:
    """Return why a cluster has not carried a revocation out, or nothing if it has."""
    if status.wanted < revision:
        return "has not looked at it"
    refused = status.phase is Phase.DEGRADED and _ACCESS_KINDS & set(status.reason.split(","))
    if status.phase in _CARRIED_OUT | {Phase.CONFLICT} or (status.phase is Phase.DEGRADED and not refused):
        return ""
    return f"is {status.phase}: {status.message}"
