"""What the planned quota and defaults do to pods, on a real API server (C16, C20 to C23)."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support import pipeline

from spur_events import settings
from spur_events.consumers.kube import apply, errors, kinds, observe
from spur_events.consumers.kube import client as kube
from spur_events.consumers.plan import desired, diff, marks, observed, quantities
from spur_events.schemas import accounts, names, tres

DEFAULT = settings.Quota()
BOTH = settings.Quota(mode="requests+limits")
GPU = "amd.com/gpu"


@pytest.fixture
async def client(control_plane: Any) -> AsyncIterator[kube.Client]:
    async with kube.Client(settings.Kubernetes(kubeconfig=control_plane.kubeconfig)) as made:
        yield made


class Account:
    """An account's namespace with quota and defaults; pods are made by an administrator."""

    def __init__(self, client: kube.Client, name: str) -> None:
        self.client, self.name, self.namespace = client, name, names.namespace(name)

    async def grant(self, grptres: str | None, config: settings.Quota = DEFAULT) -> marks.Manifest:
        """Apply an allocation and return the quota once it is in force."""
        allocation = None if grptres is None else accounts.Allocation(limits=tres.parse(grptres))
        state = accounts.AccountState(
            installation="i",
            revision=accounts.Revision(1, 1),
            name=self.name,
            incarnation="i",
            allocation=allocation,
        )
        plan = desired.objects(state, config)
        for manifest in (plan.namespace, plan.quota, plan.limits):
            assert manifest is not None
            assert diff.differs(manifest, await apply.apply(self.client, manifest)) == []

        async def in_force() -> bool:
            # Pods need the ServiceAccount that the controller makes.
            default = await apply.get(self.client, "ServiceAccount", "default", self.namespace)
            return default is not None and observed.quota_in_force(await self.quota())

        await pipeline.eventually(in_force, "the quota is in force")
        # The API server judges by a copy that follows moments later, and shows nobody how far it is.
        await asyncio.sleep(1)
        return await self.quota()

    async def quota(self) -> marks.Manifest:
        quota = await apply.get(self.client, "ResourceQuota", marks.QUOTA_NAME, self.namespace)
        assert quota is not None
        return quota

    async def pod(
        self,
        name: str,
        requests: dict[str, str] | None = None,
        limits: dict[str, str] | None = None,
        **spec: Any,
    ) -> Any:
        """Create a pod and return the resources of its container."""
        resources = {key: value for key, value in (("requests", requests), ("limits", limits)) if value}
        container = {"name": "main", "image": "example.com/none", "resources": resources}
        manifest = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name},
            "spec": {"containers": [container], **spec},
        }
        path = kinds.collection("Pod", self.namespace)
        made = await self.client.request("POST", path, body=manifest)
        return made["spec"]["containers"][0]["resources"]


@pytest.fixture
def account(client: kube.Client, unique: str) -> Account:
    return Account(client, unique)


async def test_a_pod_without_requests_is_admitted_and_counted(account: Account) -> None:
    """C21."""
    await account.grant("cpu=64,mem=131072,gres/gpu=8")
    assert await account.pod("plain") == {"requests": {"cpu": "100m", "memory": "128M"}}
    used = (await account.quota())["status"]["used"]
    expected = {"requests.cpu": "100m", "requests.memory": "128M", f"requests.{GPU}": "0"}
    assert quantities.equal(used, expected)


async def test_the_default_is_no_maximum(account: Account) -> None:
    """C22, first half: a request far above the default, without a limit."""
    await account.grant("cpu=64,mem=131072")
    assert (await account.pod("big", {"memory": "4Gi"}))["requests"] == {"cpu": "100m", "memory": "4Gi"}


@pytest.mark.parametrize(("grptres", "memory"), [("mem=256", "128M"), ("mem=100", "100M"), ("mem=1", "1M")])
async def test_the_default_fits_in_the_quota(account: Account, grptres: str, memory: str) -> None:
    """C22, second half."""
    await account.grant(grptres)
    assert (await account.pod("plain"))["requests"]["memory"] == memory


async def test_the_ninth_gpu_is_refused_and_a_lower_quota_evicts_nothing(account: Account) -> None:
    """C20, C23. A node is not needed: quota counts pods that wait for one."""
    await account.grant("cpu=64,mem=131072,gres/gpu=8")
    for number in range(8):
        await account.pod(f"gpu-{number}", limits={GPU: "1"})
    with pytest.raises(errors.ForbiddenError, match=r"exceeded quota.*requests\.amd\.com/gpu=8"):
        await account.pod("ninth", limits={GPU: "1"})
    quota = await account.grant("cpu=64,mem=131072,gres/gpu=4")
    assert quota["status"]["hard"][f"requests.{GPU}"] == "4"
    assert quota["status"]["used"][f"requests.{GPU}"] == "8"
    assert observed.over_quota(quota) == (f"requests.{GPU}",)
    pods = await observe.list_all(account.client, "Pod", namespace=account.namespace)
    assert len(pods) == 8
    with pytest.raises(errors.ForbiddenError, match="exceeded quota"):
        await account.pod("tenth", limits={GPU: "1"})


@pytest.mark.parametrize("resource", ["cpu", "memory"])
async def test_zero_requests_are_refused(account: Account, resource: str) -> None:
    await account.grant("cpu=1,mem=1000")
    with pytest.raises(errors.ForbiddenError, match=f"minimum {resource} usage per Container"):
        await account.pod("zero", {resource: "0"})


async def test_zero_requests_of_init_containers_and_pods_do_not_evade(account: Account) -> None:
    await account.grant("cpu=1,mem=1000")
    init = {"name": "init", "image": "example.com/none", "resources": {"requests": {"cpu": "0"}}}
    with pytest.raises(errors.ForbiddenError, match="minimum cpu usage per Container"):
        await account.pod("init", initContainers=[init])
    with pytest.raises((errors.ForbiddenError, errors.InvalidError)):
        await account.pod("pod-level", resources={"requests": {"cpu": "0", "memory": "0"}})


async def test_a_quota_of_zero_says_which(account: Account) -> None:
    await account.grant("cpu=0,mem=1000,gres/gpu=0")
    with pytest.raises(errors.ForbiddenError, match=r"exceeded quota.*requested: requests\.cpu=1m.*=0"):
        await account.pod("plain")
    await account.grant("cpu=1,mem=1000,gres/gpu=0")
    await account.pod("plain")
    with pytest.raises(errors.ForbiddenError, match=r"exceeded quota.*requests\.amd\.com/gpu=1"):
        await account.pod("gpu", limits={GPU: "1"})


async def test_closed_and_open_accounts(account: Account) -> None:
    await account.grant(None)
    with pytest.raises(errors.ForbiddenError, match=r"exceeded quota.*pods=1.*limited: pods=0"):
        await account.pod("plain")
    await account.grant("cpu=-1")
    await account.pod("plain")


async def test_limits_mode_caps_limits_and_gives_them(account: Account) -> None:
    await account.grant("cpu=2,mem=1000", BOTH)
    default = {"cpu": "100m", "memory": "128M"}
    assert await account.pod("plain") == {"requests": default, "limits": default}
    with pytest.raises(errors.ForbiddenError, match=r"exceeded quota.*limits\.cpu"):
        await account.pod("wide", {"cpu": "1", "memory": "1M"}, {"cpu": "3", "memory": "1M"})
    # Documented: in this mode a request above the default limit needs a limit of its own.
    with pytest.raises((errors.InvalidError, errors.ForbiddenError)):
        await account.pod("no-limit", {"memory": "500M"})
    await account.pod("stated", {"memory": "500M"}, {"memory": "500M"})


async def test_limits_mode_with_only_gpus_does_not_cap_memory_by_default(account: Account) -> None:
    await account.grant("gres/gpu=1", BOTH)
    assert "limits" not in await account.pod("plain")


@pytest.mark.parametrize("mem", [131072, 1, 1536, tres.MAX_MEM_MB])
async def test_memory_is_exact_in_bytes(account: Account, mem: int) -> None:
    """C16: read again from the cluster, it is the same number."""
    quota = await account.grant(f"mem={mem}")
    for part in ("spec", "status"):
        assert quantities.value(quota[part]["hard"]["requests.memory"]) == mem * 10**6


async def test_the_largest_counts_are_exact_and_count(account: Account) -> None:
    largest = tres.MAX_VALUE
    quota = await account.grant(f"cpu={largest},mem={tres.MAX_MEM_MB},gres/gpu={largest}")
    assert quota["status"]["hard"]["requests.cpu"] == str(largest)
    assert quota["status"]["hard"][f"requests.{GPU}"] == str(largest)
    await account.pod("plain", limits={GPU: "1"})
    assert observed.over_quota(await account.quota()) == ()


async def test_a_changed_quota_is_not_in_force_before_its_status_is(account: Account) -> None:
    quota = await account.grant("cpu=4")
    changed = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": marks.QUOTA_NAME}}
    # In one request with the change: the controller cannot have been there yet.
    answer = await account.client.request(
        "PATCH",
        kinds.of(quota),
        query={"fieldManager": marks.FIELD_MANAGER, "force": "true"},
        body={**changed, "spec": {"hard": {"requests.cpu": "2"}}},
        content_type=kube.APPLY_PATCH,
    )
    assert not observed.quota_in_force(answer)

    async def in_force() -> bool:
        return observed.quota_in_force(await account.quota())

    await pipeline.eventually(in_force, "the new quota is in force")
