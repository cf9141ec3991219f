"""Every setting: grouped, with its unit and default, read once by the command line.

From `SPUR_EVENTS_<GROUP>_<NAME>` in the environment, then from the TOML file that `SPUR_EVENTS_CONFIG` names
(or /etc/spur-events/config.toml), where each group is a table. docs/configuration.md is made from this file.
"""

import json
import os
import tomllib
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from spur_events import errors
from spur_events.schemas import subjects

CONFIG_VARIABLE = "SPUR_EVENTS_CONFIG"
DEFAULT_CONFIG = Path("/etc/spur-events/config.toml")


class _Group(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class Database(_Group):
    """The accounting database. Only the relay, `db migrate`, `sacctmgr` and `revoke` connect to it."""

    url: SecretStr = Field(
        SecretStr("postgresql://127.0.0.1:5432/spur"),
        description="Connection string (libpq URL or key=value pairs); may hold a password.",
    )
    connect_timeout_s: int = Field(
        10, ge=1, le=300, description="Seconds that one attempt to connect may take."
    )


class Nats(_Group):
    """The NATS server, 2.10 or later with JetStream."""

    url: str = Field("nats://127.0.0.1:4222", description="Address, or several separated by commas.")
    user: str = Field("", description="User name, where the server asks for one.")
    password: SecretStr = Field(SecretStr(""), description="Password of that user.")
    credentials: Path | None = Field(
        None,
        description="Credentials file (JWT and nkey seed) instead of a user; or a folder with one for each part:"
        " relay.creds, apply.creds, resync.creds, kubeconfig.creds, auth.creds, and admin.creds for the commands.",
    )
    munge: bool = Field(
        False, description="Sign in as the operating-system user, by a MUNGE credential as the password."
    )
    munge_socket: Path | None = Field(
        None, description="Socket of munged, for signing in and for checking; default: munge's own."
    )
    ca: Path | None = Field(None, description="CA bundle that signed the server's certificate; turns TLS on.")
    connect_timeout_s: int = Field(
        5, ge=1, le=300, description="Seconds that one attempt to connect may take."
    )
    replicas: int = Field(1, ge=1, le=5, description="Copies of streams and buckets in a NATS cluster.")
    partitions: int = Field(
        16, ge=1, le=256, description="Partitions of the event stream; fixed when the stream is made."
    )


class Relay(_Group):
    """The relay, between database and NATS."""

    poll_interval_s: float = Field(
        1.0, gt=0, le=60, description="Seconds after which the outbox is read even without a notification."
    )
    batch_rows: int = Field(500, ge=1, le=10000, description="Outbox rows taken in one transaction.")
    changes_per_event: int = Field(
        200, ge=1, le=5000, description="Changes in one event; a longer list is split over several."
    )
    heartbeat_s: float = Field(
        5.0, gt=0, le=30, description="Seconds between two heartbeats in the status bucket."
    )


class Audit(_Group):
    """The relay's comparison of the database with the bucket."""

    interval_s: float = Field(300.0, gt=0, le=86400, description="Seconds between two audits.")


class Resync(_Group):
    """The comparison of the bucket with a cluster's objects."""

    interval_s: float = Field(300.0, gt=0, le=86400, description="Seconds between two resyncs of a cluster.")
    prune_grace_s: float = Field(
        86400.0,
        ge=0,
        description="Seconds that the namespace of a deleted account is kept; 0: until the next resync.",
    )


class Kubernetes(_Group):
    """The cluster that this process writes to."""

    cluster: str = Field(
        "default", description="Name of the cluster in subjects and keys: a lower-case label."
    )
    kubeconfig: Path | None = Field(
        None,
        description="Kubeconfig file; default: KUBECONFIG, then the pod's own ServiceAccount. Or a folder with one"
        " for each part: apply.kubeconfig, resync.kubeconfig, kubeconfig.kubeconfig.",
    )
    timeout_s: float = Field(
        10.0,
        gt=0,
        le=60,
        description="Seconds that one request may take, and as many to get credentials as the kubeconfig says.",
    )
    concurrency: int = Field(32, ge=1, le=512, description="Requests in flight at once, per process.")

    @field_validator("cluster")
    @classmethod
    def _is_label(cls, value: str) -> str:
        if not subjects.is_cluster_name(value):
            raise ValueError(
                "a cluster's name is a lower-case label of at most 63 characters, and not 'relay'"
            )
        return value


class Apply(_Group):
    """The apply consumers, between NATS and a cluster."""

    ack_wait_s: float = Field(
        30.0, ge=1, le=600, description="Seconds after which an unanswered event goes to another worker."
    )
    retry_min_s: float = Field(
        1.0, gt=0, le=60, description="Seconds before the first retry of a failed account."
    )
    retry_max_s: float = Field(60.0, gt=0, le=3600, description="Seconds between retries at most.")
    sweep_interval_s: float = Field(
        15.0, gt=0, le=3600, description="Seconds between two looks for accounts whose status is behind."
    )


class Quota(_Group):
    """How an allocation becomes a quota."""

    mode: Literal["requests", "requests+limits"] = Field(
        "requests", description="Cap requests only, or limits as well with equal default limits."
    )
    unallocated: Literal["closed", "open"] = Field(
        "closed", description="An account without any allocation: no pods at all, or no quota."
    )
    gpu_resource: str = Field("amd.com/gpu", description="Extended resource that untyped gres/gpu counts.")
    gpu_types: dict[str, str] = Field(
        {}, description='Extended resource of each GPU type, for example {"a100": "nvidia.com/gpu"}.'
    )

    @field_validator("gpu_resource", "gpu_types")
    @classmethod
    def _is_extended(cls, value: str | dict[str, str]) -> str | dict[str, str]:
        for resource in [value] if isinstance(value, str) else value.values():
            domain, slash, name = resource.partition("/")
            if not (domain and slash and name):
                raise ValueError(
                    f"{resource!r} is not an extended resource; write it as domain/name, like amd.com/gpu"
                )
        return value

    default_cpu_milli: int = Field(
        100, ge=1, description="Default CPU request of a container without one, in thousandths of a core."
    )
    default_mem_mb: int = Field(
        128, ge=1, description="Default memory request of a container without one, in base-10 MB."
    )


class Access(_Group):
    """Kubeconfigs for members: what `run kubeconfig` hands out, and what `spur-events kubeconfig` asks for."""

    server: str = Field(
        "",
        description="The API server's address as users reach it; default: what the cluster publishes in kube-public,"
        " then the one in the responder's own kubeconfig file.",
    )
    ca: Path | None = Field(
        None,
        description="CA bundle for users; default: what the cluster publishes, then the one in the responder's own"
        " kubeconfig file.",
    )
    system_ca: bool = Field(
        False, description="Leave the CA out: users' systems trust the API server's certificate already."
    )
    token_lifetime_s: int = Field(
        3600,
        ge=600,
        le=2**31,
        description="Seconds that a token lasts, where nobody asks for another lifetime.",
    )
    max_token_lifetime_s: int = Field(
        86400,
        ge=600,
        le=2**31,
        description="Seconds that a token lasts at most; the API server may allow less.",
    )
    require_guard: bool = Field(
        True,
        description="Hand out nothing where the member guard is not in force. Without it members can keep access"
        " after their removal (docs/security.md).",
    )
    request_timeout_s: float = Field(
        10.0, gt=0, le=300, description="Seconds that a command waits for the responder's answer."
    )


class Auth(_Group):
    """The auth callout: users without any secret of their own sign in to NATS with MUNGE."""

    keys: Path | None = Field(
        None, description="Folder with the keys that `spur-events nats init` made for this service (auth)."
    )
    session_s: int = Field(
        3600, ge=60, le=86400, description="Seconds after which a connection must sign in anew."
    )
    admins: tuple[str, ...] = Field(
        (), description="Users who may ask for anybody's kubeconfig. Nobody, if empty."
    )


class Health(_Group):
    """Health and readiness of a long-running part over HTTP: /healthz and /readyz."""

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(0, ge=0, le=65535, description="Port; 0: do not listen.")


class Settings(BaseSettings):
    """All groups. `load` reads them; nothing else does."""

    model_config = SettingsConfigDict(
        env_prefix="SPUR_EVENTS_",
        env_nested_delimiter="_",
        env_ignore_empty=True,
        env_nested_max_split=1,
        extra="forbid",
        frozen=True,
    )

    database: Database = Database()
    nats: Nats = Nats()
    relay: Relay = Relay()
    audit: Audit = Audit()
    resync: Resync = Resync()
    kubernetes: Kubernetes = Kubernetes()
    apply: Apply = Apply()
    quota: Quota = Quota()
    access: Access = Access()
    auth: Auth = Auth()
    health: Health = Health()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - the signature is pydantic's
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Order the sources: arguments, environment, TOML file."""
        named = os.environ.get(CONFIG_VARIABLE)
        toml = TomlConfigSettingsSource(settings_cls, Path(named) if named else DEFAULT_CONFIG)
        return init_settings, env_settings, toml


def load() -> Settings:
    """Read all settings.

    Raises:
        MisconfiguredError: naming each setting at fault, its value and what it may be.
    """
    named = os.environ.get(CONFIG_VARIABLE)
    try:
        if named and not Path(named).is_file():
            raise errors.MisconfiguredError(f"{CONFIG_VARIABLE} names {named!r}, which is not a file")
        return Settings()
    except ValidationError as error:
        lines = [
            f"setting {'.'.join(str(part) for part in fault['loc'])} "
            f"(environment: SPUR_EVENTS_{'_'.join(str(part) for part in fault['loc'][:2]).upper()}): {fault['msg']}"
            for fault in error.errors(include_url=False, include_input=False)
        ]
        raise errors.MisconfiguredError("; ".join(lines)) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise errors.MisconfiguredError(
            f"settings file {named or DEFAULT_CONFIG} cannot be read: {error}; it must be TOML, each group a table"
        ) from error
    except ValueError as error:
        if isinstance(error.__cause__, json.JSONDecodeError):
            value = error.__cause__.doc  # not shown: it may hold a password
            found = [
                name for name, one in os.environ.items() if name.startswith("SPUR_EVENTS_") and one == value
            ]
            raise errors.MisconfiguredError(
                f'{" or ".join(sorted(found)) or "a setting"} must be JSON, like \'["alice", "bob"]\' where a list is'
                f" wanted: {error.__cause__.msg}"
            ) from error
        raise errors.MisconfiguredError(f"settings cannot be read: {error}") from error
