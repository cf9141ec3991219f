"""An API server that refuses, throttles or hangs: one account's trouble stays its own, and nothing is lost."""

import contextlib
import itertools
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web
from support import compare, pipeline, proxy, servers

from spur_events import jetstream, settings
from spur_events.consumers.plan import marks
from spur_events.local.nats import Nats
from spur_events.schemas import names, subjects
from spur_events.schemas.status import Phase

_ACCOUNTS = 50


@dataclass(frozen=True, kw_only=True)
class Site:
    """A pipeline that reaches its cluster through `proxy`; `cluster` looks at it directly."""

    config: settings.Settings
    bus: jetstream.Bus
    cluster: pipeline.Cluster
    proxy: proxy.Proxy

    async def parked(self) -> int:
        return int((await self.bus._js.stream_info(subjects.PARKED_STREAM)).state.messages)


@contextlib.asynccontextmanager
async def running(
    database_url: str,
    nats_server: Nats,
    upstream: servers.Cluster,
    unique: str,
    folder: Path,
    timeout_s: float = 30.0,
) -> AsyncIterator[Site]:
    async with proxy.before(upstream.kubeconfigs, folder) as between:
        config = pipeline.config(
            database_url,
            nats_server,
            kubernetes={"cluster": unique, "kubeconfig": between.kubeconfig, "timeout_s": timeout_s},
            # Long, so that a partition that waits for it is seen.
            apply={"sweep_interval_s": 1.0, "retry_min_s": 0.2, "retry_max_s": 1.0, "ack_wait_s": 120.0},
        )
        direct = pipeline.config(
            database_url,
            nats_server,
            kubernetes={"cluster": unique, "kubeconfig": upstream.kubeconfigs},
        )
        async with (
            pipeline.everything(config),
            jetstream.connect(config.nats, "test", "test") as bus,
            pipeline.cluster(direct) as cluster,
        ):
            yield Site(config=config, bus=bus, cluster=cluster, proxy=between)


async def test_a_server_that_throttles_is_left_alone_for_as_long_as_it_says(
    database_url: str, nats_server: Nats, control_plane: servers.Cluster, unique: str, tmp_path: Path
) -> None:
    """Case C50: 50 accounts change meanwhile."""
    async with running(database_url, nats_server, control_plane, unique, tmp_path) as site:
        pipeline.execute(
            site.config,
            f"INSERT INTO accounts (name, grp_tres) SELECT '{unique}' || n, 'cpu=1'"
            f" FROM generate_series(1, {_ACCOUNTS}) n",
        )
        await compare.whole(site.bus, site.config, site.cluster)

        async def throttle(request: web.Request) -> web.Response | None:
            if request.method == "GET":
                return None
            return proxy.refusal(429, "TooManyRequests", "please try again later", Retry_After="2")

        site.proxy.rule = throttle
        pipeline.execute(site.config, "UPDATE accounts SET grp_tres = 'cpu=2'")

        def refusals() -> dict[str, list[float]]:
            found: dict[str, list[float]] = defaultdict(list)
            for at_s, method, path in site.proxy.refused:
                if method == "PATCH" and path.startswith("/api/v1/namespaces/"):
                    found[path].append(at_s)
            return found

        async def all_refused_twice() -> bool:
            found = refusals()
            namespaces = [times for path, times in found.items() if path.count("/") == 4]
            return len(namespaces) == _ACCOUNTS and all(len(times) > 1 for times in namespaces)

        await pipeline.eventually(all_refused_twice, "every account is refused at least twice")
        site.proxy.let_through()
        for path, times in refusals().items():
            waits = [later - earlier for earlier, later in itertools.pairwise(times)]
            assert min(waits, default=2.0) >= 1.9, f"{path} came back too early: {waits}"
        await compare.whole(site.bus, site.config, site.cluster)
        assert await site.parked() == 0


async def test_a_server_that_throttles_reads_holds_nobody_up_afterwards(
    database_url: str, nats_server: Nats, control_plane: servers.Cluster, unique: str, tmp_path: Path
) -> None:
    """A read that is refused is as temporary as a write, and must not keep the partition for the ack wait."""
    async with running(database_url, nats_server, control_plane, unique, tmp_path) as site:

        async def throttle(request: web.Request) -> web.Response | None:
            if unique not in request.path:
                return None
            return proxy.refusal(429, "TooManyRequests", "please try again later", Retry_After="1")

        site.proxy.rule = throttle
        pipeline.execute(site.config, "INSERT INTO accounts (name, grp_tres) VALUES (%s, 'cpu=1')", unique)
        status = await pipeline.in_phase(site.bus, site.config, unique, Phase.FAILED)
        assert "too many requests" in status.message
        site.proxy.let_through()
        await compare.whole(site.bus, site.config, site.cluster, patience_s=60)


async def test_refused_role_bindings_are_degraded_and_everything_else_is_applied(
    database_url: str, nats_server: Nats, control_plane: servers.Cluster, unique: str, tmp_path: Path
) -> None:
    """Case C08: the status says what the cluster refused, and it heals by itself."""
    async with running(database_url, nats_server, control_plane, unique, tmp_path) as site:
        bad, good = f"{unique}bad", f"{unique}good"
        pipeline.execute(
            site.config,
            "INSERT INTO accounts (name, grp_tres) VALUES (%s, 'cpu=1'), (%s, 'cpu=1')",
            bad,
            good,
        )
        await compare.whole(site.bus, site.config, site.cluster)

        async def refuse(request: web.Request) -> web.Response | None:
            if request.method != "GET" and f"{names.namespace(bad)}/rolebindings" in request.path:
                return proxy.refusal(403, "Forbidden", 'rolebindings "x" is forbidden: no such right')
            return None

        site.proxy.rule = refuse
        pipeline.execute(
            site.config,
            f"BEGIN; UPDATE accounts SET grp_tres = 'cpu=2';"
            f" INSERT INTO users (name, account) VALUES ('alice', '{bad}'), ('alice', '{good}'); COMMIT",
        )
        status = await pipeline.in_phase(site.bus, site.config, bad, Phase.DEGRADED)
        assert status.reason == "RoleBinding"
        assert "no such right" in status.message
        assert status.applied is not None
        assert status.applied < status.wanted

        async def in_force() -> bool:
            return await site.cluster.hard(bad) == {"requests.cpu": "2"}

        await pipeline.eventually(in_force, "the new quota is in force")
        assert await site.cluster.service_accounts(bad) == ["spur-user-alice"]
        assert await site.cluster.subjects(bad) == []
        await pipeline.settled(site.bus, site.config, good)
        assert await site.cluster.subjects(good) == ["spur-user-alice"]
        site.proxy.let_through()
        await compare.whole(site.bus, site.config, site.cluster)


async def test_a_namespace_whose_requests_hang_holds_no_other_account_of_its_partition(
    database_url: str, nats_server: Nats, control_plane: servers.Cluster, unique: str, tmp_path: Path
) -> None:
    async with running(database_url, nats_server, control_plane, unique, tmp_path, timeout_s=5.0) as site:
        slow = f"{unique}slow"
        own = subjects.partition(names.slug(slow), site.bus.partitions)
        behind = [
            name
            for name in (f"{unique}n{number}" for number in range(200))
            if subjects.partition(names.slug(name), site.bus.partitions) == own
        ][:5]

        async def hang(request: web.Request) -> web.Response | None:
            return await proxy.never() if names.namespace(slow) in request.path else None

        site.proxy.rule = hang
        for name in (slow, *behind):
            pipeline.execute(site.config, "INSERT INTO accounts (name, grp_tres) VALUES (%s, 'cpu=1')", name)
        for name in behind:
            await pipeline.settled(site.bus, site.config, name)
        status = await pipeline.in_phase(site.bus, site.config, slow, Phase.FAILED)
        assert "did not answer" in status.message
        assert await site.cluster.get("Namespace", names.namespace(slow)) is None
        site.proxy.let_through()
        await compare.whole(site.bus, site.config, site.cluster)


async def test_an_existing_namespace_whose_writes_hang_holds_no_other_account_of_its_partition(
    database_url: str, nats_server: Nats, control_plane: servers.Cluster, unique: str, tmp_path: Path
) -> None:
    """As an admission webhook does it that nobody answers."""
    async with running(database_url, nats_server, control_plane, unique, tmp_path, timeout_s=5.0) as site:
        slow = f"{unique}slow"
        own = subjects.partition(names.slug(slow), site.bus.partitions)
        other = next(
            name
            for name in (f"{unique}n{number}" for number in range(200))
            if subjects.partition(names.slug(name), site.bus.partitions) == own
        )
        pipeline.execute(
            site.config,
            "INSERT INTO accounts (name, grp_tres) VALUES (%s, 'cpu=1'), (%s, 'cpu=1')",
            slow,
            other,
        )
        await compare.whole(site.bus, site.config, site.cluster)

        async def hang(request: web.Request) -> web.Response | None:
            quota = f"{names.namespace(slow)}/resourcequotas/{marks.QUOTA_NAME}"
            return await proxy.never() if quota in request.path and request.method == "PATCH" else None

        site.proxy.rule = hang
        for name in (slow, other):
            pipeline.execute(site.config, "UPDATE accounts SET grp_tres = 'cpu=2' WHERE name = %s", name)
        await pipeline.settled(site.bus, site.config, other)
        status = await pipeline.in_phase(site.bus, site.config, slow, Phase.DEGRADED)
        assert status.reason == "ResourceQuota"
        site.proxy.let_through()
        await compare.whole(site.bus, site.config, site.cluster)
