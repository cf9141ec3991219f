"""Real servers for the tests: shared ones for the whole run, and own ones for tests that kill them.

Used by conftest.py only; tests use its fixtures. A shared server is started by whoever needs it first (any
xdist worker, under a file lock) and belongs to a holder process, this file run as a program, that ends when the
run does: a worker must not be its parent, since servers die with their parents.
"""

import asyncio
import concurrent.futures
import contextlib
import fcntl
import gc
import importlib
import inspect
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, TypeVar

from spur_events import postgres as border
from spur_events import settings
from spur_events.local import child, server
from spur_events.local import controlplane as local_controlplane
from spur_events.local import munge as local_munge
from spur_events.local import nats as local_nats
from spur_events.local import postgres as local_postgres

_RUN_VARIABLE = "SPUR_EVENTS_TEST_RUN"
_KUBECONFIG_VARIABLE = "SPUR_EVENTS_TEST_KUBECONFIG"
_TEMPLATE = "spur_template"
_S = TypeVar("_S", bound=server.Server)


class Cluster(Protocol):
    """What tests need to know of the shared control plane."""

    @property
    def kubeconfig(self) -> Path:
        """Kubeconfig file of an administrator."""

    @property
    def kubeconfigs(self) -> Path:
        """Folder of kubeconfigs: one a part with the rights of deploy/kubernetes, and `admin.kubeconfig`."""


class SharedCluster:
    """The run's own control plane, or the cluster that SPUR_EVENTS_TEST_KUBECONFIG names."""

    def __init__(self, kubeconfig: Path, kubeconfigs: Path) -> None:
        self.kubeconfig = kubeconfig
        self.kubeconfigs = kubeconfigs


def open_run() -> None:
    """Begin a test run, in pytest's main process: its folder is what the workers inherit."""
    os.environ[_RUN_VARIABLE] = f"{os.getpid()}:{tempfile.mkdtemp(prefix='spur-events-tests-')}"


def close_run() -> None:
    """End the run that this process began: stop the shared servers, remove the folder."""
    owner, _, folder = os.environ.get(_RUN_VARIABLE, "").partition(":")
    if owner != str(os.getpid()):
        return
    del os.environ[_RUN_VARIABLE]
    for path in Path(folder).glob("*.holder"):
        pid = child.PidFile(path).read()
        if pid is not None:
            os.kill(pid, signal.SIGTERM)
            child.wait_gone(pid, 60)
    shutil.rmtree(folder, ignore_errors=True)


def _run() -> tuple[int, Path]:
    owner, _, folder = os.environ[_RUN_VARIABLE].partition(":")
    return int(owner), Path(folder)


def unique() -> str:
    """Return a short random lower-case label."""
    return f"t{secrets.token_hex(4)}"


@contextlib.contextmanager
def _locked(name: str) -> Iterator[None]:
    with (_run()[1] / f"{name}.lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _make(kind: str, folder: Path) -> server.Server:
    if kind == "postgres":
        return local_postgres.Postgres(folder, durable=False)
    # It would look for mistakes in each installation's guard, which takes a second of CPU each; that is done once,
    # in test_local_controlplane.
    without = "*,-validatingadmissionpolicy-status-controller"
    return local_controlplane.ControlPlane(folder, durable=False, controllers=without)


def _shared(kind: str) -> server.Server:
    """Return the run's server of this kind, started if nobody needed it before."""
    owner, folder = _run()
    made = _make(kind, folder / kind)
    with _locked(kind):
        if child.PidFile(folder / f"{kind}.holder").read() is None:
            subprocess.run([sys.executable, __file__, kind, str(folder), str(owner)], check=True)
    return made


def shared_postgres() -> local_postgres.Postgres:
    """Return the run's PostgreSQL."""
    made = _shared("postgres")
    assert isinstance(made, local_postgres.Postgres)
    return made


def shared_control_plane() -> Cluster:
    """Return the run's control plane, or the given one, with the services' rights in it."""
    given = os.environ.get(_KUBECONFIG_VARIABLE)
    if given:
        kubeconfig = Path(given)
    else:
        made = _shared("controlplane")
        assert isinstance(made, local_controlplane.ControlPlane)
        kubeconfig = made.kubeconfig
    folder = _run()[1] / "kubeconfigs"
    with _locked("kubeconfigs"):
        if not folder.exists():
            in_a_thread(_grant(kubeconfig, folder))
    return SharedCluster(kubeconfig, folder)


async def _grant(admin: Path, folder: Path) -> None:
    """Give the services their rights, and the test's own hands those of an administrator."""
    kubeconfigs = importlib.import_module("spur_events.local.kubeconfigs")
    client_module = importlib.import_module("spur_events.consumers.kube.client")
    hands = "spur-events-test"
    everything = [
        {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": {"name": hands, "namespace": kubeconfigs.NAMESPACE},
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": hands},
            "roleRef": {
                "apiGroup": "rbac.authorization.k8s.io",
                "kind": "ClusterRole",
                "name": "cluster-admin",
            },
            "subjects": [{"kind": "ServiceAccount", "name": hands, "namespace": kubeconfigs.NAMESPACE}],
        },
    ]
    made = folder.with_suffix(".new")
    async with client_module.Client(settings.Kubernetes(kubeconfig=admin)) as client:
        await kubeconfigs.prepare(client, admin, made)
        await kubeconfigs.write(client, everything)
        for part in ("admin", "test"):
            await kubeconfigs.save(client, admin, made / f"{part}.kubeconfig", hands)
    made.rename(folder)


@contextlib.contextmanager
def database(*, migrated: bool) -> Iterator[str]:
    """Yield the URL of a fresh database on the shared server, dropped afterwards."""
    shared = shared_postgres()
    template = _template(shared) if migrated else "template0"
    name = unique()
    with border.connect(_settings(shared.url)) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE {template}".encode())
    url = shared.database_url(name)
    if migrated:  # a clone is another installation: tests share a cluster
        with border.connect(_settings(url)) as connection:
            connection.execute("UPDATE spur_events.installation SET id = gen_random_uuid()::text")
    try:
        yield url
    finally:
        with border.connect(_settings(shared.url)) as connection:
            connection.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)".encode())


@contextlib.contextmanager
def copy_of(url: str) -> Iterator[str]:
    """Yield the URL of a copy of a database, as a backup that is restored; nobody may be connected to the source."""
    shared, name = shared_postgres(), unique()
    source = url.rpartition("/")[2]
    with border.connect(_settings(shared.url)) as connection:
        connection.execute(
            f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{source}'".encode()
        )
        connection.execute(f"CREATE DATABASE {name} TEMPLATE {source}".encode())
    try:
        yield shared.database_url(name)
    finally:
        with border.connect(_settings(shared.url)) as connection:
            connection.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)".encode())


def _settings(url: str) -> settings.Database:
    return settings.Database.model_validate({"url": url})


def _template(shared: local_postgres.Postgres) -> str:
    done = _run()[1] / "template.done"
    with _locked("template"):
        if not done.exists():
            with border.connect(_settings(shared.url)) as connection:
                connection.execute(f"DROP DATABASE IF EXISTS {_TEMPLATE} WITH (FORCE)".encode())
                connection.execute(f"CREATE DATABASE {_TEMPLATE} TEMPLATE template0".encode())
            _migrate(shared.database_url(_TEMPLATE))
            done.touch()
    return _TEMPLATE


def _migrate(url: str) -> None:
    migrate = importlib.import_module("spur_events.producers.migrate")
    result = migrate.migrate(_settings(url))
    if inspect.iscoroutine(result):
        in_a_thread(result)


def in_a_thread(work: Coroutine[Any, Any, Any]) -> None:
    """Run something asynchronous in a thread of its own: a fixture may run inside a test's event loop."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, work).result()


@contextlib.contextmanager
def own_nats(extra: Sequence[str] = ()) -> Iterator[local_nats.Nats]:
    """Yield a nats-server that only this test uses; `extra` are lines for its configuration."""
    with _own_folder() as folder:
        with _running(local_nats.Nats(folder, extra=extra)) as made:
            yield made
        gc.collect()  # a connection that was left open is told by this test, and not by one that comes later
        # Whatever the test did: streams, buckets and the server's log hold no token.
        leaks = importlib.import_module("support.leaks")  # not there where this file runs as a program
        found = leaks.files_with_tokens(folder / "jetstream", made.log)
        assert not found, f"a Kubernetes token is stored in {found}"


@contextlib.contextmanager
def own_munge() -> Iterator[local_munge.Munge]:
    """Yield a munged that only this test uses, with a key of its own; every user may reach it."""
    folder = Path(tempfile.mkdtemp(prefix="spur-events-munge-"))
    folder.chmod(0o711)
    try:
        with _running(local_munge.Munge(folder / "munged")) as made:
            yield made
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def own_postgres() -> Iterator[local_postgres.Postgres]:
    """Yield a PostgreSQL that only this test uses."""
    with _own_folder() as folder, _running(local_postgres.Postgres(folder, durable=False)) as made:
        yield made


@contextlib.contextmanager
def _own_folder() -> Iterator[Path]:
    folder = _run()[1] / unique()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _running(made: _S) -> Iterator[_S]:
    made.start()
    try:
        yield made
    finally:
        made.kill()


def _hold(kind: str, folder: Path, owner: int) -> int:
    """Start the server in a process of its own; returns when it is ready, with the exit code."""
    reading, writing = os.pipe()
    if os.fork() != 0:
        os.close(writing)
        with os.fdopen(reading) as stream:
            answer = stream.read()
        if answer != "ready":
            sys.stderr.write(f"{answer or f'the holder of {kind} ended'}\n")
        return int(answer != "ready")
    os.close(reading)
    os.setsid()
    with (folder / f"{kind}.holder.log").open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    with os.fdopen(writing, "w") as stream:
        held = _make(kind, folder / kind)
        try:
            held.start()
        except BaseException as error:
            stream.write(f"{type(error).__name__}: {error}")
            raise
        child.PidFile(folder / f"{kind}.holder").write(os.getpid())
        stream.write("ready")
    try:
        _wait_for_end(owner)
    finally:
        held.stop()
        if child.identity(owner) is None:  # nobody else will tidy up
            shutil.rmtree(folder, ignore_errors=True)
    return 0


def _wait_for_end(owner: int) -> None:
    """Return when the run's main process ends, or asks us to end."""

    class AskedToEnd(Exception):  # noqa: N818 - not an error
        pass

    def on_signal(_signum: int, _frame: FrameType | None) -> None:
        raise AskedToEnd

    with contextlib.suppress(AskedToEnd, ProcessLookupError):
        signal.signal(signal.SIGTERM, on_signal)
        handle = os.pidfd_open(owner)
        poller = select.poll()
        poller.register(handle, select.POLLIN)
        poller.poll()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


if __name__ == "__main__":
    sys.exit(_hold(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
