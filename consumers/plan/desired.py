"""All objects of an account, from its state: the projection.

`converge` and `resync` call it. Total: every state gives valid manifests. In which order they are written,
and what has to be removed, is left to the callers.
"""

from dataclasses import dataclass

from spur_events import settings
from spur_events.consumers.plan import marks, namespace, quota, rbac, service_accounts
from spur_events.schemas import accounts


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The objects that an account is to have; None where there is to be none.

    `closed`: no pods may start. `not_enforced`: TRES whose number Kubernetes does not hold the account to.
    """

    namespace: marks.Manifest
    quota: marks.Manifest | None
    limits: marks.Manifest | None
    role: marks.Manifest | None
    binding: marks.Manifest | None
    service_accounts: tuple[marks.Manifest, ...]
    not_enforced: tuple[str, ...]
    closed: bool


def objects(state: accounts.AccountState, config: settings.Quota) -> Plan:
    """Return what the cluster should hold for an account in this state.

    A deleted account keeps its namespace, marked as an orphan, with a closed quota, and nobody in it.
    """
    granted = quota.caps(state, config)
    metadata = namespace.inside(state)
    alive = state.deletion is None
    return Plan(
        namespace=namespace.namespace(state),
        quota=quota.quota(metadata, granted, config),
        limits=quota.limits(metadata, granted, config) if alive else None,
        role=rbac.role(metadata) if alive else None,
        binding=rbac.binding(metadata, state.members) if alive else None,
        service_accounts=service_accounts.service_accounts(metadata, state.members) if alive else (),
        not_enforced=granted.not_enforced,
        closed=granted.closed,
    )
