"""JWTs and keys of NATS: what is signed is read back, what is changed is refused, and no seed is shown."""

import base64
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spur_events import errors
from spur_events.identity import claims, keys

KEY = keys.make(keys.Kind.ACCOUNT)


@given(
    name=st.text(max_size=40),
    content=st.dictionaries(
        st.text(max_size=8), st.text(max_size=30) | st.integers() | st.booleans(), max_size=4
    ),
)
def test_what_was_signed_is_read_back(name: str, content: dict[str, str | int | bool]) -> None:
    content = {key: value for key, value in content.items() if key not in ("type", "version")}
    token = claims.sign(KEY, subject="somebody", kind="test", name=name, content=content, expires=5, issued=4)
    found = claims.read(token)
    assert found["nats"] == {**content, "type": "test", "version": 2}
    assert (found["iss"], found["sub"], found["exp"], found["iat"]) == (KEY.public, "somebody", 5, 4)
    assert found.get("name", "") == name
    assert "=" not in token


def changed(token: str, **of_claim: object) -> str:
    header, payload, signature = token.split(".")
    content = json.loads(base64.urlsafe_b64decode(payload + "=="))
    other = base64.urlsafe_b64encode(json.dumps({**content, **of_claim}).encode()).decode().rstrip("=")
    return f"{header}.{other}.{signature}"


def test_what_is_not_signed_is_refused() -> None:
    token = claims.sign(KEY, subject="bob", kind="user", content={})
    header, payload, signature = token.split(".")
    plain = base64.urlsafe_b64encode(b'{"typ":"JWT","alg":"none"}').decode().rstrip("=")
    for wrong in (
        "",
        "..",
        "a.b.c",
        "é.é.é",
        f"{header}.{payload}",
        f"{header}.{payload}.",
        f"{header}.{payload}.{signature[:-4]}",
        f"{header}.{payload}.{signature}.x",
        f"{plain}.{payload}.{signature}",
        changed(token, sub="alice"),
        changed(token, iss=keys.make(keys.Kind.ACCOUNT).public),
        changed(token, iss=None),
        changed(token, nats=None),
    ):
        with pytest.raises(claims.InvalidError):
            claims.read(wrong)


def test_keys_are_of_their_kind() -> None:
    letters = {keys.Kind.OPERATOR: "O", keys.Kind.ACCOUNT: "A", keys.Kind.USER: "U", keys.Kind.SERVER: "N"}
    for kind, letter in letters.items():
        key = keys.make(kind)
        assert key.public[0] == letter
        assert key.seed[:2] == f"S{letter}"
        assert [one for one in letters if keys.is_public(one, key.public)] == [kind]
        assert keys.is_signed(key.public, b"data", key.sign(b"data"))
        assert not keys.is_signed(key.public, b"other", key.sign(b"data"))
    for wrong in ("", "U", "not base32!", "U" * 56):
        assert not any(keys.is_public(kind, wrong) for kind in letters)
        assert not keys.is_signed(wrong, b"data", KEY.sign(b"data"))


def test_a_seed_is_shown_nowhere(tmp_path: Path) -> None:
    assert KEY.seed not in f"{KEY} {KEY!r}"
    file = tmp_path / "broken.nk"
    for content in (f"{KEY.seed}x", KEY.seed[:-1], "", "ü"):
        file.write_text(content)
        with pytest.raises(errors.MisconfiguredError, match=r"broken\.nk") as told:
            keys.read(file)
        assert KEY.seed[:20] not in str(told.value)
    with pytest.raises(errors.MisconfiguredError, match=r"absent\.nk"):
        keys.read(tmp_path / "absent.nk")


def test_a_scoped_user_brings_no_permissions_of_its_own() -> None:
    """The server refuses one that does."""
    scoped = claims.read(claims.user(KEY, "U", account="A", name="bob", tags=("role:user",)))
    assert set(scoped["nats"]) == {"issuer_account", "tags", "type", "version"}
    free = claims.read(claims.user(KEY, "U", account=KEY.public, name="bob", permissions={}))
    assert "issuer_account" not in free["nats"]
    assert free["nats"]["subs"] == -1
