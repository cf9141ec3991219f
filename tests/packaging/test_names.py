"""Tests use the names that users have: the folders at the top of the repository are no packages."""

import importlib.util

import pytest


@pytest.mark.parametrize("name", ["producers", "consumers", "schemas", "proto", "deploy"])
def test_no_bare_name_is_importable(name: str) -> None:
    assert importlib.util.find_spec(name) is None, (
        f"{name!r} can be imported: run 'pytest', not 'python -m pytest', and from no folder that has it"
    )
