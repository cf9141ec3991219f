"""What the triggers put into the outbox, for every way to change accounts and users."""

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row
from support.pipeline import PATIENCE_S

Connection = psycopg.Connection[dict[str, Any]]


@pytest.fixture
def db(database_url: str) -> Iterator[Connection]:
    with psycopg.connect(database_url, autocommit=True, row_factory=dict_row) as connection:
        yield connection


def run(db: Connection, *statements: str) -> list[tuple[str, ...]]:
    """Run statements and return what they added to the outbox: (kind, account[, user])."""
    last = db.execute("select coalesce(max(id), 0) as last from spur_events.outbox").fetchone()
    assert last is not None
    for statement in statements:
        db.execute(statement.encode())
    rows = db.execute(
        "select kind, account, user_name from spur_events.outbox where id > %s order by id", (last["last"],)
    )
    return [tuple(value for value in row.values() if value != "") for row in rows]


def last(db: Connection) -> dict[str, Any]:
    row = db.execute("select * from spur_events.outbox order by id desc limit 1").fetchone()
    assert row is not None
    return row


def table(db: Connection, name: str) -> dict[Any, Any]:
    rows = db.execute(f"select * from spur_events.{name}".encode()).fetchall()
    if name == "memberships":
        return {(row["user_name"], row["account"]): row["generation"] for row in rows}
    return {row["account"]: row for row in rows}


SEED = (
    "insert into accounts (name, grp_tres) values ('bio', null), ('physics', 'cpu=4')",
    (
        "insert into users (name, account, default_account) values ('alice', 'physics', 'physics'),"
        " ('alice', 'bio', null), ('bob', 'physics', 'physics')"
    ),
)


def test_insert(db: Connection) -> None:
    assert run(db, *SEED) == [
        ("account_added", "bio"),
        ("account_added", "physics"),
        ("member_added", "bio", "alice"),
        ("member_added", "physics", "alice"),
        ("member_added", "physics", "bob"),
    ]
    assert last(db)["after"] == {"admin_level": "none", "default_account": "physics"}
    assert last(db)["before"] is None
    assert table(db, "memberships").keys() == {("alice", "bio"), ("alice", "physics"), ("bob", "physics")}
    assert len(set(table(db, "memberships").values())) == 3
    assert table(db, "incarnations").keys() == {"bio", "physics"}


def test_update_shows_changed_columns_only(db: Connection) -> None:
    run(db, *SEED)
    assert run(db, "update accounts set grp_tres = 'cpu=8', description = 'P' where name = 'physics'") == [
        ("account_changed", "physics")
    ]
    assert last(db)["before"] == {"grp_tres": "cpu=4", "description": ""}
    assert last(db)["after"] == {"grp_tres": "cpu=8", "description": "P"}
    run(db, "update accounts set grp_tres = null where name = 'physics'")
    assert last(db)["after"] == {"grp_tres": None}
    assert run(db, "update users set admin_level = 'operator' where name = 'bob'") == [
        ("member_changed", "physics", "bob")
    ]
    assert last(db)["after"] == {"admin_level": "operator"}


@pytest.mark.parametrize(
    "statement",
    [
        "update accounts set grp_tres = grp_tres",
        "update accounts set fairshare_weight = 7, max_running_jobs = 3",
        "update accounts set grp_tres = 'x' where false",
        "update users set default_account = default_account, created_at = now()",
        "delete from users where name = 'nobody'",
        "insert into users (name, account) select 'x', 'bio' where false",
        "insert into accounts (name) values ('bio') on conflict do nothing",
        (
            "insert into accounts (name, grp_tres) values ('physics', 'cpu=4')"
            " on conflict (name) do update set grp_tres = excluded.grp_tres"
        ),
        "truncate associations",
    ],
)
def test_what_changes_nothing_emits_nothing(db: Connection, statement: str) -> None:
    run(db, *SEED)
    generations = table(db, "memberships")
    db.execute("listen spur_events")
    assert run(db, statement) == []
    assert list(db.notifies(timeout=0.05)) == []
    assert table(db, "memberships") == generations


def test_upsert_of_new_and_existing_rows(db: Connection) -> None:
    run(db, *SEED)
    incarnation = table(db, "incarnations")["physics"]
    assert run(
        db,
        "insert into accounts (name, grp_tres) values ('physics', 'cpu=9'), ('chem', 'cpu=1')"
        " on conflict (name) do update set grp_tres = excluded.grp_tres",
    ) == [("account_changed", "physics"), ("account_added", "chem")]
    assert table(db, "incarnations")["physics"] == incarnation


def test_delete_in_foreign_key_order(db: Connection) -> None:
    run(db, *SEED)
    incarnation = table(db, "incarnations")["physics"]["incarnation"]
    db.execute("insert into spur_events.allocations values ('physics', 'cpu=4')")
    assert run(
        db,
        "begin; delete from users where account = 'physics'; delete from accounts where name = 'physics'; commit",
    ) == [
        ("member_removed", "physics", "alice"),
        ("member_removed", "physics", "bob"),
        ("account_deleted", "physics"),
    ]
    assert last(db)["before"] == {"grp_tres": "cpu=4", "description": "", "organization": ""}
    assert table(db, "memberships").keys() == {("alice", "bio")}
    assert table(db, "allocations") == {}
    assert table(db, "incarnations").keys() == {"bio"}
    tombstone = table(db, "tombstones")["physics"]
    assert tombstone["incarnation"] == incarnation
    assert tombstone["deleted_by"] == db.info.user


def test_delete_account_first_with_deferred_constraint(db: Connection) -> None:
    db.execute("alter table users alter constraint users_account_fkey deferrable initially deferred")
    run(db, *SEED)
    assert run(
        db, "begin; delete from accounts where name = 'bio'; delete from users where account = 'bio'; commit"
    ) == [("account_deleted", "bio"), ("member_removed", "bio", "alice")]


def test_delete_and_rename_through_cascade(db: Connection) -> None:
    db.execute("alter table users drop constraint users_account_fkey")
    db.execute(
        "alter table users add foreign key (account) references accounts (name) on delete cascade on update cascade"
    )
    run(db, *SEED)
    assert sorted(run(db, "update accounts set name = 'biology' where name = 'bio'")) == [
        ("account_added", "biology"),
        ("account_deleted", "bio"),
        ("member_added", "biology", "alice"),
        ("member_removed", "bio", "alice"),
    ]
    assert sorted(run(db, "delete from accounts")) == [
        ("account_deleted", "biology"),
        ("account_deleted", "physics"),
        ("member_removed", "biology", "alice"),
        ("member_removed", "physics", "alice"),
        ("member_removed", "physics", "bob"),
    ]
    assert table(db, "memberships") == {}
    assert table(db, "tombstones").keys() == {"bio", "biology", "physics"}


def test_deleted_account_that_returns_has_no_tombstone_and_another_incarnation(db: Connection) -> None:
    run(db, *SEED)
    first = table(db, "incarnations")["physics"]["incarnation"]
    run(db, "delete from users", "delete from accounts", "insert into accounts (name) values ('physics')")
    assert table(db, "tombstones").keys() == {"bio"}
    assert table(db, "incarnations")["physics"]["incarnation"] != first


def test_rename_is_delete_and_create(db: Connection) -> None:
    run(db, *SEED, "delete from users")
    assert run(db, "update accounts set name = 'phys' where name = 'physics'") == [
        ("account_deleted", "physics"),
        ("account_added", "phys"),
    ]
    assert table(db, "tombstones").keys() == {"physics"}
    assert last(db)["after"]["grp_tres"] == "cpu=4"


def test_moved_member_gets_a_generation_of_its_own(db: Connection) -> None:
    run(db, *SEED)
    before = table(db, "memberships")
    assert run(db, "update users set account = 'bio' where name = 'bob'") == [
        ("member_removed", "physics", "bob"),
        ("member_added", "bio", "bob"),
    ]
    after = table(db, "memberships")
    assert ("bob", "physics") not in after
    assert after[("bob", "bio")] not in before.values()
    assert after[("alice", "physics")] == before[("alice", "physics")]


@pytest.mark.parametrize(
    "statements",
    [
        (
            "begin; delete from users where name = 'bob'; insert into users (name, account) values ('bob', 'physics');"
            " commit"
        ),
        "with gone as (delete from users where name = 'bob' returning *) insert into users select * from gone",
        (
            "begin; update users set account = 'bio' where name = 'bob';"
            " update users set account = 'physics' where name = 'bob'; commit"
        ),
        "begin; truncate users; insert into users (name, account) values ('bob', 'physics'); commit",
    ],
)
def test_removed_and_added_again_is_a_new_generation(db: Connection, statements: str) -> None:
    run(db, *SEED)
    before = table(db, "memberships")[("bob", "physics")]
    run(db, statements)
    assert table(db, "memberships")[("bob", "physics")] != before


def test_merge_that_inserts_the_key_it_deletes(db: Connection) -> None:
    run(db, *SEED)
    before = table(db, "memberships")[("bob", "physics")]
    # The statement's insert triggers run before its delete triggers.
    emitted = run(
        db,
        "merge into users u using (values ('bob', 1), ('new', 2)) s (name, n) on u.name = s.name and s.n = 1"
        " when matched then delete when not matched then insert (name, account) values ('bob', 'physics')",
    )
    assert sorted(emitted) == [("member_added", "physics", "bob"), ("member_removed", "physics", "bob")]
    assert table(db, "memberships")[("bob", "physics")] != before


def test_truncate(db: Connection) -> None:
    run(db, *SEED)
    assert run(db, "truncate users") == [
        ("member_removed", "bio", "alice"),
        ("member_removed", "physics", "alice"),
        ("member_removed", "physics", "bob"),
    ]
    assert table(db, "memberships") == {}
    run(db, SEED[1])
    assert sorted(run(db, "truncate accounts cascade")) == [
        ("account_deleted", "bio"),
        ("account_deleted", "physics"),
        ("member_removed", "bio", "alice"),
        ("member_removed", "physics", "alice"),
        ("member_removed", "physics", "bob"),
    ]
    assert table(db, "tombstones").keys() == {"bio", "physics"}
    assert run(db, "truncate accounts cascade") == []


def test_truncate_that_could_miss_rows_is_refused(db: Connection) -> None:
    run(db, *SEED)
    with pytest.raises(psycopg.errors.RaiseException, match="cannot see all rows"):
        db.execute("begin isolation level repeatable read; truncate users; commit")
    db.execute("rollback")
    assert len(table(db, "memberships")) == 3


def test_rollback_emits_nothing(db: Connection) -> None:
    db.execute("listen spur_events")
    assert run(db, "begin", *SEED, "truncate accounts cascade", "rollback") == []
    assert list(db.notifies(timeout=0.05)) == []
    assert table(db, "memberships") == {}


def test_copy(db: Connection) -> None:
    with db.cursor().copy("copy accounts (name, grp_tres) from stdin") as copy:
        copy.write_row(("bio", None))
        copy.write_row(("physics", "cpu=4"))
    assert run(db) == []
    rows = db.execute("select kind, account, after from spur_events.outbox order by id").fetchall()
    assert [(row["kind"], row["account"]) for row in rows] == [
        ("account_added", "bio"),
        ("account_added", "physics"),
    ]


def test_replica_role_is_no_way_around(db: Connection) -> None:
    db.execute("set session_replication_role = replica")
    assert len(run(db, *SEED)) == 5
    assert (
        len(run(db, "update accounts set description = 'x'", "truncate users, accounts, associations")) == 7
    )


def test_writer_needs_no_rights_on_our_schema(db: Connection) -> None:
    role = f"writer_{db.info.dbname}"
    db.execute(f"create role {role} login".encode())
    try:
        db.execute(f"grant select, insert, update, delete, truncate on accounts, users to {role}".encode())
        db.execute(f"set session authorization {role}".encode())
        db.execute("set application_name = 'their tool'")
        db.execute("begin")
        db.execute("set local spur_events.os_user = 'carol'")
        for statement in (
            *SEED,
            "update accounts set description = 'x'",
            "delete from users",
            "delete from accounts",
        ):
            db.execute(statement.encode())
        db.execute("commit")
        for forbidden in (
            "select * from spur_events.outbox",
            "select spur_events.actor()",
            "delete from spur_events.outbox",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                db.execute(forbidden.encode())
        db.execute("reset session authorization")
        row = last(db)
        assert (row["database_user"], row["os_user"], row["application"]) == (role, "carol", "their tool")
        assert table(db, "tombstones")["bio"]["deleted_by"] == f"carol (as database role {role})"
    finally:
        db.execute("reset session authorization")
        db.execute(f"drop owned by {role}".encode())
        db.execute(f"drop role {role}".encode())


def test_a_local_statement_of_the_os_user_ends_with_its_transaction(db: Connection) -> None:
    run(
        db, "begin; set local spur_events.os_user = 'carol'; insert into accounts (name) values ('a'); commit"
    )
    assert last(db)["os_user"] == "carol"
    run(db, "insert into accounts (name) values ('b')")
    assert last(db)["os_user"] == ""


def test_temporary_objects_of_the_writer_do_not_mislead_us(db: Connection) -> None:
    run(db, "create temporary table outbox (x int)", "create temporary table accounts (name text)")
    assert run(db, "insert into public.accounts (name) values ('a')") == [("account_added", "a")]


def test_one_notification_a_statement(db: Connection, database_url: str) -> None:
    with psycopg.connect(database_url, autocommit=True) as listener:
        listener.execute("listen spur_events")
        for statement in SEED:
            db.execute(statement.encode())
        received = list(listener.notifies(timeout=PATIENCE_S, stop_after=2))
        received += listener.notifies(timeout=0.1)
    assert [(note.channel, note.payload) for note in received] == [("spur_events", "")] * 2


def test_bulk_statement_runs_a_trigger_once(db: Connection) -> None:
    run(db, "insert into accounts (name) select 'a' || n from generate_series(1, 10000) n")
    run(db, "insert into users (name, account) select 'u', name from accounts")
    for n in range(6):  # plans are cached for single rows first
        run(db, f"update accounts set description = '{n}' where name = 'a1'")
    db.execute("set track_functions = 'all'")
    assert len(run(db, "update accounts set grp_tres = 'cpu=1'")) == 10000
    assert len(run(db, "update users set admin_level = 'operator'")) == 10000
    assert len(run(db, "update users set name = 'v'")) == 20000
    assert len(run(db, "delete from users", "delete from accounts")) == 20000
    if db.info.server_version >= 150000:
        db.execute("select pg_stat_force_next_flush()")
        calls = db.execute(
            "select funcname, calls from pg_stat_user_functions where funcname like 'on\\_%' order by 1"
        ).fetchall()
        assert {row["funcname"]: row["calls"] for row in calls} == {
            "on_accounts_delete": 1,
            "on_accounts_update": 1,
            "on_users_delete": 1,
            "on_users_update": 2,
        }


def test_late_commit_keeps_its_row(db: Connection, database_url: str) -> None:
    """C40: ids are taken in one order and become visible in another."""
    with psycopg.connect(database_url) as first:
        first.execute("insert into accounts (name) values ('early')")
        assert run(db, "insert into accounts (name) values ('late')") == [("account_added", "late")]
        late = last(db)["id"]
        first.commit()
    rows = db.execute("select id, account from spur_events.outbox order by id").fetchall()
    assert [row["account"] for row in rows] == ["early", "late"]
    assert rows[0]["id"] < late
