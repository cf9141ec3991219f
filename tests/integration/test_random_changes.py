"""1,000 random changes by several writers at once: the cluster ends as the projection of the database."""

import asyncio
import os

import pytest
from support import changes, compare, pipeline, servers

from spur_events import jetstream
from spur_events.consumers.kube import kinds
from spur_events.consumers.plan import marks
from spur_events.local.nats import Nats
from spur_events.schemas import names

#: To run again what failed: the seed stands in the test's name. Interleaving and batching stay free.
SEED = int(os.environ.get("SPUR_EVENTS_TEST_SEED", "20260804"))

_WRITERS = 4
_CHANGES_EACH = 250


@pytest.mark.parametrize("seed", [SEED])
async def test_the_cluster_ends_as_the_database_says(
    seed: int, database_url: str, nats_server: Nats, control_plane: servers.Cluster, unique: str
) -> None:
    given = pipeline.config(
        database_url,
        nats_server,
        kubernetes={"cluster": unique, "kubeconfig": control_plane.kubeconfigs},
        apply={"sweep_interval_s": 2.0, "retry_min_s": 0.2, "retry_max_s": 1.0},
        relay={"batch_rows": 50, "changes_per_event": 3},
    )
    async with (
        pipeline.everything(given),
        jetstream.connect(given.nats, "test", "test") as bus,
        pipeline.cluster(given) as cluster,
    ):
        counts = await asyncio.gather(
            *(
                asyncio.to_thread(changes.make, given, f"{seed}.{number}", unique, _CHANGES_EACH)
                for number in range(_WRITERS)
            )
        )
        assert sum(counts) >= 1000
        stored = await compare.whole(bus, given, cluster, hint=f"seed {seed}", patience_s=300.0)
        alive = [state for state in stored.values() if state.deletion is None]
        assert alive, f"seed {seed} left no account: it shows little"
        assert len(alive) < len(stored), f"seed {seed} deleted nothing: it shows little"


async def test_the_comparison_sees_what_is_changed_missing_and_too_much(
    database_url: str, nats_server: Nats, control_plane: servers.Cluster, unique: str
) -> None:
    """A comparison that sees nothing would prove nothing."""
    given = pipeline.config(
        database_url, nats_server, kubernetes={"cluster": unique, "kubeconfig": control_plane.kubeconfigs}
    )
    async with pipeline.cluster(given) as cluster, jetstream.connect(given.nats, "test", "test") as bus:
        async with pipeline.everything(given):
            pipeline.execute(given, "INSERT INTO accounts (name, grp_tres) VALUES (%s, 'cpu=4')", unique)
            stored = await compare.whole(bus, given, cluster)
        place = names.namespace(unique)
        labels = marks.labels(stored[unique].installation, unique)
        extra = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "x", "labels": labels}}
        await cluster.client.request("POST", kinds.collection("ServiceAccount", place), body=extra)
        await cluster.client.request("DELETE", kinds.one("RoleBinding", marks.BINDING_NAME, place))
        quota = kinds.one("ResourceQuota", marks.QUOTA_NAME, place)
        await cluster.patch(quota, {"spec": {"hard": {"pods": "500"}}})
        found = await compare.differences(bus, given, cluster, stored)
    told = " ".join(found)
    assert f"('RoleBinding', '{place}', 'spur-account-members') is missing" in told
    assert f"('ServiceAccount', '{place}', 'x') should not be there" in told
    assert "'pods': '500'" in told
