"""Prepare small corpora in tests, with a tokenizer that loses no ASCII: a token per character."""

import io
import json
import string
from pathlib import Path

import numpy as np
from rich.console import Console

from data_pipelines.__main__ import main
from data_pipelines.corpus import Corpus
from data_pipelines.manifest import total
from data_pipelines.prepare.command import prepare
from data_pipelines.prepare.options import Prepare

CHARACTERS = string.digits + string.ascii_letters + string.punctuation


def write_character_vocabulary(path: Path) -> Path:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *CHARACTERS, *(f"##{c}" for c in CHARACTERS)]
    path.write_text("".join(f"{token}\n" for token in tokens), "utf-8")
    return path


def run(out: Path, *source: str, **options) -> tuple[dict, str]:
    """Prepare in this process, everything in the train split unless told; (manifest, what was printed)."""
    if "tokenizer" not in options:
        options["tokenizer"] = str(write_character_vocabulary(out.parent / "vocab.txt"))
    settings = {"cased": True, "heldout": 0.0, "processes": 1} | options
    screen = io.StringIO()
    console = Console(file=screen, width=300)
    return prepare(Prepare(source=source, out=out, **settings), console), screen.getvalue()


def command(out: Path, *given: str, lines: tuple[dict, ...] | list[dict] = ()) -> int:
    """The status of the command, run here. lines: records of a source of JSON lines."""
    told = ["prepare", "--processes=1", "--out", str(out), *given]
    if lines:
        file = out.parent / f"{len([*out.parent.glob('*.jsonl')])}.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        told += ["--source", f"jsonl:{file}"]
    return main(told)


def splits(manifest: dict) -> dict[str, dict[str, int]]:
    """{split: {documents, sentences, tokens}} of all parts."""
    return total(part["splits"] for part in manifest["parts"])


def stored(path: Path, name: str = "tokens", split: str = "train") -> np.ndarray:
    """An array of the parts, one after another."""
    return np.concatenate([part.array(split, name) for part in Corpus(path).parts])


def documents(path: Path, split: str = "train") -> list[list[str]]:
    """The sentences of each document, spelled from their tokens: one space between words and punctuation marks."""
    corpus = Corpus(path)
    return [document for part in corpus.parts for document in _spelled(part, split)]


def _spelled(part, split):
    vocabulary = (part.corpus.tokenizer_path / "vocab.txt").read_text("utf-8").split("\n")
    tokens, starts = part.array(split, "tokens"), part.sentences(split)
    spelled = [
        "".join(
            vocabulary[token][2:] if vocabulary[token].startswith("##") else f" {vocabulary[token]}"
            for token in tokens[starts[index] : starts[index + 1]].tolist()
        ).strip()
        for index in range(len(starts) - 1)
    ]
    bounds = part.documents(split)
    return [spelled[first:last] for first, last in zip(bounds, bounds[1:], strict=False)]


def content(path: Path) -> dict[str, bytes]:
    """The bytes of every file of a corpus."""
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}
