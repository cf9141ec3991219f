"""From a committed change to objects in a real cluster: the main job, and what happens when parts of it fail."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from support import pipeline, servers
from support import site as sites
from support.site import Site

from spur_events import errors, jetstream, services, settings
from spur_events.consumers.kube import errors as kube_errors
from spur_events.consumers.kube import kinds, observe
from spur_events.consumers.plan import desired, diff, marks
from spur_events.local.nats import Nats
from spur_events.schemas import codec, names, subjects
from spur_events.schemas.events import Recheck, RecheckReason
from spur_events.schemas.status import AccountStatus, Phase


@pytest.fixture
def config(
    database_url: str, nats_server: Nats, control_plane: servers.Cluster, unique: str
) -> settings.Settings:
    return sites.config(database_url, nats_server, control_plane, unique)


@pytest.fixture
async def site(config: settings.Settings, unique: str) -> AsyncIterator[Site]:
    async with sites.running(config, unique) as made:
        yield made


async def test_an_account_becomes_its_objects(site: Site) -> None:
    site.sql("INSERT INTO accounts (name, grp_tres) VALUES ('$bio', 'cpu=64,mem=131072,gres/gpu=8')")
    site.sql("INSERT INTO users (name, account) VALUES ('alice', '$bio')")
    await site.settled("bio")
    account = site.name("bio")
    assert await site.cluster.hard(account) == {
        "requests.cpu": "64",
        "requests.memory": "131072M",
        "requests.amd.com/gpu": "8",
    }
    assert await site.cluster.subjects(account) == ["spur-user-alice"]
    assert await site.cluster.service_accounts(account) == ["spur-user-alice"]
    namespace = await site.cluster.get("Namespace", names.namespace(account))
    assert namespace is not None
    assert namespace["metadata"]["labels"][marks.MANAGED_BY] == "spur-quota"
    assert namespace["metadata"]["annotations"][marks.ACCOUNT_NAME] == account


async def test_a_removed_member_loses_binding_and_service_account(site: Site) -> None:
    """Case C04: also when it was the last one."""
    site.sql("INSERT INTO accounts (name, grp_tres) VALUES ('$bio', 'cpu=1')")
    site.sql("INSERT INTO users (name, account) VALUES ('alice', '$bio')")
    await site.settled("bio")
    site.sql("DELETE FROM users WHERE account = '$bio'")
    await site.settled("bio")
    assert await site.cluster.subjects(site.name("bio")) == []
    assert await site.cluster.service_accounts(site.name("bio")) == []


async def test_a_member_who_returns_gets_a_new_service_account(site: Site) -> None:
    """Case C46, within one transaction and thus one event."""
    site.sql("INSERT INTO accounts (name, grp_tres) VALUES ('$bio', 'cpu=1')")
    add = "INSERT INTO users (name, account) VALUES ('alice', '$bio')"
    site.sql(add)
    await site.settled("bio")
    place = ("ServiceAccount", "spur-user-alice", names.namespace(site.name("bio")))
    first = await site.cluster.get(*place)
    site.sql(f"BEGIN; DELETE FROM users WHERE account = '$bio'; {add}; COMMIT")

    async def replaced() -> bool:
        found = await site.cluster.get(*place)
        return (
            found is not None and first is not None and found["metadata"]["uid"] != first["metadata"]["uid"]
        )

    await pipeline.eventually(replaced, "another ServiceAccount of the name")
    await site.settled("bio")
    assert await site.cluster.subjects(site.name("bio")) == ["spur-user-alice"]


async def test_a_cleared_limit_leaves_the_quota_and_the_others_stay(site: Site) -> None:
    """Cases C15 and C19."""
    site.sql("INSERT INTO accounts (name, grp_tres) VALUES ('$bio', 'cpu=4,mem=1536,gres/gpu=8')")
    await site.settled("bio")
    site.sql("UPDATE accounts SET grp_tres = 'cpu=4,mem=1536,gres/gpu=-1' WHERE name = '$bio'")
    await site.settled("bio")
    assert await site.cluster.hard(site.name("bio")) == {"requests.cpu": "4", "requests.memory": "1536M"}
    site.sql("UPDATE accounts SET grp_tres = 'cpu=4,mem=1536,gres/gpu=0' WHERE name = '$bio'")
    await site.settled("bio")
    hard = await site.cluster.hard(site.name("bio"))
    assert hard is not None
    assert hard["requests.amd.com/gpu"] == "0"


async def test_a_deleted_account_is_closed_and_its_namespace_stays(site: Site) -> None:
    site.sql("INSERT INTO accounts (name, grp_tres) VALUES ('$bio', 'cpu=4')")
    site.sql("INSERT INTO users (name, account) VALUES ('alice', '$bio')")
    await site.settled("bio")
    site.sql(
        "BEGIN; DELETE FROM users WHERE account = '$bio'; DELETE FROM accounts WHERE name = '$bio'; COMMIT"
    )
    await site.in_phase("bio", Phase.CLOSED)
    account = site.name("bio")
    assert await site.cluster.subjects(account) is None
    assert await site.cluster.service_accounts(account) == []
    quota = await site.cluster.get("ResourceQuota", marks.QUOTA_NAME, names.namespace(account))
    assert quota is not None
    assert quota["spec"]["hard"] == {"pods": "0"}
    namespace = await site.cluster.get("Namespace", names.namespace(account))
    assert namespace is not None
    assert marks.ORPHANED_AT in namespace["metadata"]["annotations"]


async def test_a_re_created_account_opens_again_in_the_same_namespace(site: Site) -> None:
    add = "INSERT INTO accounts (name, grp_tres) VALUES ('$bio', 'cpu=4')"
    site.sql(add)
    await site.settled("bio")
    before = await site.cluster.get("Namespace", names.namespace(site.name("bio")))
    site.sql("DELETE FROM accounts WHERE name = '$bio'")
    await site.in_phase("bio", Phase.CLOSED)
    site.sql(add)
    await site.in_phase("bio", Phase.APPLIED)
    after = await site.cluster.get("Namespace", names.namespace(site.name("bio")))
    assert before is not None
    assert after is not None
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert marks.ORPHANED_AT not in after["metadata"]["annotations"]
    assert await site.cluster.hard(site.name("bio")) == {"requests.cpu": "4"}


async def test_a_malformed_allocation_keeps_the_quota_and_the_others_go_on(site: Site) -> None:
    """Design rule 6: written by another program straight into the database."""
    site.sql("INSERT INTO accounts (name, grp_tres) VALUES ('$bio', 'cpu=4'), ('$chem', 'cpu=4')")
    await site.settled("bio")
    site.sql("UPDATE accounts SET grp_tres = 'cpu=lots' WHERE name = '$bio'")
    site.sql("UPDATE accounts SET grp_tres = 'cpu=5' WHERE name = '$chem'")
    status = await site.in_phase("bio", Phase.INVALID)
    assert "cpu=lots" in status.message
    assert await site.cluster.hard(site.name("bio")) == {"requests.cpu": "4"}
    await site.settled("chem")
    assert await site.cluster.hard(site.name("chem")) == {"requests.cpu": "5"}


async def test_a_new_account_with_a_malformed_allocation_is_closed(site: Site) -> None:
    site.sql("INSERT INTO accounts (name, grp_tres) VALUES ('$bio', 'mem=1G')")
    await site.in_phase("bio", Phase.INVALID)
    assert await site.cluster.hard(site.name("bio")) == {"pods": "0"}


async def test_a_foreign_namespace_is_a_conflict_and_is_left_alone(site: Site) -> None:
    name = names.namespace(site.name("bio"))
    foreign = {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": name, "labels": {"team": "other"}},
    }
    await site.cluster.client.request("POST", kinds.collection("Namespace"), body=foreign)
    before = await site.cluster.get("Namespace", name)
    site.sql("INSERT INTO accounts (name, grp_tres) VALUES ('$bio', 'cpu=4')")
    status = await site.in_phase("bio", Phase.CONFLICT)
    assert name in status.message
    assert await site.cluster.get("Namespace", name) == before
    assert await site.cluster.get("ResourceQuota", marks.QUOTA_NAME, name) is None
    await site.cluster.client.request("DELETE", kinds.one("Namespace", name))
    await site.in_phase("bio", Phase.APPLIED)


async def test_a_terminating_namespace_is_waited_for_without_holding_the_partition(site: Site) -> None:
    """Case C10, and all accounts behind it in its partition go on."""
    site.sql("INSERT INTO accounts (name, grp_tres) VALUES ('$bio', 'cpu=4')")
    await site.settled("bio")
    name = names.namespace(site.name("bio"))
    pin = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "pin", "finalizers": ["example.org/pin"]},
    }
    path = f"/api/v1/namespaces/{name}/configmaps"
    await site.cluster.client.request("POST", path, body=pin)
    await site.cluster.client.request("DELETE", kinds.one("Namespace", name))
    site.sql("UPDATE accounts SET grp_tres = 'cpu=5' WHERE name = '$bio'")
    status = await site.in_phase("bio", Phase.TERMINATING)
    assert "being deleted since" in status.message
    own = subjects.partition(names.slug(site.name("bio")), site.bus.partitions)
    other = next(
        f"o{number}"
        for number in range(1000)
        if subjects.partition(names.slug(site.name(f"o{number}")), site.bus.partitions) == own
    )
    site.sql(f"INSERT INTO accounts (name, grp_tres) VALUES ('${other}', 'cpu=1')")
    await site.settled(other)
    await site.cluster.patch(f"{path}/pin", {"metadata": {"finalizers": None}})
    await site.in_phase("bio", Phase.APPLIED)
    assert await site.cluster.hard(site.name("bio")) == {"requests.cpu": "5"}


async def test_names_that_clash_in_other_systems_get_namespaces_of_their_own(site: Site) -> None:
    """Cases C24, C26 and C27."""
    odd = ["_lab", "-lab", "lab-", "9lab", "LAB", "___", "a.b", "a b", "*", ">", "a..b", "lab", "physics_lab"]
    for name in odd:
        pipeline.execute(
            site.config, "INSERT INTO accounts (name, grp_tres) VALUES (%s, 'cpu=1')", site.prefix + name
        )
    for name in odd:
        await site.settled(name)
        namespace = await site.cluster.get("Namespace", names.namespace(site.name(name)))
        assert namespace is not None
        assert namespace["metadata"]["annotations"][marks.ACCOUNT_NAME] == site.name(name)


async def test_what_cannot_be_processed_is_parked_and_the_next_change_is_applied(site: Site) -> None:
    """Case C09, with an event of another installation."""
    slug = names.slug(site.name("bio"))
    subject = subjects.change(slug, site.bus.partitions)
    foreign = Recheck(installation="another", slug=slug, reason=RecheckReason.RESYNC)
    wrong = Recheck(installation="another", slug="other", reason=RecheckReason.RESYNC)
    for number, (data, headers) in enumerate(
        [(b"\xff\x00random", {}), (b"", {}), (b"x", {codec.TYPE_HEADER: "Novel"}), codec.encode(foreign)]
    ):
        await site.bus._js.publish(subject, data, headers={**headers, "Nats-Msg-Id": f"junk{number}"})
    await site.bus.publish(subject, wrong, message_id="wrong")
    site.sql("INSERT INTO accounts (name, grp_tres) VALUES ('$bio', 'cpu=4')")
    await site.settled("bio")
    info = await site.bus._js.stream_info(subjects.PARKED_STREAM)
    assert info.state.messages == 5


async def test_replaying_every_event_changes_nothing(site: Site) -> None:
    """Any event, any number of times: no object's resourceVersion moves."""
    site.sql("INSERT INTO accounts (name, grp_tres) VALUES ('$bio', 'cpu=4')")
    site.sql("INSERT INTO users (name, account) VALUES ('alice', '$bio')")
    site.sql("UPDATE accounts SET grp_tres = 'cpu=8' WHERE name = '$bio'")
    await site.settled("bio")
    before = await versions(site, "bio")
    stream = await site.bus._js.stream_info(subjects.EVENTS_STREAM)
    for sequence in range(1, stream.state.last_seq + 1):
        message = await site.bus._js.get_msg(subjects.EVENTS_STREAM, sequence)
        headers = {k: v for k, v in (message.headers or {}).items() if k != "Nats-Msg-Id"}
        for _ in range(3):
            await site.bus._js.publish(message.subject or "", message.data or b"", headers=headers)
    await all_answered(site)
    assert await versions(site, "bio") == before


async def test_a_deleted_consumer_or_purged_stream_is_made_good(site: Site) -> None:
    """Cases C34 and C35: events that nobody will ever hand out."""
    site.sql("INSERT INTO accounts (name, grp_tres) VALUES ('$bio', 'cpu=4')")
    await site.settled("bio")
    for number in range(site.bus.partitions):
        await site.bus._js.delete_consumer(
            subjects.EVENTS_STREAM, subjects.durable(site.cluster.name, number)
        )
    site.sql("UPDATE accounts SET grp_tres = 'cpu=5' WHERE name = '$bio'")
    await site.settled("bio")
    assert await site.cluster.hard(site.name("bio")) == {"requests.cpu": "5"}


async def test_a_deleted_namespace_heals_with_the_next_change(site: Site) -> None:
    site.sql("INSERT INTO accounts (name, grp_tres) VALUES ('$bio', 'cpu=4')")
    await site.settled("bio")
    await site.cluster.client.request("DELETE", kinds.one("Namespace", names.namespace(site.name("bio"))))
    site.sql("INSERT INTO users (name, account) VALUES ('alice', '$bio')")
    await site.settled("bio")
    assert await site.cluster.subjects(site.name("bio")) == ["spur-user-alice"]
    assert await site.cluster.hard(site.name("bio")) == {"requests.cpu": "4"}


async def test_an_event_about_one_member_costs_only_what_can_change(site: Site) -> None:
    site.sql("INSERT INTO accounts (name, grp_tres) VALUES ('$bio', 'cpu=4')")
    site.sql("INSERT INTO users (name, account) SELECT 'user' || n, '$bio' FROM generate_series(1, 20) n")
    await site.settled("bio")
    before = await versions(site, "bio")
    site.sql("INSERT INTO users (name, account) VALUES ('alice', '$bio')")
    await site.settled("bio")
    after = await versions(site, "bio")
    changed = {key for key in after if before.get(key) != after[key]}
    name = names.namespace(site.name("bio"))
    assert changed == {
        ("Namespace", name),
        ("RoleBinding", marks.BINDING_NAME),
        ("ServiceAccount", "spur-user-alice"),
    }


async def test_two_apply_processes_share_the_work_and_never_go_back(
    config: settings.Settings, unique: str
) -> None:
    """200 changes over 5 accounts: the revision on a namespace only grows."""
    site_config = config
    async with (
        pipeline.everything(site_config),
        pipeline.background(services.apply(site_config)),
        jetstream.connect(config.nats, "test", "test") as bus,
        pipeline.cluster(config) as cluster,
    ):
        accounts = [f"{unique}a{number}" for number in range(5)]
        for account in accounts:
            pipeline.execute(config, "INSERT INTO accounts (name, grp_tres) VALUES (%s, 'cpu=0')", account)
        seen: dict[str, list[int]] = {account: [] for account in accounts}
        stop = asyncio.Event()

        async def look(account: str) -> None:
            while not stop.is_set():
                quota = await cluster.get("ResourceQuota", marks.QUOTA_NAME, names.namespace(account))
                if quota:
                    seen[account].append(int(quota["spec"]["hard"]["requests.cpu"]))

        lookers = [asyncio.create_task(look(account)) for account in accounts]
        for step in range(1, 41):
            for account in accounts:
                pipeline.execute(
                    config, "UPDATE accounts SET grp_tres = %s WHERE name = %s", f"cpu={step}", account
                )
            await asyncio.sleep(0)
        for account in accounts:
            await pipeline.settled(bus, config, account)
        stop.set()
        await asyncio.gather(*lookers)
        for account in accounts:
            assert seen[account] == sorted(seen[account])
            assert await cluster.hard(account) == {"requests.cpu": "40"}


async def test_an_older_state_is_never_applied(config: settings.Settings, unique: str) -> None:
    """Design rule 3: a bucket that was set back does not set the cluster back."""
    async with sites.running(config, unique) as site:
        site.sql("INSERT INTO accounts (name, grp_tres) VALUES ('$bio', 'cpu=10')")
        await site.settled("bio")
        account = site.name("bio")
        old = await pipeline.state(site.bus, account)
        assert old is not None
        site.sql("UPDATE accounts SET grp_tres = 'cpu=20' WHERE name = '$bio'")
        await site.settled("bio")
    async with sites.without_relay(config, unique) as site:  # a relay would make it good
        await site.bus.put(subjects.ACCOUNTS_BUCKET, names.slug(account), old)
        key = subjects.status_key(site.cluster.name, names.slug(account))
        entry = await site.bus.get(subjects.STATUS_BUCKET, key, AccountStatus)
        assert entry is not None
        await site.bus.delete(subjects.STATUS_BUCKET, key, last=entry.sequence)
        event = Recheck(installation=old.installation, slug=names.slug(account), reason=RecheckReason.RESYNC)
        await site.bus.publish(
            subjects.recheck(site.cluster.name, names.slug(account), site.bus.partitions),
            event,
            message_id="x",
        )
        status = await site.in_phase("bio", Phase.FAILED)
        assert status.reason == "BucketBehind"
        assert await site.cluster.hard(account) == {"requests.cpu": "20"}


async def test_a_restart_of_nats_loses_nothing(site: Site, nats_server: Nats) -> None:
    """Case C29."""
    site.sql("INSERT INTO accounts (name, grp_tres) VALUES ('$bio', 'cpu=0')")
    await site.settled("bio")
    for step in range(1, 4):
        nats_server.kill()
        nats_server.start()
        site.sql(f"UPDATE accounts SET grp_tres = 'cpu={step}' WHERE name = '$bio'")

        async def applied(step: int = step) -> bool:
            return await site.cluster.hard(site.name("bio")) == {"requests.cpu": str(step)}

        await pipeline.eventually(applied, "the change after the restart is applied")


async def test_accounts_are_equal_to_the_projection_of_the_database(site: Site) -> None:
    """Every managed object is as the planner says, by the strictest comparison that we have."""
    site.sql("INSERT INTO accounts (name, grp_tres) VALUES ('$bio', 'cpu=4,mem=1'), ('$chem', NULL)")
    site.sql("INSERT INTO users (name, account) VALUES ('alice', '$bio'), ('Bob.X', '$bio')")
    for account in ("bio", "chem"):
        await site.settled(account)
        state = await pipeline.state(site.bus, site.name(account))
        assert state is not None
        plan = desired.objects(state, site.config.quota)
        for manifest in [
            plan.namespace,
            plan.quota,
            plan.limits,
            plan.role,
            plan.binding,
            *plan.service_accounts,
        ]:
            assert manifest is not None
            metadata = manifest["metadata"]
            live = await site.cluster.get(manifest["kind"], metadata["name"], metadata.get("namespace", ""))
            assert live is not None
            assert diff.differs(manifest, live) == []


async def test_no_cluster_at_the_start_is_one_clear_error(
    database_url: str, nats_server: Nats, tmp_path: object
) -> None:
    kubeconfig = f"{tmp_path}/kubeconfig"
    with open(kubeconfig, "w", encoding="utf-8") as file:  # noqa: PTH123, ASYNC230
        file.write(
            "apiVersion: v1\nkind: Config\ncurrent-context: x\n"
            "clusters: [{name: x, cluster: {server: 'https://127.0.0.1:1'}}]\n"
            "users: [{name: x, user: {token: x}}]\n"
            "contexts: [{name: x, context: {cluster: x, user: x}}]\n"
        )
    config = pipeline.config(database_url, nats_server, kubernetes={"kubeconfig": kubeconfig})
    with pytest.raises(errors.UnreachableError, match=r"127\.0\.0\.1:1.*kubeconfig"):
        await services.apply(config)


async def versions(site: Site, account: str) -> dict[tuple[str, str], str]:
    """Return the resourceVersion of each object of an account, leaving out what only controllers write."""
    name = names.namespace(site.name(account))
    found = {}
    namespace = await site.cluster.get("Namespace", name)
    assert namespace is not None
    found["Namespace", name] = namespace["metadata"]["resourceVersion"]
    for kind in ("ResourceQuota", "LimitRange", "Role", "RoleBinding", "ServiceAccount"):
        for live in await observe.list_all(site.cluster.client, kind, namespace=name):
            if live["metadata"]["name"] == "default":
                continue  # a controller makes it, in its own time
            found[kind, live["metadata"]["name"]] = live["metadata"]["resourceVersion"]
    return found


async def all_answered(site: Site) -> None:
    """Wait until no partition has an event waiting."""

    async def idle() -> bool:
        counts = [
            await site.bus.waiting(subjects.durable(site.cluster.name, number))
            for number in range(site.bus.partitions)
        ]
        return not any(counts)

    await pipeline.eventually(idle, "all events are answered")


async def test_a_durable_with_other_settings_is_brought_up_to_date(config: settings.Settings) -> None:
    """Case C38."""
    name = subjects.durable(config.kubernetes.cluster, 0)
    filters = subjects.partition_filters(config.kubernetes.cluster, 0)
    async with jetstream.connect(config.nats, "test", "test") as bus:
        await bus.ensure_topology("x")
        await bus.ensure_consumer(name, filters, ack_wait_s=5)
        await bus.ensure_consumer(name, filters, ack_wait_s=60)
        info = await bus._js.consumer_info(subjects.EVENTS_STREAM, name)
        assert info.config is not None
        assert info.config.ack_wait == 60


async def test_a_durable_that_cannot_be_changed_is_refused_by_the_settings_name(
    config: settings.Settings,
) -> None:
    """Case C38."""
    name = subjects.durable(config.kubernetes.cluster, 3)
    async with pipeline.relay(config) as (_, bus):
        await bus._js.add_consumer(
            subjects.EVENTS_STREAM, name=name, durable_name=name, deliver_policy="new", ack_policy="explicit"
        )
        with pytest.raises(errors.MisconfiguredError, match=rf"{name}.*deliver_policy is 'new'"):
            await services.apply(config)


async def test_a_dead_webhook_is_waited_out_and_holds_up_no_revocation(site: Site, unique: str) -> None:
    """Case C11: a fail-closed webhook on namespaces, at an address where nobody answers."""
    site.sql("INSERT INTO accounts (name, grp_tres) VALUES ('$bio', 'cpu=4')")
    site.sql("INSERT INTO users (name, account) VALUES ('alice', '$bio')")
    await site.settled("bio")
    state = await pipeline.state(site.bus, site.name("bio"))
    assert state is not None
    labels = {marks.INSTALLATION: state.installation}
    path = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
    rule = {
        "apiGroups": [""],
        "apiVersions": ["v1"],
        "operations": ["CREATE", "UPDATE"],
        "resources": ["namespaces"],
    }
    webhook = {
        "name": "dead.example.org",
        "clientConfig": {"url": "https://127.0.0.1:1/"},
        "failurePolicy": "Fail",
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
        "timeoutSeconds": 2,
        "objectSelector": {"matchLabels": labels},
        "rules": [rule],
    }
    manifest = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": unique},
        "webhooks": [webhook],
    }
    probe = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": unique, "labels": labels}}

    async def refuses() -> bool:
        try:
            await site.cluster.client.request(
                "POST", kinds.collection("Namespace"), query={"dryRun": "All"}, body=probe
            )
        except kube_errors.ServerError:
            return True
        return False

    await site.cluster.client.request("POST", path, body=manifest)
    try:
        await pipeline.eventually(refuses, "the webhook is in force")
        site.sql("INSERT INTO accounts (name, grp_tres) VALUES ('$new', 'cpu=4')")
        status = await site.in_phase("new", Phase.FAILED)
        assert "dead.example.org" in status.message
        assert status.retry_at is not None
        site.sql("DELETE FROM users WHERE account = '$bio'")

        async def revoked() -> bool:
            account = site.name("bio")
            return not await site.cluster.subjects(account) and not await site.cluster.service_accounts(
                account
            )

        await pipeline.eventually(revoked, "alice is out although the namespace cannot be written")
    finally:
        await site.cluster.client.request("DELETE", f"{path}/{unique}")
    await site.in_phase("new", Phase.APPLIED)
    await site.settled("bio")
