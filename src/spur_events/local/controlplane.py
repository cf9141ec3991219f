"""A real Kubernetes control plane on loopback: etcd, kube-apiserver and kube-controller-manager.

Used by the supervisor and the tests. The binary comes from build.py, or from the folder KUBEBUILDER_ASSETS.
"""

import base64
import json
import os
import secrets
import signal
import time
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

from spur_events import errors
from spur_events.local import build, child, console, kubeapi
from spur_events.local import folder as folders

_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 10.0
_PORT_ATTEMPTS = 5
# The API server makes its certificate itself, for one year.
_RENEW_CERTIFICATE_AFTER_S = 300 * 86400
_P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # FIPS 186-4, D.1.2.3
# Anonymous requests learn whether it is healthy, and nothing else.
_AUTHENTICATION = {
    "apiVersion": "apiserver.config.k8s.io/v1",
    "kind": "AuthenticationConfiguration",
    "anonymous": {
        "enabled": True,
        "conditions": [{"path": path} for path in ("/livez", "/readyz", "/healthz")],
    },
}


class ControlPlane:
    """The three servers together, with their state below `folder`."""

    name = "control plane"

    def __init__(
        self,
        folder: Path,
        *,
        durable: bool = True,
        report: console.Report = console.on_stderr,
        extra: Sequence[str] = (),
        controllers: str = "*",
    ) -> None:
        """`extra` are more flags of kube-apiserver, `controllers` is that flag of kube-controller-manager."""
        self.folder = folder
        self.etcd = child.Child(folder, "etcd")
        self.api_server = child.Child(folder, "kube-apiserver")
        self.controller_manager = child.Child(folder, "kube-controller-manager")
        self.log = self.api_server.log
        self._durable = durable
        self._report = report
        self._extra = tuple(extra)
        self._controllers = controllers
        self._port_file = folder / "port"
        self._token_file = folder / "admin-token"
        self._certificate = folder / "certificates" / "apiserver.crt"

    @property
    def kubeconfig(self) -> Path:
        """Kubeconfig file of an administrator; written by `start`."""
        return self.folder / "kubeconfig"

    @property
    def pid(self) -> int | None:
        """The pid of kube-apiserver while all three run."""
        return self.api_server.pid if all(part.pid is not None for part in self._parts()) else None

    @property
    def port(self) -> int:
        """The TCP port of the API server on 127.0.0.1; the same after each restart."""
        return folders.port(self._port_file)

    @property
    def url(self) -> str:
        """Address of the API server."""
        return f"https://127.0.0.1:{self.port}"

    @property
    def api(self) -> kubeapi.Api:
        """Requests as the administrator."""
        return kubeapi.Api(self.port, self._certificate, folders.secret(self._token_file))

    def start(self) -> None:
        """Start what does not run; returns when requests are answered and the controllers work.

        Raises:
            PermanentError: if one of them ends instead, with the end of its log.
            TimedOutError: if they are not ready in time, likewise.
        """
        folders.make_private(self.folder)
        for part in self._parts():
            if not part.is_own:  # left behind by another process: it may be about to end
                part.kill()
        self._write_files()
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            new_port = not self._port_file.exists()
            try:
                self._start_parts()
            except errors.SpurEventsError:
                taken = self.api_server.pid is None and not folders.is_free(self.port)
                self.kill()
                if not (taken and new_port) or attempt == _PORT_ATTEMPTS:
                    raise
                self._port_file.unlink()  # somebody was faster; nobody knows this address yet
            except BaseException:
                self.kill()
                raise
            else:
                return

    def stop(self) -> None:
        """Stop all three; by force after some seconds."""
        # The API server would wait for open watches: nothing is lost by ending it, all it knows is in etcd.
        self.controller_manager.kill()
        self.api_server.stop(signal.SIGTERM, 1)
        self.etcd.stop(signal.SIGTERM, _STOP_TIMEOUT_S)

    def kill(self) -> None:
        """End all three by SIGKILL, also those that a killed parent left behind."""
        for part in (self.controller_manager, self.api_server, self.etcd):
            part.kill()

    def running(self) -> list[str]:
        """Names of those that run."""
        parts = (self.etcd, self.api_server, self.controller_manager)
        return [part.name for part in parts if part.pid is not None]

    def _parts(self) -> tuple[child.Child, ...]:
        controllers = (self.controller_manager,) if _has_controllers() else ()
        return (self.etcd, self.api_server, *controllers)

    def _write_files(self) -> None:
        token = folders.secret(self._token_file)
        folders.write_private(self.folder / "tokens.csv", f'{token},admin,admin,"system:masters"\n')
        folders.write_private(self.folder / "authentication.json", json.dumps(_AUTHENTICATION))
        key = self.folder / "service-account.key"
        if not key.exists():
            folders.write_private(key, _new_signing_key())
        if self._certificate.exists():
            age_s = time.time() - self._certificate.stat().st_mtime
            if age_s > _RENEW_CERTIFICATE_AFTER_S:
                self._certificate.unlink()
                self._certificate.with_suffix(".key").unlink(missing_ok=True)

    def _start_parts(self) -> None:
        assets = os.environ.get(build.ASSETS_VARIABLE)
        ours = None if assets else build.binary(self._report)

        def command(name: str) -> list[str | Path]:
            if ours is not None:
                return [ours, name]
            given = Path(assets or "").absolute() / name
            if not given.is_file():
                raise errors.MisconfiguredError(f"{build.ASSETS_VARIABLE}: there is no {given}")
            return [given]

        if self.etcd.pid is None:
            # Sockets in our private folder, relative so that their names stay short: whoever reaches etcd
            # reads every secret, and it has no password.
            client, peer = "unix://etcd.sock:1", "unix://etcd-peer.sock:1"
            for stale in self.folder.glob("etcd*.sock:1"):
                stale.unlink()
            self.etcd.spawn(
                [
                    *command("etcd"),
                    *("--name=spur-events", "--data-dir=etcd", "--log-level=warn"),
                    *(f"--listen-client-urls={client}", f"--advertise-client-urls={client}"),
                    *(f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"),
                    *(f"--initial-cluster=spur-events={peer}", "--enable-grpc-gateway=false"),
                    *("--auto-compaction-mode=periodic", "--auto-compaction-retention=30m"),
                    *(() if self._durable else ("--unsafe-no-fsync",)),
                ],
                death_signal=signal.SIGTERM,
                cwd=self.folder,
            )
        if self.api_server.pid is None:
            self.api_server.spawn(
                [
                    *command("kube-apiserver"),
                    *("--etcd-servers=unix:etcd.sock:1", "--bind-address=127.0.0.1"),
                    *("--advertise-address=127.0.0.1", "--endpoint-reconciler-type=none"),
                    *(f"--secure-port={self.port}", f"--cert-dir={self._certificate.parent}"),
                    *("--token-auth-file=tokens.csv", "--authentication-config=authentication.json"),
                    *("--authorization-mode=RBAC", "--allow-privileged=true"),
                    *("--service-account-issuer=https://kubernetes.default.svc", "--profiling=false"),
                    "--service-account-key-file=service-account.key",
                    "--service-account-signing-key-file=service-account.key",
                    *("--service-cluster-ip-range=10.96.0.0/16", "--event-ttl=1h"),
                    *("--max-requests-inflight=1000", "--max-mutating-requests-inflight=500"),
                    *self._extra,
                ],
                death_signal=signal.SIGKILL,
                cwd=self.folder,
            )
        self.api_server.wait_ready(self._is_answering, _START_TIMEOUT_S)
        self._write_kubeconfig()
        if not _has_controllers():
            return
        if self.controller_manager.pid is None:
            self.controller_manager.spawn(
                [
                    *command("kube-controller-manager"),
                    *(f"--kubeconfig={self.kubeconfig}", f"--root-ca-file={self._certificate}"),
                    "--service-account-private-key-file=service-account.key",
                    *("--leader-elect=false", "--secure-port=0", "--profiling=false"),
                    f"--controllers={self._controllers}",
                ],
                death_signal=signal.SIGKILL,
                cwd=self.folder,
            )
        self._wait_for_controllers()

    def _is_answering(self) -> bool:
        if self.etcd.pid is None:
            raise errors.PermanentError(f"etcd ended while starting: {self.etcd.log_end()}")
        try:
            status, _ = self.api.request("GET", "/readyz", timeout_s=5)
        except OSError:
            return False
        return status == HTTPStatus.OK

    def _wait_for_controllers(self) -> None:
        """Wait until the controllers make a default ServiceAccount, one that nobody uses, anew.

        A fresh namespace would show the same, but is visible for the five seconds that its deletion takes.
        """
        path = "/api/v1/namespaces/kube-node-lease/serviceaccounts/default"
        _, before = self.api.request("DELETE", path)

        def is_made() -> bool:
            try:
                status, found = self.api.request("GET", path)
            except OSError:
                return False
            return status == HTTPStatus.OK and found["metadata"]["uid"] != _uid(before)

        self.controller_manager.wait_ready(is_made, _START_TIMEOUT_S)

    def _write_kubeconfig(self) -> None:
        name = "spur-events"
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {
                    "name": name,
                    "cluster": {
                        "server": self.url,
                        "certificate-authority-data": base64.b64encode(
                            self._certificate.read_bytes()
                        ).decode(),
                    },
                }
            ],
            "users": [{"name": "admin", "user": {"token": folders.secret(self._token_file)}}],
            "contexts": [{"name": name, "context": {"cluster": name, "user": "admin"}}],
            "current-context": name,
        }
        folders.write_private(self.kubeconfig, json.dumps(content, indent=2) + "\n")  # JSON is YAML


def _uid(deleted: Any) -> object:
    """Return the uid in the answer to a DELETE (the object, or a Status with details), if there was one."""
    return deleted.get("metadata", {}).get("uid") or deleted.get("details", {}).get("uid")


def _has_controllers() -> bool:
    """Tell whether there is a controller manager: ready binaries may come without."""
    assets = os.environ.get(build.ASSETS_VARIABLE)
    return not assets or (Path(assets) / "kube-controller-manager").exists()


def _new_signing_key() -> str:
    """Return a new P-256 key in PEM (RFC 5915, without the optional public key).

    By hand: the standard library makes no keys, and this one structure is not worth a dependency.
    """
    scalar = secrets.randbelow(_P256_ORDER - 1) + 1
    curve = bytes.fromhex("a00a06082a8648ce3d030107")  # [0] OBJECT IDENTIFIER prime256v1
    der = bytes.fromhex("3031020101" + "0420") + scalar.to_bytes(32) + curve
    body = base64.encodebytes(der).decode()
    return f"-----BEGIN EC PRIVATE KEY-----\n{body}-----END EC PRIVATE KEY-----\n"
