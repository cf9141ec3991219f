"""The only module that imports psycopg: connections, and its errors in our tree.

Used by producers (relay, migrations, sacctmgr). Statements live in .sql files beside their users.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import psycopg
from psycopg import conninfo
from psycopg import errors as pg_errors
from psycopg.rows import dict_row

from spur_events import errors
from spur_events.settings import Database

Connection = psycopg.Connection[dict[str, Any]]
AsyncConnection = psycopg.AsyncConnection[dict[str, Any]]

# Dead peers without a TCP reset are noticed within about 20 s instead of two hours.
_KEEPALIVE = {
    "keepalives_idle": 5,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20000,
}


class ConflictError(errors.TemporaryError):
    """The transaction met another one (serialization failure, deadlock, lock time-out) and may be run again."""


def _parameters(settings: Database, application: str) -> dict[str, Any]:
    try:
        given = conninfo.conninfo_to_dict(settings.url.get_secret_value())
    except psycopg.Error as error:
        raise errors.MisconfiguredError(
            f"SPUR_EVENTS_DATABASE_URL is not a PostgreSQL connection string: {_first_line(error)}"
        ) from error
    return {
        **_KEEPALIVE,
        "connect_timeout": settings.connect_timeout_s,
        "application_name": application,
        **given,
    }


def address(settings: Database) -> str:
    """Return where the database is, without user or password, for messages."""
    given = _parameters(settings, "")
    host = given.get("host") or given.get("hostaddr") or "local socket"
    return f"{host}:{given.get('port', 5432)}, database {given.get('dbname') or 'default'}"


@contextmanager
def connect(settings: Database, application: str = "spur-events") -> Iterator[Connection]:
    """Open a connection in autocommit mode; driver errors inside the block leave it in our tree.

    Raises:
        UnreachableError: if the server does not answer or ends the connection.
        PermanentError: if it refuses a statement.
    """
    with translated(settings):
        connection = psycopg.Connection.connect(
            **_parameters(settings, application), autocommit=True, row_factory=dict_row
        )
        try:
            yield connection
        finally:
            connection.close()


async def connect_async(settings: Database, application: str) -> AsyncConnection:
    """Open an asyncio connection in autocommit mode; the caller closes it."""
    with translated(settings):
        return await psycopg.AsyncConnection.connect(
            **_parameters(settings, application), autocommit=True, row_factory=dict_row
        )


@asynccontextmanager
async def session(settings: Database, application: str) -> AsyncIterator[AsyncConnection]:
    """Open an asyncio connection for a block; driver errors inside the block leave it in our tree."""
    connection = await connect_async(settings, application)
    with translated(settings):
        try:
            yield connection
        finally:
            await connection.close()


@contextmanager
def translated(settings: Database) -> Iterator[None]:
    """Turn driver errors that leave the block into our tree, with the cause chained."""
    try:
        yield
    except (pg_errors.SerializationFailure, pg_errors.DeadlockDetected, pg_errors.LockNotAvailable) as error:
        raise ConflictError(f"transaction met another one: {_first_line(error)}") from error
    except pg_errors.InsufficientPrivilege as error:
        raise errors.MisconfiguredError(
            f"database at {address(settings)}: {_first_line(error)};"
            " the role lacks a right: docs/operations.md lists what each command needs"
        ) from error
    except (pg_errors.UndefinedTable, pg_errors.InvalidSchemaName) as error:
        raise errors.MisconfiguredError(
            f"database at {address(settings)}: {_first_line(error)}; run 'spur-events db migrate'"
        ) from error
    except (psycopg.OperationalError, psycopg.InterfaceError, TimeoutError) as error:
        raise errors.UnreachableError(
            f"no connection to the database at {address(settings)}: {_first_line(error)};"
            " check SPUR_EVENTS_DATABASE_URL and that the server runs"
        ) from error
    except psycopg.Error as error:
        raise errors.PermanentError(f"database at {address(settings)}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
