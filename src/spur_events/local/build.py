"""Builds the control plane's binary from deploy/devcluster, once, into the user's cache folder.

Called by controlplane.py. Finding a Go toolchain is golang.py's business, running the binary is not ours.
"""

import contextlib
import datetime as dt
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

from spur_events import errors
from spur_events.local import console, golang

ASSETS_VARIABLE = "KUBEBUILDER_ASSETS"
_NEEDED_BYTES = 6_000_000_000
_BUILD = "1"  # changes when the flags below do
_NETWORK_SIGNS = ("dial tcp", "no such host", "i/o timeout", "connection refused", "proxyconnect", "TLS")


def cache_folder() -> Path:
    """Return where this user's built control planes are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spur-events"


def sources() -> Path:
    """Return the folder with the Go sources, which are package data."""
    return Path(str(resources.files("spur_events"))) / "deploy" / "devcluster"


def binary(report: console.Report = console.on_stderr) -> Path:
    """Return the binary, built first where needed: minutes with nothing cached, milliseconds afterwards.

    Raises:
        MisconfiguredError: no Go to be had.
        PermanentError: the build failed; with the reason and what to do.
    """
    source = sources()
    files = sorted([*source.glob("*.go"), source / "go.mod", source / "go.sum"])
    if not all(path.is_file() for path in files) or len(files) <= 2:  # noqa: PLR2004 - no .go file at all
        raise errors.MisconfiguredError(
            f"the control plane's sources are not in {source}: install spur-events anew, {golang.OTHER_WAYS}"
        )
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    with _only_one(cache / "build.lock", report):
        go = golang.find(_go_line(source / "go.mod"), cache, report)
        digest = hashlib.sha256(f"{_BUILD} {go.version}".encode())  # with the platform
        for path in files:
            digest.update(f"{path.name} {path.stat().st_size}\n".encode() + path.read_bytes())
        target = cache / f"devcluster-{digest.hexdigest()[:16]}"
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=cache, prefix="devcluster-build-") as scratch:
                for path in files:  # an installed package may be read-only
                    shutil.copyfile(path, Path(scratch) / path.name)
                _build(go, Path(scratch), target, report)
        return target


@contextlib.contextmanager
def _only_one(path: Path, report: console.Report) -> Iterator[None]:
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("waiting for another process that builds the control plane")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _go_line(go_mod: Path) -> tuple[int, ...]:
    found = re.search(r"^go (\d+(?:\.\d+)*)$", go_mod.read_text(), re.MULTILINE)
    return tuple(int(n) for n in found.group(1).split(".")) if found else ()


def _link_flags(go_mod: Path) -> str:
    """Return flags that stamp the version of the Kubernetes that go.mod names, as its releases do."""
    found = re.search(r"k8s\.io/kubernetes v(\d+)\.(\d+)\.(\d+)", go_mod.read_text())
    major, minor, patch = found.groups() if found else ("", "", "")
    now = dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    values = {
        "gitVersion": f"v{major}.{minor}.{patch}",
        "gitMajor": major,
        "gitMinor": minor,
        "gitCommit": "unknown",
        "gitTreeState": "archive",
        "buildDate": now,
    }
    return " ".join(
        ["-s", "-w"]
        + [
            f"-X {package}.{name}={value}"
            for package in ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
            for name, value in values.items()
        ]
    )


def _build(go: golang.Toolchain, scratch: Path, target: Path, report: console.Report) -> None:
    free = shutil.disk_usage(scratch).free
    if free < _NEEDED_BYTES:
        raise errors.PermanentError(
            f"{free / 1e9:.1f} GB are free in {scratch.parent}, and building the control plane needs"
            f" {_NEEDED_BYTES / 1e9:.0f} GB: make room, or choose another folder with XDG_CACHE_HOME,"
            f" {golang.OTHER_WAYS}"
        )
    report(
        f"building the development control plane (etcd, kube-apiserver, controllers; {go.version}) from source,"
        f" because no binary for these sources is in {target.parent}: 4 to 10 minutes on two cores the first time,"
        " then it is cached"
    )
    began = time.monotonic()
    total = len(_run(go, scratch, ["list", "-deps", "."], report).splitlines())
    arguments = [
        "build",
        "-v",
        "-trimpath",
        "-ldflags",
        _link_flags(scratch / "go.mod"),
        "-o",
        "devcluster",
        ".",
    ]
    _run(go, scratch, arguments, report, total=total)
    (scratch / "devcluster").replace(target)
    for path in go.caches:
        shutil.rmtree(path, ignore_errors=True)
    report(f"control plane built in {time.monotonic() - began:.0f} s: {target}")


def _run(
    go: golang.Toolchain, cwd: Path, arguments: list[str], report: console.Report, total: int = 0
) -> str:
    """Run Go; with `total`, report how many packages it has compiled."""
    with subprocess.Popen(
        [go.program, *arguments],
        cwd=cwd,
        env=go.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        end: deque[str] = deque(maxlen=40)

        def read_errors() -> None:
            compiled = 0
            for line in process.stderr or ():
                if total and re.fullmatch(r"[\w./~-]+", line.strip()):
                    compiled += 1
                    report(f"compiled {compiled} of {total} packages", compiled / total)
                else:
                    end.append(line.rstrip())

        reader = threading.Thread(target=read_errors)
        reader.start()
        try:
            output = process.stdout.read() if process.stdout is not None else ""
        except BaseException:
            process.terminate()
            raise
        finally:
            reader.join()
    if process.returncode != 0:
        raise errors.PermanentError(_explain("\n".join(end), arguments[0]))
    return output


def _explain(said: str, step: str) -> str:
    if "no space left" in said:
        advice = "the disk is full: make room, or set TMPDIR, GOCACHE and XDG_CACHE_HOME to another disk"
    elif any(sign in said for sign in _NETWORK_SIGNS):
        advice = (
            "Go modules cannot be downloaded: check the network and the proxy, or set GOPROXY to a mirror"
        )
    elif "signal: killed" in said:
        advice = "the compiler was killed, probably for lack of memory: about 3 GB are needed"
    else:
        advice = "please report this"
    last = "\n".join(said.splitlines()[-8:])
    return f"the control plane cannot be built ('go {step}' failed): {advice}, {golang.OTHER_WAYS}\n{last}"
