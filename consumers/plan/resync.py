"""The plan of a resync: what the bucket wants against what the cluster holds, both read whole. Pure.

`consumers.resync` calls it, shows the plan, and publishes an event for each item that is work; the one writer of the
account carries that out. The rules are those by which the writer decides (`steps.compare`, `pruning`), so that a
plan says what will be done, and what is done leaves nothing to plan.

Whose a namespace is, its name and its installation's mark decide; the account label never binds it to another
account (case C06). About clocks see `pruning`.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from spur_events import settings
from spur_events.consumers.plan import desired, marks, observed, pruning, steps
from spur_events.schemas import names
from spur_events.schemas.accounts import AccountState
from spur_events.schemas.resync import Action, Item
from spur_events.schemas.status import AccountStatus, Phase

_ORDER = {action: number for number, action in enumerate(Action)}


@dataclass(frozen=True, kw_only=True)
class Live:
    """What a cluster holds.

    `namespaces`: all that carry our managed-by label, whoever's, and all that are named as ours are. `inside`: by
    namespace, the quotas, limit ranges, roles, bindings and ServiceAccounts with that label.
    """

    namespaces: tuple[marks.Manifest, ...]
    inside: Mapping[str, tuple[marks.Manifest, ...]]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be done and what is to be told, in order.

    `unchanged` counts the accounts that are as they should be; `others` the namespaces of other installations.
    """

    items: tuple[Item, ...]
    unchanged: int
    others: int = 0


def plan(
    states: Mapping[str, AccountState],
    statuses: Mapping[str, AccountStatus],
    live: Live,
    *,
    installation: str,
    config: settings.Quota,
    now: datetime,
    prune_grace_s: float,
    unexplained: Collection[str] = (),
) -> Plan:
    """Return the plan of a resync. At most one item an account is work (`schemas.resync.WORK`).

    Args:
        states: the whole bucket, by slug.
        statuses: the records of this cluster, by slug.
        live: the whole cluster, as far as it could be ours.
        installation: whose bucket this is.
        config: how an allocation becomes a quota.
        now: by the clock of this process.
        prune_grace_s: seconds that the namespace of a deleted account is kept.
        unexplained: slugs in the bucket that the database neither has nor recorded as deleted.
    """
    planner = _Planner(installation=installation, config=config, now=now, prune_grace_s=prune_grace_s)
    by_name = {namespace["metadata"]["name"]: namespace for namespace in live.namespaces}
    items: list[Item] = []
    unchanged = others = 0
    for slug, state in states.items():
        namespace = by_name.pop(names.namespace_of_slug(slug), None)
        found = planner.account(slug, state, statuses.get(slug), namespace, live.inside)
        unchanged += not found
        items += found
        if slug in unexplained and state.deletion is None:
            items.append(
                _item(Action.UNEXPLAINED, slug, state, namespace, "in the bucket, but not in the database")
            )
    for namespace in by_name.values():
        if observed.other_installation(namespace, installation):
            others += 1
        elif (item := planner.ownerless(namespace)) is not None:
            items.append(item)
    items.sort(key=lambda item: (_ORDER[item.action], item.slug, item.namespace))
    return Plan(items=tuple(items), unchanged=unchanged, others=others)


@dataclass(frozen=True, kw_only=True)
class _Planner:
    """The rules for one account or one namespace."""

    installation: str
    config: settings.Quota
    now: datetime
    prune_grace_s: float

    def account(
        self,
        slug: str,
        state: AccountState,
        status: AccountStatus | None,
        namespace: marks.Manifest | None,
        inside: Mapping[str, tuple[marks.Manifest, ...]],
    ) -> list[Item]:
        """Return the items about an account with a state; none if all is as it should be."""
        if state.installation != self.installation:
            text = f"its state in the bucket belongs to installation {state.installation}"
            return [_item(Action.CONFLICT, slug, state, namespace, text)]
        seen = observed.Observed(namespace=None)
        if namespace is not None:
            # Without the namespace nothing can be in it: what was listed is of another moment.
            found = inside.get(names.namespace_of_slug(slug), ())
            seen = observed.collect(namespace, found, self.installation, slug)
        wanted = desired.objects(state, self.config)
        todo = steps.compare(wanted, state, status, seen)
        if isinstance(todo, steps.Findings):
            return self._refused(slug, state, namespace, todo)
        if todo.paused:
            return self._paused(slug, state, todo, seen)
        if state.deletion is not None:
            return self._deleted(slug, state, todo, seen)
        if todo.nothing:
            return []
        action = Action.CHANGE
        if namespace is None or not any(_found(seen)):
            action = Action.CREATE
        elif todo.losing:
            action = Action.REVOKE
        details = () if namespace is None else (*_losing(todo, seen), *_differing(todo), *_obsolete(todo))
        return [_item(action, slug, state, namespace, *details)]

    def ownerless(self, namespace: marks.Manifest) -> Item | None:
        """Return the item about a namespace that no state in the bucket wants; None if it is nobody's business."""
        name = namespace["metadata"]["name"]
        named = name.startswith(names.NAMESPACE_PREFIX)
        slug = name.removeprefix(names.NAMESPACE_PREFIX) if named else ""
        ours = observed.owner(namespace, self.installation) == "ours"
        if not named:
            text = "carries this installation's mark under a name that it gives to none; left alone"
            return _item(Action.FOREIGN, "", None, namespace, text) if ours else None
        if not ours:
            text = "carries no installation's mark, and no account wants it; left alone"
            return _item(Action.FOREIGN, slug, None, namespace, text)
        why = "no account and no recorded deletion explains it"
        if (ending := steps.terminating(namespace)) is not None:
            return _item(Action.TERMINATING, slug, None, namespace, self._age(namespace), ending.message)
        if observed.is_paused(namespace):
            return _item(Action.PAUSED, slug, None, namespace, pruning.wish(namespace), why)
        if observed.is_retained(namespace):
            return _item(Action.RETAINED, slug, None, namespace, pruning.wish(namespace), why)
        return _item(Action.UNEXPLAINED, slug, None, namespace, why)

    def _refused(
        self, slug: str, state: AccountState, namespace: marks.Manifest | None, found: steps.Findings
    ) -> list[Item]:
        if found.phase is Phase.TERMINATING and namespace is not None:
            return [_item(Action.TERMINATING, slug, state, namespace, self._age(namespace), found.message)]
        if found.phase is not Phase.PRUNED:
            return [_item(Action.CONFLICT, slug, state, namespace, found.message)]
        if namespace is None or observed.other_installation(namespace, self.installation):
            return []
        text = "carries no installation's mark, and its account was deleted; left alone"
        return [_item(Action.FOREIGN, slug, state, namespace, text)]

    def _paused(
        self, slug: str, state: AccountState, todo: steps.Steps, seen: observed.Observed
    ) -> list[Item]:
        namespace = seen.namespace
        told = _item(Action.PAUSED, slug, state, namespace, *_differing(todo))
        if todo.nothing:
            return [told]
        details = (*_losing(todo, seen), *_obsolete(todo))
        return [_item(Action.REVOKE, slug, state, namespace, *details), told]

    def _deleted(
        self, slug: str, state: AccountState, todo: steps.Steps, seen: observed.Observed
    ) -> list[Item]:
        """Return the item about a deleted account whose namespace is there."""
        namespace = seen.namespace
        if namespace is None:
            return []
        if not todo.nothing:
            details = (*_losing(todo, seen), *_differing(todo), *_obsolete(todo))
            return [_item(Action.CLOSE, slug, state, namespace, *details)]
        if observed.is_retained(namespace):
            return [_item(Action.RETAINED, slug, state, namespace, pruning.wish(namespace))]
        kept = pruning.objection(
            state,
            namespace,
            planned_uid=namespace["metadata"]["uid"],
            planned_incarnation=state.incarnation,
            now=self.now,
            grace_s=self.prune_grace_s,
        )
        if kept:
            return [_item(Action.ORPHANED, slug, state, namespace, kept)]
        since = (namespace["metadata"].get("annotations") or {}).get(marks.ORPHANED_AT)
        return [_item(Action.PRUNE, slug, state, namespace, f"orphan since {since}")]

    def _age(self, namespace: marks.Manifest) -> str:
        try:
            since = datetime.fromisoformat(str(namespace["metadata"].get("deletionTimestamp")))
            return f"since {max(0, int((self.now - since).total_seconds()))} s"
        except (ValueError, TypeError):
            return "since a time that cannot be read"


def _item(
    action: Action, slug: str, state: AccountState | None, namespace: marks.Manifest | None, *details: str
) -> Item:
    metadata = namespace["metadata"] if namespace is not None else {}
    annotations = metadata.get("annotations") or {}
    return Item(
        action=action,
        slug=slug,
        account=state.name if state is not None else str(annotations.get(marks.ACCOUNT_NAME, "")),
        namespace=metadata.get("name") or names.namespace_of_slug(slug),
        details=tuple(detail for detail in details if detail),
        namespace_uid=metadata.get("uid", ""),
        incarnation=state.incarnation if state is not None else "",
    )


def _found(seen: observed.Observed) -> Iterable[object]:
    return (seen.quota, seen.limits, seen.role, seen.binding, *seen.service_accounts)


def _losing(todo: steps.Steps, seen: observed.Observed) -> list[str]:
    """Return who loses access: by the name in the database where the ServiceAccount tells it."""
    told = {
        account["metadata"]["name"]: (account["metadata"].get("annotations") or {}).get(marks.USER_NAME)
        for account in (*seen.service_accounts, *seen.unmarked_service_accounts)
    }
    return [f"access of {told.get(name) or name}" for name in sorted(todo.losing)]


def _differing(todo: steps.Steps) -> list[str]:
    return [f"{key} {field}" for key, fields in sorted(todo.fields.items()) for field in fields]


def _obsolete(todo: steps.Steps) -> list[str]:
    return sorted(f"{steps.key_of(one)} to be removed" for one in todo.obsolete)
