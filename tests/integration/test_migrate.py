"""`db migrate` on the three kinds of database that it meets."""

import threading
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from spur_events import errors, postgres, settings
from spur_events.producers import migrate

ALL = [migration.name for migration in migrate.known()]

# Written as spur would, with its columns in another order and one more than we know.
SPUR_TABLES = """
create table accounts (created_at timestamptz not null default now(), grp_tres text, max_running_jobs integer,
  fairshare_weight integer not null default 1, parent_account text, organization text not null default '',
  description text not null default '', name text primary key, colour text);
create table users (name text, account text references accounts (name), admin_level text not null default 'none',
  default_account text, created_at timestamptz not null default now(), primary key (name, account));
insert into accounts (name, grp_tres) values ('physics', 'cpu=4'), ('bio', null);
insert into users (name, account, default_account) values ('alice', 'physics', 'physics'), ('alice', 'bio', null);
"""


def database(url: str) -> settings.Database:
    return settings.Database.model_validate({"url": url})


def connect(url: str) -> psycopg.Connection[dict[str, Any]]:
    return psycopg.connect(url, autocommit=True, row_factory=dict_row)


def test_files_are_numbered_without_gaps() -> None:
    assert [migration.number for migration in migrate.known()] == list(range(1, len(ALL) + 1))


def test_empty_database_and_again(empty_database_url: str) -> None:
    assert migrate.migrate(database(empty_database_url)) == ALL
    with connect(empty_database_url) as connection:
        before = connection.execute("select * from spur_events.installation").fetchall()
        assert migrate.migrate(database(empty_database_url)) == []
        assert connection.execute("select * from spur_events.installation").fetchall() == before
        assert connection.execute("select * from spur_events.outbox").fetchall() == []
        assert len(before) == 1
        assert before[0]["epoch"] == 1
        tables = connection.execute(
            "select table_name from information_schema.tables where table_schema = 'public' order by 1"
        ).fetchall()
    assert [row["table_name"] for row in tables] == ["accounts", "associations", "qos", "txn", "users"]


def test_existing_rows_are_published_once_and_tables_left_alone(empty_database_url: str) -> None:
    columns = (
        "select table_name, column_name, data_type, column_default, is_nullable from information_schema.columns"
        " where table_name in ('accounts', 'users') order by table_name, ordinal_position"
    )
    indexes = "select indexdef from pg_indexes where tablename in ('accounts', 'users') order by 1"
    with connect(empty_database_url) as connection:
        connection.execute(SPUR_TABLES.encode())
        before = [connection.execute(query).fetchall() for query in (columns, indexes)]
        migrate.migrate(database(empty_database_url))
        migrate.migrate(database(empty_database_url))
        assert [connection.execute(query).fetchall() for query in (columns, indexes)] == before

        published = connection.execute("select account, kind, user_name from spur_events.outbox order by id")
        assert [tuple(row.values()) for row in published] == [
            ("bio", "republished", ""),
            ("physics", "republished", ""),
        ]
        members = connection.execute("select user_name, account from spur_events.memberships order by 2")
        assert [tuple(row.values()) for row in members] == [("alice", "bio"), ("alice", "physics")]
        incarnations = connection.execute("select account from spur_events.incarnations order by 1")
        assert [row["account"] for row in incarnations] == ["bio", "physics"]


def test_tables_outside_public_are_found_by_search_path(empty_database_url: str) -> None:
    with connect(empty_database_url) as connection:
        connection.execute("create schema site")
        name = connection.info.dbname
        connection.execute(f'alter database "{name}" set search_path = site, public'.encode())
    with connect(empty_database_url) as connection:
        connection.execute(SPUR_TABLES.encode())
        migrate.migrate(database(empty_database_url))
        connection.execute("update site.accounts set grp_tres = 'cpu=5' where name = 'physics'")
        connection.execute("truncate site.users")
        kinds = connection.execute("select kind from spur_events.outbox order by id").fetchall()
        assert connection.execute("select to_regclass('public.accounts') as t").fetchall() == [{"t": None}]
    assert [row["kind"] for row in kinds] == [
        "republished",
        "republished",
        "account_changed",
        "member_removed",
        "member_removed",
    ]


def test_two_at_once_apply_each_migration_once(empty_database_url: str) -> None:
    applied: list[list[str]] = []
    threads = [
        threading.Thread(target=lambda: applied.append(migrate.migrate(database(empty_database_url))))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(applied) == [[], ALL]


def test_database_of_a_newer_version_is_refused(database_url: str) -> None:
    with connect(database_url) as connection:
        connection.execute("insert into spur_events.migrations (number, name) values (9000, '9000_future')")
    with pytest.raises(errors.MisconfiguredError, match="9000_future was applied by a newer version"):
        migrate.migrate(database(database_url))


def test_failed_migration_leaves_nothing_of_itself(empty_database_url: str) -> None:
    with connect(empty_database_url) as connection:
        connection.execute("create view accounts as select 'x'::text as name")  # cannot carry the triggers
        connection.execute("create table users (name text, account text); create table associations (id int)")
        with pytest.raises(errors.SpurEventsError):
            migrate.migrate(database(empty_database_url))
        done = connection.execute("select name from spur_events.migrations order by 1").fetchall()
        assert [row["name"] for row in done] == ALL[:2]
        assert connection.execute("select to_regproc('spur_events.on_accounts_insert') as f").fetchall() == [
            {"f": None}
        ]
        connection.execute("drop view accounts")
        connection.execute("drop table users")
        connection.execute(SPUR_TABLES.encode())
    assert migrate.migrate(database(empty_database_url)) == ALL[2:]


def test_there_is_always_exactly_one_installation(database_url: str) -> None:
    with connect(database_url) as connection:
        with pytest.raises(psycopg.errors.UniqueViolation):
            connection.execute("insert into spur_events.installation default values")
        with pytest.raises(psycopg.errors.RaiseException):
            connection.execute("delete from spur_events.installation")


def test_unreachable_names_the_address() -> None:
    with pytest.raises(errors.UnreachableError, match=r"127\.0\.0\.1:1, database spur"):
        migrate.migrate(database("postgresql://user:secret@127.0.0.1:1/spur"))


def test_address_never_shows_the_password() -> None:
    assert "secret" not in postgres.address(database("postgresql://user:secret@127.0.0.1:1/spur"))
