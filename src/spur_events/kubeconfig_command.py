"""`spur-events kubeconfig` and `credential`: ask the responder, make a file or an answer for kubectl of its grant.

cli.py calls it. Needs NATS alone: neither the database nor the cluster. Files are left to `kubeconfig_file`, tokens
that are kept to `token_cache`, the judgement to the responder.
"""

import asyncio
import json
import os
import re
import shutil
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import typer

from spur_events import errors, kubeconfig_file, retrying, settings, token_cache
from spur_events.jetstream import caller, signin
from spur_events.schemas import names, subjects
from spur_events.schemas.access import Grant, KubeconfigReply, KubeconfigRequest, Refusal, RefusalCode

EXEC_INFO = "KUBERNETES_EXEC_INFO"
_API_VERSION = "client.authentication.k8s.io/v1"
_API_VERSIONS = (_API_VERSION, "client.authentication.k8s.io/v1beta1")

#: Seconds in which a refusal that says "in a moment" is asked about again: a change just made is carried out in
#: milliseconds.
_PATIENCE_S = 5.0
_HELD_PATIENCE_S = 1.0
#: Seconds for the responder to say whether a token that is kept is still good.
_HELD_TIMEOUT_S = 2.0
#: What says that the token in hand is worth nothing. Any other refusal says that nobody can tell at the moment: then
#: the token is tried, and the API server decides.
_ENDED = frozenset({RefusalCode.UNKNOWN_USER, RefusalCode.NOT_A_MEMBER, RefusalCode.SERVICE_ACCOUNT})
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_SPANS = (("days", 1440), ("hours", 60), ("minutes", 1))
_DURATION = re.compile(r"([0-9]{1,9})([smhd]?)", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What was asked for on the command line; None or 0: the default."""

    user: str | None = None
    account: str | None = None
    cluster: str | None = None
    output: Path | None = None
    static: bool = False
    lifetime_s: int = 0


class RefusalError(errors.RefusedError):
    """The responder said no (exit code 3)."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(f"{refusal.code}: {refusal.message}")
        self.refusal = refusal


class _NotNowError(errors.TemporaryError):
    """The responder said no for a moment."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


def seconds(text: str) -> int:
    """Return a lifetime as it is typed, in seconds: 3600, 90m, 12h, 30d.

    Raises:
        UsageError: if it is none.
    """
    found = _DURATION.fullmatch(text.strip().lower())
    if not found:
        raise errors.UsageError(
            f"--lifetime {text[:40]!r} is no lifetime, or too long a one: write seconds, or one number with"
            " s, m, h or d, like 90m"
        )
    return int(found[1]) * _UNITS[found[2]]


def kubeconfig(config: settings.Settings, wish: Wish) -> None:
    """Print a kubeconfig, or merge it into a file; what a person should know goes to standard error.

    Raises:
        UsageError: if it is not clear for whom.
        RefusalError: if the responder says no.
        NobodyError, TimedOutError: if no responder runs, or it does not answer.
    """
    cluster = wish.cluster or config.kubernetes.cluster
    output = _output(wish.output)
    request = KubeconfigRequest(account=wish.account or "", lifetime_s=wish.lifetime_s)
    timeout_s = config.access.request_timeout_s
    grant = asyncio.run(_ask(config.nats, cluster, _slug(config, wish.user), request, timeout_s, _PATIENCE_S))
    user = {"token": grant.token} if wish.static else {"exec": _plugin(config, grant, wish.lifetime_s)}
    if not wish.static:
        token_cache.write(_key(config, grant.cluster, grant.account, grant.user), _held(grant))
    entry = kubeconfig_file.Entry(
        # A slash joins them: clusters' and accounts' names may hold a hyphen, so that two could be one with it.
        name=f"spur-{grant.cluster}/{names.slug(grant.account)}",
        user_name=f"spur-{grant.cluster}/{names.slug(grant.account)}/{names.slug(grant.user)}",
        server=grant.server,
        ca=grant.ca,
        namespace=grant.namespace,
        user=user,
    )
    if output is None:
        typer.echo(kubeconfig_file.text(entry), nl=False)
    else:
        kubeconfig_file.merge(output, entry)
        typer.echo(f"{output}: {grant.user} in account {grant.account}, context {entry.name}", err=True)
    if wish.static:
        _tell_end(grant, wish.lifetime_s, output)


def _output(given: Path | None) -> Path | None:
    """Return the file that is meant; None to print.

    Raises:
        UsageError: if it is a list of files, as KUBECONFIG may be.
    """
    if given is None or str(given) == "-":
        return None
    if os.pathsep in str(given) and not given.exists():
        raise errors.UsageError(
            f"--output {str(given)!r} is a list of files, as KUBECONFIG may be: name one of them"
        )
    try:
        return given.expanduser()
    except RuntimeError as error:
        raise errors.UsageError(f"--output {str(given)!r}: {error}") from error


def credential(
    config: settings.Settings, *, cluster: str, account: str, user: str, lifetime_s: int = 0
) -> str:
    """Return what kubectl asks a credential plugin for: a token that is good, from the cache or a new one.

    Raises:
        MisconfiguredError: if kubectl speaks another version of the protocol.
        RefusalError: if the responder says no.
        NobodyError, TimedOutError, UnreachableError: if nobody can be asked, and no token is kept.
    """
    version = _api_version()
    key = _key(config, cluster, account, user)
    held = token_cache.read(key)
    if held is not None:
        held = _confirmed(config, key, held, lifetime_s)
    else:
        request = KubeconfigRequest(account=account, lifetime_s=lifetime_s)
        slug, timeout_s = names.slug(user), config.access.request_timeout_s
        held = _held(asyncio.run(_ask(config.nats, cluster, slug, request, timeout_s, _PATIENCE_S)))
        token_cache.write(key, held)
    status = {"token": held.token, "expirationTimestamp": _rfc3339(held.expires_at)}
    return json.dumps({"apiVersion": version, "kind": "ExecCredential", "status": status})


def _confirmed(
    config: settings.Settings, key: token_cache.Key, held: token_cache.Held, lifetime_s: int
) -> token_cache.Held:
    """Return the kept token if it is still the member's, a new one if hers is another by now."""
    timeout_s = min(_HELD_TIMEOUT_S, config.access.request_timeout_s)
    nats = config.nats.model_copy(update={"connect_timeout_s": timeout_s})
    request = KubeconfigRequest(account=key.account, lifetime_s=lifetime_s, held_uid=held.uid)
    try:
        grant = asyncio.run(
            _ask(nats, key.cluster, names.slug(key.user), request, timeout_s, _HELD_PATIENCE_S)
        )
    except RefusalError as error:
        if error.refusal.code in _ENDED:
            token_cache.remove(key)
            raise
        return _kept(held, error)
    except (caller.NobodyError, errors.TimedOutError, errors.UnreachableError) as error:
        return _kept(held, error)
    if not grant.token:
        return held
    held = _held(grant)
    token_cache.write(key, held)
    return held


def _kept(held: token_cache.Held, error: errors.SpurEventsError) -> token_cache.Held:
    """Return the kept token although nobody confirmed it; the API server refuses it if it is worth nothing."""
    typer.echo(f"spur-events: using the token that ends at {_ends(held.expires_at)}, since {error}", err=True)
    return held


async def _ask(
    nats: settings.Nats,
    cluster: str,
    user_slug: str,
    request: KubeconfigRequest,
    timeout_s: float,
    patience_s: float,
) -> Grant:
    if not subjects.is_cluster_name(cluster):
        raise errors.UsageError(f"--cluster {cluster!r} is no cluster's name: it is a lower-case label")
    subject = subjects.kubeconfig(cluster, user_slug)
    async with caller.caller(nats, "spur-events kubeconfig") as calling:

        async def ask() -> Grant:
            service = f"the kubeconfig service of cluster {cluster}"
            reply = await calling.ask(subject, request, KubeconfigReply, timeout_s, service)
            if isinstance(reply.result, Grant):
                return reply.result
            raise (_NotNowError if reply.result.temporary else RefusalError)(reply.result)

        try:
            return await retrying.within(
                "ask for a kubeconfig", patience_s, ask, unless=(errors.UnreachableError,)
            )
        except _NotNowError as error:
            raise RefusalError(error.refusal) from error


def _slug(config: settings.Settings, user: str | None) -> str:
    """Return whose kubeconfig is wanted: the named user's, or that of whoever our credentials name."""
    if user is not None:
        return names.slug(user)
    slug = signin.identity(config.nats, signin.ADMIN)
    if slug is None and config.nats.credentials is None:
        raise errors.UsageError(
            "no NATS credentials are configured, so nobody knows who you are: set SPUR_EVENTS_NATS_CREDENTIALS, or"
            " SPUR_EVENTS_NATS_MUNGE where users need no file, or say whose kubeconfig with --user"
        )
    if slug is None:
        raise errors.UsageError(
            "these NATS credentials name no user of accounts, but a service or an administrator: say whose"
            " kubeconfig with --user"
        )
    return slug


def _plugin(config: settings.Settings, grant: Grant, lifetime_s: int) -> dict[str, object]:
    """Return how kubectl calls us, with the settings that we have now: it may be another shell's child by then."""
    nats = config.nats
    paths = {
        settings.CONFIG_VARIABLE: os.environ.get(settings.CONFIG_VARIABLE) or None,
        "SPUR_EVENTS_NATS_CREDENTIALS": nats.credentials,
        "SPUR_EVENTS_NATS_CA": nats.ca,
        "SPUR_EVENTS_NATS_MUNGE_SOCKET": nats.munge_socket,
    }
    # An address with a password in it stays where it is: in the settings file, or in the caller's environment.
    variables = {} if "@" in nats.url else {"SPUR_EVENTS_NATS_URL": nats.url}
    variables |= {name: str(Path(path).absolute()) for name, path in paths.items() if path is not None}
    variables |= {"SPUR_EVENTS_NATS_MUNGE": "true"} if nats.munge else {}
    wanted = {"cluster": grant.cluster, "account": grant.account, "user": grant.user}
    wanted |= {"lifetime": str(lifetime_s)} if lifetime_s else {}
    return {
        "apiVersion": _API_VERSION,
        "command": _program(),
        "args": ["credential", *(f"--{name}={value}" for name, value in wanted.items())],
        "env": [{"name": name, "value": value} for name, value in sorted(variables.items())],
        "interactiveMode": "Never",
        "provideClusterInfo": False,
        "installHint": "spur-events is not installed here: pip install spur-events, then get a new kubeconfig with"
        " 'spur-events kubeconfig', or one that needs no program with 'spur-events kubeconfig --static'",
    }


def _program() -> str:
    """Return our own program as every shell finds it."""
    name = "spur-events"
    beside = Path(sys.executable).parent / name
    called = Path(sys.argv[0])
    if called.name == name and (found := shutil.which(str(called))):
        return str(Path(found).absolute())
    return str(beside) if beside.exists() else shutil.which(name) or name


def _key(config: settings.Settings, cluster: str, account: str, user: str) -> token_cache.Key:
    return token_cache.Key(cluster=cluster, account=account, user=user, nats=config.nats.url)


def _held(grant: Grant) -> token_cache.Held:
    return token_cache.Held(token=grant.token, expires_at=grant.expires_at, uid=grant.service_account_uid)


def _api_version() -> str:
    """Return the protocol's version that kubectl speaks; the current one where nobody says."""
    given = os.environ.get(EXEC_INFO)
    if not given:
        return _API_VERSION
    try:
        version = json.loads(given)["apiVersion"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise errors.MisconfiguredError(f"{EXEC_INFO} holds no ExecCredential: kubectl sets it") from error
    if version not in _API_VERSIONS:
        raise errors.MisconfiguredError(
            f"kubectl asks for {version}, known here are {', '.join(_API_VERSIONS)}: get a new kubeconfig with"
            " 'spur-events kubeconfig'"
        )
    return str(version)


def _tell_end(grant: Grant, lifetime_s: int, output: Path | None) -> None:
    lasts_s = (grant.expires_at - datetime.now(UTC)).total_seconds()
    shortened = f"; the server does not give {lifetime_s} s" if lasts_s + 60 < lifetime_s else ""
    typer.echo(f"this token ends at {_ends(grant.expires_at)}{shortened}", err=True)
    if output is not None and kubeconfig_file.is_open(output):
        typer.echo(f"others can read {output}, and the token in it: chmod 600 {output}", err=True)


def _ends(at: datetime) -> str:
    minutes = max(round((at - datetime.now(UTC)).total_seconds() / 60), 0)
    unit, size = next((unit, size) for unit, size in _SPANS if minutes >= 2 * size or size == 1)
    return f"{at.astimezone().isoformat(timespec='seconds')} (in {minutes // size} {unit})"


def _rfc3339(at: datetime) -> str:
    return at.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
