"""Pieces of the pipeline for tests: settings for given servers, parts running in the background, waiting."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from spur_events import jetstream, postgres, private, services, settings
from spur_events.consumers.kube import apply, observe
from spur_events.consumers.kube import client as kube
from spur_events.consumers.plan import guard, marks
from spur_events.local import kubeconfigs
from spur_events.local.nats import Nats
from spur_events.producers.relay import Relay
from spur_events.schemas import names, subjects
from spur_events.schemas.accounts import AccountState
from spur_events.schemas.events import AccountChanged, Change
from spur_events.schemas.status import AccountStatus, Phase

T = TypeVar("T")

#: An interval that does not end while the suite runs: a resync comes at its multiples, a day's at midnight.
_NEVER_S = max((86400.0, 61000.0), key=lambda every_s: every_s - time.time() % every_s)
#: Generous: these machines are shared, and a test that waits for a condition loses nothing by it.
PATIENCE_S = 60.0


def config(database_url: str, nats_server: Nats, **groups: dict[str, Any]) -> settings.Settings:
    """Return settings for these servers; groups override, for example relay={"batch_rows": 2}."""
    given: dict[str, dict[str, Any]] = {
        "database": {"url": database_url},
        "nats": {"url": nats_server.url},
        # So that a broken notification path is seen: nothing may depend on a short poll.
        "relay": {"poll_interval_s": 1.0, "heartbeat_s": 1.0},
        # A resync that comes by itself would carry out what a test only wants to see planned.
        "resync": {"interval_s": _NEVER_S},
    }
    for group, values in groups.items():
        given[group] = {**given.get(group, {}), **values}
    given["nats"].setdefault("credentials", credentials(nats_server, given))
    return settings.Settings.model_validate(given)


def credentials(nats_server: Nats, given: dict[str, dict[str, Any]]) -> Path:
    """Return a folder with the credentials of all parts for a cluster, and `test` with all rights in the pipeline."""
    whole = settings.Settings.model_validate(given)
    folder = nats_server.credentials(whole.kubernetes.cluster, whole.nats.partitions)
    if not (folder / "test.creds").exists():
        private.write(folder / "test.creds", nats_server.site.pipeline_user("test"))
    return folder


async def eventually(
    check: Callable[[], Awaitable[T | None]], what: str, patience_s: float = PATIENCE_S
) -> T:
    """Poll until `check` returns something true, and return it."""
    try:
        async with asyncio.timeout(patience_s):
            while True:
                found = await check()
                if found:
                    return found
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"did not happen within {patience_s:.0f} s: {what}") from None


@contextlib.asynccontextmanager
async def background(part: Coroutine[Any, Any, object]) -> AsyncIterator[asyncio.Task[object]]:
    """Run a part until the block ends; its failure fails the test."""
    task = asyncio.ensure_future(part)
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@contextlib.asynccontextmanager
async def relay(given: settings.Settings) -> AsyncIterator[tuple[Relay, jetstream.Bus]]:
    """Run a relay until the block ends; begins when it leads."""
    async with (
        jetstream.connect(given.nats, "test relay", "relay") as own,
        jetstream.connect(given.nats, "test", "test") as bus,
    ):
        part = Relay(given, own)
        async with background(part.run()) as task:
            leading = asyncio.ensure_future(part.leading.wait())
            await asyncio.wait({leading, task}, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
            assert leading.done()
            yield part, bus


def execute(given: settings.Settings, statement: str, *parameters: object) -> None:
    """Run SQL as a writer that knows nothing of us."""
    with postgres.connect(given.database, "psql") as connection:
        connection.execute(statement.encode(), parameters or None)


async def state(bus: jetstream.Bus, account: str) -> AccountState | None:
    """Return an account's state in the bucket."""
    entry = await bus.get(subjects.ACCOUNTS_BUCKET, names.slug(account), AccountState)
    return entry.value if entry else None


async def changes(bus: jetstream.Bus, account: str | None = None) -> list[tuple[AccountChanged, Change]]:
    """Return all changes in the event stream, in order."""
    found = []
    for event in await bus.read_stream(subjects.EVENTS_STREAM, subjects.ALL_CHANGES, AccountChanged):
        if account is None or event.name == account:
            found += [(event, change) for change in event.changes]
    return found


@contextlib.asynccontextmanager
async def everything(given: settings.Settings) -> AsyncIterator[None]:
    """Run the whole pipeline in this process until the block ends; begins when it is ready."""
    await may_guard(given)
    async with part(services.everything, given):
        yield


@contextlib.asynccontextmanager
async def part(
    run: Callable[[settings.Settings, Callable[[], None]], Coroutine[Any, Any, object]],
    given: settings.Settings,
) -> AsyncIterator[None]:
    """Run a part of `services` until the block ends; begins when it is ready."""
    ready = asyncio.Event()
    async with background(run(given, ready.set)) as task:
        waiting = asyncio.ensure_future(ready.wait())
        await asyncio.wait({waiting, task}, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        assert waiting.done(), "it did not become ready"
        yield


def installation(given: settings.Settings) -> str:
    """Return the id of this database's installation."""
    with postgres.connect(given.database) as connection:
        row = connection.execute("SELECT id FROM spur_events.installation").fetchone()
    assert row is not None
    return str(row["id"])


async def may_guard(given: settings.Settings) -> None:
    """Let apply write the member guard of this database's installation, as an administrator does by hand."""
    name = installation(given)
    question = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {
            "user": f"system:serviceaccount:{kubeconfigs.NAMESPACE}:spur-events-apply",
            "resourceAttributes": {
                "group": guard.GROUP,
                "resource": "validatingadmissionpolicybindings",
                "verb": "patch",
                "name": guard.name(name),
            },
        },
    }
    async with kube.Client(given.kubernetes) as client:
        await kubeconfigs.write(client, kubeconfigs.guard_manifests(name))

        async def may() -> bool:
            path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
            return bool((await client.request("POST", path, body=question))["status"]["allowed"])

        await eventually(may, "the API server knows that apply may write the guard")


class Cluster:
    """A cluster as a test looks at it: as its administrator, through our own client."""

    def __init__(self, client: kube.Client, name: str) -> None:
        self.client = client
        self.name = name

    async def get(self, kind: str, name: str, namespace: str = "") -> dict[str, Any] | None:
        """Return a live object, or None."""
        return await apply.get(self.client, kind, name, namespace)

    async def hard(self, account: str) -> dict[str, str] | None:
        """Return an account's quota as it is in force, or None."""
        quota = await self.get("ResourceQuota", marks.QUOTA_NAME, names.namespace(account))
        return (quota.get("status") or {}).get("hard") if quota else None

    async def subjects(self, account: str) -> list[str] | None:
        """Return who is bound in an account's namespace, or None where there is no binding."""
        binding = await self.get("RoleBinding", marks.BINDING_NAME, names.namespace(account))
        return [subject["name"] for subject in binding.get("subjects") or []] if binding else None

    async def service_accounts(self, account: str) -> list[str]:
        """Return the members' ServiceAccounts in an account's namespace."""
        found = await observe.list_all(self.client, "ServiceAccount", namespace=names.namespace(account))
        mine = [one["metadata"]["name"] for one in found]
        return sorted(name for name in mine if name.startswith(names.SERVICE_ACCOUNT_PREFIX))

    async def patch(self, manifest_path: str, body: dict[str, Any], manager: str = "kubectl-edit") -> None:
        """Change an object as somebody else, by a merge patch."""
        await self.client.request(
            "PATCH", manifest_path, body=body, content_type=kube.MERGE_PATCH, query={"fieldManager": manager}
        )


@contextlib.asynccontextmanager
async def cluster(given: settings.Settings) -> AsyncIterator[Cluster]:
    """Look at the cluster of these settings."""
    async with kube.Client(given.kubernetes) as client:
        yield Cluster(client, given.kubernetes.cluster)


async def status(bus: jetstream.Bus, given: settings.Settings, account: str) -> AccountStatus | None:
    """Return an account's status on the cluster of these settings."""
    key = subjects.status_key(given.kubernetes.cluster, names.slug(account))
    entry = await bus.get(subjects.STATUS_BUCKET, key, AccountStatus)
    return entry.value if entry else None


async def published(given: settings.Settings) -> None:
    """Wait until the outbox is empty: everything that was committed is on the bus."""

    async def check() -> bool:
        with postgres.connect(given.database) as connection:
            row = connection.execute("SELECT count(*) AS waiting FROM spur_events.outbox").fetchone()
        return row is not None and row["waiting"] == 0

    await eventually(check, "the outbox is empty")


async def settled(bus: jetstream.Bus, given: settings.Settings, account: str) -> AccountStatus:
    """Wait until all that was committed is published and an account's newest state is applied."""
    await published(given)

    async def check() -> AccountStatus | None:
        newest = await state(bus, account)
        found = await status(bus, given, account)
        if newest is None or found is None or not found.settled or found.wanted != newest.revision:
            return None
        return found

    return await eventually(check, f"{account} is settled")


async def in_phase(bus: jetstream.Bus, given: settings.Settings, account: str, phase: Phase) -> AccountStatus:
    """Wait until an account is in a phase, and return its status."""

    async def check() -> AccountStatus | None:
        found = await status(bus, given, account)
        return found if found is not None and found.phase is phase else None

    return await eventually(check, f"{account} is {phase}")
