"""From an account's state to its objects: quota meaning (C15, C16, C19), closing, and validity of all plans."""

import re
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spur_events import settings
from spur_events.consumers.plan import desired, marks, quantities, quota
from spur_events.schemas import accounts, tres

DEFAULT = settings.Quota()
BOTH = settings.Quota(mode="requests+limits")
OPEN = settings.Quota(unallocated="open")
AT = datetime(2026, 8, 1, 12, 0, 0, 5000, tzinfo=UTC)
LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", re.ASCII)

Limits = dict[str, int | None]


def state(limits: Limits | None = None, *, problem: str = "", **fields: Any) -> accounts.AccountState:
    allocation = None if limits is None else accounts.Allocation(limits=limits, problem=problem)
    base: dict[str, Any] = {
        "installation": "inst-1",
        "revision": accounts.Revision(1, 7),
        "name": "physics",
        "incarnation": "i1",
        "allocation": allocation,
    }
    return accounts.AccountState(**(base | fields))


def hard(limits: Limits | None, config: settings.Quota = DEFAULT, *, problem: str = "") -> dict[str, str]:
    plan = desired.objects(state(limits, problem=problem), config)
    assert plan.quota is not None
    found: dict[str, str] = plan.quota["spec"]["hard"]
    return found


def container_limits(limits: Limits, config: settings.Quota = DEFAULT) -> dict[str, Any]:
    plan = desired.objects(state(limits), config)
    assert plan.limits is not None
    [item] = plan.limits["spec"]["limits"]
    assert isinstance(item, dict)
    return item


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "cpu=64,mem=131072,gres/gpu=8",
            {"requests.cpu": "64", "requests.memory": "131072M", "requests.amd.com/gpu": "8"},
        ),
        ("mem=1", {"requests.memory": "1M"}),
        ("mem=1536", {"requests.memory": "1536M"}),
        ("gres/gpu=0", {"requests.amd.com/gpu": "0"}),
        ("cpu=0,mem=0", {"requests.cpu": "0", "requests.memory": "0"}),
        ("cpu=4,gres/gpu=-1", {"requests.cpu": "4"}),
        ("cpu=-1", {}),
        ("node=4,billing=5", {}),
    ],
)
def test_quota_texts(text: str, expected: dict[str, str]) -> None:
    assert hard(tres.parse(text)) == expected


def test_limits_mode_caps_limits_but_not_of_extended_resources() -> None:
    assert hard({"cpu": 4, "mem": 8, "gres/gpu": 1}, BOTH) == {
        "requests.cpu": "4",
        "requests.memory": "8M",
        "limits.cpu": "4",
        "limits.memory": "8M",
        "requests.amd.com/gpu": "1",
    }


@pytest.mark.parametrize("limits", [None, {}])
def test_an_account_without_allocation_is_closed_unless_configured(limits: Limits | None) -> None:
    assert hard(limits) == {"pods": "0"}
    assert desired.objects(state(limits), DEFAULT).closed
    assert hard(limits, OPEN) == {}


@pytest.mark.parametrize("config", [DEFAULT, OPEN, BOTH])
def test_a_malformed_allocation_never_uncaps(config: settings.Quota) -> None:
    assert hard({}, config, problem="bad TRES 'cpu=abc'") == {"pods": "0"}
    assert hard({"cpu": 4}, config, problem="bad")["requests.cpu"] == "4"


def test_tres_without_kubernetes_meaning_are_reported() -> None:
    plan = desired.objects(state(tres.parse("cpu=1,node=2,license/x=3,gres/gpu:a100=4,energy=-1")), DEFAULT)
    assert plan.not_enforced == ("gres/gpu:a100", "license/x", "node")


def test_typed_gpus_map_by_configuration() -> None:
    config = settings.Quota(gpu_types={"A100": "nvidia.com/gpu"})
    limits = tres.parse("gres/gpu=8,gres/gpu:a100=4,gres/gpu:mi300=2")
    assert hard(limits, config) == {"requests.amd.com/gpu": "8", "requests.nvidia.com/gpu": "4"}
    assert desired.objects(state(limits), config).not_enforced == ("gres/gpu:mi300",)


@pytest.mark.parametrize(
    ("text", "count", "others"),
    [
        ("gres/gpu=8,gres/gpu:a100=4", "4", ("gres/gpu",)),
        ("gres/gpu=2,gres/gpu:a100=4", "2", ("gres/gpu:a100",)),
        ("gres/gpu:a100=4,gres/gpu:h100=4", "4", ()),
        ("gres/gpu=3,gres/gpu:a100=2,gres/gpu:h100=1", "1", ("gres/gpu", "gres/gpu:a100")),
        ("gres/gpu=-1,gres/gpu:a100=4", "4", ()),
    ],
)
def test_the_smallest_of_several_on_one_resource_rules(
    text: str, count: str, others: tuple[str, ...]
) -> None:
    config = settings.Quota(gpu_types={"a100": "amd.com/gpu", "h100": "amd.com/gpu"})
    plan = desired.objects(state(tres.parse(text)), config)
    assert plan.quota is not None
    assert plan.quota["spec"]["hard"] == {"requests.amd.com/gpu": count}
    assert plan.not_enforced == others


@pytest.mark.parametrize(
    ("limits", "request_"),
    [
        ({"cpu": 64, "mem": 131072}, {"cpu": "100m", "memory": "128M"}),
        ({"mem": 100}, {"cpu": "100m", "memory": "100M"}),
        ({"mem": 1}, {"cpu": "100m", "memory": "1M"}),
        ({"cpu": 0, "mem": 0}, {"cpu": "1m", "memory": "1M"}),
        ({"cpu": None}, {"cpu": "100m", "memory": "128M"}),
    ],
)
def test_defaults_are_never_more_than_the_quota(limits: Limits, request_: dict[str, str]) -> None:
    item = container_limits(limits)
    assert item["defaultRequest"] == request_
    assert item["min"] == {"cpu": "1m", "memory": "1M"}
    assert "default" not in item


def test_limits_mode_gives_default_limits_where_the_quota_forces_them() -> None:
    assert container_limits({"cpu": 1, "mem": 64}, BOTH)["default"] == {"cpu": "100m", "memory": "64M"}
    assert container_limits({"mem": 64}, BOTH)["default"] == {"memory": "64M"}
    assert "default" not in container_limits({"gres/gpu": 1}, BOTH)


def test_objects_of_an_account() -> None:
    members = (
        accounts.Member(name="bob", generation="g2"),
        accounts.Member(name="Alice.Smith", generation="g1"),
    )
    plan = desired.objects(state({"cpu": 1}, members=members), DEFAULT)
    assert plan.namespace["metadata"]["name"] == "spur-acct-physics"
    assert plan.namespace["metadata"]["annotations"] == {
        "spur.amd.com/account-name": "physics",
        "spur.amd.com/revision": "1.7",
        "spur.amd.com/incarnation": "i1",
    }
    assert plan.namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "baseline"
    assert plan.binding is not None
    subjects = [subject["name"] for subject in plan.binding["subjects"]]
    assert subjects == [account["metadata"]["name"] for account in plan.service_accounts] == sorted(subjects)
    alice = plan.service_accounts[0]
    assert alice["metadata"]["annotations"] == {
        "spur.amd.com/user-name": "Alice.Smith",
        "spur.amd.com/generation": "g1",
    }
    assert alice["automountServiceAccountToken"] is False


def test_a_deleted_account_keeps_a_closed_namespace_and_nobody() -> None:
    deleted = state(
        {"cpu": 1},
        members=(accounts.Member(name="bob", generation="g"),),
        deletion=accounts.Deletion(at=AT, by="root"),
    )
    plan = desired.objects(deleted, OPEN)
    assert plan.namespace["metadata"]["annotations"]["spur.amd.com/orphaned-at"] == "2026-08-01T12:00:00Z"
    assert plan.quota is not None
    assert plan.quota["spec"]["hard"] == {"pods": "0"}
    assert plan.closed
    assert (plan.limits, plan.role, plan.binding, plan.service_accounts) == (None, None, None, ())


def test_members_have_no_rights_that_could_widen_their_own() -> None:
    plan = desired.objects(state({"cpu": 1}), DEFAULT)
    assert plan.role is not None
    writable = {
        resource
        for rule in plan.role["rules"]
        if set(rule["verbs"]) - {"get", "list", "watch"}
        for resource in rule["resources"]
    }
    assert writable == {
        *("pods", "services", "configmaps", "secrets", "persistentvolumeclaims"),
        *("pods/exec", "pods/attach", "pods/portforward"),
        *("jobs", "cronjobs", "deployments", "replicasets", "statefulsets", "daemonsets"),
    }


names_ = st.text(max_size=80)
tres_names = st.sampled_from(
    ["cpu", "mem", "gres/gpu", "gres/gpu:a100", "gres/gpu:h100", "node", "license/x", "gres/fpga"]
)
allocations = st.one_of(
    st.none(),
    st.builds(
        accounts.Allocation,
        limits=st.dictionaries(tres_names, st.one_of(st.none(), st.integers(0, tres.MAX_MEM_MB))),
        problem=st.sampled_from(["", "bad TRES"]),
    ),
)
states = st.builds(
    accounts.AccountState,
    installation=st.just("inst-1"),
    revision=st.builds(accounts.Revision, st.integers(0, 9), st.integers(0, 2**63)),
    name=names_,
    incarnation=st.just("i"),
    deletion=st.one_of(st.none(), st.builds(accounts.Deletion, at=st.datetimes(), by=names_)),
    description=st.just(""),
    organization=st.just(""),
    parent=st.just(""),
    allocation=allocations,
    members=st.lists(
        st.builds(accounts.Member, name=names_, generation=names_, is_default=st.booleans())
    ).map(tuple),
)
configs = st.builds(
    settings.Quota,
    mode=st.sampled_from(["requests", "requests+limits"]),
    unallocated=st.sampled_from(["closed", "open"]),
    gpu_resource=st.sampled_from(["amd.com/gpu", "nvidia.com/gpu"]),
    gpu_types=st.dictionaries(
        st.sampled_from(["a100", "h100"]), st.sampled_from(["amd.com/gpu", "nvidia.com/gpu"])
    ),
    default_cpu_milli=st.integers(1, 10**6),
    default_mem_mb=st.integers(1, 10**6),
)


def manifests(plan: desired.Plan) -> list[marks.Manifest]:
    some = (plan.quota, plan.limits, plan.role, plan.binding)
    return [plan.namespace, *(one for one in some if one is not None), *plan.service_accounts]


@given(states, configs)
def test_every_state_gives_valid_objects(account: accounts.AccountState, config: settings.Quota) -> None:
    plan = desired.objects(account, config)
    found = manifests(plan)
    identities = [(one["kind"], one["metadata"]["name"]) for one in found]
    assert len(set(identities)) == len(identities)
    for manifest in found:
        metadata = manifest["metadata"]
        assert LABEL.fullmatch(metadata["name"])
        assert len(metadata["name"]) <= 63
        for key, value in metadata["labels"].items():
            assert LABEL.fullmatch(value), key
            assert len(value) <= 63
        assert marks.labels("inst-1", account.slug).items() <= metadata["labels"].items()
        for value in metadata.get("annotations", {}).values():
            value.encode("utf-8")
    assert plan.quota is not None
    for text in plan.quota["spec"]["hard"].values():
        assert quantities.value(text) is not None
    assert plan.closed == (plan.quota["spec"]["hard"] == quota.CLOSED)


@given(states, configs)
def test_defaults_fit_between_minimum_and_quota(
    account: accounts.AccountState, config: settings.Quota
) -> None:
    plan = desired.objects(account, config)
    if plan.limits is None or plan.quota is None:
        return
    [item] = plan.limits["spec"]["limits"]
    for resource in ("cpu", "memory"):
        default = quantities.value(item["defaultRequest"][resource])
        least = quantities.value(item["min"][resource])
        assert default is not None
        assert least is not None
        assert 0 < least <= default
        cap = plan.quota["spec"]["hard"].get(f"requests.{resource}")
        if cap is not None and (most := quantities.value(cap)) is not None and most > 0:
            assert default <= most
        if f"limits.{resource}" in plan.quota["spec"]["hard"]:
            assert item["default"][resource] == item["defaultRequest"][resource]


@given(states, configs)
def test_only_an_allocation_or_the_setting_opens_an_account(
    account: accounts.AccountState, config: settings.Quota
) -> None:
    plan = desired.objects(account, config)
    allocation = account.allocation
    if account.deletion is not None or (
        (allocation is None or not allocation.limits)
        and (config.unallocated == "closed" or (allocation is not None and allocation.problem))
    ):
        assert plan.closed
    elif allocation is not None:
        # Every number that was given for cpu and mem is a key with that very number: 0 is not unset.
        assert plan.quota is not None
        keys = plan.quota["spec"]["hard"]
        for name, key, unit in (("cpu", "requests.cpu", 1), ("mem", "requests.memory", 10**6)):
            limit = allocation.limits.get(name)
            assert (key in keys) == (limit is not None)
            if limit is not None:
                assert quantities.value(keys[key]) == limit * unit
