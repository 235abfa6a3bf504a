"""`python -m finetune neighbours`: finds the words of a file whose hidden states are nearest to a given word's."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tyro.conf import Positional

import finetune.registry  # noqa: F401 (a run's recipe may name a task)
from data_pipelines.command_line import Place, parse
from data_pipelines.errors import UserError
from data_pipelines.progress import busy
from finetune.files import FORMS, as_text, records, text_lines, with_errors
from finetune.tables import show
from finetune.texts import fitting
from models.core.ranges import COUNT, COUNT_OR_NONE
from pretrain.options import check_options
from pretrain.recipe import LENGTH

if TYPE_CHECKING:
    from finetune.neighbours import Near

AROUND = 50  # characters of context to show on each side of a word


@dataclasses.dataclass(frozen=True, kw_only=True)
class Neighbours:
    """Print the words of a file whose hidden states (averaged over a word's pieces) have the highest cosine similarity
    to those of a word in its context. Memory holds the texts of the file and the hidden states of one batch."""

    run: Positional[Place]
    """Work directory of the run, or a Hugging Face folder."""
    word: str
    """Word to look for; several words are compared with as many consecutive words."""
    texts: Path
    """File to search: one text a line, or .tsv, .csv, .jsonl or .parquet with a column of texts."""
    context: str | None = None
    """Text that contains the word; by default the word alone."""
    text: str = "text"
    """Column of the texts."""
    layer: int | None = None
    """Layer whose hidden states are compared; 0 is the embeddings. By default the last."""
    number: int = 10
    """Number of words to print."""
    step: int | None = None
    """Step of the checkpoint; by default the newest."""
    length: int = 128
    """Maximum number of tokens in a text."""

    def __post_init__(self):
        check_options(self, {"layer": COUNT_OR_NONE, "number": COUNT, "length": LENGTH})


def main(arguments: Sequence[str]) -> int:
    options = parse(Neighbours, arguments, "python -m finetune neighbours")
    show(neighbours(options))
    return 0


def neighbours(options: Neighbours) -> list[dict]:
    """Return a table row for each word found, the nearest first."""
    from finetune.neighbours import WORD, look_at, nearest, place_of, texts_to_look_at, vector_of
    from pretrain.training.opened import open_model

    context = options.word if options.context is None else options.context
    place_of(options.word, context)  # fail before reading any file
    texts = _texts(options)
    opened = open_model(options.run, options.step)
    length, look = fitting(options.length, opened.config), look_at(options.layer, options.run)
    with busy("looking for neighbours"):
        wanted = vector_of(opened, options.word, context, look, length)
        rows = texts_to_look_at(opened, list(texts.values()), list(texts), length)
        found = nearest(opened, wanted, rows, len(WORD.findall(options.word)), look, options.number)
    if not found:
        raise UserError(f"--texts {options.texts}: has no words; give another file")
    wheres = list(texts)
    return [
        {
            "cosine": one.similarity,
            "line": wheres[one.text].rpartition(" ")[2],
            "text": _marked(texts[wheres[one.text]], one),
        }
        for one in found
    ]


def _marked(text: str, one: "Near") -> str:
    """Return a word, marked with **, and its context on one line."""
    begin, end = one.span
    around = text[max(0, begin - AROUND) : begin], text[begin:end], text[end : end + AROUND]
    return " ".join("{}**{}**{}".format(*around).split())


def _texts(options: Neighbours) -> dict[str, str]:
    """Return the non-blank texts of the file by their place (file and line)."""
    file = options.texts
    if file.suffix in FORMS:
        found = {
            one.where: as_text(one, options.text, one.fields[options.text])
            for one in records(file, {options.text: "--text"})
        }
    else:
        found = {f"{file}, line {line}": text for line, text in enumerate(with_errors(file, text_lines(file)), 1)}
    found = {where: text for where, text in found.items() if text.strip()}
    if not found:
        raise UserError(f"--texts {file}: has no texts; give another file")
    return found
