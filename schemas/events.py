"""What changed, by whom and when: the domain models behind the messages of stream SPUR_EVENTS."""

from datetime import datetime
from enum import StrEnum

from spur_events.schemas.accounts import Frozen, Revision


class ChangeKind(StrEnum):
    """What happened to an account. The values are those that the database triggers write."""

    ACCOUNT_ADDED = "account_added"
    ACCOUNT_CHANGED = "account_changed"
    ACCOUNT_DELETED = "account_deleted"
    MEMBER_ADDED = "member_added"
    MEMBER_CHANGED = "member_changed"
    MEMBER_REMOVED = "member_removed"
    MEMBER_REVOKED = "member_revoked"
    REPUBLISHED = "republished"


class Actor(Frozen):
    """Who made a change: the database role is proven, the operating-system user is only stated."""

    database_user: str
    os_user: str = ""
    application: str = ""


class Change(Frozen):
    """One change of one account or member; `id` is its outbox row, unique in an installation.

    `before` and `after` are JSON objects of the changed columns, empty where there is nothing to show.
    """

    id: int
    kind: ChangeKind
    user: str = ""
    before: str = ""
    after: str = ""
    actor: Actor
    at: datetime


class AccountChanged(Frozen):
    """An account has a new state in the bucket, at `revision`, because of `changes`."""

    installation: str
    revision: Revision
    name: str
    changes: tuple[Change, ...]
    part: int = 1
    parts: int = 1


class RecheckReason(StrEnum):
    """Why an account is looked at again."""

    RETRY = "retry"
    BEHIND = "behind"
    RESYNC = "resync"
    REQUEST = "request"
    PRUNE = "prune"
    PRUNE_UNEXPLAINED = "prune_unexplained"
    ADOPT = "adopt"


class Recheck(Frozen):
    """Asks the one writer of an account on a cluster to compare the account's objects with its state.

    For a prune, `namespace_uid` and `incarnation` are what the plan was about: anything else is left alone.
    """

    installation: str
    slug: str
    reason: RecheckReason
    namespace_uid: str = ""
    incarnation: str = ""


class AuditRequest(Frozen):
    """Asks the leading relay to compare database and bucket now.

    `forget` are slugs of accounts that the bucket has and the database neither has nor recorded as deleted:
    their deletion is then recorded.
    """

    installation: str
    forget: tuple[str, ...] = ()
    requested_by: str = ""


class ResyncRequest(Frozen):
    """Asks for a resync of a cluster. `prune` and `prune_unexplained` allow the deletion of namespaces.

    `limited` to what somebody was shown and agreed to: only the deletions that `confirmed` names, by slug.
    """

    installation: str
    id: str
    dry_run: bool = False
    prune: bool = False
    prune_unexplained: bool = False
    requested_by: str = ""
    at: datetime
    limited: bool = False
    confirmed: tuple[str, ...] = ()
