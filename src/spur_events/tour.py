"""`spur-events demo`: the whole job done once on real parts, shown step by step, and checked.

It types what an administrator types, as processes, and looks at the cluster as kubectl does. The time shown for
a step is from the commit in the database (the outbox row's own time) to the moment when the cluster was as wanted.
"""

import asyncio
import contextlib
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from spur_events import errors, jetstream, settings
from spur_events.consumers.kube import apply
from spur_events.consumers.kube import client as kube
from spur_events.consumers.plan import marks, observed
from spur_events.local import supervisor
from spur_events.schemas import names, subjects
from spur_events.schemas.events import AccountChanged

_ACCOUNT = "physics"
_NAMESPACE = names.namespace(_ACCOUNT)
_PATIENCE_S = 60.0
_POLL_S = 0.005

Seen = Callable[[kube.Client], Awaitable[bool]]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One command, what it should bring about in the cluster, and what to show afterwards."""

    title: str
    command: Sequence[str]
    seen: Seen
    show: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Try:
    """What a member types: it must work, or `refused` be told."""

    title: str
    commands: Sequence[Sequence[str]]
    refused: bool = False


def run(
    state_dir: Path | None, *, keep: bool, migrate: supervisor.Migrate, run_services: supervisor.RunServices
) -> None:
    """Run the tour; everything that it started is stopped at the end unless `keep`.

    Raises:
        TimedOutError: if a step did not come about; it names the step.
        SpurEventsError: if something does not start, with what to do.
    """
    with _folder(state_dir) as folder:
        _say("Starting PostgreSQL, NATS, a Kubernetes control plane and spur-events on this machine.")
        supervisor.up(folder, detach=True, migrate=migrate, run_services=run_services, hints=False)
        try:
            os.environ.update(supervisor.environment(folder))
            # The commands of this installation first, so that the tour shows them and no others.
            os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
            # Alice's files: her kubeconfig, and the token that is kept for it.
            os.environ["XDG_CACHE_HOME"] = str(folder / "demo-cache")
            kubeconfig = folder / "demo-alice.kubeconfig"
            kubeconfig.unlink(missing_ok=True)
            asyncio.run(_tour(settings.load(), _steps(str(kubeconfig))))
        finally:
            if keep:
                _say(f"Left running in {folder}; stop it with: spur-events down --state-dir {folder}")
            else:
                supervisor.down(folder)
                _say("Stopped everything that the demo started.")


@contextlib.contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    """Use the folder that was asked for, or a fresh one that goes away: a tour must not touch other data."""
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="spur-events-demo-", ignore_cleanup_errors=True) as fresh:
        yield Path(fresh)


async def _tour(config: settings.Settings, steps: "Sequence[Step | Try]") -> None:
    async with (
        kube.Client(config.kubernetes) as client,
        jetstream.connect(config.nats, "spur-events demo") as bus,
    ):
        if await apply.get(client, "Namespace", _NAMESPACE) is not None:
            raise errors.RefusedError(
                f"the demo works on account {_ACCOUNT!r}, which exists here already; use a fresh --state-dir"
            )
        times = []
        for step in steps:
            if isinstance(step, Try):
                await _try(step)
            else:
                times.append((step.title, await _perform(step, client, bus)))
    _say("\nFrom commit in the database to applied in the cluster:")
    for title, seconds in times:
        _say(f"  {title:<18} {seconds * 1000:6.0f} ms")
    _say("\nEverything was as it should be.")


async def _perform(step: Step, client: kube.Client, bus: jetstream.Bus) -> float:
    """Type the command, wait for its effect, show it; return seconds from commit to effect."""
    _say(f"\n== {step.title}")
    before = await bus.last_sequence(subjects.EVENTS_STREAM)
    watching = asyncio.create_task(_watch(step, client))
    try:
        await _type(step.command)
        applied_at = await watching
    finally:
        watching.cancel()
    await _type(step.show)
    changes = [
        change
        for event in await bus.read_stream(subjects.EVENTS_STREAM, subjects.ALL_CHANGES, AccountChanged)
        for change in event.changes
    ]
    if await bus.last_sequence(subjects.EVENTS_STREAM) == before or not changes:
        raise errors.PermanentError(f"demo: {step.title}: no event was published")
    seconds = applied_at - changes[-1].at.timestamp()
    _say(f"   applied {seconds * 1000:.0f} ms after the commit")
    return seconds


async def _try(step: Try) -> None:
    _say(f"\n== {step.title}")
    for command in step.commands:
        await _type(command, refused=step.refused)


async def _watch(step: Step, client: kube.Client) -> float:
    try:
        async with asyncio.timeout(_PATIENCE_S):
            while not await step.seen(client):
                await asyncio.sleep(_POLL_S)
            return time.time()
    except TimeoutError:
        raise errors.TimedOutError(
            f"demo: {step.title}: the cluster was not as wanted {_PATIENCE_S:.0f} s after '{' '.join(step.command)}';"
            " 'spur-events status' and up.log in the state folder say more (run the demo with --keep)"
        ) from None


async def _type(command: Sequence[str], *, refused: bool = False) -> None:
    _say(f"$ {shlex.join(command)}")
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    output, _ = await process.communicate()
    for line in output.decode().splitlines():
        _say(f"  {line}")
    if refused and process.returncode == 0:
        raise errors.PermanentError(f"demo: '{' '.join(command)}' should have been refused")
    if process.returncode != 0 and not refused:
        raise errors.PermanentError(f"demo: '{' '.join(command)}' ended with exit code {process.returncode}")


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def _quota_is(client: kube.Client, wanted: dict[str, str]) -> bool:
    quota = await apply.get(client, "ResourceQuota", marks.QUOTA_NAME, _NAMESPACE)
    return quota is not None and quota["spec"]["hard"] == wanted and observed.quota_in_force(quota)


async def _added(client: kube.Client) -> bool:
    wanted = {"requests.cpu": "64", "requests.memory": "131072M", "requests.amd.com/gpu": "8"}
    binding = await apply.get(client, "RoleBinding", marks.BINDING_NAME, _NAMESPACE)
    return binding is not None and await _quota_is(client, wanted)


async def _joined(client: kube.Client) -> bool:
    return await _may_alice(client) and await _has_alice(client)


async def _changed(client: kube.Client) -> bool:
    wanted = {"requests.cpu": "32", "requests.memory": "131072M", "requests.amd.com/gpu": "8"}
    return await _quota_is(client, wanted)


async def _left(client: kube.Client) -> bool:
    return not await _may_alice(client) and not await _has_alice(client)


async def _closed(client: kube.Client) -> bool:
    binding = await apply.get(client, "RoleBinding", marks.BINDING_NAME, _NAMESPACE)
    return binding is None and await _quota_is(client, {"pods": "0"})


async def _has_alice(client: kube.Client) -> bool:
    return await apply.get(client, "ServiceAccount", names.service_account("alice"), _NAMESPACE) is not None


async def _may_alice(client: kube.Client) -> bool:
    """Ask the API server itself whether alice's ServiceAccount may create pods in the account's namespace."""
    review = await client.request(
        "POST",
        "/apis/authorization.k8s.io/v1/subjectaccessreviews",
        body={
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {
                "user": f"system:serviceaccount:{_NAMESPACE}:{names.service_account('alice')}",
                "resourceAttributes": {"namespace": _NAMESPACE, "verb": "create", "resource": "pods"},
            },
        },
    )
    return bool(review["status"]["allowed"])


_OURS = f"{marks.MANAGED_BY}={marks.FIELD_MANAGER}"
_GET = ("kubectl", "get", "-n", _NAMESPACE)


def _steps(kubeconfig: str) -> "Sequence[Step | Try]":
    """Return what is typed; `kubeconfig` is where alice's goes."""
    kubectl = ("kubectl", "--kubeconfig", kubeconfig)
    return (
        Step(
            title="account added",
            command=(
                *("sacctmgr", "-i", "add", "account", f"name={_ACCOUNT}", "description=Physics"),
                "grptres=cpu=64,mem=131072,gres/gpu=8",
            ),
            seen=_added,
            show=(
                *("kubectl", "get", "ns,resourcequota,limitrange,role,rolebinding,serviceaccount", "-A"),
                *("-l", _OURS),
            ),
        ),
        Step(
            title="member added",
            command=("sacctmgr", "-i", "add", "user", "name=alice", f"account={_ACCOUNT}"),
            seen=_joined,
            show=(*_GET, "serviceaccount,rolebinding", "-o", "wide", "-l", _OURS),
        ),
        Try(
            title="alice works",
            commands=(
                # As the administrator; she herself leaves --user out.
                ("spur-events", "kubeconfig", "--user", "alice", "-o", kubeconfig),
                (*kubectl, "create", "configmap", "results", "--from-literal=answer=42"),
                (*kubectl, "get", "configmap", "results"),
            ),
        ),
        Try(
            title="alice in another namespace",
            commands=((*kubectl, "get", "pods", "-n", "default"),),
            refused=True,
        ),
        Step(
            title="quota changed",
            command=("sacctmgr", "-i", "modify", "account", f"name={_ACCOUNT}", "set", "grptres=cpu=32"),
            seen=_changed,
            show=(*_GET, "resourcequota"),
        ),
        Step(
            title="member removed",
            command=("sacctmgr", "-i", "delete", "user", "name=alice", f"account={_ACCOUNT}"),
            seen=_left,
            show=(*_GET, "serviceaccount,rolebinding", "-o", "wide", "-l", _OURS),
        ),
        Try(title="alice tries again", commands=((*kubectl, "get", "configmap", "results"),), refused=True),
        Step(
            title="account deleted",
            command=("sacctmgr", "-i", "delete", "account", f"name={_ACCOUNT}"),
            seen=_closed,
            show=("spur-events", "status"),
        ),
    )
