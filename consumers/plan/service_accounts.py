"""The ServiceAccounts of an account's members.

`desired` calls it. Replacing one of another generation, so that its tokens die, is left to
`consumers.kube.apply`.
"""

from collections.abc import Iterable

from spur_events.consumers.plan import marks
from spur_events.schemas import accounts, names


def service_accounts(
    metadata: marks.Manifest, members: Iterable[accounts.Member]
) -> tuple[marks.Manifest, ...]:
    """Return one ServiceAccount a member, by name; a user who is listed twice has the last generation."""
    by_name = {names.service_account(member.name): member for member in members}
    return tuple(_service_account(metadata, name, member) for name, member in sorted(by_name.items()))


def _service_account(metadata: marks.Manifest, name: str, member: accounts.Member) -> marks.Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {
            **metadata,
            "name": name,
            "labels": {**metadata["labels"], marks.USER: member.slug},
            "annotations": {
                marks.USER_NAME: marks.printable(member.name),
                marks.GENERATION: member.generation,
            },
        },
        # Nothing runs as a member: no pod is to carry a member's token.
        "automountServiceAccountToken": False,
    }
