"""`spur-events up`, `env` and `down`: servers and services of one state folder, in one process.

Called by cli.py, which gives the migration and the services; what a server is, is in the other modules here.
"""

import asyncio
import os
import shlex
import signal
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from spur_events import errors, process, settings
from spur_events import postgres as border
from spur_events.local import child, console, detached, kubeconfigs
from spur_events.local import state as states
from spur_events.local.running import Running

Migrate = Callable[[dict[str, str]], object]
#: Runs the services until cancelled, and calls its second argument when they are ready.
RunServices = Callable[[dict[str, str], Callable[[], None]], Coroutine[Any, Any, None]]

_STOP_TIMEOUT_S = 60.0
_KUBECONFIG_VARIABLE = "SPUR_EVENTS_KUBERNETES_KUBECONFIG"


class AskedToStopError(Exception):
    """SIGTERM came while starting."""


def up(
    state_dir: Path | None = None,
    *,
    detach: bool = False,
    kubeconfig: Path | None = None,
    migrate: Migrate,
    run_services: RunServices,
    report: console.Report = console.on_stderr,
    hints: bool = True,
) -> None:
    """Start or resume everything in a state folder; returns when stopped, with `detach` when ready.

    Must be called from the main thread, with `detach` before any other thread exists. If everything runs there
    already, says so and returns. With `hints` it prints what to type next.

    Raises:
        SpurEventsError: what does not start, and what to do.
    """
    state = states.State(states.folder_of(state_dir))
    state.create()
    if _is_up(state, report):
        return
    if detach:
        detached.run(
            lambda report, ready: _supervise(
                state, kubeconfig, migrate, run_services, report, ready, hints=hints
            ),
            state.log,
            report,
        )
    else:
        _supervise(state, kubeconfig, migrate, run_services, report, lambda: None, hints=hints)


def environment(state_dir: Path | None = None) -> dict[str, str]:
    """Return the variables that reach what `up` started.

    Raises:
        MisconfiguredError: if nothing runs in the folder.
    """
    state = states.State(states.folder_of(state_dir))
    variables = state.variables()
    if variables is None:
        option = f" --state-dir {shlex.quote(str(state_dir))}" if state_dir else ""
        starting = state.supervisor.read() is not None
        raise errors.MisconfiguredError(
            f"'up' is still starting in {state.folder}: wait until it is ready, see {state.log}"
            if starting
            else f"nothing runs in {state.folder}: start it with 'spur-events up --detach{option}'"
        )
    return variables


def shell_exports(variables: dict[str, str]) -> str:
    """Return lines `export NAME=value` for a POSIX shell."""
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in variables.items())


def use(state_dir: Path | None = None) -> None:
    """Let this process reach what `up` started, as if `env` had been evaluated.

    Without `state_dir` nothing happens where the environment says already which servers to use, or where
    nothing runs in the default folder: the settings then come from elsewhere.

    Raises:
        MisconfiguredError: if a folder is given, here or by SPUR_EVENTS_STATE_DIR, and nothing runs there.
    """
    if state_dir is None and ("SPUR_EVENTS_NATS_URL" in os.environ or "SPUR_EVENTS_CONFIG" in os.environ):
        return
    if state_dir is not None or states.VARIABLE in os.environ:
        os.environ.update(environment(state_dir))
    else:
        os.environ.update(states.State(states.folder_of(None)).variables() or {})


def down(state_dir: Path | None = None) -> list[str]:
    """Stop what `up` started, also what a killed `up` left behind; returns lines that say what was stopped.

    Raises:
        PermanentError: if something cannot be stopped.
    """
    state = states.State(states.folder_of(state_dir))
    done: list[str] = []
    pid = state.supervisor.read()
    if pid is not None:
        try:
            os.kill(pid, signal.SIGTERM)
            if not child.wait_gone(pid, _STOP_TIMEOUT_S):
                os.kill(pid, signal.SIGKILL)
                child.wait_gone(pid, _STOP_TIMEOUT_S)
                done.append(f"'up' did not stop within {_STOP_TIMEOUT_S:.0f} s and was killed")
        except ProcessLookupError:
            pass
        except PermissionError as error:
            raise errors.PermanentError(
                f"'up' in {state.folder} (pid {pid}) belongs to another user: stop it as that user"
            ) from error
        done.append(f"stopped everything in {state.folder} (pid {pid}); its data stays")
    for left in state.leftovers():
        names = ", ".join(left.running())
        left.kill()
        done.append(f"ended what was left running: {names}")
    if state.folder.exists():
        state.withdraw()
        state.supervisor.clear()
    return done or [f"nothing runs in {state.folder}"]


def _is_up(state: states.State, report: console.Report) -> bool:
    """Tell whether another `up` has everything ready here; waits for one that is still starting."""
    told = False
    while True:
        with state.claimed() as free:
            if free:
                return False
        if state.variables() is not None:
            report(f"already running in {state.folder} (pid {state.supervisor.read()})")
            return True
        if not told:
            report(f"another 'up' is starting or stopping in {state.folder}: waiting for it")
            told = True
        time.sleep(0.1)


def _supervise(
    state: states.State,
    kubeconfig: Path | None,
    migrate: Migrate,
    run_services: RunServices,
    report: console.Report,
    tell_ready: Callable[[], None],
    *,
    hints: bool,
) -> None:
    def on_signal(_signum: int, _frame: FrameType | None) -> NoReturn:
        raise AskedToStopError

    # Before the environment says that this folder is the default.
    is_default = state.folder == states.folder_of(None)
    option = "" if is_default else f" --state-dir {shlex.quote(str(state.folder))}"
    with state.claimed() as free:
        if not free:
            raise errors.TemporaryError(f"another 'up' was faster in {state.folder}")
        state.supervisor.write(os.getpid())
        state.withdraw()
        before = signal.signal(signal.SIGTERM, on_signal)
        try:
            mine = settings.load()
            postgres, nats, control_plane = state.servers(kubeconfig, report)
            servers = [postgres, nats] + ([control_plane] if control_plane is not None else [])
            with Running(servers, report):
                cluster = kubeconfig.absolute() if control_plane is None else control_plane.kubeconfig  # type: ignore[union-attr]
                variables = {
                    "SPUR_EVENTS_DATABASE_URL": postgres.database_url(states.DATABASE),
                    "SPUR_EVENTS_NATS_URL": nats.url,
                    "SPUR_EVENTS_NATS_CREDENTIALS": str(
                        nats.credentials(mine.kubernetes.cluster, mine.nats.partitions)
                    ),
                    "KUBECONFIG": str(cluster),
                    states.VARIABLE: str(state.folder),
                }
                _create_database(postgres.url)
                os.environ.update(variables)  # settings are read from there
                migrate(variables)
                if control_plane is not None:
                    # In this process alone: what `env` prints is the administrator's.
                    os.environ[_KUBECONFIG_VARIABLE] = str(_grant(state, cluster, variables))
                report("starting the services")

                def ready() -> None:
                    state.publish(variables)
                    if hints:
                        _say_what_next(state, option, report)
                    tell_ready()

                asyncio.run(process.until_signal(run_services(variables, ready)))
        except (AskedToStopError, KeyboardInterrupt):
            report("stopped before everything was ready")
        finally:
            signal.signal(signal.SIGTERM, before)
            state.withdraw()
            state.supervisor.clear()


def _create_database(url: str) -> None:
    with border.connect(settings.Database.model_validate({"url": url})) as connection:
        known = connection.execute(
            "SELECT 1 FROM pg_database WHERE datname = %s", [states.DATABASE]
        ).fetchone()
        if known is None:
            connection.execute(f"CREATE DATABASE {states.DATABASE}".encode())


def _grant(state: states.State, admin: Path, variables: dict[str, str]) -> Path:
    """Give each service its own rights in the embedded control plane; returns the folder of their kubeconfigs."""
    database = settings.Database.model_validate({"url": variables["SPUR_EVENTS_DATABASE_URL"]})
    with border.connect(database) as connection:
        row = connection.execute("SELECT id FROM spur_events.installation").fetchone()
    if row is None:
        raise errors.PermanentError("the database has no installation id: run 'spur-events db migrate'")
    folder = state.folder / "kubeconfigs"
    kubeconfigs.install(admin, folder, row["id"])
    return folder


def _say_what_next(state: states.State, option: str, report: console.Report) -> None:
    report(f"everything is ready; its state is in {state.folder}. Next:")
    report(f'  eval "$(spur-events env{option})"')
    report("  sacctmgr -i add account name=physics grptres=cpu=64,mem=131072")
    report(f"  spur-events down{option}    stops it again, the data stays")
