"""A running pipeline with one cluster, and what a test needs to edit and to look at there as somebody else."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from support import pipeline, servers

from spur_events import jetstream, services, settings
from spur_events.consumers.kube import client as kube
from spur_events.consumers.kube import kinds
from spur_events.local.nats import Nats
from spur_events.schemas import names, subjects
from spur_events.schemas.access import GuardState, PartReport
from spur_events.schemas.events import Recheck, RecheckReason
from spur_events.schemas.status import AccountStatus, Phase


@dataclass(frozen=True, kw_only=True)
class Site:
    """Everything runs. Accounts are named without the test's own prefix."""

    config: settings.Settings
    bus: jetstream.Bus
    cluster: pipeline.Cluster
    prefix: str

    def sql(self, statement: str) -> None:
        """Run SQL with $ for the test's own name prefix."""
        pipeline.execute(self.config, statement.replace("$", self.prefix))

    def name(self, account: str) -> str:
        return self.prefix + account

    def namespace(self, account: str) -> str:
        return names.namespace(self.name(account))

    async def add(self, account: str, *users: str, grptres: str = "cpu=4") -> None:
        """Add an account with members, and wait until it is applied."""
        self.sql(f"INSERT INTO accounts (name, grp_tres) VALUES ('${account}', '{grptres}')")
        for user in users:
            self.sql(f"INSERT INTO users (name, account) VALUES ('{user}', '${account}')")
        await self.settled(account)

    async def guarded(self) -> None:
        """Wait until apply has proven the member guard: the next time that it looks by itself is a minute away."""

        async def proven() -> bool:
            key = subjects.part_key(self.cluster.name, "apply")
            entry = await self.bus.get(subjects.STATUS_BUCKET, key, PartReport)
            if entry is None:
                return False
            return entry.value.guard is GuardState.IN_FORCE and not entry.value.message

        await pipeline.eventually(proven, "the member guard is in force")

    async def delete(self, account: str) -> AccountStatus:
        """Delete an account, and wait until that is applied."""
        self.sql(
            f"BEGIN; DELETE FROM users WHERE account = '${account}';"
            f" DELETE FROM accounts WHERE name = '${account}'; COMMIT"
        )
        return await self.settled(account)

    async def settled(self, account: str) -> AccountStatus:
        return await pipeline.settled(self.bus, self.config, self.name(account))

    async def in_phase(self, account: str, phase: Phase) -> AccountStatus:
        return await pipeline.in_phase(self.bus, self.config, self.name(account), phase)

    async def gone(self, account: str) -> None:
        """Wait until an account's namespace is gone."""

        async def check() -> bool:
            return await self.get("Namespace", account) is None

        await pipeline.eventually(check, f"the namespace of {account} is gone")

    async def get(self, kind: str, account: str, name: str = "") -> dict[str, Any] | None:
        """Return a live object of an account; without a name, its namespace."""
        place = self.namespace(account)
        return await (self.cluster.get(kind, name, place) if name else self.cluster.get("Namespace", place))

    async def live(self, kind: str, account: str, name: str = "") -> dict[str, Any]:
        found = await self.get(kind, account, name)
        assert found is not None, f"{kind} {name} of {account} is not there"
        return found

    async def edit(self, kind: str, account: str, name: str, patch: dict[str, Any]) -> None:
        """Change an object as `kubectl edit` does."""
        place = self.namespace(account)
        path = kinds.one(kind, place) if kind == "Namespace" else kinds.one(kind, name, place)
        await self.cluster.patch(path, patch)

    async def force(self, manifest: dict[str, Any], manager: str = "argocd") -> None:
        """Apply an object by server-side apply as another manager that takes everything over."""
        await self.cluster.client.request(
            "PATCH",
            kinds.of(manifest),
            query={"fieldManager": manager, "force": "true"},
            body=manifest,
            content_type=kube.APPLY_PATCH,
        )

    async def remove(self, kind: str, account: str, name: str = "") -> None:
        place = self.namespace(account)
        path = kinds.one(kind, place) if kind == "Namespace" else kinds.one(kind, name, place)
        await self.cluster.client.request("DELETE", path)

    async def create(self, manifest: dict[str, Any]) -> None:
        """Create an object as somebody who knows nothing of server-side apply."""
        place = manifest["metadata"].get("namespace", "")
        path = kinds.collection(manifest["kind"], place)
        await self.cluster.client.request("POST", path, body=manifest, query={"fieldManager": "python"})

    async def pin(self, account: str) -> str:
        """Put something into an account's namespace that keeps it from going away; returns its path."""
        path = f"/api/v1/namespaces/{self.namespace(account)}/configmaps"
        metadata = {"name": "pin", "finalizers": ["example.org/pin"]}
        body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}
        await self.cluster.client.request("POST", path, body=body)
        return f"{path}/pin"

    async def recheck(
        self,
        account: str,
        reason: RecheckReason = RecheckReason.RESYNC,
        *,
        uid: str = "",
        incarnation: str = "",
        slug: str = "",
    ) -> AccountStatus:
        """Ask for another look as a resync does, behind all that was committed, and wait for the answer."""
        await pipeline.published(self.config)
        slug = slug or names.slug(self.name(account))
        installation = await self.bus.check_topology()
        event = Recheck(
            installation=installation,
            slug=slug,
            reason=reason,
            namespace_uid=uid,
            incarnation=incarnation,
        )
        subject = subjects.recheck(self.cluster.name, slug, self.bus.partitions)
        sequence = await self.bus.publish(subject, event, message_id=servers.unique())
        key = subjects.status_key(self.cluster.name, slug)

        async def answered() -> AccountStatus | None:
            entry = await self.bus.get(subjects.STATUS_BUCKET, key, AccountStatus)
            return entry.value if entry is not None and entry.value.answers(sequence) else None

        return await pipeline.eventually(answered, f"{reason} of {slug} is answered")

    async def prune(self, account: str, *, uid: str = "", incarnation: str = "") -> AccountStatus:
        """Ask for the deletion of an account's namespace, as a resync with a confirmed plan does."""
        state = await pipeline.state(self.bus, self.name(account))
        assert state is not None
        found = await self.live("Namespace", account)
        return await self.recheck(
            account,
            RecheckReason.PRUNE,
            uid=uid or found["metadata"]["uid"],
            incarnation=incarnation or state.incarnation,
        )


def config(
    database_url: str, nats_server: Nats, control_plane: servers.Cluster, name: str, **groups: dict[str, Any]
) -> settings.Settings:
    """Return settings with short waits."""
    given: dict[str, dict[str, Any]] = {
        "kubernetes": {"cluster": name, "kubeconfig": control_plane.kubeconfigs},
        "apply": {"sweep_interval_s": 1.0, "retry_min_s": 0.2, "retry_max_s": 1.0},
    }
    return pipeline.config(database_url, nats_server, **(given | groups))


@contextlib.asynccontextmanager
async def running(given: settings.Settings, prefix: str) -> AsyncIterator[Site]:
    """Run everything until the block ends."""
    async with (
        pipeline.everything(given),
        jetstream.connect(given.nats, "test", "test") as bus,
        pipeline.cluster(given) as cluster,
    ):
        yield Site(config=given, bus=bus, cluster=cluster, prefix=prefix)


@contextlib.asynccontextmanager
async def without_relay(given: settings.Settings, prefix: str) -> AsyncIterator[Site]:
    """Run what a cluster needs, without the relay, until the block ends."""
    async with (
        pipeline.part(services.apply, given),
        pipeline.part(services.resync, given),
        jetstream.connect(given.nats, "test", "test") as bus,
        pipeline.cluster(given) as cluster,
    ):
        yield Site(config=given, bus=bus, cluster=cluster, prefix=prefix)
