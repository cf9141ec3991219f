"""Benchmarks of the whole pipeline; scripts/bench runs it. Figures are for this machine, in this run only."""

import argparse
import asyncio
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from spur_events import jetstream, postgres, retrying, settings
from spur_events.consumers import resync
from spur_events.consumers.kube import apply, kinds
from spur_events.consumers.kube import client as kube
from spur_events.consumers.plan import desired, marks, observed
from spur_events.local.controlplane import ControlPlane
from spur_events.local.nats import Nats
from spur_events.local.postgres import Postgres
from spur_events.producers import migrate
from spur_events.schemas import names, subjects, tres
from spur_events.schemas.accounts import AccountState, Allocation, Member, Revision
from spur_events.schemas.events import ResyncRequest
from spur_events.schemas.resync import ResyncReport, RunState
from spur_events.schemas.status import AccountStatus

_IN_FLIGHT = 32


def main() -> None:
    """Start everything, measure, stop."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--accounts", type=int, default=1000, help="new accounts for the projection (1000)")
    parser.add_argument("--members", type=int, default=5, help="members of each of them (5)")
    parser.add_argument(
        "--changes", type=int, default=200, help="changes for the latency, at 10 a second (200)"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="spur-events-bench-") as folder:
        database = Postgres(Path(folder) / "postgres", durable=False)
        nats = Nats(Path(folder) / "nats")
        cluster = ControlPlane(Path(folder) / "controlplane", durable=False)
        for server in (database, nats, cluster):
            server.start()
        config = settings.load()
        os.environ |= {
            "SPUR_EVENTS_DATABASE_URL": database.url,
            "SPUR_EVENTS_NATS_URL": nats.url,
            "SPUR_EVENTS_NATS_CREDENTIALS": str(
                nats.credentials(config.kubernetes.cluster, config.nats.partitions)
            ),
            "KUBECONFIG": str(cluster.kubeconfig),
        }
        config = settings.load()
        migrate.migrate(config.database)
        log = (Path(folder) / "services.log").open("w")
        command = [str(Path(sys.executable).with_name("spur-events")), "run"]
        parts = [subprocess.Popen([*command, part], stderr=log) for part in ("relay", "apply", "resync")]
        try:
            asyncio.run(_measure(config, options, {"apply": parts[1].pid, "relay": parts[0].pid}, cluster))
        finally:
            for part in parts:
                part.terminate()
                part.wait()
            for server in (cluster, nats, database):
                server.stop()


async def _measure(
    config: settings.Settings, options: argparse.Namespace, pids: dict[str, int], cluster: ControlPlane
) -> None:
    async with kube.Client(config.kubernetes) as client, jetstream.connect(config.nats, "bench") as bus:
        await retrying.forever("wait for the relay's streams", bus.check_topology)
        pids["kube-apiserver"] = cluster.api_server.pid or 0
        raw = await _raw(client, options, pids)
        await _project(config, bus, options, raw, pids)
        await _unchanged(config, bus, client, options, pids)
        await _latency(config, client, options)


async def _raw(client: kube.Client, options: argparse.Namespace, pids: dict[str, int]) -> float:
    """Apply the same objects as the projection does, with nothing else around: the API server's limit."""
    count = max(options.accounts // 4, 50)
    limit = asyncio.Semaphore(_IN_FLIGHT)
    requests = 0

    async def one(number: int) -> None:
        nonlocal requests
        async with limit:
            for manifest in _manifests(f"raw{number}", options.members):
                await apply.apply(client, manifest)
                requests += 1

    before = _cpu_s(pids["kube-apiserver"])
    began = time.perf_counter()
    await asyncio.gather(*(one(number) for number in range(count)))
    seconds = time.perf_counter() - began
    used = _cpu_s(pids["kube-apiserver"]) - before
    print(
        f"raw: {count} accounts with {options.members} members, {requests} applies, {_IN_FLIGHT} in flight:"
        f" {seconds:.1f} s, {requests / seconds:.0f} applies/s, {count / seconds:.1f} accounts/s,"
        f" API server CPU {used / requests * 1000:.2f} ms an apply"
    )
    return count / seconds


def _manifests(account: str, members: int) -> Iterable[marks.Manifest]:
    state = AccountState(
        installation="bench",
        revision=Revision(1, 1),
        name=account,
        incarnation="x",
        allocation=Allocation(limits=tres.parse("cpu=64,mem=131072,gres/gpu=8")),
        members=tuple(Member(name=f"user{number}", generation="g") for number in range(members)),
    )
    plan = desired.objects(state, settings.Quota())
    fixed = (plan.namespace, plan.quota, plan.limits, plan.role)
    return [*(one for one in fixed if one), *plan.service_accounts, *([plan.binding] if plan.binding else [])]


async def _project(
    config: settings.Settings,
    bus: jetstream.Bus,
    options: argparse.Namespace,
    raw: float,
    pids: dict[str, int],
) -> None:
    before = {part: _cpu_s(pid) for part, pid in pids.items()}
    with postgres.connect(config.database) as connection:
        began = time.perf_counter()
        with connection.transaction():
            connection.execute(
                "INSERT INTO accounts (name, grp_tres)"
                " SELECT 'new' || n, 'cpu=64,mem=131072,gres/gpu=8' FROM generate_series(1, %s) n",
                (options.accounts,),
            )
            connection.execute(
                "INSERT INTO users (name, account)"
                " SELECT 'user' || m, 'new' || n FROM generate_series(1, %s) n, generate_series(1, %s) m",
                (options.accounts, options.members),
            )
    while True:
        statuses = await bus.read_all(subjects.STATUS_BUCKET, AccountStatus, f"{config.kubernetes.cluster}.")
        settled = sum(isinstance(one, jetstream.Entry) and one.value.settled for one in statuses.values())
        if settled >= options.accounts:
            break
        await asyncio.sleep(0.2)
    seconds = time.perf_counter() - began
    rate = options.accounts / seconds
    used = ", ".join(f"{part} {_cpu_s(pid) - before[part]:.1f}" for part, pid in pids.items())
    print(
        f"projection: {options.accounts} new accounts with {options.members} members, from commit to all applied and"
        f" in force: {seconds:.1f} s, {rate:.1f} accounts/s, {rate / raw:.0%} of raw (CPU s: {used};"
        f" apply's memory {_rss_mb(pids['apply']):.0f} MB)"
    )


async def _unchanged(
    config: settings.Settings,
    bus: jetstream.Bus,
    client: kube.Client,
    options: argparse.Namespace,
    pids: dict[str, int],
) -> None:
    """Resync accounts that are all as they should be, beside applying a part of them again."""
    request = ResyncRequest(
        installation=await bus.check_topology(), id=uuid.uuid4().hex, prune=True, at=datetime.now(UTC)
    )
    before = _cpu_s(pids["kube-apiserver"])
    began = time.perf_counter()
    await resync.ask(bus, config.kubernetes.cluster, request)
    key = subjects.report_key(config.kubernetes.cluster, request.id)
    while (
        found := await bus.get(subjects.STATUS_BUCKET, key, ResyncReport)
    ) is None or found.value.state is RunState.RUNNING:
        await asyncio.sleep(0.05)
    seconds = time.perf_counter() - began
    used = _cpu_s(pids["kube-apiserver"]) - before
    again = [f"raw{number}" for number in range(max(options.accounts // 4, 50))]
    before = _cpu_s(pids["kube-apiserver"])
    for account in again:
        await asyncio.gather(*(apply.apply(client, one) for one in _manifests(account, options.members)))
    reapplied = (_cpu_s(pids["kube-apiserver"]) - before) / len(again) * options.accounts
    print(
        f"resync: {found.value.unchanged} unchanged accounts: {seconds:.2f} s, {found.value.reads} list calls,"
        f" {len(found.value.items)} items, API server CPU {used:.2f} s;"
        f" applying them all again would take {reapplied:.1f} s of it ({reapplied / max(used, 0.01):.0f} times)"
    )


async def _latency(config: settings.Settings, client: kube.Client, options: argparse.Namespace) -> None:
    accounts = itertools.cycle(f"new{number}" for number in range(1, min(options.accounts, 50) + 1))
    times_ms = []
    with postgres.connect(config.database) as connection:
        for step in range(options.changes):
            account = next(accounts)
            connection.execute(
                "UPDATE accounts SET grp_tres = %s WHERE name = %s", (f"cpu={step + 100}", account)
            )
            began = time.perf_counter()
            path = kinds.one("ResourceQuota", marks.QUOTA_NAME, names.namespace(account))
            while True:
                quota = await client.request("GET", path)
                hard = quota["spec"]["hard"]
                if hard == {"requests.cpu": str(step + 100)} and observed.quota_in_force(quota):
                    break
                await asyncio.sleep(0.002)
            times_ms.append((time.perf_counter() - began) * 1000)
            await asyncio.sleep(max(0.0, 0.1 - times_ms[-1] / 1000))
    cuts = statistics.quantiles(times_ms, n=100)
    print(
        f"latency: {options.changes} quota changes at 10 a second, commit to in force:"
        f" p50 {cuts[49]:.0f} ms, p90 {cuts[89]:.0f} ms, p99 {cuts[98]:.0f} ms, max {max(times_ms):.0f} ms"
    )


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _rss_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


if __name__ == "__main__":
    main()
