"""`spur-events nats`: its options and help; cli.py registers it, nats_site does what they say."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="NATS accounts and credentials of a site.")
user_app = typer.Typer(no_args_is_help=True, help="Credentials of users.")
app.add_typer(user_app, name="user")

DEFAULT_FOLDER = Path("/etc/spur-events/nats")

Dir = Annotated[Path, typer.Option("--dir", help="Folder of the site: holds its secret keys.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Write the credentials to this file.")]


class ServicePart(StrEnum):
    """Parts that have credentials of their own."""

    RELAY = "relay"
    APPLY = "apply"
    RESYNC = "resync"
    KUBECONFIG = "kubeconfig"
    AUTH = "auth"
    ADMIN = "admin"


class Role(StrEnum):
    """Roles whose key can be replaced."""

    RELAY = "relay"
    APPLY = "apply"
    RESYNC = "resync"
    KUBECONFIG = "kubeconfig"
    AUTH = "auth"
    ADMIN = "admin"
    USER = "user"
    USER_ADMIN = "user-admin"


@app.command()
def init(
    folder: Dir = DEFAULT_FOLDER,
    cluster: Annotated[
        list[str] | None,
        typer.Option(help="Name of a Kubernetes cluster; may be repeated. Default: as configured."),
    ] = None,
    listen: Annotated[str, typer.Option(help="HOST:PORT that nats-server listens on.")] = "127.0.0.1:4222",
    tls_cert: Annotated[
        Path | None, typer.Option(help="The server's certificate (with its chain): turns TLS on.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="The certificate's private key.")] = None,
    store_dir: Annotated[
        Path | None, typer.Option(help="Where the server keeps its data. Default: beside its configuration.")
    ] = None,
) -> None:
    """Make keys, accounts, the server's configuration and everybody's credentials for a new site."""
    from spur_events import nats_site  # noqa: PLC0415 - other commands need not load the driver

    nats_site.init(
        folder,
        clusters=cluster or [],
        listen=listen,
        tls_cert=tls_cert,
        tls_key=tls_key,
        store_dir=store_dir,
    )


@app.command()
def service(
    part: Annotated[ServicePart, typer.Argument(help="Which part.")],
    cluster: Annotated[str | None, typer.Option(help="For which cluster. Default: as configured.")] = None,
    output: Output = None,
    folder: Dir = DEFAULT_FOLDER,
) -> None:
    """Make credentials for a part: of another cluster, or for another host."""
    from spur_events import nats_site  # noqa: PLC0415

    nats_site.service(folder, str(part), cluster, output)


@app.command()
def rotate(
    role: Annotated[Role, typer.Argument(help="Whose key.")],
    folder: Dir = DEFAULT_FOLDER,
) -> None:
    """Replace a role's signing key: all credentials of that role are dead, those of services are made anew."""
    from spur_events import nats_site  # noqa: PLC0415

    nats_site.rotate(folder, str(role))


@app.command()
def update(folder: Dir = DEFAULT_FOLDER) -> None:
    """Sign all accounts anew, as this version declares them, and tell the server. Credentials stay good."""
    from spur_events import nats_site  # noqa: PLC0415

    nats_site.update(folder)


@user_app.command("add")
def add_user(
    name: Annotated[str, typer.Argument(help="The user, by the name in the accounting database.")],
    days: Annotated[
        int, typer.Option(min=0, max=36500, help="Days that they are good for; 0: until they are revoked.")
    ] = 0,
    output: Output = None,
    admin: Annotated[bool, typer.Option("--admin", help="May ask for anybody's kubeconfig.")] = False,
    folder: Dir = DEFAULT_FOLDER,
) -> None:
    """Make credentials for a user; the server need not be told."""
    from spur_events import nats_site  # noqa: PLC0415

    nats_site.add_user(folder, name, days=days, admin=admin, output=output)


@user_app.command("revoke")
def revoke_user(
    name: Annotated[str, typer.Argument(help="The user.")],
    folder: Dir = DEFAULT_FOLDER,
) -> None:
    """End all credentials that a user was given, and her connections. Kubeconfigs: see 'spur-events revoke'."""
    from spur_events import nats_site  # noqa: PLC0415

    nats_site.revoke_user(folder, name)
