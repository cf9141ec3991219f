"""Access to a cluster: the domain models behind requests for kubeconfigs, and the parts' reports about a cluster."""

from datetime import datetime
from enum import StrEnum

from pydantic import Field

from spur_events.schemas.accounts import Frozen

#: What the API server refuses is refused before it is asked
#: (https://kubernetes.io/docs/reference/kubernetes-api/authentication-resources/token-request-v1/).
MIN_TOKEN_LIFETIME_S = 600


class RefusalCode(StrEnum):
    """Why no kubeconfig is handed out (proto/spur/events/v1/access.proto says more)."""

    BAD_REQUEST = "bad-request"
    UNKNOWN_USER = "unknown-user"
    NOT_A_MEMBER = "not-a-member"
    ACCOUNT_NEEDED = "account-needed"
    NOT_READY = "not-ready"
    RELAY_SILENT = "relay-silent"
    SERVICE_ACCOUNT = "service-account"
    GUARD_MISSING = "guard-missing"
    LIFETIME = "lifetime"
    CLUSTER_UNREACHABLE = "cluster-unreachable"
    MISCONFIGURED = "misconfigured"


class KubeconfigRequest(Frozen):
    """Asks for a kubeconfig; who asks is told by the subject. Empty account: the default or only one."""

    account: str = ""
    lifetime_s: int = 0
    held_uid: str = ""


class Refusal(Frozen):
    """No kubeconfig, why, and what the user should do. `temporary`: may be different in a moment."""

    code: RefusalCode
    message: str
    temporary: bool = False


class Grant(Frozen):
    """What a kubeconfig is made of. `token` is empty where the held one is still good; its text is never shown."""

    cluster: str
    account: str
    user: str
    namespace: str
    server: str
    ca: str
    service_account: str
    service_account_uid: str
    token: str = Field("", repr=False)
    expires_at: datetime


class KubeconfigReply(Frozen):
    """The answer: a grant or a refusal."""

    result: Grant | Refusal


class GuardRequest(Frozen):
    """Asks an apply process to look at the member guard now, and to mend it."""

    installation: str


class GuardState(StrEnum):
    """Whether the member guard is enforced by a cluster. UNKNOWN: this part does not look."""

    UNKNOWN = "unknown"
    IN_FORCE = "in force"
    MISSING = "missing"
    UNSUPPORTED = "unsupported"


class PartReport(Frozen):
    """What a part found out about its rights on a cluster, and apply about the guard. Times are UTC."""

    installation: str
    cluster: str
    part: str
    missing_rights: tuple[str, ...] = ()
    guard: GuardState = GuardState.UNKNOWN
    message: str = ""
    at: datetime
