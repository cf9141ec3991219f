"""nats-server's configuration for a site, in two files: one of settings, one of accounts.

`site` calls it. Administrators may edit the first (a cluster block, limits); the second is written again whenever
an account changes. Neither has a secret in it. Strings are written as JSON (`_quoted`).
"""

import json
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from spur_events import private

CONFIG, ACCOUNTS = "nats-server.conf", "accounts.conf"
_READABLE = 0o644  # nats-server has a user of its own
#: Seconds in which a client must have said who it is, and the auth service have answered. Less than 2: then the
#: server pings, and a client that takes its first line for the answer (nats-py does) believes that it is let in.
_SIGN_IN_S = 1.8


def _quoted(text: str) -> str:
    """Return a string as nats-server reads it: JSON's escapes, but none for other characters than ASCII."""
    return json.dumps(text, ensure_ascii=False)


class Server(BaseModel):
    """What `nats init` asks about the server. Without a `store` its data lies beside the configuration."""

    model_config = ConfigDict(frozen=True)

    listen: str = "127.0.0.1:4222"
    name: str = "spur-events"
    store: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    extra: Sequence[str] = ()


def write(folder: Path, server: Server) -> None:
    """Write the settings; they stay as they are from then on."""
    store = server.store or folder / "data"
    lines = [
        "# Made by 'spur-events nats init', once: change what you like.",
        f"listen: {_quoted(server.listen)}",
        f"server_name: {_quoted(server.name)}",
        "",
        "# Streams and buckets.",
        f"jetstream {{ store_dir: {_quoted(str(store))} }}",
        "",
        "# Accounts that were changed while the server ran; on a cluster, each server has them all.",
        "resolver {",
        "  type: full",
        f"  dir: {_quoted(str(store / 'accounts'))}",
        "  allow_delete: false",
        '  interval: "2m"',
        "}",
        f"authorization {{ timeout: {_SIGN_IN_S} }}",
        "",
    ]
    if server.tls_cert is not None and server.tls_key is not None:
        lines += [
            "tls {",
            f"  cert_file: {_quoted(str(server.tls_cert.absolute()))}",
            f"  key_file: {_quoted(str(server.tls_key.absolute()))}",
            "  timeout: 5",
            "}",
            "",
        ]
    lines += [*server.extra, f"include ./{ACCOUNTS}"]
    private.write(folder / CONFIG, "\n".join(lines) + "\n", mode=_READABLE)


def write_accounts(
    folder: Path, *, operator: str, system_account: str, sentinel: str, accounts: dict[str, str]
) -> None:
    """Write what the server must know of accounts at its start."""
    lines = [
        "# Written by 'spur-events nats': do not edit.",
        f"operator: {operator}",
        f"system_account: {system_account}",
        "# Who comes without credentials is this user, until the auth service has answered.",
        f"default_sentinel: {sentinel}",
        "resolver_preload {",
        *(f"  {public}: {token}" for public, token in accounts.items()),
        "}",
    ]
    private.write(folder / ACCOUNTS, "\n".join(lines) + "\n", mode=_READABLE)
