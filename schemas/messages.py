"""Domain models to protobuf messages and back, a pair of functions each. `codec` alone calls them.

A reader raises ValueError or KeyError for a message that no writer of ours makes.
"""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from google.protobuf.message import Message

from spur_events.schemas import tres
from spur_events.schemas.access import (
    Grant,
    GuardRequest,
    GuardState,
    KubeconfigReply,
    KubeconfigRequest,
    PartReport,
    Refusal,
    RefusalCode,
)
from spur_events.schemas.accounts import AccountState, Allocation, Deletion, Frozen, Member, Revision
from spur_events.schemas.events import (
    AccountChanged,
    Actor,
    AuditRequest,
    Change,
    ChangeKind,
    Recheck,
    RecheckReason,
    ResyncRequest,
)
from spur_events.schemas.pb import access_pb2, events_pb2, state_pb2, status_pb2
from spur_events.schemas.resync import Action, Checkpoint, Item, ResyncReport, RunState
from spur_events.schemas.status import AccountStatus, Phase, RelayStatus

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def _ms(at: datetime) -> int:
    return (at - _EPOCH) // timedelta(milliseconds=1)


def _at(ms: int) -> datetime:
    return _EPOCH + timedelta(milliseconds=ms)


def _required(value: str, field: str) -> str:
    if not value:
        raise ValueError(f"{field} is empty")
    return value


def _write_revision(revision: Revision) -> state_pb2.Revision:
    return state_pb2.Revision(epoch=revision.epoch, number=revision.number)


def _read_revision(message: state_pb2.Revision) -> Revision:
    return Revision(message.epoch, message.number)


def _write_state(state: AccountState) -> state_pb2.AccountState:
    message = state_pb2.AccountState(
        installation=state.installation,
        revision=_write_revision(state.revision),
        name=state.name,
        incarnation=state.incarnation,
        description=state.description,
        organization=state.organization,
        parent=state.parent,
        members=[
            state_pb2.Member(name=m.name, generation=m.generation, is_default=m.is_default)
            for m in state.members
        ],
    )
    if state.deletion is not None:
        message.deletion.CopyFrom(state_pb2.Deletion(at_unix_ms=_ms(state.deletion.at), by=state.deletion.by))
    if state.allocation is not None:
        message.allocation.problem = state.allocation.problem
        for name, value in state.allocation.limits.items():
            if value is None:
                message.allocation.limits[name].cleared = True
            else:
                message.allocation.limits[name].value = value
        message.allocation.SetInParent()
    return message


def _read_state(message: state_pb2.AccountState) -> AccountState:
    allocation = None
    if message.HasField("allocation"):
        limits: tres.Limits = {}
        for name, limit in sorted(message.allocation.limits.items()):
            kind = limit.WhichOneof("kind")
            if kind is None:
                raise ValueError(f"limit {name} has neither a value nor 'cleared'")
            limits[name] = limit.value if kind == "value" else None
        allocation = Allocation(limits=limits, problem=message.allocation.problem)
    deletion = None
    if message.HasField("deletion"):
        deletion = Deletion(at=_at(message.deletion.at_unix_ms), by=message.deletion.by)
    return AccountState(
        installation=_required(message.installation, "installation"),
        revision=_read_revision(message.revision),
        name=message.name,
        incarnation=message.incarnation,
        deletion=deletion,
        description=message.description,
        organization=message.organization,
        parent=message.parent,
        allocation=allocation,
        members=tuple(
            Member(name=m.name, generation=m.generation, is_default=m.is_default) for m in message.members
        ),
    )


def _write_changed(event: AccountChanged) -> events_pb2.AccountChanged:
    return events_pb2.AccountChanged(
        installation=event.installation,
        revision=_write_revision(event.revision),
        name=event.name,
        part=event.part,
        parts=event.parts,
        changes=[
            events_pb2.Change(
                id=c.id,
                kind=events_pb2.ChangeKind.Value(f"CHANGE_KIND_{c.kind.name}"),
                user=c.user,
                before=c.before,
                after=c.after,
                actor=events_pb2.Actor(
                    database_user=c.actor.database_user,
                    os_user=c.actor.os_user,
                    application=c.actor.application,
                ),
                at_unix_ms=_ms(c.at),
            )
            for c in event.changes
        ],
    )


def _read_changed(message: events_pb2.AccountChanged) -> AccountChanged:
    return AccountChanged(
        installation=_required(message.installation, "installation"),
        revision=_read_revision(message.revision),
        name=message.name,
        part=message.part,
        parts=message.parts,
        changes=tuple(
            Change(
                id=c.id,
                kind=ChangeKind[events_pb2.ChangeKind.Name(c.kind).removeprefix("CHANGE_KIND_")],
                user=c.user,
                before=c.before,
                after=c.after,
                actor=Actor(
                    database_user=c.actor.database_user,
                    os_user=c.actor.os_user,
                    application=c.actor.application,
                ),
                at=_at(c.at_unix_ms),
            )
            for c in message.changes
        ),
    )


def _write_recheck(event: Recheck) -> events_pb2.Recheck:
    return events_pb2.Recheck(
        installation=event.installation,
        slug=event.slug,
        reason=events_pb2.RecheckReason.Value(f"RECHECK_REASON_{event.reason.name}"),
        namespace_uid=event.namespace_uid,
        incarnation=event.incarnation,
    )


def _read_recheck(message: events_pb2.Recheck) -> Recheck:
    return Recheck(
        installation=_required(message.installation, "installation"),
        slug=_required(message.slug, "slug"),
        reason=RecheckReason[events_pb2.RecheckReason.Name(message.reason).removeprefix("RECHECK_REASON_")],
        namespace_uid=message.namespace_uid,
        incarnation=message.incarnation,
    )


def _write_request(request: ResyncRequest) -> events_pb2.ResyncRequest:
    return events_pb2.ResyncRequest(
        installation=request.installation,
        id=request.id,
        dry_run=request.dry_run,
        prune=request.prune,
        prune_unexplained=request.prune_unexplained,
        requested_by=request.requested_by,
        at_unix_ms=_ms(request.at),
        limited=request.limited,
        confirmed=request.confirmed,
    )


def _read_request(message: events_pb2.ResyncRequest) -> ResyncRequest:
    return ResyncRequest(
        installation=_required(message.installation, "installation"),
        id=_required(message.id, "id"),
        dry_run=message.dry_run,
        prune=message.prune,
        prune_unexplained=message.prune_unexplained,
        requested_by=message.requested_by,
        at=_at(message.at_unix_ms),
        limited=message.limited,
        confirmed=tuple(message.confirmed),
    )


def _write_audit(request: AuditRequest) -> events_pb2.AuditRequest:
    return events_pb2.AuditRequest(
        installation=request.installation, forget=request.forget, requested_by=request.requested_by
    )


def _read_audit(message: events_pb2.AuditRequest) -> AuditRequest:
    return AuditRequest(
        installation=_required(message.installation, "installation"),
        forget=tuple(message.forget),
        requested_by=message.requested_by,
    )


def _write_status(status: AccountStatus) -> status_pb2.AccountStatus:
    message = status_pb2.AccountStatus(
        cluster=status.cluster,
        name=status.name,
        installation=status.installation,
        wanted=_write_revision(status.wanted),
        phase=status_pb2.Phase.Value(f"PHASE_{status.phase.name}"),
        reason=status.reason,
        message=status.message,
        since_unix_ms=_ms(status.since),
        namespace=status.namespace,
        namespace_uid=status.namespace_uid,
        namespace_version=status.namespace_version,
        objects=status.objects,
        not_enforced=status.not_enforced,
        over_quota=status.over_quota,
        attempts=status.attempts,
        retry_at_unix_ms=0 if status.retry_at is None else _ms(status.retry_at),
        state_sequence=status.state_sequence,
        handled_sequence=status.handled_sequence,
        retained=status.retained,
    )
    if status.applied is not None:
        message.applied.CopyFrom(_write_revision(status.applied))
    return message


def _read_status(message: status_pb2.AccountStatus) -> AccountStatus:
    return AccountStatus(
        cluster=_required(message.cluster, "cluster"),
        name=message.name,
        installation=_required(message.installation, "installation"),
        wanted=_read_revision(message.wanted),
        applied=_read_revision(message.applied) if message.HasField("applied") else None,
        phase=Phase[status_pb2.Phase.Name(message.phase).removeprefix("PHASE_")],
        reason=message.reason,
        message=message.message,
        since=_at(message.since_unix_ms),
        namespace=message.namespace,
        namespace_uid=message.namespace_uid,
        namespace_version=message.namespace_version,
        objects=dict(message.objects),
        not_enforced=tuple(message.not_enforced),
        over_quota=tuple(message.over_quota),
        attempts=message.attempts,
        retry_at=_at(message.retry_at_unix_ms) if message.retry_at_unix_ms else None,
        state_sequence=message.state_sequence,
        handled_sequence=message.handled_sequence,
        retained=message.retained,
    )


def _write_relay(status: RelayStatus) -> status_pb2.RelayStatus:
    return status_pb2.RelayStatus(
        installation=status.installation,
        epoch=status.epoch,
        host=status.host,
        pid=status.pid,
        at_unix_ms=_ms(status.at),
        revision=status.revision,
        refused=status.refused,
    )


def _read_relay(message: status_pb2.RelayStatus) -> RelayStatus:
    return RelayStatus(
        installation=_required(message.installation, "installation"),
        epoch=message.epoch,
        host=message.host,
        pid=message.pid,
        at=_at(message.at_unix_ms),
        revision=message.revision,
        refused=dict(message.refused),
    )


def _write_checkpoint(checkpoint: Checkpoint) -> status_pb2.Checkpoint:
    return status_pb2.Checkpoint(
        installation=checkpoint.installation,
        epoch=checkpoint.epoch,
        revision=checkpoint.revision,
        database_accounts=checkpoint.database_accounts,
        bucket_accounts=checkpoint.bucket_accounts,
        tombstones=checkpoint.tombstones,
        digest=checkpoint.digest,
        unexplained=checkpoint.unexplained,
        at_unix_ms=_ms(checkpoint.at),
        audited_at_unix_ms=_ms(checkpoint.audited_at),
    )


def _read_checkpoint(message: status_pb2.Checkpoint) -> Checkpoint:
    return Checkpoint(
        installation=_required(message.installation, "installation"),
        epoch=message.epoch,
        revision=message.revision,
        database_accounts=message.database_accounts,
        bucket_accounts=message.bucket_accounts,
        tombstones=message.tombstones,
        digest=message.digest,
        unexplained=tuple(message.unexplained),
        at=_at(message.at_unix_ms),
        audited_at=_at(message.audited_at_unix_ms),
    )


def _write_report(report: ResyncReport) -> status_pb2.ResyncReport:
    return status_pb2.ResyncReport(
        id=report.id,
        cluster=report.cluster,
        installation=report.installation,
        state=status_pb2.ResyncState.Value(f"RESYNC_STATE_{report.state.name}"),
        dry_run=report.dry_run,
        prune=report.prune,
        prune_unexplained=report.prune_unexplained,
        requested_by=report.requested_by,
        started_at_unix_ms=_ms(report.started_at),
        at_unix_ms=_ms(report.at),
        message=report.message,
        accounts=report.accounts,
        unchanged=report.unchanged,
        reads=report.reads,
        waiting=report.waiting,
        items=[
            status_pb2.ResyncItem(
                action=status_pb2.ResyncAction.Value(f"RESYNC_ACTION_{item.action.name}"),
                slug=item.slug,
                account=item.account,
                namespace=item.namespace,
                details=item.details,
                namespace_uid=item.namespace_uid,
                incarnation=item.incarnation,
                outcome=item.outcome,
                failed=item.failed,
                carried_out=item.carried_out,
            )
            for item in report.items
        ],
    )


def _read_report(message: status_pb2.ResyncReport) -> ResyncReport:
    return ResyncReport(
        id=_required(message.id, "id"),
        cluster=_required(message.cluster, "cluster"),
        installation=_required(message.installation, "installation"),
        state=RunState[status_pb2.ResyncState.Name(message.state).removeprefix("RESYNC_STATE_")],
        dry_run=message.dry_run,
        prune=message.prune,
        prune_unexplained=message.prune_unexplained,
        requested_by=message.requested_by,
        started_at=_at(message.started_at_unix_ms),
        at=_at(message.at_unix_ms),
        message=message.message,
        accounts=message.accounts,
        unchanged=message.unchanged,
        reads=message.reads,
        waiting=message.waiting,
        items=tuple(
            Item(
                action=Action[status_pb2.ResyncAction.Name(item.action).removeprefix("RESYNC_ACTION_")],
                slug=item.slug,
                account=item.account,
                namespace=item.namespace,
                details=tuple(item.details),
                namespace_uid=item.namespace_uid,
                incarnation=item.incarnation,
                outcome=item.outcome,
                failed=item.failed,
                carried_out=item.carried_out,
            )
            for item in message.items
        ),
    )


def _write_kubeconfig_request(request: KubeconfigRequest) -> access_pb2.KubeconfigRequest:
    return access_pb2.KubeconfigRequest(
        account=request.account, lifetime_s=request.lifetime_s, held_uid=request.held_uid
    )


def _read_kubeconfig_request(message: access_pb2.KubeconfigRequest) -> KubeconfigRequest:
    return KubeconfigRequest(
        account=message.account, lifetime_s=message.lifetime_s, held_uid=message.held_uid
    )


def _write_kubeconfig_reply(reply: KubeconfigReply) -> access_pb2.KubeconfigReply:
    found = reply.result
    if isinstance(found, Refusal):
        return access_pb2.KubeconfigReply(
            refusal=access_pb2.Refusal(
                code=access_pb2.RefusalCode.Value(f"REFUSAL_CODE_{found.code.name}"),
                message=found.message,
                temporary=found.temporary,
            )
        )
    return access_pb2.KubeconfigReply(
        grant=access_pb2.Grant(
            cluster=found.cluster,
            account=found.account,
            user=found.user,
            namespace=found.namespace,
            server=found.server,
            ca=found.ca,
            service_account=found.service_account,
            service_account_uid=found.service_account_uid,
            token=found.token,
            expires_at_unix_ms=_ms(found.expires_at),
        )
    )


def _read_kubeconfig_reply(message: access_pb2.KubeconfigReply) -> KubeconfigReply:
    if message.WhichOneof("result") == "refusal":
        refusal = message.refusal
        return KubeconfigReply(
            result=Refusal(
                code=RefusalCode[access_pb2.RefusalCode.Name(refusal.code).removeprefix("REFUSAL_CODE_")],
                message=refusal.message,
                temporary=refusal.temporary,
            )
        )
    grant = message.grant
    return KubeconfigReply(
        result=Grant(
            cluster=_required(grant.cluster, "cluster"),
            account=grant.account,
            user=grant.user,
            namespace=_required(grant.namespace, "namespace"),
            server=_required(grant.server, "server"),
            ca=grant.ca,
            service_account=grant.service_account,
            service_account_uid=_required(grant.service_account_uid, "service_account_uid"),
            token=grant.token,
            expires_at=_at(grant.expires_at_unix_ms),
        )
    )


def _write_guard_request(request: GuardRequest) -> access_pb2.GuardRequest:
    return access_pb2.GuardRequest(installation=request.installation)


def _read_guard_request(message: access_pb2.GuardRequest) -> GuardRequest:
    return GuardRequest(installation=_required(message.installation, "installation"))


def _write_part(report: PartReport) -> access_pb2.PartReport:
    name = "UNSPECIFIED" if report.guard is GuardState.UNKNOWN else report.guard.name
    return access_pb2.PartReport(
        installation=report.installation,
        cluster=report.cluster,
        part=report.part,
        missing_rights=report.missing_rights,
        guard=access_pb2.GuardState.Value(f"GUARD_STATE_{name}"),
        message=report.message,
        at_unix_ms=_ms(report.at),
    )


def _read_part(message: access_pb2.PartReport) -> PartReport:
    name = access_pb2.GuardState.Name(message.guard).removeprefix("GUARD_STATE_")
    return PartReport(
        installation=_required(message.installation, "installation"),
        cluster=_required(message.cluster, "cluster"),
        part=_required(message.part, "part"),
        missing_rights=tuple(message.missing_rights),
        guard=GuardState.UNKNOWN if name == "UNSPECIFIED" else GuardState[name],
        message=message.message,
        at=_at(message.at_unix_ms),
    )


WRITERS: dict[str, Callable[..., Message]] = {
    "AccountState": _write_state,
    "AccountChanged": _write_changed,
    "Recheck": _write_recheck,
    "AccountStatus": _write_status,
    "RelayStatus": _write_relay,
    "AuditRequest": _write_audit,
    "ResyncRequest": _write_request,
    "Checkpoint": _write_checkpoint,
    "ResyncReport": _write_report,
    "KubeconfigRequest": _write_kubeconfig_request,
    "KubeconfigReply": _write_kubeconfig_reply,
    "GuardRequest": _write_guard_request,
    "PartReport": _write_part,
}
READERS: dict[str, tuple[type[Message], Callable[..., Frozen]]] = {
    "AccountState": (state_pb2.AccountState, _read_state),
    "AccountChanged": (events_pb2.AccountChanged, _read_changed),
    "Recheck": (events_pb2.Recheck, _read_recheck),
    "AccountStatus": (status_pb2.AccountStatus, _read_status),
    "RelayStatus": (status_pb2.RelayStatus, _read_relay),
    "AuditRequest": (events_pb2.AuditRequest, _read_audit),
    "ResyncRequest": (events_pb2.ResyncRequest, _read_request),
    "Checkpoint": (status_pb2.Checkpoint, _read_checkpoint),
    "ResyncReport": (status_pb2.ResyncReport, _read_report),
    "KubeconfigRequest": (access_pb2.KubeconfigRequest, _read_kubeconfig_request),
    "KubeconfigReply": (access_pb2.KubeconfigReply, _read_kubeconfig_reply),
    "GuardRequest": (access_pb2.GuardRequest, _read_guard_request),
    "PartReport": (access_pb2.PartReport, _read_part),
}
