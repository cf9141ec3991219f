"""Where the API server is and who we are there: from a kubeconfig or from the pod that we run in.

`client` calls it. kubernetes_asyncio reads the files (certificates, tokens, exec plugins) and builds the TLS
context; requests are left to `client`. `published` asks for what the file says about the server.
"""

import asyncio
import atexit
import base64
import contextlib
import ipaddress
import json
import os
import signal
import ssl
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from aiohttp import client_proto
from kubernetes_asyncio import client as k8s
from kubernetes_asyncio.config import config_exception, exec_provider, incluster_config, kube_config

from spur_events import errors, process, settings

_UNUSABLE = (
    *(config_exception.ConfigException, yaml.YAMLError, OSError),
    # Files of another shape make the library fail in these ways.
    *(AttributeError, KeyError, TypeError, ValueError, AssertionError),
)
_WHERE = "set SPUR_EVENTS_KUBERNETES_KUBECONFIG or KUBECONFIG to a kubeconfig file"


def _temporary_file(self: Any, content: bytes | str) -> str:  # noqa: ARG001 - it becomes a method
    """Give a certificate or key to OpenSSL, which reads files only.

    Instead of the library's method, which leaves each file open for ever: every 401 would cost file descriptors.
    """
    number, name = tempfile.mkstemp()
    kube_config._temp_files[name] = name  # noqa: SLF001
    os.close(number)
    Path(name).write_bytes(content.encode() if isinstance(content, str) else content)
    return name


kube_config.FileOrData._create_temp_file_with_content = _temporary_file  # type: ignore[method-assign]  # noqa: SLF001
atexit.register(kube_config._cleanup_temp_files)  # noqa: SLF001


async def _run_plugin(self: Any, previous_response: str | None = None) -> Any:  # noqa: ARG001 - it becomes a method
    """Return the credentials that an exec plugin prints.

    Instead of the library's method, which leaves a plugin running when nobody waits for it any more. The protocol:
    https://kubernetes.io/docs/reference/access-authn-authz/authentication/#input-and-output-formats
    """
    info = {"apiVersion": self.api_version, "kind": "ExecCredential", "spec": {"interactive": False}}
    plugin = await asyncio.create_subprocess_exec(
        *self.args,
        env=self.env | {"KUBERNETES_EXEC_INFO": json.dumps(info)},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, told = await plugin.communicate()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(plugin.pid, signal.SIGKILL)  # with what it has started
        raise
    finally:
        plugin._transport.close()  # type: ignore[attr-defined]  # noqa: SLF001 - others may hold its pipes
        await plugin.wait()
    name = self.args[0]
    if plugin.returncode:
        said = told.decode("utf-8", "replace").strip() or "it said nothing"
        raise config_exception.ConfigException(
            f"the exec plugin {name} ended with {plugin.returncode}: {said}"
        )
    try:
        given = json.loads(out)
        version, status = given["apiVersion"], given["status"]
    except (ValueError, KeyError, TypeError) as error:
        raise config_exception.ConfigException(f"the exec plugin {name} printed no ExecCredential") from error
    if version != self.api_version:
        raise config_exception.ConfigException(
            f"the exec plugin {name} answers in {version}, not {self.api_version}"
        )
    return status


exec_provider.ExecProvider.run = _run_plugin  # type: ignore[method-assign]


def of_part(config: settings.Kubernetes, part: str) -> settings.Kubernetes:
    """Return the configuration of a part: its own kubeconfig where the setting names a folder of them."""
    given = config.kubeconfig
    if given is None or not given.is_dir():
        return config
    return config.model_copy(update={"kubeconfig": given / f"{part}.kubeconfig"})


def source(config: settings.Kubernetes) -> str | None:
    """Return the kubeconfig path or paths to read, or None for the pod's own ServiceAccount.

    Raises:
        MisconfiguredError: if there is neither. ~/.kube/config is not taken: a service must not write to
            whatever cluster somebody last looked at.
    """
    path = str(config.kubeconfig) if config.kubeconfig is not None else os.environ.get("KUBECONFIG", "")
    if path:
        if not any(Path(part).expanduser().is_file() for part in path.split(os.pathsep) if part):
            raise errors.MisconfiguredError(f"kubeconfig {path} does not exist; {_WHERE}")
        return path
    if os.environ.get(incluster_config.SERVICE_HOST_ENV_NAME):
        return None
    raise errors.MisconfiguredError(f"no Kubernetes cluster is configured; {_WHERE}")


@dataclass(frozen=True, kw_only=True)
class Own:
    """What a kubeconfig file says about its API server: the address, the PEM bundle, and how both are checked."""

    server: str
    ca: str
    verified: bool
    server_name: str


def own_endpoint(config: settings.Kubernetes) -> Own | None:
    """Return what our own kubeconfig file says about the API server; None where there is no file.

    Read anew at each call; users, their certificates and their programs are left alone.

    Raises:
        MisconfiguredError: if the file cannot be used.
    """
    path = source(config)
    if path is None:
        return None
    try:
        merged: Any = kube_config.KubeConfigMerger(path).config
        context = merged["contexts"].get_with_name(merged["current-context"])["context"]
        cluster = merged["clusters"].get_with_name(context["cluster"])["cluster"]
        folder = str(Path(cluster.path).absolute().parent)
        bundle = kube_config.FileOrData(cluster, "certificate-authority", file_base_path=folder).as_data()
        return Own(
            server=str(cluster["server"]),
            ca=decoded(bundle or ""),
            verified=cluster.safe_get("insecure-skip-tls-verify") is not True,
            server_name=str(cluster.safe_get("tls-server-name") or ""),
        )
    except _UNUSABLE as error:
        raise errors.MisconfiguredError(f"kubeconfig {path} cannot be used: {error}; {_WHERE}") from error


def decoded(text: str) -> str:
    """Return the PEM bundle in a field `certificate-authority-data`.

    Raises:
        ValueError: if it is not base64.
    """
    return base64.b64decode(text).decode("ascii")


async def load(config: settings.Kubernetes) -> k8s.ApiClient:
    """Return a client with its own connection pool, ready to be used; nothing was sent yet.

    Raises:
        MisconfiguredError: naming the file that cannot be used, and why.
    """
    path = source(config)
    configuration = await _read(path, config.timeout_s)
    configuration.connection_pool_maxsize = config.concurrency
    try:
        # No await from here to the end of `finally`: two loads would delete each other's files.
        api = k8s.ApiClient(configuration)
    except (ssl.SSLError, OSError, ValueError) as error:
        raise errors.MisconfiguredError(
            f"the certificates in {path or 'the pod'} cannot be used: {error}"
        ) from error
    else:
        if _is_loopback(str(configuration.host)):
            # As kubectl does it: a site's HTTPS_PROXY is not meant for this machine. The library always
            # lets the session read the environment, and aiohttp makes no exception of its own.
            api.rest_client.pool_manager._trust_env = False  # noqa: SLF001
        pool: Any = api.rest_client.pool_manager.connector
        pool._factory = _Remembering()  # noqa: SLF001
        return api
    finally:
        # Certificates and the private key were written to temporary files for OpenSSL, which has read
        # them by now. The library removes them at exit, which a killed process never reaches.
        kube_config._cleanup_temp_files()  # noqa: SLF001


async def close(api: k8s.ApiClient) -> None:
    """End a client's connections at once, also those that aiohttp has given up.

    One whose request was cancelled, or that got ready while it was, waits up to 30 s for the server's farewell.
    """
    pool: Any = api.rest_client.pool_manager.connector
    for transport in list(pool._factory.transports):  # noqa: SLF001
        process.abort(transport)
    await api.close()
    await asyncio.sleep(0)  # asyncio closes them in its next round


class _Remembering:
    """Makes aiohttp's handlers of connections, and remembers the connections."""

    def __init__(self) -> None:
        self.transports: weakref.WeakSet[asyncio.BaseTransport] = weakref.WeakSet()

    def __call__(self) -> client_proto.ResponseHandler:
        return _Handler(self.transports)


class _Handler(client_proto.ResponseHandler):
    def __init__(self, transports: weakref.WeakSet[asyncio.BaseTransport]) -> None:
        super().__init__(asyncio.get_running_loop())
        self._transports = transports

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transports.add(transport)
        super().connection_made(transport)


async def refresh(config: settings.Kubernetes, configuration: k8s.Configuration) -> bool:
    """Read the credentials again, after a 401; tell whether the token is another one now."""
    with contextlib.suppress(errors.MisconfiguredError):
        newer = await _read(source(config), config.timeout_s)
        kube_config._cleanup_temp_files()  # noqa: SLF001
        if newer.api_key and newer.api_key != configuration.api_key:
            configuration.api_key.update(newer.api_key)
            return True
    return False


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def _read(path: str | None, timeout_s: float) -> k8s.Configuration:
    configuration = k8s.Configuration()
    try:
        if path is None:
            incluster_config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        else:
            async with asyncio.timeout(timeout_s):
                await kube_config.load_kube_config(
                    config_file=path, client_configuration=configuration, persist_config=False
                )
    except TimeoutError as error:
        raise errors.MisconfiguredError(
            f"kubeconfig {path} cannot be used: no credentials within {timeout_s:g} s from what it names (an exec"
            " plugin, for example); try that by hand, or allow it more with SPUR_EVENTS_KUBERNETES_TIMEOUT_S"
        ) from error
    except _UNUSABLE as error:
        name = f"kubeconfig {path}" if path else "the pod's ServiceAccount"
        raise errors.MisconfiguredError(f"{name} cannot be used: {error}; {_WHERE}") from error
    return configuration
