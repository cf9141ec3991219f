"""Carries out the steps of one account, in an order that is safe, and tells what came of it.

`converge` calls it with a client that checks its lease before every write, and keeps the record. What is to be
written, and whether anything may be, was decided in `plan.steps`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from typing import Any

from spur_events import errors
from spur_events.consumers import lease
from spur_events.consumers.kube import apply
from spur_events.consumers.kube import client as kube
from spur_events.consumers.kube import errors as kube_errors
from spur_events.consumers.plan import desired, marks, observed, steps
from spur_events.schemas.accounts import AccountState
from spur_events.schemas.status import Phase

#: How often and how long (seconds) the quota controller is waited for within a pass. It usually needs a few
#: milliseconds; when it has a backlog, a later recheck looks again instead of holding the partition.
_QUOTA_WAITS_S = (0.01, 0.02, 0.04, 0.08, 0.15)
#: What ends a pass at once; anything else concerns one object.
_FATAL = (lease.LostError, errors.UnreachableError)
_Write = Callable[[kube.Client, marks.Manifest], Awaitable[object]]


async def carry_out(
    client: kube.Client, plan: desired.Plan, state: AccountState, todo: steps.Steps
) -> steps.Findings:
    """Write what has to be written; the failure of one object does not stop the others.

    Raises:
        ConflictError, NotFoundError: if the namespace is not the one that the steps are about; nothing was written.
        LostError, UnreachableError: at once; what is unwritten stays so.
    """
    writer = _Writer(client, plan)
    live = todo.namespace
    if todo.paused and live is not None:
        await writer.revoke(todo)
        findings = writer.paused_findings(todo, live)
        return replace(findings, **_facts(live), not_enforced=plan.not_enforced)
    if todo.write_namespace:
        try:
            if todo.uid is None:
                live = await apply.create(client, plan.namespace)
            else:
                live = await apply.apply(client, plan.namespace, uid=todo.uid, resource_version=todo.version)
        except (*_FATAL, kube_errors.ConflictError, kube_errors.NotFoundError):
            raise
        except errors.SpurEventsError as error:
            writer.failed["Namespace"] = error
    await writer.revoke(todo)
    if live is not None and "Namespace" not in writer.failed:
        await writer.grant(todo)
        if todo.check_quota and not todo.changed and todo.quota is not None:
            writer.quota = todo.quota
        findings = await writer.findings(check_quota=todo.check_quota)
    else:
        findings = await writer.findings(check_quota=False)
    if state.deletion is not None and findings.phase is Phase.PENDING:
        findings = replace(findings, phase=None, reason="", message="")  # closing is not waited for
    return replace(findings, **_facts(live), not_enforced=plan.not_enforced)


def _facts(live: marks.Manifest | None) -> dict[str, Any]:
    """Return what the findings say about the namespace itself."""
    if live is None:
        return {}
    metadata = live["metadata"]
    return {
        "namespace_uid": metadata["uid"],
        "namespace_version": metadata["resourceVersion"],
        "retained": observed.is_retained(live),
    }


class _Writer:
    """The writes of one pass, and their failures by kind."""

    def __init__(self, client: kube.Client, plan: desired.Plan) -> None:
        self._client = client
        self._plan = plan
        self._bound = False
        self.failed: dict[str, errors.SpurEventsError] = {}
        self._unwritten: set[str] = set()
        self.quota: marks.Manifest | None = None

    async def revoke(self, todo: steps.Steps) -> None:
        """End access: first the binding's subjects (at once), then the ServiceAccounts (for good)."""
        kinds = {found["kind"] for found in todo.obsolete}
        if "RoleBinding" in kinds:
            await self._remove_all([found for found in todo.obsolete if found["kind"] == "RoleBinding"])
        elif todo.reduced is not None:
            await self._attempt(todo.reduced, apply.apply)
        elif todo.losing and self._plan.binding is not None and not todo.paused:
            returning = {account["metadata"]["name"] for account in self._plan.service_accounts} & todo.losing
            kept = [s for s in self._plan.binding.get("subjects") or [] if s["name"] not in returning]
            without = {**self._plan.binding, "subjects": kept}
            await self._attempt(without, apply.apply)
            self._bound = not returning
        await self._remove_all([found for found in todo.obsolete if found["kind"] == "ServiceAccount"])
        await self._remove_all(
            [found for found in todo.obsolete if found["kind"] not in {"RoleBinding", "ServiceAccount"}]
        )

    async def grant(self, todo: steps.Steps) -> None:
        """Write what is wanted: limits and people at once, and then what lets the people in."""
        # In a namespace that this pass made there is nothing yet that a member's ServiceAccount could replace.
        person = apply.ensure_service_account if todo.uid is not None else apply.apply
        writers = {"ServiceAccount": person}
        await self._all(
            self._attempt(manifest, writers.get(manifest["kind"], apply.apply))
            for manifest in todo.changed
            if manifest["kind"] != "RoleBinding"
        )
        bound = any(manifest["kind"] == "RoleBinding" for manifest in todo.changed)
        if self._plan.binding is not None and not self._bound and (bound or todo.losing):
            await self._attempt(self._plan.binding, apply.apply)

    async def findings(self, *, check_quota: bool) -> steps.Findings:
        """Return what the writes came to."""
        over: tuple[str, ...] = ()
        in_force = True
        if check_quota and self._plan.quota is not None and "ResourceQuota" not in self.failed:
            quota = await self._settled_quota(self._plan.quota)
            in_force = quota is not None and observed.quota_in_force(quota)
            over = observed.over_quota(quota) if quota is not None else ()
        objects = {
            steps.key_of(manifest): steps.record_of(manifest)
            for manifest in steps.members_of(self._plan)
            if steps.key_of(manifest) not in self._unwritten
        }
        if self.failed:
            return replace(self._failures(objects), over_quota=over)
        if not in_force:
            return steps.Findings(
                phase=Phase.PENDING,
                reason="QuotaNotInForce",
                message="the quota controller has not taken up the quota yet",
                objects=objects,
            )
        return steps.Findings(objects=objects, over_quota=over)

    def paused_findings(self, todo: steps.Steps, live: marks.Manifest) -> steps.Findings:
        """Return what the revocations in a paused namespace came to."""
        objects = {**todo.recorded}
        if self.failed:
            return self._failures(objects)
        left = f"; as somebody left it: {', '.join(sorted(todo.fields))}" if todo.fields else ""
        return steps.Findings(
            phase=Phase.PAUSED,
            reason="Paused",
            message=f"namespace {live['metadata']['name']} carries {marks.RECONCILE}={marks.PAUSED}:"
            f" only access is removed there{left}",
            retry=False,
            objects=objects,
        )

    def _failures(self, objects: dict[str, str]) -> steps.Findings:
        delays = [e.retry_after_s for e in self.failed.values() if isinstance(e, errors.TemporaryError)]
        return steps.Findings(
            phase=Phase.FAILED if "Namespace" in self.failed else Phase.DEGRADED,
            reason=",".join(sorted(self.failed)),
            message="; ".join(str(error) for error in self.failed.values()),
            retry_after_s=max((d for d in delays if d is not None), default=None),
            objects=objects,
        )

    async def _settled_quota(self, manifest: marks.Manifest) -> marks.Manifest | None:
        """Return the live quota once it is in force, or as it is when that takes too long."""
        quota = self.quota
        place = manifest["metadata"]["name"], manifest["metadata"]["namespace"]
        for wait_s in _QUOTA_WAITS_S:
            if quota is not None and observed.quota_in_force(quota):
                return quota
            await asyncio.sleep(wait_s)
            quota = await apply.get(self._client, "ResourceQuota", *place)
        return quota

    async def _remove_all(self, found: list[marks.Manifest]) -> None:
        await self._all(self._attempt(one, _remove) for one in found)

    async def _all(self, attempts: Iterable[Awaitable[None]]) -> None:
        outcomes = await asyncio.gather(*attempts, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def _attempt(self, manifest: marks.Manifest, write: _Write) -> None:
        try:
            written = await write(self._client, manifest)
        except _FATAL:
            raise
        except errors.SpurEventsError as error:
            self.failed.setdefault(manifest["kind"], error)
            self._unwritten.add(steps.key_of(manifest))
        else:
            if manifest["kind"] == "ResourceQuota" and isinstance(written, dict):
                self.quota = written


async def _remove(client: kube.Client, found: marks.Manifest) -> None:
    live: marks.Manifest | None = found
    if "uid" not in found["metadata"]:  # known from the record only
        metadata = found["metadata"]
        live = await apply.get(client, found["kind"], metadata["name"], metadata["namespace"])
    if live is not None:
        await apply.delete(client, live)
