"""Tokens that are kept: for their owner alone, for one key, and never past their end."""

import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from spur_events import token_cache
from spur_events.token_cache import Held, Key

KEY = Key(cluster="west", account="physics", user="alice", nats="nats://x")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "spur-events" / "tokens"


def held(left_s: float = 3600) -> Held:
    return Held(token="t0ken", expires_at=datetime.now(UTC) + timedelta(seconds=left_s), uid="u")


def only(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_what_was_kept_comes_back(cache: Path) -> None:
    one = held()
    token_cache.write(KEY, one)
    assert token_cache.read(KEY) == one
    assert only(cache).stat().st_mode & 0o777 == 0o600
    assert cache.stat().st_mode & 0o777 == 0o700
    assert "alice" not in only(cache).name
    assert "t0ken" not in repr(one)
    token_cache.remove(KEY)
    assert token_cache.read(KEY) is None
    token_cache.remove(KEY)


def test_each_key_for_itself() -> None:
    token_cache.write(KEY, held())
    for field in ("cluster", "account", "user", "nats"):
        assert token_cache.read(Key(**{**vars(KEY), field: "other"})) is None


@pytest.mark.parametrize(("left_s", "used"), [(3600, True), (40, True), (20, False), (0, False), (-9, False)])
def test_never_past_its_end(left_s: float, used: bool) -> None:
    token_cache.write(KEY, held(left_s))
    assert (token_cache.read(KEY) is not None) is used


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        '{"token": "x"}',
        json.dumps({"key": vars(KEY), "token": "x", "uid": "u", "expires_at": "soon"}),
        json.dumps({"key": vars(KEY), "token": "x", "uid": "u", "expires_at": "2999-01-01T00:00:00"}),
        json.dumps({"key": {}, "token": "x", "uid": "u", "expires_at": "2999-01-01T00:00:00Z"}),
        json.dumps({"key": vars(KEY), "token": "", "uid": "u", "expires_at": "2999-01-01T00:00:00Z"}),
        json.dumps(
            {"key": vars(KEY), "token": "x" * 70000, "uid": "u", "expires_at": "2999-01-01T00:00:00Z"}
        ),
    ],
)
def test_a_damaged_file_counts_as_none_and_is_written_again(cache: Path, text: str) -> None:
    token_cache.write(KEY, held())
    only(cache).write_text(text)
    assert token_cache.read(KEY) is None
    token_cache.write(KEY, held())
    assert token_cache.read(KEY) is not None


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_file_that_others_may_touch(cache: Path, mode: int) -> None:
    token_cache.write(KEY, held())
    only(cache).chmod(mode)
    assert token_cache.read(KEY) is None
    token_cache.write(KEY, held())
    assert token_cache.read(KEY) is not None
    assert only(cache).stat().st_mode & 0o777 == 0o600


def test_a_folder_that_others_may_touch(cache: Path) -> None:
    token_cache.write(KEY, held())
    cache.chmod(0o755)
    assert token_cache.read(KEY) is None
    token_cache.write(KEY, held())
    assert token_cache.read(KEY) is not None


def test_links_are_not_followed(cache: Path, tmp_path: Path) -> None:
    token_cache.write(KEY, held())
    real = tmp_path / "elsewhere"
    only(cache).rename(real)
    name = cache / token_cache._path(KEY).name
    name.symlink_to(real)
    assert token_cache.read(KEY) is None
    before = real.read_text()
    token_cache.write(KEY, held(1800))
    assert not name.is_symlink(), "the link is replaced, not written through"
    assert real.read_text() == before

    name.unlink()
    elsewhere = tmp_path / "folder"
    cache.rename(elsewhere)
    cache.symlink_to(elsewhere)
    token_cache.write(KEY, held())
    assert list(elsewhere.iterdir()) == []
    assert token_cache.read(KEY) is None


def test_a_pipe_does_not_hang(cache: Path) -> None:
    token_cache.write(KEY, held())
    path = only(cache)
    path.unlink()
    os.mkfifo(path, 0o600)
    assert token_cache.read(KEY) is None


def test_no_place_to_keep_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    token_cache.write(KEY, held())
    assert token_cache.read(KEY) is None


def test_a_relative_cache_folder_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    assert token_cache.folder() == Path.home() / ".cache" / "spur-events" / "tokens"


def test_a_relative_home_is_no_place_to_keep_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "somewhere")
    monkeypatch.chdir(tmp_path)
    token_cache.write(KEY, held())
    assert token_cache.read(KEY) is None
    assert list(tmp_path.iterdir()) == []
