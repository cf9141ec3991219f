"""What may be written to an account's objects: pauses, adoption, other installations, who loses access."""

from typing import Any

import pytest
from support import simulated

from spur_events.consumers.plan import desired, marks, observed, steps
from spur_events.schemas import names
from spur_events.schemas.accounts import AccountState, Allocation, Member, Revision
from spur_events.schemas.status import AccountStatus, Phase

NS = names.namespace("bio")
STATE = AccountState(
    installation=simulated.OURS,
    revision=Revision(1, 7),
    name="bio",
    incarnation="i1",
    allocation=Allocation(limits={"cpu": 4}),
    members=(Member(name="alice", generation="g1"), Member(name="bob", generation="g1")),
)
PLAN = desired.objects(STATE, simulated.CONFIG)


def holding(state: AccountState = STATE) -> simulated.Cluster:
    cluster = simulated.Cluster()
    cluster.project(state)
    return cluster


def compare(cluster: simulated.Cluster, **options: Any) -> steps.Steps | steps.Findings:
    return steps.compare(PLAN, STATE, None, cluster.observe("bio"), **options)


def compared(cluster: simulated.Cluster, **options: Any) -> steps.Steps:
    found = compare(cluster, **options)
    assert isinstance(found, steps.Steps)
    return found


def refused(cluster: simulated.Cluster, **options: Any) -> steps.Findings:
    found = compare(cluster, **options)
    assert isinstance(found, steps.Findings)
    return found


def paused(cluster: simulated.Cluster) -> simulated.Cluster:
    metadata = cluster.objects["Namespace", "", NS]["metadata"]
    metadata["annotations"] = {**metadata["annotations"], marks.RECONCILE: marks.PAUSED}
    return cluster


def spurs_own() -> simulated.Cluster:
    """What spur's own reconciler leaves: no installation, no original name, no generation."""
    cluster = holding(
        STATE.model_copy(update={"members": (*STATE.members, Member(name="eve", generation=""))})
    )
    for found in cluster.objects.values():
        found["metadata"]["labels"].pop(marks.INSTALLATION)
        found["metadata"]["annotations"] = {}
    return cluster


def test_nothing_differs() -> None:
    assert compared(holding()).nothing
    assert compared(paused(holding())).nothing
    assert compared(paused(holding())).paused


def test_a_pause_leaves_drift_in_place() -> None:
    cluster = paused(holding())
    cluster.objects["ResourceQuota", NS, marks.QUOTA_NAME]["spec"]["hard"]["pods"] = "9"
    cluster.remove("Role", NS, marks.ROLE_NAME)
    cluster.remove("ServiceAccount", NS, "spur-user-alice")
    found = compared(cluster)
    assert found.nothing
    assert set(found.fields) == {
        "ResourceQuota/spur-account-quota",
        "Role/spur-account-editor",
        "ServiceAccount/spur-user-alice",
    }


def test_a_pause_takes_only_those_who_left_out_of_the_binding() -> None:
    gone = STATE.model_copy(update={"members": (*STATE.members, Member(name="eve", generation="g1"))})
    cluster = paused(holding(gone))
    binding = cluster.objects["RoleBinding", NS, marks.BINDING_NAME]
    guest = {"kind": "User", "name": "guest", "apiGroup": "rbac.authorization.k8s.io"}
    elsewhere = {"kind": "ServiceAccount", "name": "spur-user-eve", "namespace": "default"}
    binding["subjects"] += [guest, elsewhere]
    found = compared(cluster)
    assert found.reduced is not None
    assert [subject["name"] for subject in found.reduced["subjects"]] == [
        "spur-user-alice",
        "spur-user-bob",
        "guest",
        "spur-user-eve",
    ]
    assert [steps.key_of(one) for one in found.obsolete] == ["ServiceAccount/spur-user-eve"]
    assert found.changed == ()
    assert not found.write_namespace


def test_a_member_who_left_and_returned_loses_the_old_account_in_a_pause_and_gets_no_new_one() -> None:
    old = STATE.model_copy(update={"members": (Member(name="alice", generation="g0"), STATE.members[1])})
    found = compared(paused(holding(old)))
    assert found.losing == {"spur-user-alice"}
    assert [steps.key_of(one) for one in found.obsolete] == ["ServiceAccount/spur-user-alice"]
    assert found.changed == ()


def test_a_strangers_account_of_a_bound_name_is_not_deleted() -> None:
    cluster = holding()
    metadata = {"name": "spur-user-eve", "namespace": NS}
    cluster.put({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata})
    subject = {"kind": "ServiceAccount", "name": "spur-user-eve", "namespace": NS}
    cluster.objects["RoleBinding", NS, marks.BINDING_NAME]["subjects"].append(subject)
    for found in (compared(cluster), compared(paused(cluster))):
        assert found.losing == {"spur-user-eve"}
        assert found.obsolete == ()


def test_an_account_whose_labels_were_edited_is_still_ours() -> None:
    gone = STATE.model_copy(update={"members": (*STATE.members, Member(name="eve", generation="g1"))})
    cluster = holding(gone)
    cluster.objects["ServiceAccount", NS, "spur-user-eve"]["metadata"]["labels"][marks.ACCOUNT] = "chem"
    assert [steps.key_of(one) for one in compared(cluster).obsolete] == ["ServiceAccount/spur-user-eve"]


def test_without_adopt_spurs_own_namespace_is_a_conflict() -> None:
    assert refused(spurs_own()).reason == "ForeignNamespace"


def test_adopt_takes_spurs_own_namespace_over_and_trusts_none_of_its_tokens() -> None:
    found = compared(spurs_own(), adopt=True)
    assert found.write_namespace
    assert found.losing == {"spur-user-alice", "spur-user-bob", "spur-user-eve"}
    assert [steps.key_of(one) for one in found.obsolete] == ["ServiceAccount/spur-user-eve"]
    assert {steps.key_of(one) for one in found.changed} == {
        steps.key_of(one) for one in steps.members_of(PLAN)
    }


@pytest.mark.parametrize("adopt", [False, True])
def test_another_installations_namespace_is_never_adopted(adopt: bool) -> None:
    cluster = spurs_own()
    cluster.objects["Namespace", "", NS]["metadata"]["labels"][marks.INSTALLATION] = "theirs"
    found = refused(cluster, adopt=adopt)
    assert (found.phase, found.reason) == (Phase.CONFLICT, "ForeignInstallation")
    assert "theirs" in found.message


def test_a_paused_namespace_is_not_adopted() -> None:
    assert marks.RECONCILE in refused(paused(spurs_own()), adopt=True).message


@pytest.mark.parametrize("part", ["labels", "annotations"])
def test_wishes_are_labels_or_annotations(part: str) -> None:
    namespace = {"metadata": {part: {marks.RECONCILE: "paused", marks.RETAIN: "true"}}}
    assert observed.is_paused(namespace)
    assert observed.is_retained(namespace)
    other = {"metadata": {part: {marks.RECONCILE: "yes", marks.RETAIN: "false"}}}
    assert not observed.is_paused(other)
    assert not observed.is_retained(other)


def test_the_record_of_a_paused_account_is_not_relied_on() -> None:
    status = AccountStatus(
        cluster="default",
        name="bio",
        installation=simulated.OURS,
        wanted=STATE.revision,
        phase=Phase.PAUSED,
        since="2026-12-01T00:00:00Z",
        namespace=NS,
        namespace_uid="uid-1",
        namespace_version="1",
        objects={"Role/x": "y"},
    )
    assert steps.recall(PLAN, STATE, status) is None
    assert steps.recall(PLAN, STATE, status.model_copy(update={"phase": Phase.APPLIED})) is not None
