"""One pass over an account's objects: find out which differ, then write them in an order that is safe.

Two ways to find out: `recall` compares digests with what the status record says was applied, and costs the API
server nothing; `compare` reads what is there. `converge` chooses, and keeps the record.
"""

import asyncio
import logging
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass, field, replace

from spur_events import errors
from spur_events.consumers import lease
from spur_events.consumers.kube import apply, observe
from spur_events.consumers.kube import client as kube
from spur_events.consumers.kube import errors as kube_errors
from spur_events.consumers.plan import desired, diff, marks
from spur_events.schemas.accounts import AccountState, Revision
from spur_events.schemas.status import AccountStatus, Phase

log = logging.getLogger(__name__)

#: How often and how long (seconds) the quota controller is waited for within a pass. It usually needs a few
#: milliseconds; when it has a backlog, a later recheck looks again instead of holding the partition.
_QUOTA_WAITS_S = (0.01, 0.02, 0.04, 0.08, 0.15)
#: What ends a pass at once; anything else concerns one object.
_FATAL = (lease.LostError, errors.UnreachableError)


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What a pass came to. `phase` is None where every object is as wanted."""

    phase: Phase | None = None
    reason: str = ""
    message: str = ""
    retry: bool = True
    retry_after_s: float | None = None
    namespace_uid: str = ""
    namespace_version: str = ""
    objects: dict[str, str] = field(default_factory=dict)
    not_enforced: tuple[str, ...] = ()
    over_quota: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Steps:
    """What a pass has to write.

    `namespace` is the live one, where it was read; `uid` and `version` are what it must still be.
    `losing` are the ServiceAccounts, by name, whose access ends: their members left, or left and returned.
    `obsolete` are live objects that must go, or (kind, name) of those that are only known from the record.
    """

    namespace: marks.Manifest | None = None
    write_namespace: bool = True
    uid: str | None = None
    version: str | None = None
    changed: tuple[marks.Manifest, ...] = ()
    losing: frozenset[str] = frozenset()
    obsolete: tuple[marks.Manifest, ...] = ()
    quota: marks.Manifest | None = None
    check_quota: bool = True


def key_of(manifest: marks.Manifest) -> str:
    """Return the key of an object in the status record."""
    return f"{manifest['kind']}/{manifest['metadata']['name']}"


def record_of(manifest: marks.Manifest) -> str:
    """Return what the status record keeps of an applied object: its digest, and its generation if it has one."""
    return f"{diff.digest(manifest)}:{_generation(manifest)}"


def members_of(plan: desired.Plan) -> Iterable[marks.Manifest]:
    """Return a plan's objects inside the namespace."""
    fixed = (plan.quota, plan.limits, plan.role, plan.binding)
    return [*(manifest for manifest in fixed if manifest is not None), *plan.service_accounts]


def recall(plan: desired.Plan, state: AccountState, status: AccountStatus | None) -> Steps | None:
    """Return the steps by the record of the last pass, or None where it cannot be relied on."""
    if (
        status is None
        or state.deletion is not None
        or status.phase not in {Phase.APPLIED, Phase.INVALID}
        or status.installation != state.installation
        or not (status.namespace_uid and status.namespace_version and status.objects)
    ):
        return None
    wanted = {key_of(manifest): manifest for manifest in members_of(plan)}
    changed = tuple(
        manifest for key, manifest in wanted.items() if status.objects.get(key) != record_of(manifest)
    )
    gone = [key.partition("/")[::2] for key in status.objects if key not in wanted]
    returned = {
        manifest["metadata"]["name"]
        for manifest in changed
        if manifest["kind"] == "ServiceAccount"
        and (known := status.objects.get(key_of(manifest))) is not None
        and known.rpartition(":")[2] != _generation(manifest)
    }
    return Steps(
        uid=status.namespace_uid,
        version=status.namespace_version,
        changed=changed,
        losing=frozenset(returned | {name for kind, name in gone if kind == "ServiceAccount"}),
        obsolete=tuple(
            {"kind": kind, "metadata": {"name": name, "namespace": status.namespace}} for kind, name in gone
        ),
        check_quota=any(manifest["kind"] == "ResourceQuota" for manifest in changed),
    )


async def compare(
    client: kube.Client, plan: desired.Plan, state: AccountState, status: AccountStatus | None
) -> Steps | Findings:
    """Read what the cluster holds and return the steps, or findings where nothing may be written."""
    name = plan.namespace["metadata"]["name"]
    seen = await observe.observe(client, name, state.installation, state.slug)
    live = seen.namespace
    if live is None:
        if state.deletion is not None:
            return Findings(not_enforced=plan.not_enforced)
        return Steps(changed=tuple(members_of(plan)))
    if (refusal := _refusal(live, state, status)) is not None:
        return refusal
    recorded = status.objects if status is not None else {}
    accounts = {
        account["metadata"]["name"]: account
        for account in (
            *seen.service_accounts,
            # Ours by the record, with the mark taken off.
            *(a for a in seen.unmarked_service_accounts if key_of(a) in recorded),
        )
    }
    fixed = {
        key_of(found): found
        for found in (seen.quota, seen.limits, seen.role, seen.binding)
        if found is not None
    }
    wanted = {key_of(manifest): manifest for manifest in members_of(plan)}
    present = {**fixed, **{key_of(account): account for account in accounts.values()}}
    changed = tuple(
        manifest
        for key, manifest in wanted.items()
        if key not in present or _differs(state.name, manifest, present[key])
    )
    obsolete = tuple(found for key, found in present.items() if key not in wanted)
    return Steps(
        namespace=live,
        write_namespace=bool(diff.differs(plan.namespace, live)),
        uid=live["metadata"]["uid"],
        version=live["metadata"]["resourceVersion"],
        changed=changed,
        losing=frozenset(
            found_name
            for found_name, found in accounts.items()
            if key_of(found) not in wanted or _generation(found) != _generation(wanted[key_of(found)])
        ),
        obsolete=obsolete,
        quota=seen.quota,
    )


def _differs(account: str, manifest: marks.Manifest, live: marks.Manifest) -> bool:
    """Whether a live object is to be written again; who else wrote to it is logged, since it is taken back."""
    fields = diff.differs(manifest, live)
    if fields:
        facts = {"account": account, "object": key_of(manifest), "fields": fields}
        log.info("object differs", extra={**facts, "also_written_by": observe.other_managers(live)})
    return bool(fields)


def _refusal(live: marks.Manifest, state: AccountState, status: AccountStatus | None) -> Findings | None:
    """Return why a live namespace may not be written to now, or None if it may."""
    name = live["metadata"]["name"]
    if (ending := observe.terminating(live)) is not None:
        return Findings(
            phase=Phase.TERMINATING,
            reason="NamespaceTerminating",
            message=f"namespace {name} is being deleted since {ending.since}; held by: {', '.join(ending.held_by)}",
        )
    known_uid = status.namespace_uid if status is not None else ""
    if observe.owner(live, state.installation, known_uid=known_uid) == "foreign":
        if state.deletion is not None:
            return Findings()  # it never was ours: nothing to close
        return Findings(
            phase=Phase.CONFLICT,
            reason="ForeignNamespace",
            message=f"namespace {name} exists and is not this installation's; it is left alone"
            " until somebody removes it",
        )
    text = (live["metadata"].get("annotations") or {}).get(marks.REVISION, "")
    recorded = Revision.parse(text)
    if recorded is not None and recorded > state.revision:
        return Findings(
            phase=Phase.FAILED,
            reason="BucketBehind",
            message=f"namespace {name} records revision {recorded}, the bucket has {state.revision}, which is older:"
            " nothing older is ever applied; a relay that starts brings the bucket up to date",
        )
    return None


async def carry_out(client: kube.Client, plan: desired.Plan, state: AccountState, steps: Steps) -> Findings:
    """Write what has to be written; the failure of one object does not stop the others.

    Raises:
        ConflictError, NotFoundError: if the namespace is not the one that the steps are about; nothing was written.
        LostError, UnreachableError: at once; what is unwritten stays so.
    """
    writer = _Writer(client, plan)
    live = steps.namespace
    if steps.write_namespace:
        try:
            live = await apply.apply(client, plan.namespace, uid=steps.uid, resource_version=steps.version)
        except (*_FATAL, kube_errors.ConflictError, kube_errors.NotFoundError):
            raise
        except errors.SpurEventsError as error:
            writer.failed["Namespace"] = error
    await writer.revoke(steps)
    if live is not None and "Namespace" not in writer.failed:
        await writer.grant(steps)
        if steps.check_quota and not steps.changed and steps.quota is not None:
            writer.quota = steps.quota
        findings = await writer.findings(check_quota=steps.check_quota)
    else:
        findings = await writer.findings(check_quota=False)
    metadata = live["metadata"] if live is not None else {}
    if state.deletion is not None and findings.phase is Phase.PENDING:
        findings = replace(findings, phase=None, reason="", message="")  # closing is not waited for
    return replace(
        findings,
        namespace_uid=metadata.get("uid", ""),
        namespace_version=metadata.get("resourceVersion", ""),
        not_enforced=plan.not_enforced,
    )


class _Writer:
    """The writes of one pass, and their failures by kind."""

    def __init__(self, client: kube.Client, plan: desired.Plan) -> None:
        self._client = client
        self._plan = plan
        self._bound = False
        self.failed: dict[str, errors.SpurEventsError] = {}
        self._unwritten: set[str] = set()
        self.quota: marks.Manifest | None = None

    async def revoke(self, steps: Steps) -> None:
        """End access: first the binding's subjects (at once), then the ServiceAccounts (for good)."""
        kinds = {found["kind"] for found in steps.obsolete}
        if "RoleBinding" in kinds:
            await self._remove_all([found for found in steps.obsolete if found["kind"] == "RoleBinding"])
        elif steps.losing and self._plan.binding is not None:
            returning = {
                account["metadata"]["name"] for account in self._plan.service_accounts
            } & steps.losing
            kept = [s for s in self._plan.binding.get("subjects") or [] if s["name"] not in returning]
            without = {**self._plan.binding, "subjects": kept}
            await self._attempt(without, apply.apply(self._client, without))
            self._bound = not returning
        await self._remove_all([found for found in steps.obsolete if found["kind"] == "ServiceAccount"])
        await self._remove_all(
            [found for found in steps.obsolete if found["kind"] not in {"RoleBinding", "ServiceAccount"}]
        )

    async def grant(self, steps: Steps) -> None:
        """Write what is wanted: limits before people, and people before what lets them in."""
        by_kind: dict[str, list[marks.Manifest]] = {}
        for manifest in steps.changed:
            by_kind.setdefault(manifest["kind"], []).append(manifest)
        accounts = by_kind.pop("ServiceAccount", [])
        bindings = by_kind.pop("RoleBinding", [])
        await self._all(
            self._attempt(manifest, apply.apply(self._client, manifest))
            for manifests in by_kind.values()
            for manifest in manifests
        )
        await self._all(
            self._attempt(manifest, apply.ensure_service_account(self._client, manifest))
            for manifest in accounts
        )
        if self._plan.binding is not None and not self._bound and (bindings or steps.losing):
            await self._attempt(self._plan.binding, apply.apply(self._client, self._plan.binding))

    async def findings(self, *, check_quota: bool) -> Findings:
        """Return what the writes came to."""
        over: tuple[str, ...] = ()
        in_force = True
        if check_quota and self._plan.quota is not None and "ResourceQuota" not in self.failed:
            quota = await self._settled_quota(self._plan.quota)
            in_force = quota is not None and observe.quota_in_force(quota)
            over = observe.over_quota(quota) if quota is not None else ()
        objects = {
            key_of(manifest): record_of(manifest)
            for manifest in members_of(self._plan)
            if key_of(manifest) not in self._unwritten
        }
        if self.failed:
            delays = [e.retry_after_s for e in self.failed.values() if isinstance(e, errors.TemporaryError)]
            return Findings(
                phase=Phase.FAILED if "Namespace" in self.failed else Phase.DEGRADED,
                reason=",".join(sorted(self.failed)),
                message="; ".join(str(error) for error in self.failed.values()),
                retry_after_s=max((d for d in delays if d is not None), default=None),
                objects=objects,
                over_quota=over,
            )
        if not in_force:
            return Findings(
                phase=Phase.PENDING,
                reason="QuotaNotInForce",
                message="the quota controller has not taken up the quota yet",
                objects=objects,
            )
        return Findings(objects=objects, over_quota=over)

    async def _settled_quota(self, manifest: marks.Manifest) -> marks.Manifest | None:
        """Return the live quota once it is in force, or as it is when that takes too long."""
        quota = self.quota
        place = manifest["metadata"]["name"], manifest["metadata"]["namespace"]
        for wait_s in _QUOTA_WAITS_S:
            if quota is not None and observe.quota_in_force(quota):
                return quota
            await asyncio.sleep(wait_s)
            quota = await apply.get(self._client, "ResourceQuota", *place)
        return quota

    async def _remove_all(self, found: list[marks.Manifest]) -> None:
        await self._all(self._attempt(one, self._remove(one)) for one in found)

    async def _remove(self, found: marks.Manifest) -> None:
        live: marks.Manifest | None = found
        if "uid" not in found["metadata"]:  # known from the record only
            metadata = found["metadata"]
            live = await apply.get(self._client, found["kind"], metadata["name"], metadata["namespace"])
        if live is not None:
            await apply.delete(self._client, live)

    async def _all(self, attempts: Iterable[Awaitable[None]]) -> None:
        outcomes = await asyncio.gather(*attempts, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def _attempt(self, manifest: marks.Manifest, write: Awaitable[object]) -> None:
        try:
            written = await write
        except _FATAL:
            raise
        except errors.SpurEventsError as error:
            self.failed.setdefault(manifest["kind"], error)
            self._unwritten.add(key_of(manifest))
        else:
            if manifest["kind"] == "ResourceQuota" and isinstance(written, dict):
                self.quota = written


def _generation(manifest: marks.Manifest) -> str:
    return str((manifest["metadata"].get("annotations") or {}).get(marks.GENERATION, ""))
