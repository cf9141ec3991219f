"""Subjects, keys, stream and bucket names: every name on the bus, in one place.

Slugs hold only `[a-z0-9-]`, so one slug is one subject token and one key token (schemas.names).
"""

import hashlib
import re

from spur_events.schemas import names
from spur_events.schemas.events import AccountChanged, Recheck

EVENTS_STREAM = "SPUR_EVENTS"
PARKED_STREAM = "SPUR_PARKED"
ACCOUNTS_BUCKET = "spur-accounts"
STATUS_BUCKET = "spur-status"
RELAY_KEY = "relay"
CHECKPOINT_KEY = "checkpoint"
#: Begins no cluster's name, so that these keys are nobody's status.
_REPORT_PREFIX = "_resync."
PART_PREFIX = "_part."
AUDIT_REQUEST = "spur.audit"

#: Key in the metadata of SPUR_EVENTS that holds the number of partitions, fixed when the stream is made.
PARTITIONS_METADATA = "spur-events-partitions"
#: Key in the metadata of SPUR_EVENTS that holds the id of the installation that publishes to it.
INSTALLATION_METADATA = "spur-events-installation"

ALL_CHANGES = "spur.change.>"

_TOKEN = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?", re.ASCII)


def is_cluster_name(name: str) -> bool:
    """Return whether a cluster may be called so: a lower-case label, since the name is a subject token."""
    return _TOKEN.fullmatch(name) is not None and name not in {RELAY_KEY, CHECKPOINT_KEY}


def partition(slug: str, partitions: int) -> int:
    """Return the partition of an account: the same in every process and version."""
    return int.from_bytes(hashlib.sha256(slug.encode("ascii")).digest()[:8], "big") % partitions


def change(slug: str, partitions: int) -> str:
    """Return the subject of an account's change events."""
    return f"spur.change.{partition(slug, partitions)}.{slug}"


def recheck(cluster: str, slug: str, partitions: int) -> str:
    """Return the subject that asks one cluster to look at an account again."""
    return f"spur.recheck.{cluster}.{partition(slug, partitions)}.{slug}"


def resync(cluster: str) -> str:
    """Return the subject of requests to resync a cluster."""
    return f"spur.resync.{cluster}"


def resync_durable(cluster: str) -> str:
    """Return the name of the durable consumer of those requests."""
    return f"resync-{cluster}"


def kubeconfig(cluster: str, user_slug: str) -> str:
    """Return the subject on which a user asks for a kubeconfig; `*` as the slug is what the responder listens to."""
    return f"spur.kubeconfig.{cluster}.{user_slug}"


def guard(cluster: str) -> str:
    """Return the subject of requests to look at a cluster's member guard now; an apply process answers."""
    return f"spur.guard.{cluster}"


def part_key(cluster: str, part: str) -> str:
    """Return the key of what a part found out about its rights and the guard of a cluster."""
    return f"{PART_PREFIX}{cluster}.{part}"


def report_key(cluster: str, request: str = "") -> str:
    """Return the key of a cluster's last resync report, or of the one that answers a request, by its id."""
    return f"{_REPORT_PREFIX}{cluster}{f'.{request}' if request else ''}"


def is_account_status(key: str) -> bool:
    """Return whether a key of the status bucket is an account's status on a cluster."""
    return "." in key and not key.startswith((_REPORT_PREFIX, PART_PREFIX))


def partition_filters(cluster: str, number: int) -> list[str]:
    """Return what the consumer of one partition on one cluster listens to."""
    return [f"spur.change.{number}.>", f"spur.recheck.{cluster}.{number}.>"]


def durable(cluster: str, number: int) -> str:
    """Return the name of the durable consumer of one partition on one cluster."""
    return f"apply-{cluster}-{number}"


def status_key(cluster: str, slug: str) -> str:
    """Return the key of an account's status on one cluster."""
    return f"{cluster}.{slug}"


def slug_of(subject: str) -> str:
    """Return the last token of a change or recheck subject, or of a status key: the slug."""
    return subject.rpartition(".")[2]


def slug_in(event: AccountChanged | Recheck) -> str:
    """Return the slug of the account that an event is about, from its payload."""
    return event.slug if isinstance(event, Recheck) else names.slug(event.name)


def parked(cluster: str, reason: str) -> str:
    """Return the subject under which a message that cannot be processed is parked."""
    return f"spur.parked.{cluster}.{reason}"
