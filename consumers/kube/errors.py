"""What an API server can answer instead of doing it, as errors of our tree.

`client` raises them; the callers decide about retries by their base: temporary (with the server's own delay) or
permanent. Reasons: https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/status/.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spur_events import errors

UnreachableError = errors.UnreachableError


class NotFoundError(errors.PermanentError):
    """404: the object, or the namespace that it should be in, does not exist."""


class ConflictError(errors.TemporaryError):
    """409: a precondition (UID, resourceVersion) does not hold: somebody was faster, look again."""


class AlreadyExistsError(ConflictError):
    """409: the object to be created is there already, perhaps still being deleted."""


class NamespaceTerminatingError(errors.TemporaryError):
    """403 in a namespace that is being deleted: nothing can be created there until it is gone."""


class ForbiddenError(errors.TemporaryError):
    """403: a right is missing, or admission says no. Temporary: rights are granted without our doing."""


class UnauthorizedError(errors.TemporaryError):
    """401: the credentials are not accepted. Temporary: they are replaced without our doing."""


class ThrottledError(errors.TemporaryError):
    """429, or 5xx with Retry-After: the server asks to be left alone for `retry_after_s`."""


class ExpiredError(errors.TemporaryError):
    """410: the continue token of a list is too old; list again from the start."""


class SlowError(errors.TemporaryError):
    """No answer within the time-out, on a connection that stands: this request's trouble, not the cluster's."""


class ServerError(errors.TemporaryError):
    """5xx: the server, its storage or an admission webhook failed."""


class InvalidError(errors.PermanentError):
    """400, 422 and other 4xx: the server will not take this request, however often it is sent."""


#: What concerns one request, and so one account; an unreachable server concerns them all.
ANSWERS = (
    NotFoundError,
    ConflictError,
    NamespaceTerminatingError,
    ForbiddenError,
    UnauthorizedError,
    ThrottledError,
    ExpiredError,
    SlowError,
    ServerError,
    InvalidError,
)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A refusal as it came: HTTP status, the `Status` object, and what was asked for."""

    status: int
    method: str
    path: str
    address: str
    body: Mapping[str, Any]
    retry_after: str = ""


def from_answer(answer: Answer) -> errors.SpurEventsError:
    """Return the error for a refusal. The messages name server, verb and object."""
    said = str(answer.body.get("message") or f"HTTP status {answer.status}")
    kind = _kind(answer)
    if kind is UnauthorizedError:
        return UnauthorizedError(
            f"the API server at {answer.address} does not accept our credentials ({said}); check the user in"
            " the kubeconfig (SPUR_EVENTS_KUBERNETES_KUBECONFIG or KUBECONFIG)"
        )
    # For a missing right the server itself names the user, the verb, the resource and the namespace.
    text = f"{answer.method} {answer.path} on {answer.address}: {_WORDS.get(kind, '')}{said}"
    if issubclass(kind, errors.TemporaryError):
        return kind(text, retry_after_s=_seconds(answer.retry_after))
    return kind(text)


_BY_STATUS: dict[int, type[errors.SpurEventsError]] = {
    401: UnauthorizedError,
    403: ForbiddenError,
    404: NotFoundError,
    408: ServerError,
    409: ConflictError,
    410: ExpiredError,
    429: ThrottledError,
}
_WORDS: dict[type[errors.SpurEventsError], str] = {
    ForbiddenError: "forbidden: ",
    NamespaceTerminatingError: "the namespace is still being deleted: ",
    ThrottledError: "too many requests: ",
    ServerError: "the server failed: ",
    InvalidError: "refused: ",
}
_SERVER_FAULTS = range(500, 600)


def _kind(answer: Answer) -> type[errors.SpurEventsError]:
    kind = _BY_STATUS.get(answer.status, InvalidError)
    if answer.status in _SERVER_FAULTS:
        return ThrottledError if answer.retry_after else ServerError
    if kind is ForbiddenError and _has_cause(answer.body, "reason", "NamespaceTerminating"):
        return NamespaceTerminatingError
    if kind is InvalidError and _has_cause(answer.body, "field", "metadata.uid"):
        # How a server-side apply says that the object is not the one with the given UID.
        return ConflictError
    if kind is ConflictError and answer.body.get("reason") == "AlreadyExists":
        return AlreadyExistsError
    return kind


def _has_cause(body: Mapping[str, Any], key: str, value: str) -> bool:
    causes = (body.get("details") or {}).get("causes") or []
    return any(cause.get(key) == value for cause in causes)


def _seconds(retry_after: str) -> float | None:
    # Kubernetes writes seconds; the HTTP date form comes only from proxies and is not worth a clock.
    return float(retry_after) if retry_after.isdecimal() else None
