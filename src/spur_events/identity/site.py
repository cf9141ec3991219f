"""The folder of a site: its keys, and what is made of them (JWTs, credentials files, the server's configuration).

`nats_command` works on it for an administrator, local.nats for `up` and the tests: what is shipped is what is
tested. A running server is told by the caller (jetstream.claims). Layout:

    site.json       what is on record: users, revocations, clusters
    keys/           seeds of operator, accounts and roles: the secrets of the site
    creds/          credentials of the services, of admin and of system
    users/          credentials of users
    auth/           what the auth callout service needs (SPUR_EVENTS_AUTH_KEYS)
    server/         what nats-server needs: no secret in it
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spur_events import errors, private
from spur_events.identity import claims, keys, roles, serverconf
from spur_events.schemas import names

_RECORD = "site.json"
_OPERATOR = "operator"
_SECONDS_OF_A_DAY = 86400
#: The auth service's signing key of its own account, unscoped: it signs answers with it.
_ANSWERS = "answers"
#: What a file with credentials begins with (claims.credentials).
_CREDENTIALS_MARK = b"-BEGIN NATS USER JWT-"


def _beginning(path: Path) -> bytes:
    if not path.is_file():
        return b""
    with path.open("rb") as stream:
        return stream.read(100)


class Site:
    """A site's folder. `create` makes one, `Site(folder)` opens it."""

    def __init__(self, folder: Path) -> None:
        """Open a site.

        Raises:
            MisconfiguredError: if there is none.
        """
        self.folder = folder
        try:
            self._record: dict[str, Any] = json.loads((folder / _RECORD).read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise errors.MisconfiguredError(
                f"{folder} is not the folder of a NATS site ({_RECORD}: {error}); name it with --dir, or make one"
                " with 'spur-events nats init'"
            ) from error

    @classmethod
    def create(
        cls, folder: Path, server: serverconf.Server, *, clusters: Sequence[str], partitions: int
    ) -> "Site":
        """Make keys, credentials for all parts of the clusters, and the server's configuration.

        Raises:
            RefusedError: if there is a site already: its keys are worth more than anything made here.
            MisconfiguredError: if the folder cannot be written.
        """
        if (folder / _RECORD).exists() or (folder / "keys").exists():
            raise errors.RefusedError(
                f"there is a NATS site in {folder} already, and it stays as it is; add to it with 'spur-events nats"
                " service' and 'nats user add', or name another folder with --dir"
            )
        try:
            for part in ("", "keys", "creds", "users", "auth", "server"):
                private.make_folder(folder / part)
            cls._make_keys(folder)
            record = {
                "format": 1,
                "cluster": clusters[0],
                "users": {},
                "revoked": {},
                "services": [],
                "issued": 0,
            }
            private.write(folder / _RECORD, json.dumps(record))
            site = cls(folder)
            for part in roles.PARTS:
                for cluster in clusters if part in roles.OF_A_CLUSTER else clusters[:1]:
                    site.service(part, cluster, partitions)
            site._write_others()
            site._write_auth()
            serverconf.write(site.server_folder, server)
            site.write_accounts()
        except OSError as error:
            raise errors.MisconfiguredError(f"{folder} cannot be written: {error.strerror}") from error
        return site

    @staticmethod
    def _make_keys(folder: Path) -> None:
        kinds = {_OPERATOR: keys.Kind.OPERATOR}
        for name, account in roles.accounts().items():
            kinds[name] = keys.Kind.ACCOUNT
            kinds |= {f"{name}.{role}": keys.Kind.ACCOUNT for role in account["roles"]}
            if "callout" in account:
                kinds[f"{name}.{_ANSWERS}"] = keys.Kind.ACCOUNT
        for name, kind in kinds.items():
            private.write(folder / "keys" / f"{name}.nk", keys.make(kind).seed + "\n")

    @property
    def server_folder(self) -> Path:
        """What nats-server needs."""
        return self.folder / "server"

    @property
    def credentials(self) -> Path:
        """The folder with one credentials file a part, as the settings take it."""
        return self.folder / "creds"

    def key(self, name: str) -> keys.Key:
        """Return a key of the site: `operator`, an account's, or `<account>.<role>`."""
        return keys.read(self.folder / "keys" / f"{name}.nk")

    def write_accounts(self) -> dict[str, str]:
        """Sign all accounts anew, as declared and recorded, put them into the server's configuration, return them."""
        # A server keeps the newer of two, by the second.
        self._record["issued"] = max(int(time.time()), self._record["issued"] + 1)
        self._save()
        signed = {self.key(name).public: self._account(name) for name in roles.accounts()}
        system = self.key(roles.SYSTEM).public
        serverconf.write_accounts(
            self.server_folder,
            operator=claims.operator(self.key(_OPERATOR), name="spur-events", system_account=system),
            system_account=system,
            sentinel=self._user(roles.SENTINEL, keys.make(keys.Kind.USER), name=roles.SENTINEL),
            accounts=signed,
        )
        return signed

    def _account(self, name: str) -> str:
        declared = roles.accounts()[name]
        authorization = {}
        signing_keys = []
        if callout := declared.get("callout"):
            authorization = {
                "auth_users": self._callout_users(),
                "allowed_accounts": [self.key(other).public for other in callout["accounts"]],
            }
            signing_keys = [self.key(f"{name}.{_ANSWERS}").public]
        return claims.account(
            self.key(_OPERATOR),
            self.key(name).public,
            name=name,
            jetstream=declared.get("jetstream", False),
            scopes=[
                claims.scope(self.key(f"{name}.{role}").public, role, roles.permissions(role))
                for role in declared["roles"]
                if not roles.is_bearer(role)
            ],
            signing_keys=signing_keys,
            exports=[
                {"name": subject, "subject": subject, "type": "service"}
                for subject in declared.get("exports", [])
            ],
            imports=[
                {
                    "name": one["subject"],
                    "subject": one["subject"],
                    "account": self.key(one["account"]).public,
                    "type": "service",
                }
                for one in declared.get("imports", [])
            ],
            authorization=authorization,
            revocations=self._record["revoked"].get(name, {}),
            issued=self._record["issued"],
        )

    def _user(
        self, role: str, key: keys.Key, *, name: str, tags: tuple[str, ...] = (), expires: int = 0
    ) -> str:
        account = roles.account_of(role)
        # A scoped key's users have no settings of their own, and "bearer" is one: hence another key and permissions.
        bearer = roles.is_bearer(role)
        return claims.user(
            self.key(f"{account}.{_ANSWERS if bearer else role}"),
            key.public,
            account=self.key(account).public,
            name=name,
            tags=tags,
            permissions=roles.permissions(role) if bearer else None,
            expires=expires,
            bearer=bearer,
        )

    def service(self, part: str, cluster: str, partitions: int, output: Path | None = None) -> Path:
        """Make credentials for a part (of a cluster), and return the file.

        Another user of the auth service is one that its account must name: `write_accounts` then.

        Raises:
            RefusedError: if `output` is something else than credentials.
        """
        if output is not None:
            self._check_output(output)
        return self._service(part, cluster, partitions, output)

    def _service(self, part: str, cluster: str, partitions: int, output: Path | None) -> Path:
        if output is None:
            own = part in roles.OF_A_CLUSTER and cluster != self._record["cluster"]
            output = self.credentials / (cluster if own else ".") / f"{part}.creds"
            private.make_folder(output.parent)
        key = keys.make(keys.Kind.USER)
        token = self._user(
            part,
            key,
            name=roles.user_name(part, cluster),
            tags=roles.tags(part, cluster, partitions),
        )
        private.write(output, claims.credentials(token, key))
        made: dict[str, Any] = {"part": part, "key": key.public, "file": self._relative(output)}
        made |= {"cluster": cluster, "partitions": partitions} if part in roles.OF_A_CLUSTER else {}
        self._record["services"].append(made)
        self._save()
        return output

    def add_user(self, name: str, *, days: int = 0, admin: bool = False, output: Path | None = None) -> Path:
        """Make credentials for a user, good at once on a running server, and return the file.

        Raises:
            RefusedError: if `output` is something else than credentials.
        """
        if output is not None:
            self._check_output(output)
        slug = names.slug(name)
        expires = int(time.time()) + days * _SECONDS_OF_A_DAY if days else 0
        role = roles.USER_ADMIN if admin else roles.USER
        key = keys.make(keys.Kind.USER)
        token = self._user(role, key, name=slug, tags=(f"{roles.ROLE_TAG}{role}",), expires=expires)
        output = output or self.folder / "users" / f"{slug}.creds"
        # On record first: what nobody knows of, nobody could revoke.
        self._record["users"].setdefault(name, []).append(
            {"key": key.public, "role": role, "expires": expires}
        )
        self._save()
        private.write(output, claims.credentials(token, key))
        return output

    def revoke_user(self, name: str) -> int:
        """Put all credentials of a user on the account's list of the revoked, and return how many those are.

        They are dead when a running server has been given the account again: `write_accounts`.

        Raises:
            UsageError: if she was given none.
        """
        known = self._record["users"].pop(name, [])
        now = int(time.time())
        alive = [one for one in known if not one["expires"] or one["expires"] > now]
        if not alive:
            raise errors.UsageError(
                f"user {name!r} was given no credentials here that still hold; who signs in with MUNGE has none:"
                " take away the membership (sacctmgr), or the system account"
            )
        revoked = self._record["revoked"].setdefault(roles.USERS, {})
        revoked |= {one["key"]: now for one in alive}
        self._save()
        (self.folder / "users" / f"{names.slug(name)}.creds").unlink(missing_ok=True)
        return len(alive)

    def rotate(self, role: str) -> list[Path]:
        """Give a role a new signing key: whatever the old one signed is dead once `write_accounts` is done.

        Returns the credentials of services that were made anew. Users must be added again.
        """
        account = roles.account_of(role)
        private.write(self.folder / "keys" / f"{account}.{role}.nk", keys.make(keys.Kind.ACCOUNT).seed + "\n")
        mine = [one for one in self._record["services"] if one["part"] == role]
        self._record["services"] = [one for one in self._record["services"] if one["part"] != role]
        for name, known in list(self._record["users"].items()):
            self._record["users"][name] = [one for one in known if one["role"] != role]
        self._save()
        self._write_auth()
        files = {one["file"]: one for one in mine}
        return [
            self._service(role, one.get("cluster", ""), one.get("partitions", 0), self.folder / file)
            for file, one in files.items()
        ]

    def pipeline_user(self, name: str) -> str:
        """Return credentials with all rights in the pipeline's account: for tests, nothing shipped uses it."""
        key = keys.make(keys.Kind.USER)
        account = self.key(roles.PIPELINE)
        token = claims.user(account, key.public, account=account.public, name=name, permissions={})
        return claims.credentials(token, key)

    def _check_output(self, path: Path) -> None:
        """Refuse to write over anything but credentials: it may be a key of the site."""
        whole, site = path.resolve(), self.folder.resolve()
        own = whole.is_relative_to(site) and whole.parent not in (
            site / "users",
            *self._credentials_folders(),
        )
        if own or (path.exists() and _CREDENTIALS_MARK not in _beginning(path)):
            raise errors.RefusedError(
                f"{path} is not for credentials, and is left as it is: name a file that does not exist, or one with"
                " NATS credentials"
            )
        if not path.parent.is_dir():
            raise errors.RefusedError(f"{path} cannot be written: there is no folder {path.parent}")

    def _credentials_folders(self) -> list[Path]:
        folder = self.credentials.resolve()
        return [folder, *(one for one in folder.iterdir() if one.is_dir())]

    def _relative(self, path: Path) -> str:
        """Return a path as seen from the site, where it is in it: a site may be moved."""
        whole = path.absolute()
        return str(
            whole.relative_to(self.folder.absolute())
            if whole.is_relative_to(self.folder.absolute())
            else whole
        )

    def _callout_users(self) -> list[str]:
        return [one["key"] for one in self._record["services"] if one["part"] == roles.AUTH_SERVICE]

    def _write_others(self) -> None:
        """Make the credentials of those that are no part: who pushes accounts, and the sentinel for old servers."""
        for role in (roles.SYSTEM_USER, roles.SENTINEL):
            key = keys.make(keys.Kind.USER)
            token = self._user(role, key, name=role)
            private.write(self.credentials / f"{role}.creds", claims.credentials(token, key))

    def _write_auth(self) -> None:
        """Put what the auth service signs with into a folder of its own: it needs no other key of the site."""
        folder = self.folder / "auth"
        for name in (
            f"{roles.AUTH}.{_ANSWERS}",
            f"{roles.USERS}.{roles.USER}",
            f"{roles.USERS}.{roles.USER_ADMIN}",
        ):
            private.write(folder / f"{name}.nk", self.key(name).seed + "\n")
        known = {name: self.key(name).public for name in (roles.AUTH, roles.USERS)}
        private.write(folder / "accounts.json", json.dumps(known, indent=2) + "\n")

    def _save(self) -> None:
        private.write(self.folder / _RECORD, json.dumps(self._record, indent=2) + "\n")
