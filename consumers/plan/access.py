"""Whether a user gets a token, from what was read: each question is a function, and each no a named refusal.

Pure. `consumers.kubeconfig` reads, and asks in this order; nothing here is taken from an earlier request (design
rules 16 to 18). The sentences are for the user who asked: what is wrong, and what she can do.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from spur_events import errors
from spur_events.consumers.plan import marks, observed
from spur_events.schemas import access, accounts, names
from spur_events.schemas.access import RefusalCode
from spur_events.schemas.status import RELAY_STALE_S, AccountStatus, Phase, RelayStatus

_TELL = "tell the administrator"
_MAX_NAME = 256


class DeniedError(errors.RefusedError):
    """No token, for a reason that the user is told."""

    def __init__(self, code: RefusalCode, message: str, *, temporary: bool = False) -> None:
        super().__init__(message)
        self.refusal = access.Refusal(code=code, message=message, temporary=temporary)


@dataclass(frozen=True, kw_only=True)
class Membership:
    """An account that a user is in."""

    name: str
    is_default: bool

    @property
    def slug(self) -> str:
        """The account's label-safe name."""
        return names.slug(self.name)


@dataclass(frozen=True, kw_only=True)
class Live:
    """A member's objects, as the API server just showed them; None where there is none."""

    namespace: marks.Manifest | None
    service_account: marks.Manifest | None
    quota: marks.Manifest | None


def check_request(user_slug: str, request: access.KubeconfigRequest) -> None:
    """Refuse what no command of ours sends.

    Raises:
        DeniedError: saying what is wrong with it.
    """
    if not names.is_slug(user_slug):
        raise DeniedError(RefusalCode.BAD_REQUEST, "the subject does not end with a user's slug")
    if len(request.account) > _MAX_NAME:
        raise DeniedError(
            RefusalCode.BAD_REQUEST, f"an account's name of more than {_MAX_NAME} characters: check --account"
        )


def check_relay(beat: RelayStatus | None, installation: str, now: datetime) -> None:
    """Refuse while nobody can say whether the members are up to date.

    Raises:
        DeniedError: if the relay gave no sign of life for too long, or its clock is not ours.
    """
    age_s = (
        (now - beat.at).total_seconds() if beat is not None and beat.installation == installation else None
    )
    if age_s is None or age_s > RELAY_STALE_S:
        said = "never" if age_s is None else f"{age_s:.0f} s ago"
        raise DeniedError(
            RefusalCode.RELAY_SILENT,
            f"who is a member may be out of date: the relay was last heard of {said}, and nothing is handed out"
            f" after {RELAY_STALE_S:.0f} s. Try again later; if it stays so, {_TELL} that"
            " 'spur-events run relay' does not run",
        )
    if age_s < -RELAY_STALE_S:
        # A heartbeat from the future would count as fresh long after the relay's end.
        raise DeniedError(
            RefusalCode.RELAY_SILENT,
            f"the relay's clock is {-age_s:.0f} s ahead of the kubeconfig service's, so that nobody can say"
            f" whether it lives: {_TELL}",
        )


def choose(user_slug: str, found: Iterable[Membership], wanted: str) -> Membership:
    """Return the account that is meant: the named one, else the default, else the only one.

    Raises:
        DeniedError: if she is in none, not in the named one, or in several and named none. An account that does
            not exist and one that she is not in are refused alike.
    """
    mine = sorted(found, key=lambda one: one.name)
    if not mine:
        raise DeniedError(
            RefusalCode.UNKNOWN_USER,
            f"user {user_slug} is in no account: ask the administrator to add you to one",
        )
    listed = ", ".join(one.name for one in mine)
    if wanted:
        # As it is stored, then as it stands in object names, then as sacctmgr would have stored it.
        for text in ([one.name for one in mine], [one.slug for one in mine]):
            if wanted in text:
                return mine[text.index(wanted)]
        for one in mine:
            if one.name == wanted.lower():
                return one
        raise DeniedError(
            RefusalCode.NOT_A_MEMBER,
            f"user {user_slug} is not in an account {wanted!r}; in: {listed}. Name one of these with --account,"
            " or ask the administrator to be added",
        )
    defaults = [one for one in mine if one.is_default]
    if len(defaults) == 1:
        return defaults[0]
    if len(mine) == 1:
        return mine[0]
    raise DeniedError(
        RefusalCode.ACCOUNT_NEEDED,
        f"user {user_slug} is in several accounts, and none of them is the default: name one with --account: {listed}",
    )


def member_in(
    state: accounts.AccountState | None, user_slug: str, account: str, installation: str
) -> accounts.Member:
    """Return the user's membership in an account's newest state.

    Raises:
        DeniedError: if there is none.
    """
    if state is not None and state.installation != installation:
        raise DeniedError(
            RefusalCode.MISCONFIGURED,
            f"the account's state is of another installation than this service's: {_TELL}",
        )
    if state is not None and state.deletion is None:
        for member in state.members:
            if member.slug == user_slug:
                return member
    raise DeniedError(
        RefusalCode.NOT_A_MEMBER,
        f"user {user_slug} is not in an account {account!r} any more: ask the administrator to be added",
    )


def check_applied(state: accounts.AccountState, status: AccountStatus | None, cluster: str) -> None:
    """Refuse until the cluster is as the newest state wants it, or somebody paused it.

    Raises:
        DeniedError: saying how far the cluster is.
    """
    if status is None or status.wanted < state.revision:
        raise DeniedError(
            RefusalCode.NOT_READY,
            f"cluster {cluster} has not carried out the newest change of account {state.name} yet: try again in"
            f" a moment; if it stays so, {_TELL} that 'spur-events run apply' does not run for it",
            temporary=True,
        )
    if status.settled or status.phase is Phase.PAUSED:
        return
    why = ": ".join(text for text in (status.reason, status.message) if text)
    raise DeniedError(
        RefusalCode.NOT_READY,
        f"account {state.name} is {status.phase} on cluster {cluster}{f' ({why})' if why else ''}: try again in"
        f" a moment; if it stays so, {_TELL}, who sees it in 'spur-events status'",
        temporary=True,
    )


def check_live(live: Live, state: accounts.AccountState, member: accounts.Member, cluster: str) -> str:
    """Return the UID of the member's ServiceAccount, if it is hers and her account's quota is in force.

    Raises:
        DeniedError: naming what is missing in the cluster.
    """
    where = f"of account {state.name} on cluster {cluster}"
    wait = f"try again in a moment; if it stays so, {_TELL} to run 'spur-events resync'"
    namespace, found = live.namespace, live.service_account
    if namespace is None or observed.owner(namespace, state.installation) != "ours":
        raise DeniedError(
            RefusalCode.NOT_READY, f"the namespace {where} is not there or not ours: {wait}", temporary=True
        )
    if observed.terminating(namespace) is not None:
        raise DeniedError(
            RefusalCode.NOT_READY, f"the namespace {where} is being deleted: {wait}", temporary=True
        )
    if live.quota is None or not observed.quota_in_force(live.quota):
        raise DeniedError(
            RefusalCode.NOT_READY, f"the quota {where} is not in force yet: {wait}", temporary=True
        )
    if found is None or not _is_of(found, state, member):
        if observed.is_paused(namespace):
            raise DeniedError(
                RefusalCode.SERVICE_ACCOUNT,
                f"the namespace {where} is paused, and {member.name} was added, or her tokens revoked, since then:"
                f" {_TELL}, who takes the mark {marks.RECONCILE}={marks.PAUSED} off",
            )
        raise DeniedError(
            RefusalCode.SERVICE_ACCOUNT,
            f"the ServiceAccount of {member.name} {where} is not there, or is not of this membership: {wait}",
            temporary=True,
        )
    return str(found["metadata"]["uid"])


def _is_of(found: marks.Manifest, state: accounts.AccountState, member: accounts.Member) -> bool:
    metadata = found["metadata"]
    wanted = marks.labels(state.installation, state.slug)
    return (
        not metadata.get("deletionTimestamp")
        and wanted.items() <= (metadata.get("labels") or {}).items()
        and (metadata.get("annotations") or {}).get(marks.GENERATION) == member.generation
    )


def check_guard(found: access.GuardState, message: str, cluster: str) -> None:
    """Refuse where members could keep their access after they were removed (design rule 15).

    Raises:
        DeniedError: unless the guard is in force.
    """
    if found is not access.GuardState.IN_FORCE:
        raise DeniedError(
            RefusalCode.GUARD_MISSING,
            f"the member guard of cluster {cluster} is {found} ({message or 'no more is known'}), and without it"
            f" nothing is handed out: {_TELL}",
        )


def lifetime_s(asked_s: int, default_s: int, longest_s: int) -> int:
    """Return for how long to ask: what was asked for or the default, never more than the longest.

    Raises:
        DeniedError: if less was asked than an API server gives.
    """
    if not asked_s:
        return min(default_s, longest_s)
    if asked_s < access.MIN_TOKEN_LIFETIME_S:
        raise DeniedError(
            RefusalCode.LIFETIME,
            f"a lifetime of {asked_s} s is too short: Kubernetes makes no token of less than"
            f" {access.MIN_TOKEN_LIFETIME_S} s; ask for at least that, or leave --lifetime out",
        )
    return min(asked_s, longest_s)
