"""What has to be written for an account, and what may not be: the differences between plan and cluster.

Pure. Two ways to find out: `recall` compares digests with what the status record says was applied, and costs the
API server nothing; `compare` goes by live objects. `passes` carries the steps out, `resync` shows them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from spur_events.consumers.plan import desired, diff, marks, observed
from spur_events.schemas import names
from spur_events.schemas.accounts import AccountState, Revision
from spur_events.schemas.status import AccountStatus, Phase


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What a pass came to. `phase` is None where every object is as wanted, `retained` where nobody looked."""

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
    retained: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Steps:
    """What a pass has to write.

    `namespace` is the live one, where it was read; `uid` and `version` are what it must still be.
    `losing` are the ServiceAccounts, by name, whose access ends: their members left, or left and returned.
    `obsolete` are live objects that must go, or (kind, name) of those that are only known from the record.
    `fields` says what differs, by object, where live objects were compared.

    In a `paused` namespace only access is removed: `reduced` is the live binding without those who lose it,
    `recorded` what the status record knows and is to go on knowing.
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
    paused: bool = False
    reduced: marks.Manifest | None = None
    recorded: Mapping[str, str] = field(default_factory=dict)

    @property
    def nothing(self) -> bool:
        """Whether every object is as wanted."""
        return not (self.write_namespace or self.changed or self.losing or self.obsolete or self.reduced)


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
    plan: desired.Plan,
    state: AccountState,
    status: AccountStatus | None,
    seen: observed.Observed,
    *,
    adopt: bool = False,
) -> Steps | Findings:
    """Return the steps by what the cluster holds, or findings where nothing may be written.

    With `adopt` a namespace without any installation's mark is taken over; spur's own are of that kind.
    """
    live = seen.namespace
    if live is None:
        if state.deletion is not None:
            return Findings(phase=Phase.PRUNED, not_enforced=plan.not_enforced, retained=False)
        return Steps(changed=tuple(members_of(plan)))
    if (refusal := _refusal(live, state, status, adopt=adopt)) is not None:
        return replace(refusal, retained=observed.is_retained(live))
    found = _differences(plan, live, status, seen)
    return _revocations(found, status, seen) if observed.is_paused(live) else found


def _differences(
    plan: desired.Plan, live: marks.Manifest, status: AccountStatus | None, seen: observed.Observed
) -> Steps:
    namespace_fields = diff.differs(plan.namespace, live)
    accounts = {account["metadata"]["name"]: account for account in _ours(status, seen)}
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
    members = {account["metadata"]["name"] for account in plan.service_accounts}
    losing = {
        name
        for name, found in accounts.items()
        if name not in members or _generation(found) != _generation(wanted[key_of(found)])
    }
    return Steps(
        namespace=live,
        write_namespace=bool(namespace_fields),
        uid=live["metadata"]["uid"],
        version=live["metadata"]["resourceVersion"],
        changed=tuple(manifest for key, manifest in wanted.items() if differing[key]),
        # Bound without a ServiceAccount: somebody deleted it, and whoever makes one of the name has access.
        losing=frozenset(losing | (_bound(seen.binding) - members)),
        obsolete=tuple(found for key, found in present.items() if key not in wanted),
        quota=seen.quota,
        fields={
            key: tuple(fields)
            for key, fields in {key_of(plan.namespace): namespace_fields, **differing}.items()
            if fields
        },
    )


def _ours(status: AccountStatus | None, seen: observed.Observed) -> list[marks.Manifest]:
    """Return the ServiceAccounts that are ours: by their marks, or by the record where those were taken off."""
    recorded = status.objects if status is not None else {}
    return [
        *seen.service_accounts,
        *(account for account in seen.unmarked_service_accounts if key_of(account) in recorded),
    ]


def _revocations(found: Steps, status: AccountStatus | None, seen: observed.Observed) -> Steps:
    """Return what of the steps ends somebody's access; the rest waits until the pause is over."""
    unwanted = [one for one in found.obsolete if one["kind"] == "RoleBinding"]
    ending = [one for one in _ours(status, seen) if one["metadata"]["name"] in found.losing]
    reduced = None
    if seen.binding is not None and not unwanted and found.losing & _bound(seen.binding):
        reduced = _without(seen.binding, found.losing)
    obsolete = (*unwanted, *ending)
    gone = {key_of(one) for one in obsolete}
    recorded = status.objects if status is not None else {}
    return replace(
        found,
        write_namespace=False,
        changed=(),
        losing=found.losing if obsolete or reduced else frozenset(),
        obsolete=obsolete,
        check_quota=False,
        paused=True,
        reduced=reduced,
        recorded={key: text for key, text in recorded.items() if key not in gone},
    )


def _bound(binding: marks.Manifest | None) -> set[str]:
    """Return the members' ServiceAccounts, by name, that a live binding lets in."""
    return {
        subject["name"]
        for subject in (binding or {}).get("subjects") or []
        if binding is not None and _is_members(subject, binding["metadata"]["namespace"])
    }


def _is_members(subject: Mapping[str, str], namespace: str) -> bool:
    return (
        subject.get("kind") == "ServiceAccount"
        and subject.get("namespace") == namespace
        and subject["name"].startswith(names.SERVICE_ACCOUNT_PREFIX)
    )


def _without(binding: marks.Manifest, losing: frozenset[str]) -> marks.Manifest:
    """Return a live binding, as somebody left it, without some of its members, to be applied."""
    metadata = binding["metadata"]
    mine = {
        part: {key: text for key, text in (metadata.get(part) or {}).items() if key in own}
        for part, own in (("labels", marks.OWN_LABELS), ("annotations", marks.OWN_ANNOTATIONS))
    }
    return {
        "apiVersion": binding["apiVersion"],
        "kind": binding["kind"],
        "metadata": {"name": metadata["name"], "namespace": metadata["namespace"], **mine},
        "roleRef": binding["roleRef"],
        "subjects": [
            subject
            for subject in binding.get("subjects") or []
            if not (subject["name"] in losing and _is_members(subject, metadata["namespace"]))
        ],
    }


def _refusal(
    live: marks.Manifest, state: AccountState, status: AccountStatus | None, *, adopt: bool
) -> Findings | None:
    """Return why a live namespace may not be written to now, or None if it may."""
    known_uid = status.namespace_uid if status is not None else ""
    foreign = observed.owner(live, state.installation, known_uid=known_uid) == "foreign"
    if foreign and state.deletion is not None:
        return Findings(phase=Phase.PRUNED)  # it is not ours: there is nothing to close
    if (ending := terminating(live)) is not None:
        return ending
    if foreign:
        return _conflict(live, state, adopt=adopt)
    text = (live["metadata"].get("annotations") or {}).get(marks.REVISION, "")
    recorded = Revision.parse(text)
    if recorded is not None and recorded > state.revision:
        return Findings(
            phase=Phase.FAILED,
            reason="BucketBehind",
            message=f"namespace {live['metadata']['name']} records revision {recorded}, the bucket has"
            f" {state.revision}, which is older: nothing older is ever applied; the relay's audit brings the bucket up"
            " to date",
        )
    return None


def _conflict(live: marks.Manifest, state: AccountState, *, adopt: bool) -> Findings | None:
    """Return why somebody else's namespace is left alone, or None if it is to be taken over and may be."""
    name = live["metadata"]["name"]
    if other := observed.other_installation(live, state.installation):
        return Findings(
            phase=Phase.CONFLICT,
            reason="ForeignInstallation",
            message=f"namespace {name} belongs to installation {other}, this one is {state.installation}; it is left"
            f" alone, and is not adopted. If that installation is no more, take the label {marks.INSTALLATION} off it"
            " first",
        )
    if not adopt:
        return Findings(
            phase=Phase.CONFLICT,
            reason="ForeignNamespace",
            message=f"namespace {name} exists and is not this installation's; it is left alone."
            " Remove or rename it, or take it over with 'spur-events adopt'",
        )
    if observed.is_paused(live):
        return Findings(
            phase=Phase.CONFLICT,
            reason="ForeignNamespace",
            message=f"namespace {name} carries {marks.RECONCILE}={marks.PAUSED}: take that off, then adopt it",
        )
    return None


def terminating(live: marks.Manifest) -> Findings | None:
    """Return that a namespace is being deleted, since when and what holds it; None if it is not."""
    ending = observed.terminating(live)
    if ending is None:
        return None
    return Findings(
        phase=Phase.TERMINATING,
        reason="NamespaceTerminating",
        message=f"namespace {live['metadata']['name']} is being deleted since {ending.since};"
        f" held by: {', '.join(ending.held_by) or 'nothing that it tells'}",
    )


def _generation(manifest: marks.Manifest) -> str:
    return str((manifest["metadata"].get("annotations") or {}).get(marks.GENERATION, ""))
