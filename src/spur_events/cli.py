"""The command `spur-events`: reads settings, calls the parts, prints what a person or a program reads.

Exit codes: 0 done, 1 failed, 2 usage, 3 refused by a safety rule, 4 timed out. `sacctmgr` is a command of its
own (producers.sacctmgr).
"""

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from spur_events import errors, nats_command, process, settings, telemetry

app = typer.Typer(
    name="spur-events",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Make Kubernetes follow an HPC accounting database within seconds, over NATS JetStream.",
)
database = typer.Typer(no_args_is_help=True, help="The accounting database.")
app.add_typer(database, name="db")
app.add_typer(nats_command.app, name="nats")

StateDir = Annotated[
    Path | None,
    # Not typer's envvar: a server that the environment names goes before SPUR_EVENTS_STATE_DIR (supervisor.use).
    typer.Option(
        "--state-dir",
        help="Folder of a development installation (or SPUR_EVENTS_STATE_DIR); several can run side by side.",
    ),
]


def _not_empty(value: str | None) -> str | None:
    """Refuse a name that is there and empty, as from a script's unset variable: it would mean everything."""
    if value == "":
        raise typer.BadParameter("it is empty: name one, or leave the option out")
    return value


Cluster = Annotated[
    str | None, typer.Option(help="Another cluster than the configured one.", callback=_not_empty)
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for a program to read.")]


class Part(StrEnum):
    """The long-running parts."""

    RELAY = "relay"
    APPLY = "apply"
    RESYNC = "resync"
    KUBECONFIG = "kubeconfig"
    AUTH = "auth"
    ALL = "all"


def main() -> None:
    """Run the command; an error that is meant for a person is one line, without a traceback."""
    try:
        app()
    except errors.SpurEventsError as error:
        if os.environ.get("SPUR_EVENTS_DEBUG"):
            raise
        typer.echo(f"spur-events: {error}", err=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


@app.command()
def run(part: Annotated[Part, typer.Argument(help="Which part; 'all' runs all but auth together.")]) -> None:
    """Run a part of the pipeline until SIGTERM."""
    from spur_events import health, services  # noqa: PLC0415 - other commands need not load the drivers

    telemetry.set_up()
    config = settings.load()
    parts: dict[Part, Callable[[settings.Settings], Coroutine[Any, Any, None]]] = {
        Part.RELAY: services.relay,
        Part.APPLY: services.apply,
        Part.RESYNC: services.resync,
        Part.KUBECONFIG: services.kubeconfig,
        Part.AUTH: services.auth,
        Part.ALL: services.everything,
    }
    expected = services.TOGETHER if part is Part.ALL else {str(part)}

    async def work() -> None:
        async with health.serving(config.health, expected):
            await parts[part](config)

    _run(process.until_signal(work()))


@database.command("migrate")
def migrate_database() -> None:
    """Create what is missing in the accounting database; safe to run again at any time."""
    from spur_events.producers import migrate  # noqa: PLC0415

    applied = migrate.migrate(settings.load().database)
    for name in applied:
        typer.echo(f"applied {name}")
    if not applied:
        typer.echo("nothing to do: the database is up to date")


@app.command()
def status(
    accounts: Annotated[list[str] | None, typer.Argument(help="Only these accounts.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Print again when something changed.")] = False,
    as_json: Json = False,
    state_dir: StateDir = None,
) -> None:
    """Show how far every cluster is with every account, and whether the relay lives."""
    from spur_events import report  # noqa: PLC0415
    from spur_events.local import supervisor  # noqa: PLC0415

    supervisor.use(state_dir)
    _run(
        process.until_signal(
            report.status(settings.load(), set(accounts or ()), watch=watch, as_json=as_json)
        )
    )


@app.command()
def resync(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the plan.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before deletions.")] = False,
    prune_unexplained: Annotated[
        bool,
        typer.Option(
            "--prune-unexplained",
            help="Also remove what no account and no recorded deletion explains.",
        ),
    ] = False,
    cluster: Cluster = None,
    as_json: Json = False,
    state_dir: StateDir = None,
) -> None:
    """Bring a cluster back to what the database says; shows the plan and asks before it deletes.

    Exit code 1 if an account could not be written, 3 if a safety rule stopped deletions, 4 if nothing answered.
    """
    from spur_events import resync_command  # noqa: PLC0415
    from spur_events.local import supervisor  # noqa: PLC0415

    supervisor.use(state_dir)
    wish = resync_command.Wish(dry_run=dry_run, yes=yes, prune_unexplained=prune_unexplained, as_json=as_json)
    sys.exit(_run(resync_command.resync(settings.load(), wish, cluster)))


@app.command()
def adopt(
    account: Annotated[str, typer.Argument(help="The account, by its name in the database.")],
    cluster: Cluster = None,
    state_dir: StateDir = None,
) -> None:
    """Take over a namespace of the account's name that exists already, for example one of spur itself."""
    from spur_events import resync_command  # noqa: PLC0415
    from spur_events.local import supervisor  # noqa: PLC0415

    supervisor.use(state_dir)
    typer.echo(_run(resync_command.adopt(settings.load(), account, cluster)))


@app.command()
def revoke(
    user: Annotated[
        str, typer.Option(help="Whose tokens, by the name in the database.", callback=_not_empty)
    ],
    account: Annotated[
        str | None, typer.Option(help="Only those for this account.", callback=_not_empty)
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for the clusters; 0: do not wait.")
    ] = 60.0,
    state_dir: StateDir = None,
) -> None:
    """Make every token that a member has worthless; she stays a member and can ask for another kubeconfig.

    Exit code 4 if some cluster has not carried it out in time; it will, as soon as it can.
    """
    from spur_events import revoke_command  # noqa: PLC0415
    from spur_events.local import supervisor  # noqa: PLC0415

    supervisor.use(state_dir)
    revoke_command.revoke(settings.load(), user, account, timeout)


@app.command("kubeconfig")
def make_kubeconfig(
    user: Annotated[
        str | None,
        typer.Option(
            help="Whose, by the name in the database; default: whom the credentials name.",
            callback=_not_empty,
        ),
    ] = None,
    account: Annotated[
        str | None,
        typer.Option(help="For which account; default: the default one.", callback=_not_empty),
    ] = None,
    cluster: Cluster = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="File to merge it into; default, or -: print it. Nothing else in it is lost.",
        ),
    ] = None,
    static: Annotated[
        bool, typer.Option("--static", help="Put a token into it, which ends, instead of a way to get one.")
    ] = False,
    lifetime: Annotated[
        str,
        typer.Option(
            help="How long a token lasts, at least 10m: seconds, or like 90m, 12h, 7d. Default: the site's.",
            show_default=False,
        ),
    ] = "0",
    state_dir: StateDir = None,
) -> None:
    """Make a kubeconfig for the namespace of an account; kubectl then renews its token by itself.

    Exit code 1 if the kubeconfig service does not run, 3 if it refuses, 4 if it does not answer.
    """
    from spur_events import kubeconfig_command  # noqa: PLC0415
    from spur_events.local import supervisor  # noqa: PLC0415

    supervisor.use(state_dir)
    wish = kubeconfig_command.Wish(
        user=user,
        account=account,
        cluster=cluster,
        output=output,
        static=static,
        lifetime_s=kubeconfig_command.seconds(lifetime),
    )
    kubeconfig_command.kubeconfig(settings.load(), wish)


@app.command()
def credential(
    cluster: Annotated[str, typer.Option(help="The cluster.")],
    account: Annotated[str, typer.Option(help="The account.")],
    user: Annotated[str, typer.Option(help="The user.")],
    lifetime: Annotated[
        str,
        typer.Option(
            help="How long a token lasts: seconds, or like 90m. Default: the site's.", show_default=False
        ),
    ] = "0",
    state_dir: StateDir = None,
) -> None:
    """Print a token for kubectl, which calls this as the kubeconfig says (an exec credential plugin)."""
    # kubectl waits for this at each of its calls: nothing is imported that is not needed.
    if state_dir is not None or "SPUR_EVENTS_NATS_URL" not in os.environ:
        from spur_events.local import supervisor  # noqa: PLC0415

        supervisor.use(state_dir)
    config = settings.load()
    if not any(url.strip().startswith("ws") for url in config.nats.url.split(",")):
        # The NATS client takes it for WebSocket if it is there, and it costs a third of our time (0.2 of 0.6 s).
        sys.modules.setdefault("aiohttp", None)  # type: ignore[arg-type]  # None: cannot be imported
    from spur_events import kubeconfig_command  # noqa: PLC0415

    lifetime_s = kubeconfig_command.seconds(lifetime)
    typer.echo(
        kubeconfig_command.credential(
            config, cluster=cluster, account=account, user=user, lifetime_s=lifetime_s
        )
    )


@app.command()
def events(
    account: Annotated[str | None, typer.Argument(help="Only this account.")] = None,
    as_json: Json = False,
    state_dir: StateDir = None,
) -> None:
    """Show the audit trail: what changed, by whom and when."""
    from spur_events import report  # noqa: PLC0415
    from spur_events.local import supervisor  # noqa: PLC0415

    supervisor.use(state_dir)
    _run(report.events(settings.load(), account, as_json=as_json))


def _migrate(_variables: dict[str, str]) -> None:
    from spur_events.producers import migrate  # noqa: PLC0415

    migrate.migrate(settings.load().database)


async def _serve(_variables: dict[str, str], ready: Callable[[], None]) -> None:
    from spur_events import services  # noqa: PLC0415

    telemetry.set_up()
    await services.everything(settings.load(), ready)


@app.command()
def up(
    detach: Annotated[bool, typer.Option("--detach", help="Return when everything is ready.")] = False,
    kubeconfig: Annotated[
        Path | None,
        typer.Option(
            help="Use this cluster instead of the embedded control plane.", exists=True, dir_okay=False
        ),
    ] = None,
    state_dir: StateDir = None,
) -> None:
    """Start everything on this machine: PostgreSQL, NATS, a Kubernetes control plane, and all services."""
    from spur_events.local import supervisor  # noqa: PLC0415

    supervisor.up(state_dir, detach=detach, kubeconfig=kubeconfig, migrate=_migrate, run_services=_serve)


@app.command()
def env(state_dir: StateDir = None) -> None:
    """Print 'export NAME=value' lines for what 'up' started: eval "$(spur-events env)"."""
    from spur_events.local import supervisor  # noqa: PLC0415

    typer.echo(supervisor.shell_exports(supervisor.environment(state_dir)))


@app.command()
def down(state_dir: StateDir = None) -> None:
    """Stop what 'up' started; its data stays."""
    from spur_events.local import supervisor  # noqa: PLC0415

    for line in supervisor.down(state_dir):
        typer.echo(line)


@app.command("build-control-plane")
def build_control_plane() -> None:
    """Build the development control plane for 'up', 'demo' and the tests, if it is not cached; print where it is."""
    from spur_events.local import build  # noqa: PLC0415

    typer.echo(build.binary())


@app.command()
def demo(
    keep: Annotated[bool, typer.Option("--keep", help="Leave everything running at the end.")] = False,
    state_dir: StateDir = None,
) -> None:
    """Start everything, show the whole job being done, check it, and stop."""
    from spur_events import tour  # noqa: PLC0415

    tour.run(state_dir, keep=keep, migrate=_migrate, run_services=_serve)
