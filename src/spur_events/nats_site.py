"""What `spur-events nats` does: a site's folder is changed, and a running server told. nats_command has the options.

What is made and signed is the business of `identity`, what each role may do of deploy/nats/accounts.json.
"""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, ParamSpec, TypeVar

import typer

from spur_events import errors, jetstream, settings
from spur_events.identity import roles, serverconf
from spur_events.identity import site as sites
from spur_events.schemas import subjects

P = ParamSpec("P")
T = TypeVar("T")

_CLAIMS_UPDATE = "$SYS.REQ.CLAIMS.UPDATE"
_ANSWER_S = 5.0
_MAX_NAME = 255


def init(
    folder: Path,
    *,
    clusters: list[str],
    listen: str,
    tls_cert: Path | None,
    tls_key: Path | None,
    store_dir: Path | None,
) -> None:
    """Make a site."""
    config = settings.load()
    clusters = list(dict.fromkeys(clusters or [config.kubernetes.cluster]))
    for name in clusters:
        _check_cluster(name)
    host, colon, port = listen.rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 2**16):
        raise errors.UsageError(f"--listen {listen!r} is not HOST:PORT, like 0.0.0.0:4222")
    if (tls_cert is None) != (tls_key is None):
        raise errors.UsageError("--tls-cert and --tls-key go together")
    for path in (tls_cert, tls_key):
        if path is not None and not path.is_file():
            raise errors.UsageError(f"{path} is not a file")
    server = serverconf.Server(
        listen=listen, store=store_dir.absolute() if store_dir else None, tls_cert=tls_cert, tls_key=tls_key
    )
    site = sites.Site.create(folder.absolute(), server, clusters=clusters, partitions=config.nats.partitions)
    _say_what_next(site, clusters, listen, tls=tls_cert is not None)


def service(folder: Path, part: str, cluster: str | None, output: Path | None) -> None:
    """Make credentials for a part."""
    config = settings.load()
    name = cluster or config.kubernetes.cluster
    _check_cluster(name)
    if cluster and part not in roles.OF_A_CLUSTER:
        raise errors.UsageError(f"{part} is one for all clusters: leave --cluster out")
    site = sites.Site(folder)
    made = _written(site.service, part, name, config.nats.partitions, output)
    typer.echo(f"credentials of {part} are in {made}")
    if part == roles.AUTH_SERVICE:  # its account must name it
        _tell(site, config.nats)


def rotate(folder: Path, role: str) -> None:
    """Replace a role's signing key."""
    config = settings.load()
    site = sites.Site(folder)
    for made in _written(site.rotate, role):
        typer.echo(f"new credentials of {role} are in {made}")
    if role in (roles.USER, roles.USER_ADMIN):
        typer.echo("users: make new credentials for them ('spur-events nats user add')")
        typer.echo(f"auth service: give it {folder / 'auth'} again, and restart it")
    _tell(site, config.nats)


def update(folder: Path) -> None:
    """Sign all accounts anew."""
    _tell(sites.Site(folder), settings.load().nats)


def add_user(folder: Path, name: str, *, days: int, admin: bool, output: Path | None) -> None:
    """Make credentials for a user."""
    _check_name(name)
    made = _written(sites.Site(folder).add_user, name, days=days, admin=admin, output=output)
    typer.echo(f"credentials of {name} are in {made}; she needs")
    typer.echo("  SPUR_EVENTS_NATS_URL=<the server> SPUR_EVENTS_NATS_CREDENTIALS=<that file>")
    if name != name.lower():
        typer.echo("note: sacctmgr stores names in lower case; this name is kept as it is", err=True)


def revoke_user(folder: Path, name: str) -> None:
    """End all credentials of a user."""
    _check_name(name)
    config = settings.load()
    site = sites.Site(folder)
    count = _written(site.revoke_user, name)
    typer.echo(f"{count} credentials of {name} are revoked")
    _tell(site, config.nats)


def _written(work: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Call what writes into the site's folder; a file that cannot be written is named."""
    try:
        return work(*arguments, **options)
    except OSError as error:
        raise errors.MisconfiguredError(
            f"{error.filename or 'a file'} cannot be written: {error.strerror}"
        ) from error


def _tell(site: sites.Site, nats: settings.Nats) -> None:
    """Sign the accounts and give them to the running server.

    Raises:
        UnreachableError: if it does not answer: what was changed is kept, and it is told the next time.
    """
    try:
        signed = _written(site.write_accounts)
    except errors.SpurEventsError as error:
        raise errors.MisconfiguredError(
            f"the change is stored in {site.folder}, but the accounts cannot be signed and no server knows it: {error};"
            " then run 'spur-events nats update'"
        ) from error
    mine = nats.model_copy(update={"credentials": site.credentials, "munge": False})
    try:
        asyncio.run(_push(mine, list(signed.values())))
    except errors.TemporaryError as error:
        _not_told(site, error)
    typer.echo(f"told the server at {nats.url}")


async def _push(nats: settings.Nats, accounts: list[str]) -> None:
    async with jetstream.connect(nats, "spur-events nats", roles.SYSTEM_USER) as bus:
        for account in accounts:
            said = json.loads(await bus.request(_CLAIMS_UPDATE, account.encode("ascii"), _ANSWER_S))
            if "error" in said:
                raise errors.TemporaryError(
                    f"the server says: {said['error'].get('description', said['error'])}"
                )


def _not_told(site: sites.Site, error: errors.SpurEventsError) -> NoReturn:
    raise errors.UnreachableError(
        f"the change is stored in {site.folder}, but the running server does not know it yet: {error}; then run"
        " 'spur-events nats update'"
    ) from error


def _check_cluster(name: str) -> None:
    if not subjects.is_cluster_name(name):
        raise errors.UsageError(f"{name!r} cannot be a cluster's name: a lower-case label, and not 'relay'")


def _check_name(name: str) -> None:
    """Refuse what no user is called: her subject would be of nobody."""
    if not name or len(name) > _MAX_NAME or not name.isprintable() or any(sign.isspace() for sign in name):
        raise errors.UsageError(
            f"{name[:40]!r} is not a user's name: 1 to {_MAX_NAME} printable characters without blanks"
        )


def _say_what_next(site: sites.Site, clusters: list[str], listen: str, *, tls: bool) -> None:
    first, *others = clusters
    lines = [
        f"a NATS site was made in {site.folder}. Next:",
        f"1. nats-server: copy {site.server_folder} to its host (no secret is in it) and start",
        f"     nats-server --config {site.server_folder / serverconf.CONFIG}",
        f"2. services of cluster {first}, and administrators: SPUR_EVENTS_NATS_CREDENTIALS={site.credentials}",
        "   on other hosts the one file of the part that runs there is enough",
        *(f"   services of cluster {name}: {site.credentials / name}" for name in others),
        "3. users: 'spur-events nats user add NAME'; or by MUNGE, without any file: 'spur-events run auth' with",
        f"     SPUR_EVENTS_AUTH_KEYS={site.folder / 'auth'}",
        f"4. keep {site.folder}/keys to yourself, and a copy of it in a safe place",
    ]
    if not tls and not listen.startswith(("127.", "localhost:", "[::1]")):
        lines.append(
            "warning: without --tls-cert and --tls-key everything goes over the network in clear text, tokens too"
        )
    for line in lines:
        typer.echo(line)
