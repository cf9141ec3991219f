"""The Namespace of an account, and the metadata that the objects in it share.

`desired` calls it. Deleting the namespace of a deleted account is left to resync (design rule 11).
"""

from datetime import UTC, datetime

from spur_events.consumers.plan import marks
from spur_events.schemas import accounts, names


def namespace(state: accounts.AccountState) -> marks.Manifest:
    """Return the Namespace; that of a deleted account says since when it is an orphan."""
    annotations = {
        marks.ACCOUNT_NAME: marks.printable(state.name),
        marks.REVISION: str(state.revision),
        marks.INCARNATION: state.incarnation,
    }
    if state.deletion is not None:
        annotations[marks.ORPHANED_AT] = rfc3339(state.deletion.at)
    return {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {
            "name": names.namespace(state.name),
            "labels": marks.labels(state.installation, state.slug) | marks.POD_SECURITY,
            "annotations": annotations,
        },
    }


def inside(state: accounts.AccountState) -> marks.Manifest:
    """Return the metadata, without a name, of an object in the account's namespace."""
    return {
        "namespace": names.namespace(state.name),
        "labels": marks.labels(state.installation, state.slug),
    }


def rfc3339(at: datetime) -> str:
    """Return a time in the way that Kubernetes writes its own."""
    aware = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    return aware.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
