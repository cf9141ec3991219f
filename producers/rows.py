"""What the commands of producers.accounting and producers.members share: their transaction and its statements.

Table and column names are constants of the callers, never input; values always travel as parameters.
"""

import datetime as dt
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spur_events import errors
from spur_events.producers import changes

if TYPE_CHECKING:  # so that the grammar, which wants only our types, starts without a database driver
    from spur_events import postgres

#: Seconds that a command waits for another one, or for rows that somebody has locked.
LOCK_TIMEOUT_S = 30
_LOCK_KEY = 0x73707572_61636374  # "spuracct"

Memberships = dict[str, dict[str, dict[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class Actor:
    """Who gives the command: an operating-system user, stated and not proven."""

    os_user: str
    uid: int | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a command did (or, as a dry run, would do): entities and remarks for the person."""

    done: tuple[str, ...]
    notes: tuple[str, ...] = ()


@contextmanager
def transaction(
    connection: "postgres.Connection", actor: Actor, *, dry_run: bool = False
) -> Iterator["Transaction"]:
    """Run a block as one command; a dry run checks and does everything and is rolled back.

    Raises:
        MisconfiguredError: if the database was not migrated, so that no change would reach a cluster.
    """
    with connection.transaction(force_rollback=dry_run):
        # READ COMMITTED whatever the site's default is: what is read after the lock must be what is there.
        connection.execute("set transaction isolation level read committed")
        row = connection.execute(
            "select set_config('spur_events.os_user', %s, true), set_config('lock_timeout', %s, true),"
            " exists (select from pg_catalog.pg_trigger"
            " where tgrelid = to_regclass('users') and tgname = 'spur_events_insert') as captured",
            (actor.os_user, f"{LOCK_TIMEOUT_S}s"),
        ).fetchone()
        if not (row and row["captured"]):
            raise errors.MisconfiguredError(
                "the database lacks the tables or triggers of spur-events, so no change would reach a cluster;"
                " run 'spur-events db migrate'"
            )
        # One command at a time: its checks (parents, defaults) then hold until it commits. Other writers are
        # kept right by the tables' own constraints.
        connection.execute("select pg_advisory_xact_lock(%s)", (_LOCK_KEY,))
        yield Transaction(connection, actor)


class Transaction:
    """The statements of one command."""

    def __init__(self, connection: "postgres.Connection", actor: Actor) -> None:
        self._connection = connection
        self._actor = actor

    def select(self, query: str, parameters: Sequence[Any]) -> list[dict[str, Any]]:
        """Return all rows of a query."""
        return self._connection.execute(query.encode(), parameters).fetchall()

    def insert(self, table: str, row: dict[str, Any]) -> None:
        """Insert one row."""
        places = ", ".join(["%s"] * len(row))
        statement = f"insert into {table} ({', '.join(row)}) values ({places})"  # noqa: S608 - constants
        self._connection.execute(statement.encode(), list(row.values()))

    def update(self, table: str, columns: dict[str, Any], key: dict[str, str]) -> None:
        """Write columns, if there are any, where the key columns have these values."""
        if columns:
            written = ", ".join(f"{column} = %s" for column in columns)
            where = " and ".join(f"{column} = %s" for column in key)
            statement = f"update {table} set {written} where {where}"  # noqa: S608 - constants
            self._connection.execute(statement.encode(), [*columns.values(), *key.values()])

    def accounts(self, names: Sequence[str]) -> dict[str, str | None]:
        """Return the stored grp_tres of those accounts that exist; they cannot vanish before we commit."""
        found = self.select(
            "select name, grp_tres from accounts where name = any(%s) order by name for update",
            (list(names),),
        )
        return {row["name"]: row["grp_tres"] for row in found}

    def memberships(self, users: Sequence[str]) -> Memberships:
        """Return the rows of those users that exist, by user and account."""
        found: Memberships = {}
        query = (
            "select name, account, admin_level, default_account from users where name = any(%s)"
            " order by name, account for update"
        )
        for row in self.select(query, (list(users),)):
            found.setdefault(row["name"], {})[row["account"]] = row
        return found

    def clear_default(self, user: str) -> None:
        """Leave a user without a default account: the unique index allows no second one, not even briefly."""
        self._connection.execute(
            "update users set default_account = null where name = %s and default_account is not null", (user,)
        )

    def move_defaults(self, users: Sequence[str]) -> tuple[str, ...]:
        """Give users who lost their default account their oldest other one (case C48), and say so."""
        orphans = self.select(
            "select distinct on (name) name, account from users u where name = any(%s) and not exists"
            " (select from users d where d.name = u.name and d.default_account is not null)"
            " order by name, created_at, account",
            (list(users),),
        )
        for row in orphans:
            self.update("users", {"default_account": row["account"]}, row)
        return tuple(f"the default account of {row['name']!r} is now {row['account']!r}" for row in orphans)

    def audit(self, action: str, kind: str, name: str, details: dict[str, Any]) -> None:
        """Record in spur's audit log what is being done; it commits or vanishes with the change."""
        self.insert(
            "txn",
            {
                "ts": dt.datetime.now(dt.UTC),
                "actor": self._actor.os_user,
                "actor_uid": self._actor.uid,
                "verified": False,
                "source": "sacctmgr",
                "action": action,
                "entity_type": kind,
                "entity_name": name,
                "outcome": "success",
                "details": json.dumps(details),
            },
        )


def refuse_missing(kind: str, missing: Sequence[str], done: str) -> None:
    """Raise PermanentError if anything is missing."""
    if missing:
        raise errors.PermanentError(
            f"unknown {kind} {changes.listed(missing)}. Nothing {done};"
            f" 'sacctmgr show {kind}' lists those that exist"
        )
