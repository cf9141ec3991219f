"""Random changes in the accounting database, as any program with rights on the tables could make them.

Every account's name begins with the test's own prefix; the rest, and the users' names, are odd on purpose.
"""

import contextlib
import random
import time

from spur_events import errors, postgres, settings

# fmt: off
_ACCOUNTS = (
    *("bio", "chem", "phys", "math", "geo", "hist", "law", "med", "art", "astro"),
    *("Bio", "BIO", "a.b", "a b", "a..b", "*", ">", "_lab", "lab-", "___", "", "x" * 60),
    *("universität", "名前", "rocket \U0001f680", "it's \"quoted\"", "back\\slash", "two\nlines", "line\u2028sep"),
    "bio--abcdefghij234567",
)
_USERS = (
    *("alice", "bob", "carol", "dave", "erin", "frank"),
    *("Alice.Smith", "_@x.org", "-", "ünal", "李", "root", "default", "u" * 70, " ", "a\tb"),
)
_TRES = (
    *(None, "", " ", "cpu=4", "cpu=0", "cpu=-1", "cpu=4,mem=131072,gres/gpu=8", "mem=1536", "gres/gpu=0"),
    *("cpu=-1,mem=-1", "gres/gpu:a100=2,gres/gpu=8", "license/matlab=3,billing=9", "CPU=7, MEM=1", "mem=0"),
    *("cpu=lots", "mem=1G", "cpu=1,cpu=2", "cpu=1.5", "cpu=", "cpu=-5", "=", "cpu=\u0663", "cpu=99999999999999999999"),
    *("cpu=9223372036854775807", "mem=9223372036854"),
)
# fmt: on
_Statement = tuple[str, tuple[object, ...]]


_UPSERT = (
    "INSERT INTO accounts (name, grp_tres) VALUES (%s, %s), (%s, 'cpu=1')"
    " ON CONFLICT (name) DO UPDATE SET grp_tres = excluded.grp_tres"
)
_EVERYWHERE = "INSERT INTO users (name, account) SELECT %s, name FROM accounts ON CONFLICT DO NOTHING"
_INHERIT = "UPDATE accounts SET fairshare_weight = 7, parent_account = %s WHERE name = %s"


def _statement(rng: random.Random, prefix: str) -> _Statement:
    """Return one random statement, as any program with rights on the tables could send it."""
    account = prefix + rng.choice(_ACCOUNTS)
    other = prefix + rng.choice(_ACCOUNTS)
    user = rng.choice(_USERS)
    limits = rng.choice(_TRES)
    if rng.random() < 0.4:
        limits = f"cpu={rng.randint(0, 500)},mem={rng.randint(0, 10**6)}"
    choices: list[tuple[int, str, tuple[object, ...]]] = [
        (12, "INSERT INTO accounts (name, grp_tres) VALUES (%s, %s)", (account, limits)),
        (6, _UPSERT, (account, limits, account + "2")),
        (25, "UPDATE accounts SET grp_tres = %s WHERE name = %s", (limits, account)),
        (4, "UPDATE accounts SET description = %s WHERE name = %s", (f"d{rng.random()}", account)),
        (3, _INHERIT, (other, account)),
        (3, "UPDATE accounts SET name = %s WHERE name = %s", (other, account)),
        (25, "INSERT INTO users (name, account) VALUES (%s, %s)", (user, account)),
        (4, _EVERYWHERE, (user,)),
        (12, "DELETE FROM users WHERE name = %s AND account = %s", (user, account)),
        (3, "DELETE FROM users WHERE name = %s", (user,)),
        (3, "UPDATE users SET account = %s WHERE name = %s AND account = %s", (other, user, account)),
        (2, "UPDATE users SET admin_level = 'operator' WHERE account = %s", (account,)),
        (4, "DELETE FROM users WHERE account = %s", (account,)),
        (8, "DELETE FROM accounts WHERE name = %s", (account,)),
    ]
    _, statement, parameters = rng.choices(choices, [weight for weight, _, _ in choices])[0]
    return statement, parameters


def _transaction(rng: random.Random, prefix: str) -> list[_Statement]:
    account = prefix + rng.choice(_ACCOUNTS)
    kind = rng.random()
    if kind < 0.1:  # gone with everybody in it
        return [
            ("DELETE FROM users WHERE account = %s", (account,)),
            ("DELETE FROM accounts WHERE name = %s", (account,)),
        ]
    if kind < 0.15:  # gone and back within one commit
        return [
            ("DELETE FROM users WHERE account = %s", (account,)),
            ("DELETE FROM accounts WHERE name = %s", (account,)),
            ("INSERT INTO accounts (name, grp_tres) VALUES (%s, 'cpu=3')", (account,)),
            ("INSERT INTO users (name, account) VALUES ('alice', %s)", (account,)),
        ]
    return [_statement(rng, prefix) for _ in range(rng.choice((1, 1, 1, 2, 3, 4)))]


def make(given: settings.Settings, seed: str, prefix: str, wanted: int, pause_s: float = 0.0) -> int:
    """Make random changes until `wanted` statements that changed rows are committed; return how many.

    A lost database is waited for; whether the transaction in hand was committed is then unknown, as always.
    """
    rng = random.Random(seed)  # noqa: S311 - repeatable on purpose
    committed = 0
    while committed < wanted:
        with (
            contextlib.suppress(errors.UnreachableError),
            postgres.connect(given.database, f"writer {seed}") as connection,
        ):
            while committed < wanted:
                committed += _commit(given, connection, rng, prefix)
                time.sleep(pause_s)
    return committed


def _commit(
    given: settings.Settings, connection: postgres.Connection, rng: random.Random, prefix: str
) -> int:
    touched = 0
    undo = rng.random() < 0.1
    statements = _transaction(rng, prefix)
    # A key that is taken, a member in the way, a deadlock: a program goes on with the next.
    with contextlib.suppress(errors.PermanentError, postgres.ConflictError):
        with postgres.translated(given.database), connection.transaction(force_rollback=undo):
            for statement, parameters in statements:
                touched += connection.execute(statement.encode(), parameters).rowcount > 0
        return 0 if undo else touched
    return 0
