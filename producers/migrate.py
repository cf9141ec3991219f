"""Brings the accounting database to the schema that this version knows.

Called by `spur-events db migrate`, `up` and the tests. The SQL stands in producers/sql; what the relay and
`sacctmgr` do with the tables is theirs.
"""

import re
from importlib import resources
from importlib.resources.abc import Traversable
from typing import NamedTuple

from spur_events import errors, postgres, settings

APPLICATION = "spur-events db migrate"

#: Statement-level triggers that CREATE TRIGGER ... EXECUTE FUNCTION can hold ALWAYS, and gen_random_uuid().
_OLDEST_SERVER = 140000
_LOCK_KEY = 0x73707572_6D696772  # "spurmigr"
_FILE = re.compile(r"(\d{4})_\w+\.sql", re.ASCII)


class Migration(NamedTuple):
    """A numbered file of producers/sql/migrations."""

    number: int
    name: str
    sql: bytes


def known() -> list[Migration]:
    """Return the migrations of this version, in order."""
    found = [
        Migration(int(match[1]), file.name.removesuffix(".sql"), file.read_bytes())
        for file in _folder().joinpath("migrations").iterdir()
        if (match := _FILE.fullmatch(file.name))
    ]
    return sorted(found)


def migrate(database: settings.Database) -> list[str]:
    """Apply the migrations that the database lacks, and return their names.

    Each is applied in a transaction of its own together with its record; concurrent calls wait for each other.

    Raises:
        MisconfiguredError: if the server is too old, or a newer version has migrated the database already.
        UnreachableError, PermanentError: as `postgres.connect`.
    """
    migrations = known()
    with postgres.connect(database, APPLICATION) as connection:
        if connection.info.server_version < _OLDEST_SERVER:
            raise errors.MisconfiguredError(
                f"database at {postgres.address(database)}: PostgreSQL {connection.info.server_version // 10000}"
                " is too old; spur-events needs PostgreSQL 14 or later"
            )
        # A session's lock, held over all transactions; it ends with the connection.
        connection.execute("select pg_advisory_lock(%s)", (_LOCK_KEY,))
        applied = _applied(connection)
        unknown = sorted(applied.keys() - {migration.number for migration in migrations})
        if unknown:
            raise errors.MisconfiguredError(
                f"database at {postgres.address(database)}: migration {applied[unknown[-1]]} was applied by a newer"
                " version of spur-events; install that version or later"
            )
        missing = [migration for migration in migrations if migration.number not in applied]
        for migration in missing:
            with connection.transaction():
                connection.execute(migration.sql)
                connection.execute(
                    "insert into spur_events.migrations (number, name) values (%s, %s)",
                    (migration.number, migration.name),
                )
        return [migration.name for migration in missing]


def _applied(connection: postgres.Connection) -> dict[int, str]:
    exists = connection.execute(
        "select to_regclass('spur_events.migrations') is not null as found"
    ).fetchone()
    if not (exists and exists["found"]):
        # Only where absent: a role that may not create schemas can still see that nothing is to be done.
        with connection.transaction():
            connection.execute(_folder().joinpath("migrations_table.sql").read_bytes())
    rows = connection.execute("select number, name from spur_events.migrations").fetchall()
    return {row["number"]: row["name"] for row in rows}


def _folder() -> Traversable:
    return resources.files("spur_events.producers.sql")
