"""README and the pages of docs/: README is short, links lead somewhere, commands and their options exist."""

import contextlib
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = {page: page.read_text() for page in (ROOT / "README.md", *ROOT.glob("docs/*.md"))}
LINKS = {(page, link) for page in PAGES for link in re.findall(r"\]\((?!https?:)([^)]+)\)", PAGES[page])}
BLOCKS = {block for text in PAGES.values() for block in re.findall(r"(?m)^ {4}(python -m (?:.*\\\n)*.*)", text)}
COMMANDS = {command for block in BLOCKS for command in block.replace("\\\n", " ").split(" -- ")}


def test_readme_is_short():
    readme = PAGES[ROOT / "README.md"]
    assert len(readme.splitlines()) <= 120 and len(readme.split()) <= 1200


@pytest.mark.parametrize(("page", "link"), sorted(LINKS))
def test_a_link_leads_to_a_file_and_to_its_heading(page, link):
    path, _, heading = link.partition("#")
    target = page.parent / path if path else page
    headings = re.findall(r"(?m)^#+ (.*)", target.read_text() if heading else "")
    assert target.exists()
    assert heading in ["", *(re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in headings)]


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_a_command_and_its_options_exist(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    line = command.split(" #")[0]
    _, _, module, *named = re.split(" --(?!all)", line)[0].split()
    chosen = {*re.findall(r" (--[\w.-]+)", line)} - {"--all"}  # which a command may have beside its options
    with contextlib.suppress(SystemExit):
        assert importlib.import_module(f"{module}.__main__").main([*named, "--help"]) == 0
    assert chosen <= {*re.findall(r"--[\w.-]+", capsys.readouterr().out)}
