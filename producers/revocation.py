"""Takes back every token of a member without ending the membership: a new generation in the database.

`spur-events revoke` calls it. The relay publishes it like a change, and the clusters replace the ServiceAccount.
"""

from dataclasses import dataclass

from spur_events import errors, postgres
from spur_events.producers import rows


@dataclass(frozen=True, kw_only=True)
class Revoked:
    """A membership whose tokens die: the names as stored, and the generation of the tokens to come."""

    user: str
    account: str
    generation: str


def revoke(
    connection: postgres.Connection, actor: rows.Actor, user: str, account: str | None
) -> list[Revoked]:
    """Give a user's membership in an account, or in all her accounts, a new generation; in one transaction.

    Raises:
        PermanentError: if the user is not a member there; nothing was changed.
    """
    with rows.transaction(connection, actor) as work:
        # As sacctmgr stores them, unless another writer stored exactly what was typed.
        for name, place in ((user, account), (user.lower(), account.lower() if account else None)):
            found = work.select(
                "select account, generation from spur_events.revoke_member(%s, %s)", (name, place)
            )
            if found:
                return [
                    Revoked(user=name, account=row["account"], generation=row["generation"]) for row in found
                ]
    where = f"of account {account!r}" if account else "of any account"
    raise errors.PermanentError(
        f"user {user!r} is not a member {where}; nothing was revoked. 'sacctmgr show user' lists the members"
    )
