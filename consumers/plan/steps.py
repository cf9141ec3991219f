"""What has to be written for an account, and what may not be: the differences between plan and cluster.

Pure. Two ways to find out: `recall` compares digests with what the status record says was applied, and costs the
API server nothing; `compare` goes by live objects. `passes` carries the steps out, `resync` shows them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from spur_events.consumers.plan import desired, diff, marks, observed
from spur_events.schemas.accounts import AccountState, Revision
from spur_events.schemas.status import AccountStatus, Phase


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
    `fields` says what differs, by object, where live objects were compared.
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
    fields: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def nothing(self) -> bool:
        """Whether every object is as wanted."""
        return not (self.write_namespace or self.changed or self.losing or self.obsolete)


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


def compare(
    plan: desired.Plan, state: AccountState, status: AccountStatus | None, seen: observed.Observed
) -> Steps | Findings:
    """Return the steps by what the cluster holds, or findings where nothing may be written."""
    live = seen.namespace
    if live is None:
        if state.deletion is not None:
            return Findings(not_enforced=plan.not_enforced)
        return Steps(changed=tuple(members_of(plan)))
    if (refusal := _refusal(live, state, status)) is not None:
        return refusal
    namespace_fields = diff.differs(plan.namespace, live)
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
    differing = {
        key: diff.differs(manifest, present[key]) if key in present else ["absent"]
        for key, manifest in wanted.items()
    }
    obsolete = tuple(found for key, found in present.items() if key not in wanted)
    return Steps(
        namespace=live,
        write_namespace=bool(namespace_fields),
        uid=live["metadata"]["uid"],
        version=live["metadata"]["resourceVersion"],
        changed=tuple(manifest for key, manifest in wanted.items() if differing[key]),
        losing=frozenset(
            found_name
            for found_name, found in accounts.items()
            if key_of(found) not in wanted or _generation(found) != _generation(wanted[key_of(found)])
        ),
        obsolete=obsolete,
        quota=seen.quota,
        fields={
            key: tuple(fields)
            for key, fields in {key_of(plan.namespace): namespace_fields, **differing}.items()
            if fields
        },
    )


def _refusal(live: marks.Manifest, state: AccountState, status: AccountStatus | None) -> Findings | None:
    """Return why a live namespace may not be written to now, or None if it may."""
    name = live["metadata"]["name"]
    if (ending := observed.terminating(live)) is not None:
        return Findings(
            phase=Phase.TERMINATING,
            reason="NamespaceTerminating",
            message=f"namespace {name} is being deleted since {ending.since}; held by: {', '.join(ending.held_by)}",
        )
    known_uid = status.namespace_uid if status is not None else ""
    if observed.owner(live, state.installation, known_uid=known_uid) == "foreign":
        if state.deletion is not None:
            return Findings()  # it never was ours: nothing to close
        return Findings(
            phase=Phase.CONFLICT,
            reason="ForeignNamespace",
            message=f"namespace {name} exists and is not this installation's; it is left alone."
            " Remove or rename it, or take it over with 'spur-events adopt'",
        )
    text = (live["metadata"].get("annotations") or {}).get(marks.REVISION, "")
    recorded = Revision.parse(text)
    if recorded is not None and recorded > state.revision:
        return Findings(
            phase=Phase.FAILED,
            reason="BucketBehind",
            message=f"namespace {name} records revision {recorded}, the bucket has {state.revision}, which is older:"
            " nothing older is ever applied; the relay's audit brings the bucket up to date",
        )
    return None


def _generation(manifest: marks.Manifest) -> str:
    return str((manifest["metadata"].get("annotations") or {}).get(marks.GENERATION, ""))
