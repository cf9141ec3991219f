"""The end state, compared whole: the database against the bucket, and its projection against the cluster.

Every object that carries the installation's mark is listed, so that what should not be there shows as well.
Deliberately not built on plan.diff, which the pipeline itself decides with.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterable, Mapping
from typing import Any

from support import pipeline

from spur_events import errors, jetstream, postgres, settings
from spur_events.consumers.kube import kinds, observe
from spur_events.consumers.plan import desired, guard, marks, quantities
from spur_events.producers import outbox
from spur_events.schemas import names, subjects
from spur_events.schemas.accounts import AccountState
from spur_events.schemas.status import AccountStatus, Phase

_Key = tuple[str, str, str]
_MANAGED = sorted(set(kinds.KINDS) - {"Pod"})
_NOT_IN_FORCE = "is not in force"
_NOT_CONTENT = frozenset({"apiVersion", "kind", "metadata"})


async def whole(
    bus: jetstream.Bus,
    given: settings.Settings,
    cluster: pipeline.Cluster,
    *,
    hint: str = "",
    patience_s: float = 120.0,
    healing_s: float = 0.0,
) -> dict[str, AccountState]:
    """Wait until everything is published and settled, then assert that all three agree; return the states.

    `healing_s`: how long a difference may last that a late write of a frozen process has made.
    """
    stored = await _settled(bus, given, patience_s, hint)
    begun_s = time.monotonic()
    found = await differences(bus, given, cluster, stored)
    # A closed account is settled before the quota controller has taken up its quota.
    while found and time.monotonic() < begun_s + (
        patience_s if all(_NOT_IN_FORCE in one for one in found) else healing_s
    ):
        await asyncio.sleep(0.1)
        found = await differences(bus, given, cluster, stored)
    assert not found, f"{hint} {len(found)} differences:\n" + "\n".join(found[:40])
    return stored


async def differences(
    bus: jetstream.Bus, given: settings.Settings, cluster: pipeline.Cluster, stored: dict[str, AccountState]
) -> list[str]:
    """Return what is not as the database says, one line each."""
    problems = await unpublished(bus, stored)
    published = await bus.read_all(subjects.ACCOUNTS_BUCKET, AccountState)
    statuses = await bus.read_all(subjects.STATUS_BUCKET, AccountStatus, f"{given.kubernetes.cluster}.")
    installation = next(iter(stored.values())).installation
    live = await objects(cluster, installation)
    # Where nobody gave apply the right to write the guard there is none; what is there must be right.
    guards = {_key(manifest): manifest for manifest in guard.manifests(installation)}
    wanted: dict[_Key, dict[str, Any]] = {key: guards[key] for key in guards.keys() & live.keys()}
    for slug, entry in published.items():
        if not isinstance(entry, jetstream.Entry):
            continue
        name = entry.value.name
        status = statuses.get(subjects.status_key(given.kubernetes.cluster, slug))
        plan = desired.objects(entry.value, given.quota)
        problems += _status(name, entry.value, status, there=_key(plan.namespace) in live)
        if entry.value.deletion is not None and _key(plan.namespace) not in live:
            continue  # it came and went before anybody looked: nothing to close
        wanted |= {_key(manifest): manifest for manifest in _all(plan)}
    problems += [f"cluster: {key} is missing" for key in wanted.keys() - live.keys()]
    problems += [f"cluster: {key} should not be there" for key in live.keys() - wanted.keys()]
    for key in wanted.keys() & live.keys():
        problems += [f"cluster: {key} {text}" for text in _unlike(wanted[key], live[key])]
    return sorted(problems)


async def unpublished(bus: jetstream.Bus, stored: dict[str, AccountState]) -> list[str]:
    """Return in what the bucket is not as the database, one line each."""
    published = await bus.read_all(subjects.ACCOUNTS_BUCKET, AccountState)
    slugs = {names.slug(name): name for name in stored}
    problems = [f"bucket: {slug} is not in the database" for slug in published.keys() - slugs.keys()]
    for slug, name in slugs.items():
        entry = published.get(slug)
        if not isinstance(entry, jetstream.Entry):
            problems.append(f"bucket: {name!r} is missing or unreadable: {entry}")
        elif entry.value != stored[name].model_copy(update={"revision": entry.value.revision}):
            problems.append(f"bucket: {name!r} is {entry.value}, the database has {stored[name]}")
    return problems


async def objects(
    cluster: pipeline.Cluster, installation: str, of_kinds: Iterable[str] = _MANAGED
) -> dict[_Key, dict[str, Any]]:
    """Return everything in the cluster that carries the installation's mark."""
    selector = marks.selector(installation)
    found: dict[_Key, dict[str, Any]] = {}
    for kind in of_kinds:
        for item in await observe.list_all(cluster.client, kind, selector=selector):
            found[_key(item)] = item
    return found


async def states(given: settings.Settings) -> dict[str, AccountState]:
    """Return every account's state in the database, the deleted ones as tombstones, at revision 0."""
    async with postgres.session(given.database, "test") as connection, connection.transaction():
        await connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        owner = await outbox.installation(connection)
        every = [row["name"] for row in await outbox.rows(connection, "every_name")]
        return await outbox.read_states(connection, owner, every, numbered=False)


async def _settled(
    bus: jetstream.Bus, given: settings.Settings, patience_s: float, hint: str
) -> dict[str, AccountState]:
    """Wait until the outbox is empty and every account of the database is settled at its newest revision."""
    open_accounts: dict[str, object] = {}

    async def check() -> dict[str, AccountState] | None:
        try:
            async with postgres.session(given.database, "test") as connection:
                if await outbox.waiting(connection):
                    open_accounts.clear()
                    return None
            stored = await states(given)
            published = await bus.read_all(subjects.ACCOUNTS_BUCKET, AccountState)
            prefix = f"{given.kubernetes.cluster}."
            statuses = await bus.read_all(subjects.STATUS_BUCKET, AccountStatus, prefix)
        except errors.TemporaryError:
            return None  # a server is on its way up
        open_accounts.clear()
        for name in stored:
            slug = names.slug(name)
            newest, status = published.get(slug), statuses.get(prefix + slug)
            known = status.value if isinstance(status, jetstream.Entry) else None
            if not isinstance(newest, jetstream.Entry):
                open_accounts[name] = newest
            elif known is None or not known.settled or known.wanted != newest.value.revision:
                open_accounts[name] = known and (known.phase, known.reason, known.message, known.wanted)
        return stored if not open_accounts else None

    try:
        return await pipeline.eventually(check, f"all accounts are settled {hint}", patience_s)
    except AssertionError as error:
        error.add_note(f"not settled: {dict(list(open_accounts.items())[:20])}")
        with contextlib.suppress(errors.TemporaryError):
            for number in sorted({subjects.partition(names.slug(n), bus.partitions) for n in open_accounts}):
                consumer = subjects.durable(given.kubernetes.cluster, number)
                info = await bus._js.consumer_info(subjects.EVENTS_STREAM, consumer)
                error.add_note(f"{consumer}: {info}")
        raise


def _status(name: str, state: AccountState, status: object, *, there: bool) -> list[str]:
    if not isinstance(status, jetstream.Entry):
        return [f"status: {name!r} has none: {status}"]
    expected = Phase.APPLIED
    if state.deletion is not None:
        expected = Phase.CLOSED if there else Phase.PRUNED
    elif state.allocation is not None and state.allocation.problem:
        expected = Phase.INVALID
    found = status.value
    if (found.phase, found.applied, found.retry_at) != (expected, state.revision, None):
        return [f"status: {name!r} should be {expected} at {state.revision}: {found}"]
    return []


def _all(plan: desired.Plan) -> list[dict[str, Any]]:
    given = (plan.namespace, plan.quota, plan.limits, plan.role, plan.binding, *plan.service_accounts)
    return [manifest for manifest in given if manifest is not None]


def _key(manifest: Mapping[str, Any]) -> _Key:
    metadata = manifest["metadata"]
    return manifest["kind"], metadata.get("namespace", ""), metadata["name"]


def _unlike(want: dict[str, Any], live: dict[str, Any]) -> list[str]:
    """Return how a live object differs from a manifest, in anything that the manifest states."""
    problems = []
    for part in ("labels", "annotations"):
        have = live["metadata"].get(part) or {}
        mine = {key: text for key, text in have.items() if key.startswith("spur.amd.com/")}
        stated = want["metadata"].get(part) or {}
        problems += [
            f"has {part} {key}={have.get(key)!r}, not {stated.get(key)!r}"
            for key in stated.keys() | mine.keys()
            if stated.get(key) != have.get(key)
        ]
    problems += [
        f"has {field} {live.get(field)}, not {want[field]}"
        for field in want.keys() - _NOT_CONTENT
        if not _same(want[field], live.get(field))
    ]
    if live["metadata"].get("deletionTimestamp"):
        problems.append("is being deleted")
    if want["kind"] == "ResourceQuota" and not _same(
        want["spec"]["hard"], (live.get("status") or {}).get("hard") or {}
    ):
        problems.append(f"{_NOT_IN_FORCE}: {live.get('status')}, not {want['spec']['hard']}")
    return problems


def _same(want: Any, have: Any) -> bool:
    if isinstance(want, dict) and isinstance(have, dict):
        return all(_same(want.get(key), have.get(key)) for key in want.keys() | have.keys())
    if isinstance(want, list) and isinstance(have, list):
        return len(want) == len(have) and all(_same(*pair) for pair in zip(want, have, strict=True))
    if isinstance(want, str) and isinstance(have, str):
        return want == have or (quantities.value(want) is not None and quantities.same(want, have))
    # The server leaves out what is empty; `False` and 0 are values.
    return bool(want == have) or (_empty(want) and _empty(have))


def _empty(value: Any) -> bool:
    return value is None or value in ("", [], {})
