"""The blocks of README and the site: what can run runs once, in order, on one corpus and one run, at tiny sizes.

Of blocks marked `<!-- checked, not run -->` (installs, clouds, long runs) every command is parsed, with its values.
"""

import contextlib
import importlib
import io
import json
import re
import shlex
from pathlib import Path

import pytest
import tyro
from sybil import Sybil
from sybil.example import Example
from sybil.parsers.markdown import CodeBlockParser

from tests.test_docs import PAGES, ROOT
from tests.texts import write_texts

MARK = "<!-- checked, not run -->"
FIRST = ROOT / "docs/tutorials/laptop.md"  # makes the corpus and the run that other pages use
TINY = {  # appended to what a page says; the last of two counts
    ("data_pipelines", "prepare"): "--vocab-size 300 --processes 1 --heldout 0.05",
    ("pretrain", "run"): "--steps 2 --eval-examples 8 --phases.0.length 32 --phases.0.batch-size 2 "
    "--model.depth 1 --model.width 16 --model.heads 2 --model.feed-forward 32",
    ("pretrain", "annotate"): "--phases.0.length 32 --k 8",
    ("pretrain", "generate"): "--max-tokens 4",
}
DONE = set()  # (run, *words) that pages have in common
FILE = re.compile(r"^cat > (\S+) <<'EOF'\n(.*?)\nEOF$", re.M | re.S)


class Parsed(BaseException):
    """A command line was accepted."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("docs")
    write_texts(made / "texts", 60, seed=0)
    return made


def commands(script: str) -> list[list[str]]:
    """The `python -m` lines of a shell script, as words without `python -m`."""
    lines = re.findall(r"(?m)^ *python -m (.*)$", script.replace("\\\n", " "))
    return [part for line in lines for part in _parts(shlex.split(line, comments=True))]


def _parts(words: list[str]) -> list[list[str]]:
    """The words of a command, and of a command behind its ` -- python -m`."""
    if "--" in words:
        at = words.index("--")
        return [words[:at], *([words[at + 3 :]] if words[at + 1 : at + 2] == ["python"] else [])]
    return [words]


def call(words: list[str], run: bool) -> None:
    """AssertionError where a command does not accept its options, or, run, does not end well."""
    words, out = (words[: words.index(">")], words[-1]) if ">" in words else (words, "")
    if words[0].startswith("benchmarks."):  # to import one imports PyTorch
        source = (ROOT / f"{words[0].replace('.', '/')}.py").read_text()
        assert all(re.search(rf"\b{word[2:].replace('-', '_')}\b", source) for word in words if word.startswith("--"))
        return
    cheap = words[:2] == ["pretrain", "recipes"]
    tiny = TINY.get(tuple(words[:2]), "").split() if run else []
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed), contextlib.suppress(Parsed):
        if not (run or cheap):
            patch.setattr(tyro, "cli", _then_stop(tyro.cli))
        status = importlib.import_module(f"{words[0]}.__main__").main([*words[1:], *tiny])
        assert status == 0 and (run or cheap), f"{' '.join(words)}: exit status {status}"
    if out:
        Path(out).write_text(printed.getvalue())


def _then_stop(cli):
    def parse(*arguments, **keywords):
        cli(*arguments, **keywords)
        raise Parsed

    return parse


def shell(example: Example) -> None:
    run = not marked(example)
    for file, text in FILE.findall(example.parsed):
        Path(file).write_text(text)
    lines = [line for line in FILE.sub("", example.parsed).replace("\\\n", " ").splitlines() if line]
    assert not run or all(line.startswith("python -m ") for line in lines), "cannot run: mark it"
    for words in commands(example.parsed):
        if (run, *words) not in DONE:
            call(words, run)
            DONE.add((run, *words))


def python(example: Example) -> None:
    program = compile(example.parsed, example.path, "exec")
    if not marked(example):
        exec(program, {})


def well_formed(example: Example) -> None:
    json.loads(re.sub(r'^"phases": ', "", example.parsed))


def marked(example: Example) -> bool:
    """Pages of measurements and of clusters are, as a whole."""
    of_site = Path(example.path).is_relative_to(ROOT / "docs") or example.path == str(ROOT / "README.md")
    return not of_site or example.document.text[: example.start].rstrip().endswith(MARK)


PARSERS = [
    CodeBlockParser("sh", shell),
    CodeBlockParser("bash", lambda example: None),  # whole scripts of a cluster
    CodeBlockParser("python", python),
    CodeBlockParser("json", well_formed),
]
DOCUMENTS = {page: Sybil(PARSERS).parse(page) for page in sorted(PAGES, key=lambda page: (page != FIRST, page))}


@pytest.mark.parametrize("page", [page for page in DOCUMENTS if list(DOCUMENTS[page].examples())], ids=str)
def test_the_blocks_of_a_page(page, folder, monkeypatch):
    monkeypatch.chdir(folder)
    for example in DOCUMENTS[page].examples():
        example.evaluate()


def test_a_block_with_a_wrong_option_or_value_fails():
    for wrong in ("pretrain run bert-tiny --corpus c --workdir w --setps 3", "pretrain eval runs/a --examples few"):
        with pytest.raises(AssertionError, match="exit status 2"):
            call(wrong.split(), run=False)
