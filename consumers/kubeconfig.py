"""The kubeconfig responder: answers a user's request with a short token for her account, or says why not.

`services.kubeconfig` runs it. Who asks is the last token of the request's subject, which NATS guards; nothing in the
payload says so (design rule 17). Everything is read anew for each request and judged by `plan.access`; the
membership is read once more when the token is there, since a removal may have come between. Nothing is kept, and
tokens are neither logged nor stored.
"""

import asyncio
import logging
import re
from collections import Counter
from datetime import UTC, datetime
from importlib import metadata

from spur_events import errors, jetstream, process, retrying, settings
from spur_events.consumers import guard, memberships
from spur_events.consumers.kube import apply, published, tokens
from spur_events.consumers.kube import client as kube
from spur_events.consumers.kube import errors as kube_errors
from spur_events.consumers.plan import access, marks
from spur_events.jetstream import service
from spur_events.schemas import codec, names, subjects
from spur_events.schemas.access import (
    Grant,
    GuardState,
    KubeconfigReply,
    KubeconfigRequest,
    Refusal,
    RefusalCode,
)
from spur_events.schemas.accounts import AccountState, Member
from spur_events.schemas.status import AccountStatus, RelayStatus

log = logging.getLogger(__name__)

SERVICE = "spur-kubeconfig"
PART = "kubeconfig"

#: What the cluster answers where the ServiceAccount went away between the check and the request.
_GONE = (kube_errors.NotFoundError, kube_errors.ConflictError, kube_errors.NamespaceTerminatingError)
_FORBIDDEN = 403
_BAD = 400
_UNAVAILABLE = 503
_STATUS = {
    RefusalCode.BAD_REQUEST: _BAD,
    RefusalCode.ACCOUNT_NEEDED: _BAD,
    RefusalCode.LIFETIME: _BAD,
    RefusalCode.UNKNOWN_USER: _FORBIDDEN,
    RefusalCode.NOT_A_MEMBER: _FORBIDDEN,
}


class Responder:
    """Hands out tokens for one cluster."""

    def __init__(
        self, config: settings.Settings, bus: jetstream.Bus, client: kube.Client, installation: str
    ) -> None:
        self._config = config
        self._cluster = config.kubernetes.cluster
        self._bus = bus
        self._client = client
        self._installation = installation
        self._memberships = memberships.Memberships(bus)
        self._counts: Counter[str] = Counter()
        self.ready = asyncio.Event()

    async def run(self) -> None:
        """Answer until cancelled."""
        await retrying.forever("offer kubeconfigs", self._serve)

    async def _serve(self) -> None:
        await self._memberships.of("")  # reads the bucket whole, so that the first user does not wait for it
        offer = service.Service(
            name=SERVICE,
            endpoint=PART,
            version=_version(),
            description="Short-lived kubeconfigs for members of accounts",
            metadata={"cluster": self._cluster, "installation": self._installation},
            subject=subjects.kubeconfig(self._cluster, "*"),
            kind=KubeconfigRequest,
            answer=self.answer,
            stats=self.stats,
        )
        async with service.serving(self._bus, offer):
            self.ready.set()
            await asyncio.get_running_loop().create_future()

    def stats(self) -> dict[str, int]:
        """Return how many requests were granted, refused, and failed by a fault of ours."""
        return {key: self._counts[key] for key in ("granted", "refused", "failed")}

    async def answer(self, user: str, request: KubeconfigRequest | codec.CodecError) -> service.Answer:
        """Return the answer to a request of the user with this slug."""
        result: Grant | Refusal
        outcome = "refused"
        try:
            result = await self._judge(user, request)
            outcome = "granted"
        except access.DeniedError as error:
            result = error.refusal
        except Exception as error:
            outcome = "failed"
            log.exception("kubeconfig failed", extra={"user": _shown(user), "error": type(error).__name__})
            result = Refusal(
                code=RefusalCode.MISCONFIGURED,
                message="the kubeconfig service failed: tell the administrator, who finds the reason in its log",
            )
        self._counts[outcome] += 1
        self._tell(user, request, result)
        if isinstance(result, Grant):
            return service.Answer(reply=KubeconfigReply(result=result))
        status = _STATUS.get(result.code, _UNAVAILABLE)
        return service.Answer(reply=KubeconfigReply(result=result), status=status, word=str(result.code))

    async def _judge(self, user: str, request: KubeconfigRequest | codec.CodecError) -> Grant:
        if isinstance(request, codec.CodecError):
            raise access.DeniedError(
                RefusalCode.BAD_REQUEST,
                f"the request cannot be read ({request}): use 'spur-events kubeconfig' of the same version",
            )
        access.check_request(user, request)
        state, member = await self._membership(user, request.account)
        try:
            uid = await self._check_cluster(state, member)
            lifetime_s = access.lifetime_s(
                request.lifetime_s,
                self._config.access.token_lifetime_s,
                self._config.access.max_token_lifetime_s,
            )
            where = await published.endpoint(self._client, self._config, PART)
            token = None
            if request.held_uid != uid:
                token = await tokens.request(
                    self._client,
                    names.service_account(member.name),
                    names.namespace(state.name),
                    uid=uid,
                    lifetime_s=lifetime_s,
                )
        except errors.SpurEventsError as error:
            raise self._denied(error, state.name) from error
        await self._check_still(state, member)
        return Grant(
            cluster=self._cluster,
            account=state.name,
            user=member.name,
            namespace=names.namespace(state.name),
            server=where.server,
            ca=where.ca,
            service_account=names.service_account(member.name),
            service_account_uid=uid,
            token=token.text if token else "",
            expires_at=token.expires_at if token else datetime.now(UTC),
        )

    async def _membership(self, user: str, wanted: str) -> tuple[AccountState, Member]:
        """Return the account that is meant and the user's membership, if the cluster is up to date with both."""
        try:
            beat = await self._bus.get(subjects.STATUS_BUCKET, subjects.RELAY_KEY, RelayStatus, newest=True)
            access.check_relay(beat.value if beat else None, self._installation, datetime.now(UTC))
            chosen = access.choose(user, await self._memberships.of(user), wanted)
            state, member = await self._read_member(chosen.slug, user, chosen.name)
            key = subjects.status_key(self._cluster, state.slug)
            status = await self._bus.get(subjects.STATUS_BUCKET, key, AccountStatus, newest=True)
        except (errors.TemporaryError, codec.CodecError) as error:
            raise _unread(error) from error
        access.check_applied(state, status.value if status else None, self._cluster)
        return state, member

    async def _read_member(self, slug: str, user: str, account: str) -> tuple[AccountState, Member]:
        entry = await self._bus.get(subjects.ACCOUNTS_BUCKET, slug, AccountState, newest=True)
        member = access.member_in(entry.value if entry else None, user, account, self._installation)
        assert entry is not None  # noqa: S101 - nobody is a member of what is not there
        return entry.value, member

    async def _check_cluster(self, state: AccountState, member: Member) -> str:
        """Return the UID of the member's ServiceAccount, if all is in the cluster that must be."""
        namespace = names.namespace(state.name)
        (found, account, quota), (judged, message) = await process.together(
            process.together(
                apply.get(self._client, "Namespace", namespace),
                apply.get(self._client, "ServiceAccount", names.service_account(member.name), namespace),
                apply.get(self._client, "ResourceQuota", marks.QUOTA_NAME, namespace),
            ),
            self._guard(),
        )
        live = access.Live(namespace=found, service_account=account, quota=quota)
        uid = access.check_live(live, state, member, self._cluster)
        access.check_guard(judged, message, self._cluster)
        return uid

    async def _guard(self) -> tuple[GuardState, str]:
        if not self._config.access.require_guard:
            return GuardState.IN_FORCE, "not asked for"
        return await guard.state(self._client, self._installation)

    async def _check_still(self, state: AccountState, member: Member) -> None:
        """Refuse if the membership ended or began anew since it was read; the token is dropped then."""
        try:
            _, now = await self._read_member(state.slug, member.slug, state.name)
        except (errors.TemporaryError, codec.CodecError) as error:
            raise _unread(error) from error
        if now.generation != member.generation:
            raise access.DeniedError(
                RefusalCode.NOT_READY,
                f"the membership of {member.name} in account {state.name} began anew just now: try again",
                temporary=True,
            )

    def _denied(self, error: errors.SpurEventsError, account: str) -> access.DeniedError:
        """Return a refusal for what the cluster answered. The API server's own words are for the log."""
        if isinstance(error, access.DeniedError):
            return error
        log.warning(
            "cluster refused", extra={"account": account, "error": str(error), "kind": type(error).__name__}
        )
        if isinstance(error, _GONE):
            return access.DeniedError(
                RefusalCode.SERVICE_ACCOUNT,
                f"the ServiceAccount for account {account} on cluster {self._cluster} was replaced or removed just"
                " now: try again in a moment",
                temporary=True,
            )
        if isinstance(error, kube_errors.ForbiddenError | kube_errors.UnauthorizedError):
            return access.DeniedError(
                RefusalCode.MISCONFIGURED,
                f"the kubeconfig service lacks a right on cluster {self._cluster}: tell the administrator, who"
                " finds it in the service's log and in 'spur-events status'",
            )
        if isinstance(error, errors.TemporaryError):
            return access.DeniedError(
                RefusalCode.CLUSTER_UNREACHABLE,
                f"the API server of cluster {self._cluster} does not answer: try again in a moment",
                temporary=True,
            )
        said = str(error) if isinstance(error, errors.MisconfiguredError) else "its log says more"
        return access.DeniedError(
            RefusalCode.MISCONFIGURED,
            f"the kubeconfig service of cluster {self._cluster} is not set up for this; tell the administrator: {said}",
        )

    def _tell(
        self, user: str, request: KubeconfigRequest | codec.CodecError, result: Grant | Refusal
    ) -> None:
        fields: dict[str, object] = {"user": _shown(user), "cluster": self._cluster}
        if isinstance(result, Grant):
            fields |= {"account": names.slug(result.account)}
            fields |= {"expires": result.expires_at.isoformat()} if result.token else {"held": True}
            log.info("kubeconfig granted", extra=fields)
            return
        # As a slug: anything may stand in a request.
        wanted = request.account if isinstance(request, KubeconfigRequest) else ""
        fields |= {"account": names.slug(wanted) if wanted else "", "code": str(result.code)}
        log.warning("kubeconfig refused", extra=fields)


def _unread(error: Exception) -> access.DeniedError:
    log.warning("bucket not read", extra={"error": str(error)})
    return access.DeniedError(
        RefusalCode.NOT_READY,
        "who is a member cannot be read at the moment: try again in a moment; if it stays so, tell the administrator",
        temporary=True,
    )


def _shown(user: str) -> str:
    """Return a subject's last token for the log: anything may stand there."""
    return user if names.is_slug(user) else "(no slug)"


def _version() -> str:
    """Return our version as the service protocol wants it: three numbers."""
    found = re.match(r"\d+\.\d+\.\d+", metadata.version("spur-events"))
    return found[0] if found else "0.0.0"
