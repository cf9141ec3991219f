"""The plan of a resync: each action by itself, and any states against any cluster (issue 4)."""

import copy
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import simulated

from spur_events.consumers.plan import desired, diff, marks, namespace, observed, pruning, resync, steps
from spur_events.schemas import names
from spur_events.schemas.accounts import AccountState, Allocation, Deletion, Member, Revision
from spur_events.schemas.resync import WORK, Action, Item
from spur_events.schemas.status import AccountStatus, Phase

NOW = datetime(2026, 12, 1, 12, tzinfo=UTC)
GRACE_S = 3600.0
LONG_AGO = NOW - timedelta(hours=2)
JUST_NOW = NOW - timedelta(minutes=5)
NS = names.namespace("bio")


def state(name: str = "bio", *, deleted: datetime | None = None, **fields: Any) -> AccountState:
    given = {
        "installation": simulated.OURS,
        "revision": Revision(1, 7),
        "name": name,
        "incarnation": "i1",
        "deletion": Deletion(at=deleted, by="root") if deleted else None,
        "allocation": None if deleted else Allocation(limits={"cpu": 4}),
        "members": () if deleted else (Member(name="alice", generation="g1"),),
    }
    return AccountState(**(given | fields))


def remembered(cluster: simulated.Cluster, wanted: AccountState) -> AccountStatus:
    live = cluster.get("Namespace", "", names.namespace(wanted.name))
    return AccountStatus(
        cluster="default",
        name=wanted.name,
        installation=wanted.installation,
        wanted=wanted.revision,
        phase=Phase.APPLIED,
        since=NOW,
        namespace=names.namespace(wanted.name),
        namespace_uid=live["metadata"]["uid"] if live else "",
    )


def planned(
    cluster: simulated.Cluster,
    *states: AccountState,
    statuses: dict[str, AccountStatus] | None = None,
    **options: Any,
) -> resync.Plan:
    given: dict[str, Any] = {
        "installation": simulated.OURS,
        "config": simulated.CONFIG,
        "now": NOW,
        "prune_grace_s": GRACE_S,
    }
    return resync.plan({one.slug: one for one in states}, statuses or {}, cluster.live(), **(given | options))


def only(plan: resync.Plan) -> Item:
    [item] = plan.items
    return item


def holding(*states: AccountState) -> simulated.Cluster:
    cluster = simulated.Cluster()
    for one in states:
        cluster.project(one)
    return cluster


def mark(cluster: simulated.Cluster, part: str, key: str, value: str | None) -> None:
    metadata = cluster.objects["Namespace", "", NS]["metadata"]
    metadata[part] = {k: v for k, v in metadata[part].items() if k != key}
    if value is not None:
        metadata[part][key] = value


def test_accounts_that_are_as_they_should_be_are_counted_only() -> None:
    plan = planned(holding(state(), state("chem")), state(), state("chem"))
    assert (plan.items, plan.unchanged) == ((), 2)


def test_an_account_without_namespace_is_created() -> None:
    item = only(planned(simulated.Cluster(), state()))
    assert (item.action, item.account, item.namespace) == (Action.CREATE, "bio", NS)


def test_an_empty_namespace_is_created_too() -> None:
    cluster = simulated.Cluster()
    cluster.put(desired.objects(state(), simulated.CONFIG).namespace)
    assert only(planned(cluster, state())).action is Action.CREATE


def test_a_change_names_the_fields() -> None:
    cluster = holding(state())
    cluster.objects["ResourceQuota", NS, marks.QUOTA_NAME]["spec"]["hard"]["pods"] = "500"
    cluster.remove("Role", NS, marks.ROLE_NAME)
    item = only(planned(cluster, state()))
    assert item.action is Action.CHANGE
    assert item.details == (
        "ResourceQuota/spur-account-quota spec.hard[pods]",
        "Role/spur-account-editor absent",
    )


def test_a_member_who_left_is_revoked_by_name() -> None:
    cluster = holding(state(members=(Member(name="Bob.X", generation="g1"),)))
    item = only(planned(cluster, state(members=())))
    assert item.action is Action.REVOKE
    assert "access of Bob.X" in item.details


def test_a_member_who_left_and_returned_is_revoked() -> None:
    item = only(planned(holding(state()), state(members=(Member(name="alice", generation="g2"),))))
    assert item.action is Action.REVOKE


def test_a_bound_name_without_service_account_is_revoked() -> None:
    cluster = holding(state())
    cluster.remove("ServiceAccount", NS, "spur-user-alice")
    item = only(planned(cluster, state(members=())))
    assert item.action is Action.REVOKE
    assert "access of spur-user-alice" in item.details


def test_a_tombstone_is_closed_then_waits_then_is_pruned() -> None:
    cluster, tombstone = holding(state()), state(deleted=LONG_AGO)
    item = only(planned(cluster, tombstone))
    assert item.action is Action.CLOSE
    assert "access of alice" in item.details
    cluster.handle(item, {"bio": tombstone}, {}, now=NOW, grace_s=GRACE_S)
    early = only(planned(cluster, tombstone, now=LONG_AGO + timedelta(minutes=59)))
    assert early.action is Action.ORPHANED
    assert "11:00" in early.details[0]
    item = only(planned(cluster, tombstone))
    assert item.action is Action.PRUNE
    assert item.namespace_uid == cluster.objects["Namespace", "", NS]["metadata"]["uid"]
    assert item.incarnation == "i1"
    cluster.handle(item, {"bio": tombstone}, {}, now=NOW, grace_s=GRACE_S)
    assert planned(cluster, tombstone) == resync.Plan(items=(), unchanged=1)
    assert not cluster.objects


@pytest.mark.parametrize("text", [None, "yesterday", "2026-12-01T09:00:00"])
def test_without_a_readable_time_of_its_end_a_namespace_is_closed_first(text: str | None) -> None:
    cluster = holding(state(deleted=LONG_AGO))
    mark(cluster, "annotations", marks.ORPHANED_AT, text)
    assert only(planned(cluster, state(deleted=LONG_AGO))).action is Action.CLOSE


def test_a_namespace_of_another_incarnation_is_closed_first() -> None:
    cluster = holding(state(deleted=LONG_AGO))
    mark(cluster, "annotations", marks.INCARNATION, "i0")
    assert only(planned(cluster, state(deleted=LONG_AGO))).action is Action.CLOSE


def test_a_re_created_account_opens_its_old_namespace() -> None:
    cluster = holding(state(deleted=LONG_AGO))
    item = only(planned(cluster, state(incarnation="i2", revision=Revision(1, 9))))
    assert item.action is Action.CHANGE
    assert f"Namespace/{NS} metadata.annotations[{marks.ORPHANED_AT}]" in item.details


@pytest.mark.parametrize("part", ["labels", "annotations"])
def test_retain_keeps_a_namespace(part: str) -> None:
    cluster = holding(state(deleted=LONG_AGO))
    mark(cluster, part, marks.RETAIN, "true")
    assert only(planned(cluster, state(deleted=LONG_AGO))).action is Action.RETAINED


@pytest.mark.parametrize("part", ["labels", "annotations"])
def test_a_pause_keeps_everything_but_access(part: str) -> None:
    cluster = holding(state(members=(*state().members, Member(name="bob", generation="g1"))))
    mark(cluster, part, marks.RECONCILE, "paused")
    cluster.objects["ResourceQuota", NS, marks.QUOTA_NAME]["spec"]["hard"]["pods"] = "500"
    work, told = planned(cluster, state()).items
    assert (work.action, told.action) == (Action.REVOKE, Action.PAUSED)
    assert work.details == ("access of bob", "ServiceAccount/spur-user-bob to be removed")
    assert "ResourceQuota/spur-account-quota spec.hard[pods]" in told.details
    cluster.handle(work, {"bio": state()}, {}, now=NOW, grace_s=GRACE_S)
    assert cluster.objects["ResourceQuota", NS, marks.QUOTA_NAME]["spec"]["hard"]["pods"] == "500"
    assert [one.action for one in planned(cluster, state()).items] == [Action.PAUSED]


def test_a_paused_tombstone_loses_access_and_is_not_pruned() -> None:
    cluster, tombstone = holding(state()), state(deleted=LONG_AGO)
    mark(cluster, "annotations", marks.RECONCILE, "paused")
    work, _ = planned(cluster, tombstone).items
    assert work.action is Action.REVOKE
    cluster.handle(work, {"bio": tombstone}, {}, now=NOW, grace_s=GRACE_S)
    assert {kind for kind, _, _ in cluster.objects} == {"Namespace", "ResourceQuota", "LimitRange", "Role"}
    assert only(planned(cluster, tombstone)).action is Action.PAUSED


@pytest.mark.parametrize("wanted", [[state()], [state(deleted=LONG_AGO)], []])
def test_a_terminating_namespace_is_told_with_age_and_what_holds_it(wanted: list[AccountState]) -> None:
    cluster = holding(state(deleted=LONG_AGO))
    found = cluster.objects["Namespace", "", NS]
    found["metadata"]["deletionTimestamp"] = namespace.rfc3339(NOW - timedelta(seconds=90))
    found["spec"] = {"finalizers": ["kubernetes"]}
    item = only(planned(cluster, *wanted))
    assert item.action is Action.TERMINATING
    assert item.details[0] == "since 90 s"
    assert "finalizer kubernetes" in item.details[1]


def test_a_foreign_namespace_of_a_wanted_name_is_a_conflict() -> None:
    cluster = simulated.Cluster()
    cluster.put({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NS}})
    assert only(planned(cluster, state())).action is Action.CONFLICT
    assert only(planned(cluster)).action is Action.FOREIGN
    assert only(planned(cluster, state(deleted=LONG_AGO))).action is Action.FOREIGN


def test_another_installation_is_counted_and_never_planned_for() -> None:
    """Case C03."""
    theirs = state(installation="theirs")
    plan = planned(holding(theirs))
    assert (plan.items, plan.others) == ((), 1)
    assert "belongs to installation theirs" in only(planned(holding(theirs), state())).details[0]


def test_a_namespace_of_ours_that_nothing_explains_is_told() -> None:
    cluster = holding(state())
    item = only(planned(cluster))
    assert (item.action, item.account, item.slug) == (Action.UNEXPLAINED, "bio", "bio")
    assert item.namespace_uid
    mark(cluster, "annotations", marks.RETAIN, "true")
    assert only(planned(cluster)).action is Action.RETAINED


def test_an_account_that_the_database_does_not_explain_is_told_and_kept_as_it_is() -> None:
    item = only(planned(holding(state()), state(), unexplained=["bio"]))
    assert (item.action, item.incarnation) == (Action.UNEXPLAINED, "i1")


def test_our_mark_on_a_namespace_of_another_name_is_foreign() -> None:
    cluster = simulated.Cluster()
    labels = marks.labels(simulated.OURS, "bio")
    cluster.put({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "prod", "labels": labels}})
    assert only(planned(cluster)).action is Action.FOREIGN


def test_changed_marks_are_restored_and_never_bind_to_another_account() -> None:
    """Case C06."""
    cluster = holding(state(), state("chem"))
    statuses = {"bio": remembered(cluster, state())}
    mark(cluster, "labels", marks.ACCOUNT, "chem")
    mark(cluster, "labels", marks.INSTALLATION, None)
    item = only(planned(cluster, state(), state("chem"), statuses=statuses))
    assert (item.action, item.slug) == (Action.CHANGE, "bio")
    assert f"Namespace/{NS} metadata.labels[{marks.ACCOUNT}]" in item.details


def test_a_namespace_ahead_of_the_bucket_is_left_alone() -> None:
    cluster = holding(state(revision=Revision(1, 9)))
    item = only(planned(cluster, state(allocation=None)))
    assert item.action is Action.CONFLICT
    assert "1.9" in item.details[0]


# --- any states, any cluster -----------------------------------------------------------------------------------------

ACCOUNTS = ["bio", "chem", "Physics_Lab"]
USERS = ["alice", "bob", "Carol.X"]

members = st.lists(
    st.builds(Member, name=st.sampled_from(USERS), generation=st.sampled_from(["g1", "g2"])),
    unique_by=lambda member: member.name,
    max_size=3,
).map(tuple)
allocations = st.sampled_from([None, Allocation(limits={"cpu": 4}), Allocation(limits={"cpu": 0, "mem": 9})])


def states_at(revision: int) -> st.SearchStrategy[dict[str, AccountState]]:
    def one(name: str) -> st.SearchStrategy[AccountState | None]:
        incarnation = st.sampled_from(["i1", "i2"])
        alive = st.builds(
            state,
            st.just(name),
            revision=st.just(Revision(1, revision)),
            incarnation=incarnation,
            allocation=allocations,
            members=members,
        )
        dead = st.builds(
            state,
            st.just(name),
            deleted=st.sampled_from([LONG_AGO, JUST_NOW]),
            revision=st.just(Revision(1, revision)),
            incarnation=incarnation,
        )
        return st.one_of(st.none(), alive, dead)

    return st.tuples(*(one(name) for name in ACCOUNTS)).map(
        lambda found: {each.slug: each for each in found if each is not None}
    )


Edit = Callable[[simulated.Cluster, str], None]


def _label(part: str, key: str, value: str | None) -> Edit:
    def edit(cluster: simulated.Cluster, place: str) -> None:
        found = cluster.get("Namespace", "", place)
        if found is not None:
            kept = {k: v for k, v in found["metadata"][part].items() if k != key}
            found["metadata"][part] = kept | ({key: value} if value is not None else {})

    return edit


def _edit(kind: str, name: str, change: Callable[[dict[str, Any]], object]) -> Edit:
    def edit(cluster: simulated.Cluster, place: str) -> None:
        found = cluster.get(kind, place, name) if kind != "Namespace" else cluster.get(kind, "", place)
        if found is not None:
            change(found)

    return edit


def _remove(kind: str, name: str) -> Edit:
    return lambda cluster, place: cluster.remove(kind, place, name)


def _subject(name: str, place: str = NS) -> dict[str, str]:
    return {"kind": "ServiceAccount", "name": name, "namespace": place}


def _stranger(cluster: simulated.Cluster, place: str) -> None:
    """Things of others in a namespace of ours."""
    if cluster.get("Namespace", "", place) is not None:
        for kind, name in (("ServiceAccount", "spur-user-mallory"), ("ResourceQuota", "theirs")):
            metadata = {"name": name, "namespace": place}
            cluster.put({"apiVersion": "v1", "kind": kind, "metadata": metadata})


def _unmark(found: dict[str, Any]) -> None:
    found["metadata"]["labels"].pop(marks.MANAGED_BY, None)


EDITS: dict[str, Edit] = {
    "namespace deleted": lambda cluster, place: cluster.remove("Namespace", "", place),
    "terminating": _edit(
        "Namespace", "", lambda f: f["metadata"].update(deletionTimestamp=namespace.rfc3339(JUST_NOW))
    ),
    "paused": _label("annotations", marks.RECONCILE, marks.PAUSED),
    "retained": _label("labels", marks.RETAIN, marks.RETAINED),
    "somebody's label": _label("labels", "team", "blue"),
    "no installation": _label("labels", marks.INSTALLATION, None),
    "other installation": _label("labels", marks.INSTALLATION, "theirs"),
    "not managed": _label("labels", marks.MANAGED_BY, None),
    "other account": _label("labels", marks.ACCOUNT, "chem"),
    "ahead": _label("annotations", marks.REVISION, "1.99"),
    "other incarnation": _label("annotations", marks.INCARNATION, "i7"),
    "no orphan mark": _label("annotations", marks.ORPHANED_AT, None),
    "old orphan mark": _label("annotations", marks.ORPHANED_AT, "2020-01-01T00:00:00Z"),
    "quota deleted": _remove("ResourceQuota", marks.QUOTA_NAME),
    "role deleted": _remove("Role", marks.ROLE_NAME),
    "binding deleted": _remove("RoleBinding", marks.BINDING_NAME),
    "account deleted": _remove("ServiceAccount", "spur-user-alice"),
    "quota key": _edit("ResourceQuota", marks.QUOTA_NAME, lambda f: f["spec"]["hard"].update(pods="500")),
    "subject": _edit(
        "RoleBinding",
        marks.BINDING_NAME,
        # In the binding's own namespace: somebody of another one is no member, and a pause leaves her as she was put.
        lambda f: f["subjects"].append(_subject("spur-user-eve", f["metadata"]["namespace"])),
    ),
    "rule": _edit("Role", marks.ROLE_NAME, lambda f: f["rules"].append({"verbs": ["*"]})),
    "limit": _edit(
        "LimitRange", marks.LIMITS_NAME, lambda f: f["spec"]["limits"][0].update(default={"cpu": "9"})
    ),
    "role of binding": _edit("RoleBinding", marks.BINDING_NAME, lambda f: f["roleRef"].update(name="old")),
    "generation": _edit(
        "ServiceAccount", "spur-user-alice", lambda f: f["metadata"]["annotations"].pop(marks.GENERATION, 0)
    ),
    "marks of an account": _edit("ServiceAccount", "spur-user-bob", _unmark),
    "stranger": _stranger,
}
#: What a list by label does not show: the writer, who reads everything, then does more than was planned.
HIDING = {"marks of an account"}


@given(
    before=states_at(5),
    wanted=states_at(7),
    done=st.sets(st.sampled_from(ACCOUNTS)),
    edits=st.lists(st.tuples(st.sampled_from(sorted(EDITS)), st.sampled_from(ACCOUNTS)), max_size=6),
    known=st.booleans(),
)
def test_a_plan_that_is_carried_out_leaves_nothing_to_do(
    before: dict[str, AccountState],
    wanted: dict[str, AccountState],
    done: set[str],
    edits: list[tuple[str, str]],
    known: bool,
) -> None:
    """`done` are the accounts that the cluster has followed already."""
    before |= {slug: one for slug, one in wanted.items() if one.name in done}
    cluster = holding(*before.values())
    statuses = {slug: remembered(cluster, one) for slug, one in before.items()} if known else {}
    for name, account in edits:
        slug = names.slug(account)
        if name in HIDING and (slug not in wanted or wanted[slug].deletion is not None):
            continue
        EDITS[name](cluster, names.namespace(account))
    start = copy.deepcopy(cluster.objects)
    plan = planned(cluster, *wanted.values(), statuses=statuses)
    check_plan(plan, wanted, start)
    carry_out(cluster, plan, wanted, statuses)
    again = planned(cluster, *wanted.values(), statuses=statuses)
    # A tombstone that was closed may be due at once: that is the next resync's work, and the last.
    left = [item for item in again.items if item.action in WORK]
    closed = {item.slug for item in plan.items if item.action is Action.CLOSE}
    assert all(item.action is Action.PRUNE and item.slug in closed for item in left)
    check_cluster(cluster, wanted, again, start)
    carry_out(cluster, again, wanted, statuses)
    last = planned(cluster, *wanted.values(), statuses=statuses)
    assert not [item for item in last.items if item.action in WORK]


def carry_out(
    cluster: simulated.Cluster,
    plan: resync.Plan,
    wanted: dict[str, AccountState],
    statuses: dict[str, AccountStatus],
) -> None:
    for item in plan.items:
        if item.action in WORK:
            cluster.handle(item, wanted, statuses, now=NOW, grace_s=GRACE_S)


def check_plan(
    plan: resync.Plan, wanted: dict[str, AccountState], start: dict[simulated.Key, dict[str, Any]]
) -> None:
    work = [item for item in plan.items if item.action in WORK]
    assert len({item.slug for item in work}) == len(work)
    for item in work:
        assert item.slug in wanted
        assert item.namespace == names.namespace(wanted[item.slug].name)
        if item.action is Action.PRUNE:
            deletion = wanted[item.slug].deletion
            assert deletion is not None
            assert deletion.at == LONG_AGO
            metadata = start["Namespace", "", item.namespace]["metadata"]
            assert metadata["uid"] == item.namespace_uid
            assert metadata["labels"][marks.INSTALLATION] == simulated.OURS
            assert not observed.is_retained({"metadata": metadata})
            assert not observed.is_paused({"metadata": metadata})


def check_cluster(
    cluster: simulated.Cluster,
    wanted: dict[str, AccountState],
    again: resync.Plan,
    start: dict[simulated.Key, dict[str, Any]],
) -> None:
    left_alone = {
        item.namespace
        for item in again.items
        if item.action in {Action.CONFLICT, Action.FOREIGN, Action.TERMINATING, Action.UNEXPLAINED}
    }
    left_alone |= {
        name
        for (kind, _, name), found in start.items()
        if kind == "Namespace" and observed.other_installation(found, simulated.OURS)
    }
    paused = {item.namespace for item in again.items if item.action is Action.PAUSED}
    explained = {names.namespace(one.name) for one in wanted.values()}
    for key, found in start.items():
        place = key[1] or key[2]
        if place in left_alone or place not in explained:
            assert cluster.objects[key] == found
        elif "mallory" in key[2] or key[2] == "theirs":
            gone = cluster.get("Namespace", "", place) is None
            assert gone or cluster.objects[key] == found
    for one in wanted.values():
        place = names.namespace(one.name)
        if place in left_alone:
            continue
        check_account(cluster, one, paused=place in paused)


def check_account(cluster: simulated.Cluster, one: AccountState, *, paused: bool) -> None:
    place = names.namespace(one.name)
    plan = desired.objects(one, simulated.CONFIG)
    if one.deletion is not None and cluster.get("Namespace", "", place) is None:
        return
    binding = cluster.get("RoleBinding", place, marks.BINDING_NAME)
    allowed = {subject["name"] for subject in (plan.binding or {}).get("subjects", [])}
    assert {subject["name"] for subject in (binding or {}).get("subjects", [])} <= allowed
    generations = {
        account["metadata"]["name"]: account["metadata"]["annotations"][marks.GENERATION]
        for account in plan.service_accounts
    }
    for account in cluster.observe(one.slug).service_accounts:
        metadata = account["metadata"]
        assert metadata["annotations"][marks.GENERATION] == generations[metadata["name"]]
    if paused:
        return
    for manifest in (plan.namespace, *steps.members_of(plan)):
        live = cluster.objects[simulated._key(manifest)]
        assert diff.differs(manifest, live) == []
    if one.deletion is not None:
        assert binding is None
        assert cluster.get("Role", place, marks.ROLE_NAME) is None


# --- what speaks against a deletion ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "edits", "said"),
    [
        ({}, {}, ""),
        ({"planned_uid": "uid-0"}, {}, "another namespace"),
        ({"planned_incarnation": "i0"}, {}, "earlier account"),
        ({"now": LONG_AGO + timedelta(seconds=GRACE_S - 1)}, {}, "grace"),
        ({"state": state()}, {}, "the account exists"),
        ({"state": state(deleted=LONG_AGO, incarnation="i2")}, {}, "earlier account"),
        ({}, {marks.ORPHANED_AT: "soon"}, "since when"),
        ({}, {marks.INCARNATION: "i0"}, "earlier account"),
        ({}, {marks.RETAIN: "true"}, marks.RETAIN),
        ({}, {marks.RECONCILE: "paused"}, marks.RECONCILE),
        ({}, {"label": "x"}, "marks"),
    ],
)
def test_objections(options: dict[str, Any], edits: dict[str, str], said: str) -> None:
    cluster = holding(state(deleted=LONG_AGO))
    found = cluster.objects["Namespace", "", NS]
    for key, text in edits.items():
        mark(cluster, "labels" if key == "label" else "annotations", key, text)
        if key == "label":
            mark(cluster, "labels", marks.INSTALLATION, None)
    given: dict[str, Any] = {
        "state": state(deleted=LONG_AGO),
        "planned_uid": found["metadata"]["uid"],
        "planned_incarnation": "i1",
        "now": NOW,
        "grace_s": GRACE_S,
    }
    given |= options
    why = pruning.objection(given.pop("state"), found, **given)
    assert said in why
    assert bool(why) == bool(said)
