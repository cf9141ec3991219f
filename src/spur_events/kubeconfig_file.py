"""Kubeconfig files: our entries as text, or merged into a file that somebody has already, of which nothing is lost.

`kubeconfig_command` calls it. Merging works on YAML's nodes and not on values, so that whatever else is in the file
(other contexts, unknown fields, a date, a number that is meant as text) is written as it was read; comments and
layout alone are lost, as with `kubectl config`.
"""

import base64
import contextlib
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from yaml import representer

from spur_events import errors, private

_LOCK_TIMEOUT_S = 5.0
_WIDE = 2**31 - 1  # no line breaks in a value
_SECTIONS = ("clusters", "contexts", "users")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A cluster, a user of it and the context that joins the two; `user` is how the user proves who she is."""

    name: str
    user_name: str
    server: str
    ca: str
    namespace: str
    user: dict[str, Any]


def document(entry: Entry) -> dict[str, Any]:
    """Return a kubeconfig that holds an entry and nothing else."""
    cluster: dict[str, Any] = {"server": entry.server}
    if entry.ca:
        cluster["certificate-authority-data"] = base64.b64encode(entry.ca.encode()).decode()
    context = {"cluster": entry.name, "namespace": entry.namespace, "user": entry.user_name}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": entry.name, "cluster": cluster}],
        "contexts": [{"name": entry.name, "context": context}],
        "users": [{"name": entry.user_name, "user": entry.user}],
        "current-context": entry.name,
    }


def text(entry: Entry) -> str:
    """Return a kubeconfig file with an entry and nothing else."""
    return yaml.safe_dump(document(entry), sort_keys=False, width=_WIDE)


def merge(path: Path, entry: Entry) -> None:
    """Put an entry into a file, in place of one of the same name, and make it the current one.

    A new file can be read by its owner alone; another keeps its mode and, where root writes, its owner. A link is
    followed. kubectl is kept out meanwhile, in the way in which it keeps others out.

    Raises:
        PermanentError: if the file cannot be read or written or is no kubeconfig; it is as it was then.
        TemporaryError: if another program holds it.
    """
    with _named(path):
        if path.is_dir():
            raise errors.PermanentError(f"{path} is a folder: name a file in it")
    with _named(path), _as_its_owner(path), _locked(path):
        target = Path(os.path.realpath(path))
        if target.is_symlink():
            raise errors.PermanentError(f"{path} is a link that leads back to itself")
        if not target.exists():
            private.make_folder(target.parent)
            private.write(target, text(entry))
            return
        found = target.stat()
        if not stat.S_ISREG(found.st_mode):
            raise errors.PermanentError(f"{path} is not a file; choose another one")
        if not os.access(target, os.W_OK, effective_ids=True):
            raise errors.PermanentError(f"{path} may not be written by you; choose another file")
        merged = _merged(target.read_text("utf-8"), entry, path)
        private.write(target, merged, mode=stat.S_IMODE(found.st_mode))


def is_open(path: Path) -> bool:
    """Whether somebody else than its owner may read a file."""
    return bool(path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH))


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise errors.PermanentError(
            f"{path} is no kubeconfig: it is not text; choose another file"
        ) from error
    except OSError as error:
        raise errors.PermanentError(
            f"{path} cannot be used: {error.strerror}; choose another file"
        ) from error


@contextlib.contextmanager
def _as_its_owner(path: Path) -> Iterator[None]:
    """Let an administrator who writes to somebody's file do no more there than its owner may: it stays hers, too.

    As root she could be led elsewhere by a link, and give it away. Whoever puts a file into a folder that is not his
    (in /tmp, say) gets no access that is meant for somebody else.
    """
    target = Path(os.path.realpath(path))
    if os.geteuid() != 0 or not target.exists():
        yield
        return
    found, folder = target.stat(), target.parent.stat()
    if found.st_uid == 0:
        yield
        return
    if folder.st_uid != found.st_uid:
        raise errors.PermanentError(
            f"{path} belongs to user id {found.st_uid}, and its folder does not: the access could be meant for"
            " somebody else; remove it, or choose another file"
        )
    groups = os.getgroups()
    os.setgroups([found.st_gid])
    os.setegid(found.st_gid)
    os.seteuid(found.st_uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold FILE.lock, which must not exist before: what kubectl and client-go do (clientcmd.ModifyConfig)."""
    private.make_folder(path.parent)
    lock = path.with_name(f"{path.name}.lock")
    until_s = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        try:
            os.close(os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            break
        except FileExistsError as error:
            if time.monotonic() > until_s:
                raise errors.TemporaryError(
                    f"another program is changing {path}: try again; if none is, remove {lock}"
                ) from error
            time.sleep(0.05)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)


def _merged(old: str, entry: Entry, path: Path) -> str:
    try:
        root = yaml.compose(old, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        said = " ".join(str(error).split())
        raise errors.PermanentError(f"{path} is no kubeconfig: {said}; choose another file") from error
    if root is None:  # empty
        return text(entry)
    if not isinstance(root, yaml.MappingNode) or not _is_kubeconfig(root):
        raise errors.PermanentError(f"{path} is no kubeconfig; choose another file")
    for key, value in document(entry).items():
        if key not in _SECTIONS:
            _set(root, key, value)
            continue
        section = _get(root, key)
        if section is None or section.tag == "tag:yaml.org,2002:null":
            _set(root, key, value)
        elif isinstance(section, yaml.SequenceNode):
            _put(section, value[0])
        else:
            raise errors.PermanentError(f"{path} is no kubeconfig: {key} is no list; choose another file")
    return str(yaml.serialize(root, Dumper=yaml.SafeDumper, allow_unicode=True, width=_WIDE))


def _is_kubeconfig(root: yaml.MappingNode) -> bool:
    kind = _get(root, "kind")
    if kind is not None:
        return bool(kind.value == "Config")
    return any(_get(root, key) is not None for key in _SECTIONS)


def _put(section: yaml.SequenceNode, item: dict[str, Any]) -> None:
    """Replace the item of a section that has the same name, or add it."""
    places = [
        place
        for place, node in enumerate(section.value)
        if isinstance(node, yaml.MappingNode)
        and (name := _get(node, "name")) is not None
        and name.value == item["name"]
    ]
    for place in reversed(places[1:]):
        del section.value[place]
    if places:
        section.value[places[0]] = _node(item)
    else:
        section.value.append(_node(item))
        if not section.value[:-1]:
            section.flow_style = False  # `[]` is written in the other style; a full one is not


def _get(mapping: yaml.MappingNode, key: str) -> Any:
    for name, value in mapping.value:
        if name.value == key:
            return value
    return None


def _set(mapping: yaml.MappingNode, key: str, value: object) -> None:
    for place, (name, _) in enumerate(mapping.value):
        if name.value == key:
            mapping.value[place] = (name, _node(value))
            return
    mapping.value.append((_node(key), _node(value)))


def _node(value: object) -> Any:
    return representer.SafeRepresenter(default_flow_style=False, sort_keys=False).represent_data(value)
