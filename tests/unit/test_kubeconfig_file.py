"""Merging into a kubeconfig: everything of others stays, ours is replaced, and a file that is none stays as it is."""

import json
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from spur_events import errors, kubeconfig_file
from spur_events.kubeconfig_file import Entry

OURS = Entry(
    name="spur-default/physics",
    user_name="spur-default/physics/alice",
    server="https://127.0.0.1:6443",
    ca="-----BEGIN CERTIFICATE-----\n",
    namespace="spur-acct-physics",
    user={"token": "secret"},
)
OTHER = """\
# a comment
apiVersion: v1
kind: Config
preferences: {colors: true}
current-context: minikube
clusters:
- name: minikube
  cluster:
    server: https://192.168.49.2:8443
    certificate-authority: /home/me/.minikube/ca.crt
    extensions:
    - extension: {last-update: 2001-12-14t21:59:43.10-05:00, version: v1.31}
      name: cluster_info
contexts:
- context: {cluster: minikube, user: minikube}
  name: minikube
users:
- name: minikube
  user:
    token: 0o14
    password: "12345"
    expiry: 2026-01-01
    unknown: &x [1_000, yes, ~, "Ü"]
    again: *x
unknown-section: {a: 1}
"""


def merged(path: Path, entry: Entry = OURS) -> dict[str, Any]:
    kubeconfig_file.merge(path, entry)
    found: dict[str, Any] = yaml.safe_load(path.read_text("utf-8"))
    return found


def test_a_new_file_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "config"
    assert merged(path) == kubeconfig_file.document(OURS) == yaml.safe_load(kubeconfig_file.text(OURS))
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_nothing_of_others_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "config"
    path.write_text(OTHER, "utf-8")
    path.chmod(0o640)
    before = yaml.safe_load(OTHER)
    after = merged(path)
    assert after["current-context"] == OURS.name
    for section in ("clusters", "contexts", "users"):
        assert after[section][:-1] == before[section]
        assert after[section][-1] == kubeconfig_file.document(OURS)[section][0]
    for key in ("preferences", "unknown-section", "kind", "apiVersion"):
        assert after[key] == before[key]
    # Not only the values: what kubectl reads as text is not to become a number or another date.
    text = path.read_text("utf-8")
    for written in ("0o14", "2001-12-14t21:59:43.10-05:00", "1_000", "2026-01-01", "'12345'", "Ü"):
        assert written in text.replace('"', "'")
    assert path.stat().st_mode & 0o777 == 0o640


def test_again_replaces_our_own_entries(tmp_path: Path) -> None:
    path = tmp_path / "config"
    path.write_text(OTHER)
    merged(path)
    changed = Entry(
        name=OURS.name,
        user_name=OURS.user_name,
        server="https://elsewhere",
        ca="",
        namespace="n",
        user={"exec": {"command": "x", "args": ["a b", "c: d"]}},
    )
    after = merged(path, changed)
    assert [one["name"] for one in after["clusters"]] == ["minikube", OURS.name]
    assert after["clusters"][1]["cluster"] == {"server": "https://elsewhere"}
    assert [one["user"] for one in after["users"]][1] == changed.user
    assert merged(path, changed) == after


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# nothing\n",
        "kind: Config\n",
        "kind: Config\nclusters: null\nusers: []\n",
        json.dumps({"apiVersion": "v1", "kind": "Config", "clusters": [], "users": []}, indent=2),
        "clusters: []\n",
    ],
)
def test_files_with_little_in_them(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config"
    path.write_text(text)
    assert merged(path) == kubeconfig_file.document(OURS)


@pytest.mark.parametrize(
    "content",
    [
        b"[1, 2]",
        b"just text",
        b"kind: Pod\nclusters: []\n",
        b"a: 1\n",
        b"kind: Config\nclusters: {a: 1}\n",
        b"kind: [Config\n",
        b"kind: Config\n---\nkind: Config\n",
        b"\xff\xfe\x00",
        b"kind: Config\nx: \x00",
    ],
)
def test_what_is_no_kubeconfig_stays_as_it_is(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config"
    path.write_bytes(content)
    with pytest.raises(errors.PermanentError, match="no kubeconfig") as error:
        kubeconfig_file.merge(path, OURS)
    assert str(path) in str(error.value)
    assert path.read_bytes() == content
    assert sorted(tmp_path.iterdir()) == [path], "no lock, no temporary file is left"


def test_a_link_is_followed(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_text(OTHER)
    link.symlink_to(real)
    merged(link)
    assert link.is_symlink()
    assert OURS.name in real.read_text()


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for path in (tmp_path, tmp_path / "pipe", loop, tmp_path / "pipe" / "below"):
        with pytest.raises(errors.PermanentError):
            kubeconfig_file.merge(path, OURS)


def test_kubectls_lock_is_respected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, lock = tmp_path / "config", tmp_path / "config.lock"
    lock.touch()
    timer = threading.Timer(0.2, lock.unlink)
    timer.start()
    merged(path)
    timer.join()
    lock.touch()
    monkeypatch.setattr(kubeconfig_file, "_LOCK_TIMEOUT_S", 0.1)
    with pytest.raises(errors.TemporaryError, match=r"remove .*config\.lock"):
        kubeconfig_file.merge(path, OURS)
    assert lock.exists(), "somebody else's"


def test_several_at_once(tmp_path: Path) -> None:
    path = tmp_path / "config"
    entries = [
        Entry(name=f"n{i}", user_name=f"u{i}", server="s", ca="", namespace="n", user={}) for i in range(8)
    ]
    threads = [threading.Thread(target=kubeconfig_file.merge, args=(path, entry)) for entry in entries]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = yaml.safe_load(path.read_text())
    assert {one["name"] for one in found["users"]} == {f"u{i}" for i in range(8)}


_SCALARS = st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="utf-8"), max_size=20)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab:- #'\"", max_size=5), inner),
    max_leaves=8,
)


@hypothesis.settings(deadline=None)  # it writes files, on a machine that others use as well
@given(
    st.dictionaries(st.sampled_from(["preferences", "x", "y"]), _VALUES),
    st.lists(st.dictionaries(st.sampled_from(["name", "user", "z"]), _VALUES), max_size=3),
    st.sampled_from([True, False, None]),
)
def test_any_other_content_stays(
    tmp_path_factory: pytest.TempPathFactory, more: dict[str, Any], users: list[Any], flow: bool | None
) -> None:
    path = tmp_path_factory.mktemp("any") / "config"
    content = {"kind": "Config", "users": users} | more
    path.write_text(yaml.safe_dump(content, default_flow_style=flow, allow_unicode=True), "utf-8")
    # What the file says: PyYAML does not write every text so that it reads it again (U+0085).
    before = yaml.safe_load(path.read_text("utf-8"))
    after = merged(path)
    for key in more:
        assert after[key] == before[key]
    assert after["users"][:-1] == [one for one in before["users"] if one.get("name") != OURS.user_name]


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs files of two users")


@pytest.fixture
def hers() -> Iterator[Path]:
    """Yield a kubeconfig of somebody else, in a folder of hers that she can get at."""
    folder = Path(tempfile.mkdtemp(prefix="spur-events-test-"))
    (folder / "config").write_text("")
    os.chown(folder / "config", 65534, 65534)
    os.chown(folder, 65534, 65534)
    yield folder / "config"
    shutil.rmtree(folder)


@as_root
def test_root_leaves_somebodys_file_hers(hers: Path) -> None:
    kubeconfig_file.merge(hers, OURS)
    found = hers.stat()
    assert (found.st_uid, found.st_gid, os.geteuid(), os.getegid()) == (65534, 65534, 0, 0)
    assert "current-context" in hers.read_text()


@as_root
def test_root_is_led_nowhere_by_the_owner_of_a_folder(
    hers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """She swaps her file for a link at the moment at which it was written."""
    secret = tmp_path / "secret"
    secret.write_text("root's")
    replace = Path.replace

    def swapped(self: Path, target: Path) -> Path:
        done = replace(self, target)
        target.unlink()
        target.symlink_to(secret)
        return done

    monkeypatch.setattr(Path, "replace", swapped)
    kubeconfig_file.merge(hers, OURS)
    assert secret.stat().st_uid == 0
    assert secret.read_text() == "root's"


@as_root
def test_root_may_do_no_more_in_her_folder_than_she(hers: Path, tmp_path: Path) -> None:
    """A link out of her folder to a file that is hers, in a folder that is not."""
    there = tmp_path / "there"
    there.write_text("")
    os.chown(there, 65534, 65534)
    hers.unlink()
    hers.symlink_to(there)
    with pytest.raises(errors.PermanentError, match=r"belongs to user id 65534.*another file"):
        kubeconfig_file.merge(hers, OURS)
    assert there.read_text() == ""


@as_root
def test_a_file_that_somebody_put_there_before_gets_no_access(tmp_path: Path) -> None:
    """As in /tmp: the token would be his who made the file."""
    path = tmp_path / "alice.kubeconfig"
    path.write_text("")
    os.chown(path, 65534, 65534)
    with pytest.raises(errors.PermanentError, match=f"{path} belongs to user id 65534"):
        kubeconfig_file.merge(path, OURS)
    assert path.read_text() == ""
    assert not path.with_name("alice.kubeconfig.lock").exists()
