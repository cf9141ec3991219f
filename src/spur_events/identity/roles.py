"""Accounts and roles, as deploy/nats/accounts.json declares them, in the words of an account's JWT (pure).

`site` signs what comes out. docs/nats.md says what each role is for.
"""

import functools
import json
from importlib import resources
from typing import Any

from spur_events.schemas import subjects

SYSTEM, PIPELINE, USERS, AUTH = "SYSTEM", "PIPELINE", "USERS", "AUTH"
#: Roles that are parts of spur-events, each with a credentials file of its own.
PARTS = ("relay", "apply", "resync", "kubeconfig", "auth", "admin")
#: Parts of which each cluster has its own.
OF_A_CLUSTER = ("apply", "resync", "kubeconfig")
USER, USER_ADMIN, SENTINEL, SYSTEM_USER = "user", "user-admin", "sentinel", "system"
#: Begins the tag that names a user's role; jetstream.signin reads it.
ROLE_TAG = "role:"
AUTH_SERVICE = "auth"

#: How long an answer may take: an audit of many accounts is the longest.
_ANSWER_NS = 300 * 1_000_000_000


@functools.cache
def declared() -> dict[str, Any]:
    """Return the whole declaration."""
    text = resources.files("spur_events").joinpath("deploy/nats/accounts.json").read_text("utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def accounts() -> dict[str, dict[str, Any]]:
    """Return the accounts by name."""
    found: dict[str, dict[str, Any]] = declared()["accounts"]
    return found


def account_of(role: str) -> str:
    """Return the name of the account that has a role."""
    return next(name for name, account in accounts().items() if role in account["roles"])


def permissions(role: str) -> dict[str, Any]:
    """Return a role's permissions, as the template of a scoped signing key has them."""
    declaration = accounts()[account_of(role)]["roles"][role]
    found: dict[str, Any] = {
        "pub": _only(_spelled_out(declaration["publish"])),
        "sub": _only(_spelled_out(declaration["subscribe"])),
    }
    if declaration.get("answers"):
        found["resp"] = {"max": 1, "ttl": _ANSWER_NS}
    return found


def is_bearer(role: str) -> bool:
    """Return whether a role's JWT alone is enough, without its key: no secret at all."""
    return bool(accounts()[account_of(role)]["roles"][role].get("bearer"))


def tags(part: str, cluster: str, partitions: int) -> tuple[str, ...]:
    """Return the tags of a part's user: its role, and what its role's template asks for."""
    wanted = accounts()[account_of(part)]["roles"][part].get("tags", [])
    values = {
        "cluster": [cluster],
        "durable": [subjects.durable(cluster, number) for number in range(partitions)],
    }
    return (f"{ROLE_TAG}{part}", *(f"{tag}:{value}" for tag in wanted for value in values[tag]))


def user_name(part: str, cluster: str) -> str:
    """Return the name of a part's user, which its inboxes are named after: no other part may read them."""
    return f"{part}-{cluster}" if part in OF_A_CLUSTER else part


def _only(allowed: list[str]) -> dict[str, list[str]]:
    # To the server, an empty list of what is allowed means everything.
    return {"allow": allowed} if allowed else {"deny": [">"]}


def _spelled_out(entries: list[str]) -> list[str]:
    """Put groups in place of their names: `@group`, or `@group:prefix` for each of the group behind a prefix."""
    found = []
    for entry in entries:
        if entry.startswith("@"):
            group, _, prefix = entry[1:].partition(":")
            found += [prefix + member for member in declared()["groups"][group]]
        else:
            found.append(entry)
    return found
