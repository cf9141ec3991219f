"""The member guard in the cluster: looks at it, mends it, and has the API server prove that it is enforced.

`apply` keeps it (`Keeper`, by way of `rights.Reporter`); the kubeconfig responder and `resync` only look. What it
refuses, `plan.guard` says.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from spur_events import errors as base
from spur_events import jetstream, process, retrying, settings
from spur_events.consumers.kube import apply, errors, kinds
from spur_events.consumers.kube import client as kube
from spur_events.consumers.plan import diff, guard, marks, observed
from spur_events.schemas import subjects
from spur_events.schemas.access import GuardRequest, GuardState, PartReport
from spur_events.schemas.resync import WORK, Action, Item
from spur_events.schemas.status import AccountStatus, Phase

log = logging.getLogger(__name__)

_GROUP = f"/apis/{guard.GROUP}/v1"
_UNSUPPORTED = "the cluster has no ValidatingAdmissionPolicy: it needs Kubernetes 1.30 or later"
#: Namespaces that are tried for a proof: some may be on their way out.
_NAMESPACES = 5
_OURS = frozenset({Phase.APPLIED, Phase.PENDING, Phase.INVALID, Phase.DEGRADED, Phase.CLOSED, Phase.PAUSED})
#: A server takes a new policy up within about a second (tried on 1.37); this is for slow ones.
_PROOF_ATTEMPTS = 20
_PROOF_PAUSE_S = 0.5
#: Seconds that apply may take to mend the guard: two looks, two writes, and the proof.
_ANSWER_S = 30.0
#: Seconds in which one must be there to be asked: after a start of all parts together, resync may be the first.
_LISTENS_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Found:
    """One of the two objects: as it should be, as it is, and where these differ."""

    manifest: marks.Manifest
    live: marks.Manifest | None
    foreign: bool
    differing: tuple[str, ...]

    @property
    def trouble(self) -> str:
        """What is wrong with it, in words; empty if nothing is."""
        where = f"{self.manifest['kind']} {self.manifest['metadata']['name']}"
        if self.live is None:
            return f"{where} is not there"
        if self.foreign:
            return f"{where} does not carry this installation's mark: it is not touched; remove or rename it"
        return f"{where} differs: {', '.join(self.differing)}" if self.differing else ""


async def look(client: kube.Client, installation: str) -> tuple[Found, ...]:
    """Read policy and binding, and compare them with what they should be; nothing is written.

    Raises:
        NotFoundError: if the cluster does not know such objects.
        ForbiddenError, UnreachableError and the others of `kube.errors`: if it cannot be told.
    """
    wanted = guard.manifests(installation)
    live = await process.together(
        *(apply.get(client, one["kind"], one["metadata"]["name"]) for one in wanted)
    )
    if all(one is None for one in live) and not await _is_known(client):
        raise errors.NotFoundError(f"{client.address}: {_UNSUPPORTED}")
    return tuple(_compared(one, found, installation) for one, found in zip(wanted, live, strict=True))


async def state(client: kube.Client, installation: str) -> tuple[GuardState, str]:
    """Return whether the guard is in the cluster, unchanged and whole, and what is wrong otherwise. Writes nothing.

    Raises:
        SpurEventsError: if it cannot be told (`look`).
    """
    try:
        found = await look(client, installation)
    except errors.NotFoundError:
        return GuardState.UNSUPPORTED, _UNSUPPORTED
    return _judged(found)


async def items(client: kube.Client, installation: str) -> list[Item]:
    """Return what a resync has to say about the guard; empty if it is as it should be, or cannot be had."""
    try:
        found = await look(client, installation)
    except errors.NotFoundError:
        return []  # `status` says so; there is nothing to be done about it here
    except errors.ForbiddenError as error:
        return [_item(Action.CONFLICT, f"the member guard cannot be looked at: {error}")]
    return [_item(_action(one), one.trouble) for one in found if one.trouble]


async def mended(
    bus: jetstream.Bus, cluster: str, installation: str, planned: Sequence[Item]
) -> dict[int, Item]:
    """Have apply mend the guard if that is planned; returns the items about it with their outcomes, by number."""
    mine = {
        number: item
        for number, item in enumerate(planned)
        if item.action in WORK and not item.slug and not item.outcome
    }
    if not mine:
        return {}
    question = GuardRequest(installation=installation)
    try:
        answer = await retrying.within(
            "have the member guard mended",
            _LISTENS_S,
            lambda: bus.ask(subjects.guard(cluster), question, PartReport, _ANSWER_S),
            unless=(base.UnreachableError,),
        )
    except base.TemporaryError as error:
        ended = {"outcome": f"no apply process mended it: {error}", "failed": True}
    else:
        fine = answer.guard is GuardState.IN_FORCE
        text = f"{answer.guard}{f': {answer.message}' if answer.message else ''}"
        ended = {"outcome": text, "failed": not fine, "carried_out": fine}
    return {number: item.model_copy(update=ended) for number, item in mine.items()}


def _action(one: Found) -> Action:
    if one.foreign:
        return Action.CONFLICT
    return Action.CREATE if one.live is None else Action.CHANGE


def _item(action: Action, detail: str) -> Item:
    """An item about no account and no namespace: the detail names the object."""
    return Item(action=action, slug="", namespace="", details=(detail,))


class Keeper:
    """Keeps the guard of one installation in one cluster as it should be."""

    def __init__(
        self, config: settings.Settings, bus: jetstream.Bus, client: kube.Client, installation: str
    ) -> None:
        self._cluster = config.kubernetes.cluster
        self._bus = bus
        self._client = client
        self._installation = installation

    async def keep(self) -> tuple[GuardState, str]:
        """Look, write what differs, and have it proven; returns how it stands. Raises nothing that a server says."""
        try:
            return await self._keep()
        except errors.NotFoundError:
            return GuardState.UNSUPPORTED, _UNSUPPORTED
        except (*errors.ANSWERS, base.TemporaryError) as error:  # of the API server, or of NATS
            return GuardState.MISSING, f"the guard cannot be looked at or written: {error}"

    async def _keep(self) -> tuple[GuardState, str]:
        found = await look(self._client, self._installation)
        for one in found:
            if one.foreign or not one.trouble:
                continue
            log.warning("member guard differs", extra=_fields(one))
            await apply.apply(
                self._client, one.manifest, uid=one.live["metadata"]["uid"] if one.live else None
            )
        if any(one.trouble for one in found):
            found = await look(self._client, self._installation)
        judged, message = _judged(found)
        return await self._proven() if judged is GuardState.IN_FORCE else (judged, message)

    async def _proven(self) -> tuple[GuardState, str]:
        """Have the API server refuse what the guard always refuses: it may be there and not be enforced."""
        for attempt in range(_PROOF_ATTEMPTS):
            if attempt:
                await asyncio.sleep(_PROOF_PAUSE_S)
            enforced = await self._is_enforced()
            if enforced is None:
                return GuardState.IN_FORCE, "there is no namespace yet in which it could be tried"
            if enforced:
                return GuardState.IN_FORCE, ""
        return GuardState.MISSING, (
            "the API server has the guard but does not enforce it: see that its admission plugin"
            " ValidatingAdmissionPolicy is enabled"
        )

    async def _is_enforced(self) -> bool | None:
        """Whether a server refuses; None if there is no namespace to try it in."""
        mark = f"'{guard.name(self._installation)}'"
        async with contextlib.aclosing(self._namespaces()) as namespaces:
            async for namespace in namespaces:
                try:
                    await self._client.request(
                        "POST",
                        kinds.collection("ServiceAccount", namespace),
                        query={"dryRun": "All"},
                        body={
                            "apiVersion": "v1",
                            "kind": "ServiceAccount",
                            "metadata": {"name": guard.PROBE, "namespace": namespace},
                        },
                    )
                except (errors.NotFoundError, errors.NamespaceTerminatingError):
                    continue
                except errors.ForbiddenError as error:
                    if mark in str(error):
                        return True
                    raise  # a right is missing, or somebody else's policy was first
                return False
        return None

    async def _namespaces(self) -> AsyncGenerator[str, None]:
        tried = 0
        prefix = f"{self._cluster}."
        async for _, entry in self._bus.each(subjects.STATUS_BUCKET, AccountStatus, prefix):
            if isinstance(entry, jetstream.Entry) and entry.value.applied and entry.value.phase in _OURS:
                yield entry.value.namespace
                tried += 1
                if tried == _NAMESPACES:
                    return


def _judged(found: tuple[Found, ...]) -> tuple[GuardState, str]:
    trouble = "; ".join(one.trouble for one in found if one.trouble)
    return (GuardState.MISSING, trouble) if trouble else (GuardState.IN_FORCE, "")


def _compared(manifest: marks.Manifest, live: marks.Manifest | None, installation: str) -> Found:
    foreign = live is not None and not guard.is_ours(live, installation)
    differing = diff.differs(manifest, live) if live is not None else []
    return Found(manifest=manifest, live=live, foreign=foreign, differing=tuple(differing))


async def _is_known(client: kube.Client) -> bool:
    """Whether the API server has the guard's kinds: an absent object and an absent kind are both a 404."""
    try:
        found = await client.request("GET", _GROUP)
    except errors.NotFoundError:
        return False
    plural = kinds.KINDS[guard.POLICY].plural
    return any(one.get("name") == plural for one in found.get("resources") or [])


def _fields(one: Found) -> dict[str, object]:
    return {
        "object": f"{one.manifest['kind']} {one.manifest['metadata']['name']}",
        "trouble": one.trouble,
        "also_written_by": observed.other_managers(one.live) if one.live is not None else (),
    }
