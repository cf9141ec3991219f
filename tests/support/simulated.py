"""A cluster as a dictionary: carries out what a plan asks for, as `consumers.converge` does it.

For tests of the planner. It has what decides: names, marks, our own fields whole, other people's labels kept.
"""

import copy
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from spur_events import settings
from spur_events.consumers.plan import desired, marks, observed, pruning, resync, steps
from spur_events.schemas import names
from spur_events.schemas.accounts import AccountState
from spur_events.schemas.resync import WORK, Action, Item
from spur_events.schemas.status import AccountStatus

Key = tuple[str, str, str]
CONFIG = settings.Quota()
OURS = "ours"


class Cluster:
    """All objects, by kind, namespace and name."""

    def __init__(self) -> None:
        self.objects: dict[Key, dict[str, Any]] = {}
        self._made = 0

    def put(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Write an object: our fields whole, others' labels and annotations left alone."""
        made = copy.deepcopy(dict(manifest))
        old = self.objects.get(_key(made))
        self._made += 1
        for part, own in (("labels", marks.OWN_LABELS), ("annotations", marks.OWN_ANNOTATIONS)):
            kept = {
                k: v for k, v in ((old or {}).get("metadata", {}).get(part) or {}).items() if k not in own
            }
            made["metadata"][part] = {**kept, **(made["metadata"].get(part) or {})}
        uid = old["metadata"]["uid"] if old else f"uid-{self._made}"
        made["metadata"] |= {"uid": uid, "resourceVersion": str(self._made)}
        self.objects[_key(made)] = made
        return made

    def remove(self, kind: str, namespace: str, name: str) -> None:
        """Delete an object; a namespace with all that is in it."""
        self.objects.pop((kind, namespace, name), None)
        if kind == "Namespace":
            for key in [key for key in self.objects if key[1] == name]:
                del self.objects[key]

    def get(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        return self.objects.get((kind, namespace, name))

    def project(self, state: AccountState) -> None:
        """Make an account's objects as they should be."""
        wanted = desired.objects(state, CONFIG)
        for manifest in (wanted.namespace, *steps.members_of(wanted)):
            self.put(manifest)

    def live(self) -> resync.Live:
        """Return what a resync lists."""
        inside: dict[str, list[dict[str, Any]]] = {}
        namespaces = []
        for (kind, namespace, name), found in self.objects.items():
            managed = (found["metadata"].get("labels") or {}).get(marks.MANAGED_BY) == marks.FIELD_MANAGER
            if kind == "Namespace" and (managed or name.startswith(names.NAMESPACE_PREFIX)):
                namespaces.append(found)
            elif kind != "Namespace" and managed:
                inside.setdefault(namespace, []).append(found)
        return resync.Live(
            namespaces=tuple(copy.deepcopy(namespaces)),
            inside={name: tuple(copy.deepcopy(found)) for name, found in inside.items()},
        )

    def observe(self, slug: str) -> observed.Observed:
        """Return what the writer of an account reads."""
        name = names.namespace_of_slug(slug)
        namespace = self.get("Namespace", "", name)
        if namespace is None:
            return observed.Observed(namespace=None)
        inside = [found for key, found in self.objects.items() if key[1] == name]
        return observed.collect(copy.deepcopy(namespace), copy.deepcopy(inside), OURS, slug)

    def handle(
        self,
        item: Item,
        states: Mapping[str, AccountState],
        statuses: Mapping[str, AccountStatus],
        *,
        now: datetime,
        grace_s: float,
    ) -> None:
        """Do what the writer does about an item that is work."""
        assert item.action in WORK
        state = states[item.slug]
        wanted = desired.objects(state, CONFIG)
        todo = steps.compare(wanted, state, statuses.get(item.slug), self.observe(item.slug))
        if isinstance(todo, steps.Findings):
            return
        if item.action is Action.PRUNE and todo.nothing and not todo.paused and todo.namespace is not None:
            why = pruning.objection(
                state,
                todo.namespace,
                planned_uid=item.namespace_uid,
                planned_incarnation=item.incarnation,
                now=now,
                grace_s=grace_s,
            )
            assert not why
            self.remove("Namespace", "", item.namespace)
            return
        if todo.write_namespace:
            self.put(wanted.namespace)
        for name in todo.losing:
            if todo.paused or name not in {one["metadata"]["name"] for one in wanted.service_accounts}:
                continue
            self.remove("ServiceAccount", item.namespace, name)
        for one in todo.obsolete:
            self.remove(one["kind"], item.namespace, one["metadata"]["name"])
        for manifest in (*todo.changed, *([todo.reduced] if todo.reduced else [])):
            self.put(manifest)


def _key(manifest: Mapping[str, Any]) -> Key:
    metadata = manifest["metadata"]
    return manifest["kind"], metadata.get("namespace", ""), metadata["name"]
