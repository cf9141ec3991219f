"""What `spur-events status` and `events` print: read from the bus, never from the cluster or the database."""

import asyncio
import json
import sys
from datetime import UTC, datetime
from typing import Any

import rich.box
import rich.console
import rich.markup
import rich.table

from spur_events import errors, jetstream, settings
from spur_events.schemas import subjects
from spur_events.schemas.access import GuardState, PartReport
from spur_events.schemas.accounts import AccountState
from spur_events.schemas.events import AccountChanged
from spur_events.schemas.resync import WORK, ResyncReport
from spur_events.schemas.status import RELAY_STALE_S, AccountStatus, Phase, RelayStatus

_WATCH_S = 0.5
#: Parts report every 5 min at the latest (consumers.rights).
_SILENT_S = 660.0


async def status(config: settings.Settings, only: set[str], *, watch: bool, as_json: bool) -> None:
    """Print the accounts of every cluster; with `watch`, again whenever a record changes."""
    async with jetstream.connect(config.nats, "spur-events status") as bus:
        shown = None
        while True:
            found = await _collect(bus, only)
            # The heartbeat's age changes all the time and is no news.
            clusters = [
                {**one, "parts": [_still(part) for part in one["parts"]]} for one in found["clusters"]
            ]
            news = (found["relay"]["state"], clusters, found["accounts"])
            if news != shown:
                _print_json(found) if as_json else _print_status(found, filtered=bool(only))
                shown = news
            if not watch:
                break
            await asyncio.sleep(_WATCH_S)
    if unknown := only - {row.get("account") for row in found["accounts"]}:
        raise errors.PermanentError(
            f"no account {', '.join(sorted(unknown))} on the bus; 'spur-events status' without names shows all"
        )


async def _collect(bus: jetstream.Bus, only: set[str]) -> dict[str, Any]:
    states = await bus.read_all(subjects.ACCOUNTS_BUCKET, AccountState)
    statuses = await bus.read_all(subjects.STATUS_BUCKET, AccountStatus)
    accounts: list[dict[str, Any]] = []
    reported = set()
    for key, entry in sorted(statuses.items()):
        if not subjects.is_account_status(key):
            continue
        if isinstance(entry, jetstream.Damaged):
            accounts.append({"key": key, "phase": "Unreadable", "message": entry.problem})
            continue
        reported.add(entry.value.slug)
        if entry.value.phase is Phase.PRUNED and not only:
            continue  # nothing is left of it
        state = states.get(entry.value.slug)
        newest = state.value.revision if isinstance(state, jetstream.Entry) else entry.value.wanted
        accounts.append(_row(entry.value, newest))
    for slug, state in sorted(states.items()):
        if slug not in reported and isinstance(state, jetstream.Entry):
            accounts.append(
                {
                    "account": state.value.name,
                    "cluster": "-",
                    "phase": "Waiting",
                    "wanted": str(state.value.revision),
                    "message": "no cluster has looked at it yet; is 'spur-events run apply' running?",
                }
            )
    if only:
        accounts = [row for row in accounts if row.get("account") in only]
    return {
        "relay": await _relay(bus),
        "clusters": await _clusters(bus),
        "resyncs": await _resyncs(bus),
        "accounts": accounts,
    }


def _row(status: AccountStatus, newest: Any) -> dict[str, Any]:
    phase = str(status.phase) if newest <= status.wanted else "Behind"
    return {
        "account": status.name,
        "cluster": status.cluster,
        "namespace": status.namespace,
        "phase": phase,
        "reason": status.reason,
        "message": status.message,
        "wanted": str(max(newest, status.wanted)),
        "applied": str(status.applied) if status.applied else None,
        "since": status.since.isoformat(timespec="seconds"),
        "not_enforced": list(status.not_enforced),
        "retained": status.retained,
        "over_quota": list(status.over_quota),
        "retry_at": status.retry_at.isoformat(timespec="seconds") if status.retry_at else None,
    }


async def _resyncs(bus: jetstream.Bus) -> list[dict[str, Any]]:
    """Return the last resync of each cluster."""
    reports = await bus.read_all(subjects.STATUS_BUCKET, ResyncReport, subjects.report_key(""))
    return [
        {
            "cluster": entry.value.cluster,
            "state": str(entry.value.state),
            "dry_run": entry.value.dry_run,
            "age_s": round((datetime.now(UTC) - entry.value.at).total_seconds(), 1),
            "failed": [
                item.account or item.namespace or "member guard" for item in entry.value.items if item.failed
            ],
            "told": [
                f"{item.action} {item.namespace or 'member guard'}"
                for item in entry.value.items
                if item.action not in WORK
            ],
            "message": entry.value.message,
        }
        for key, entry in reports.items()
        if isinstance(entry, jetstream.Entry) and key == subjects.report_key(entry.value.cluster)
    ]


async def _clusters(bus: jetstream.Bus) -> list[dict[str, Any]]:
    """Return what the parts of each cluster found out about their rights there, and apply about the guard."""
    reports = await bus.read_all(subjects.STATUS_BUCKET, PartReport, subjects.PART_PREFIX)
    found: dict[str, dict[str, Any]] = {}
    for _, entry in sorted(reports.items()):
        if isinstance(entry, jetstream.Damaged):
            continue
        report = entry.value
        unknown = {"cluster": report.cluster, "guard": str(GuardState.UNKNOWN), "message": "", "parts": []}
        cluster = found.setdefault(report.cluster, unknown)
        if report.guard is not GuardState.UNKNOWN:
            cluster |= {"guard": str(report.guard), "message": report.message}
        cluster["parts"].append(
            {
                "part": report.part,
                "age_s": round((datetime.now(UTC) - report.at).total_seconds(), 1),
                "missing_rights": list(report.missing_rights),
                "message": report.message if report.guard is GuardState.UNKNOWN else "",
            }
        )
    return list(found.values())


def _still(part: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in part.items() if key != "age_s"}


def _print_cluster(console: rich.console.Console, cluster: dict[str, Any]) -> None:
    told = f" - {cluster['message']}" if cluster["message"] else ""
    console.print(f"cluster {cluster['cluster']}: member guard {cluster['guard']}{told}", markup=False)
    for part in cluster["parts"]:
        troubles = [f"right missing: {right}" for right in part["missing_rights"]]
        troubles += [part["message"]] if part["message"] else []
        if part["age_s"] > _SILENT_S:
            troubles.append(f"last heard of {part['age_s']:.0f} s ago; does it run?")
        for trouble in troubles:
            console.print(f"cluster {cluster['cluster']}: {part['part']}: {trouble}", markup=False)


async def _relay(bus: jetstream.Bus) -> dict[str, Any]:
    entry = await bus.get(subjects.STATUS_BUCKET, subjects.RELAY_KEY, RelayStatus)
    if entry is None:
        return {"state": "never seen", "message": "start it with 'spur-events run relay'"}
    beat = entry.value
    age_s = (datetime.now(UTC) - beat.at).total_seconds()
    return {
        "state": "leads" if age_s <= RELAY_STALE_S else "silent",
        "age_s": round(age_s, 1),
        "host": beat.host,
        "pid": beat.pid,
        "installation": beat.installation,
        "epoch": beat.epoch,
        "refused": dict(beat.refused),
    }


def _print_json(found: object) -> None:
    json.dump(found, sys.stdout, indent=2)
    sys.stdout.write("\n")


def _console() -> rich.console.Console:
    # Not cut to a guessed width when a program or a log reads it.
    return rich.console.Console(highlight=False, width=None if sys.stdout.isatty() else 200)


def _print_status(found: dict[str, Any], *, filtered: bool) -> None:
    console = _console()
    relay = found["relay"]
    age = f", heartbeat {relay['age_s']} s ago" if "age_s" in relay else ""
    console.print(f"relay: {relay['state']}{age}{' - ' + relay['message'] if 'message' in relay else ''}")
    for slug, why in relay.get("refused", {}).items():
        console.print(f"refused: {slug}: {why}", markup=False)
    for cluster in found["clusters"]:
        _print_cluster(console, cluster)
    for run in found["resyncs"]:
        told = "".join(f"; {line}" for line in (*run["told"], run["message"]) if line)
        failed = f"; failed: {', '.join(run['failed'])}" if run["failed"] else ""
        console.print(
            f"last resync of {run['cluster']}: {run['state']}, {run['age_s']} s ago{failed}{told}",
            markup=False,
        )
    if not found["accounts"] and not filtered:
        console.print("no accounts yet: add one with 'sacctmgr -i add account name=physics grptres=cpu=64'")
        return
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("ACCOUNT", "CLUSTER", "PHASE", "WANTED", "APPLIED", "SINCE", "NOTES"):
        table.add_column(heading, overflow="fold")
    for row in found["accounts"]:
        notes = [note for note in (row.get("reason"), row.get("message")) if note]
        notes += ["retained"] if row.get("retained") else []
        notes += [f"not enforced: {name}" for name in row.get("not_enforced", ())]
        notes += [f"over-quota: {key}" for key in row.get("over_quota", ())]
        cells = [row.get("account", row.get("key")), row.get("cluster"), row["phase"], row.get("wanted")]
        cells += [row.get("applied"), row.get("since"), "; ".join(notes)]
        table.add_row(*(rich.markup.escape(str(cell)) if cell else "-" for cell in cells))
    console.print(table)


async def events(config: settings.Settings, account: str | None, *, as_json: bool) -> None:
    """Print the changes that the event stream holds, oldest first."""
    async with jetstream.connect(config.nats, "spur-events events") as bus:
        found = await bus.read_stream(subjects.EVENTS_STREAM, subjects.ALL_CHANGES, AccountChanged)
    rows = [
        {
            "at": change.at.isoformat(timespec="milliseconds"),
            "account": event.name,
            "change": str(change.kind),
            "user": change.user,
            "before": change.before,
            "after": change.after,
            "database_user": change.actor.database_user,
            "os_user": change.actor.os_user,
            "application": change.actor.application,
            "id": change.id,
            "revision": str(event.revision),
        }
        for event in found
        if account in (None, event.name)
        for change in event.changes
    ]
    if as_json:
        _print_json(rows)
        return
    for row in rows:
        who = row["os_user"] or row["database_user"]
        what = " ".join(
            str(part) for part in (row["change"], row["user"], row["before"], row["after"]) if part
        )
        sys.stdout.write(f"{row['at']}  {row['account']}  {what}  by {who} ({row['application']})\n")
