"""The documents are current and complete: settings, commands, links."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from spur_events import cli, settings

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*.md")])
_LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _commands(command: object, prefix: str) -> list[str]:
    children = getattr(command, "commands", None)
    if not children:
        return [prefix]
    return [one for name, child in children.items() for one in _commands(child, f"{prefix} {name}")]


def _anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ +(.*)$", _text(path), re.MULTILINE)
    # GitHub's rule: lower case, punctuation dropped, spaces to hyphens.
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_configuration_is_what_scripts_docs_makes(tmp_path: Path) -> None:
    made = tmp_path / "configuration.md"
    subprocess.run([sys.executable, ROOT / "scripts/docs", made], check=True)
    assert _text(made) == _text(ROOT / "docs/configuration.md"), "run scripts/docs and commit what it writes"


def test_every_setting_is_described() -> None:
    page = _text(ROOT / "docs/configuration.md")
    for group, field in settings.Settings.model_fields.items():
        for name, setting in field.annotation.model_fields.items():  # type: ignore[union-attr]
            assert setting.description, f"{group}.{name}"
            assert f"`SPUR_EVENTS_{group}_{name}`".upper() in page.upper()


def test_every_command_is_in_the_documents() -> None:
    told = "\n".join(_text(path) for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    commands = _commands(typer.main.get_command(cli.app), "spur-events")
    assert len(commands) > 8, "the list itself is wrong"
    parts = [f"spur-events run {part}" for part in cli.Part]
    missing = [command for command in [*commands, *parts] if command not in told]
    assert missing == []


def test_no_document_tells_of_a_command_that_is_not_there() -> None:
    known = {command.split()[1] for command in _commands(typer.main.get_command(cli.app), "spur-events")}
    for path in DOCUMENTS:
        # What is still to come stands under its own heading, without the command's name in front.
        told = set(re.findall(r"spur-events ([a-z][a-z-]+)\b", " ".join(_CODE.findall(_text(path)))))
        assert told <= known, path


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for link in _LINK.findall(_CODE.sub("", _text(path))):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), link
        assert target.is_relative_to(ROOT), link
        if anchor:
            assert anchor in _anchors(target), link


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_named_files_exist(path: Path) -> None:
    """A path of the repository in backticks is there: a moved file shows."""
    folders = ("src", "producers", "consumers", "schemas", "proto", "deploy", "scripts", "tests", "docs")
    for name in re.findall(r"`([a-z]+/[\w./-]*)`", _text(path)):
        if name.split("/")[0] in folders:
            assert (ROOT / name).exists(), name
