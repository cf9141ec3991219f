"""What is shipped is what is tested: sdist and wheel are built once, looked into, installed and run."""

import configparser
import fcntl
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
#: The folders whose Python files are the package, and where the package has them.
SOURCES = {
    "src/spur_events": "spur_events",
    "producers": "spur_events/producers",
    "consumers": "spur_events/consumers",
    "schemas": "spur_events/schemas",
}
DATA = (
    "spur_events/py.typed",
    "spur_events/deploy/nats/topology.json",
    "spur_events/deploy/devcluster/go.mod",
    "spur_events/deploy/devcluster/go.sum",
)

IMPORT_ALL = """
import importlib, json, pathlib, pkgutil, sys
target = pathlib.Path(sys.argv[1])
import spur_events
names = ["spur_events"] + [m.name for m in pkgutil.walk_packages(spur_events.__path__, "spur_events.")]
for name in names:
    module = importlib.import_module(name)
    assert pathlib.Path(module.__file__).is_relative_to(target), f"{name} is {module.__file__}"
print(json.dumps(names))
"""


class Built(NamedTuple):
    """The two archives, and the wheel installed."""

    sdist: Path
    wheel: Path
    installed: Path


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build and install once for all xdist workers, whose temporary folders share a parent."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    folder = folder / "packaging"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            _build(folder)
            (folder / "done").touch()
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    (wheel,) = (folder / "dist").glob("*.whl")
    return Built(sdist, wheel, folder / "installed")


def _build(folder: Path) -> None:
    # A copy of what git knows: setuptools writes into the folder that it builds in, and other tests run there.
    listed = _run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]).split("\0")
    source = folder / "source"
    for name in filter(None, listed):
        origin, copy = ROOT / name, source / name
        if not os.path.lexists(origin):
            continue
        copy.parent.mkdir(parents=True, exist_ok=True)
        if origin.is_symlink():
            copy.symlink_to(origin.readlink())
        else:
            copy.write_bytes(origin.read_bytes())
            copy.chmod(origin.stat().st_mode)
    # The wheel is made from the sdist, as an index's users get it. No isolation: nothing is downloaded.
    _run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), "."], cwd=source)
    (wheel,) = (folder / "dist").glob("*.whl")
    _run(
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"),
            *("--disable-pip-version-check", "--target", str(folder / "installed"), str(wheel)),
        ]
    )


def _run(command: list[str], cwd: Path = ROOT, **variables: str) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "COV_"))}
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**environment, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    return done.stdout


def _files(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def _tracked(folder: str) -> list[PurePosixPath]:
    listed = _run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", f"{folder}/"]
    ).split("\0")
    return [
        PurePosixPath(name)
        for name in listed
        if name and (ROOT / name).is_file() and not (ROOT / name).is_symlink()
    ]


def test_the_wheel_owns_one_global_name(built: Built) -> None:
    tops = {name.partition("/")[0] for name in _files(built.wheel)}
    assert tops == {"spur_events", "spur_events-0.1.0.dist-info"}


def test_the_wheel_has_every_module_and_data_file(built: Built) -> None:
    shipped = _files(built.wheel)
    wanted = {
        f"{package}/{path.relative_to(folder)}"
        for folder, package in SOURCES.items()
        for path in _tracked(folder)
        if path.suffix in {".py", ".pyi", ".sql"}
    }
    wanted |= {f"spur_events/{path}" for path in _tracked("deploy/devcluster") if path.suffix == ".go"}
    assert len(wanted) > 80, "the list itself is wrong"
    assert wanted | set(DATA) <= shipped, sorted((wanted | set(DATA)) - shipped)


def test_the_wheel_has_nothing_that_belongs_elsewhere(built: Built) -> None:
    odd = [
        name
        for name in _files(built.wheel)
        if "__pycache__" in name or "/tests/" in name or name.endswith((".pyc", ".orig"))
    ]
    assert odd == []


def test_the_archives_carry_the_licence(built: Built) -> None:
    licence = (ROOT / "LICENSE").read_bytes()
    with zipfile.ZipFile(built.wheel) as archive:
        assert archive.read("spur_events-0.1.0.dist-info/licenses/LICENSE") == licence
    with tarfile.open(built.sdist) as source:
        member = source.extractfile("spur_events-0.1.0/LICENSE")
        assert member is not None
        assert member.read() == licence


def test_the_console_scripts_exist(built: Built) -> None:
    points = configparser.ConfigParser()
    points.read(built.installed / "spur_events-0.1.0.dist-info" / "entry_points.txt")
    assert dict(points["console_scripts"]) == {
        "spur-events": "spur_events.cli:main",
        "sacctmgr": "spur_events.producers.sacctmgr.main:main",
    }
    for name in points["console_scripts"]:
        program = built.installed / "bin" / name
        said = _run([str(program), "--help"], cwd=built.installed, PYTHONPATH=str(built.installed))
        assert "Usage" in said


def test_every_module_imports_from_the_wheel(built: Built, tmp_path: Path) -> None:
    said = _run(
        [sys.executable, "-W", "error", "-c", IMPORT_ALL, str(built.installed)],
        cwd=tmp_path,
        PYTHONPATH=str(built.installed),
        PYTHONSAFEPATH="1",
    )
    names = set(json.loads(said))
    modules = {name for name in _files(built.wheel) if name.endswith(".py")}
    wanted = {name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in modules}
    assert names == wanted, "modules that walk_packages does not find lack an __init__.py above them"


def test_the_unit_tests_pass_on_the_wheel(built: Built, tmp_path: Path) -> None:
    plugin = tmp_path / "shows_origin.py"
    plugin.write_text(
        "import pathlib, sys, spur_events\n"
        f"assert pathlib.Path(spur_events.__file__).is_relative_to({str(built.installed)!r}), spur_events.__file__\n"
        "def pytest_unconfigure():\n"
        "    for name, module in sorted(sys.modules.items()):\n"
        "        if name.partition('.')[0] == 'spur_events' and getattr(module, '__file__', None):\n"
        f"            assert pathlib.Path(module.__file__).is_relative_to({str(built.installed)!r}), name\n"
        "    print('all from the wheel')\n"
    )
    pytest_command = str(Path(sys.executable).parent / "pytest")
    said = _run(
        # test_docs reads the repository's documents, not the package.
        [
            *(pytest_command, "-q", "-p", "shows_origin", "-p", "no:cacheprovider", "-p", "no:xdist"),
            *("tests/unit", "--ignore=tests/unit/test_docs.py"),
        ],
        PYTHONPATH=f"{built.installed}{os.pathsep}{tmp_path}",
    )
    assert "all from the wheel" in said
    assert " passed" in said
