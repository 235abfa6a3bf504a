"""`python -m finetune neighbours`: which words of a file are to a model most like a word in its context."""

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

AROUND = 50  # characters beside a word that are shown


@dataclasses.dataclass(frozen=True, kw_only=True)
class Neighbours:
    """Print the words of a file whose hidden states (the mean over a word's pieces) have the largest cosine with those
    of a word in its context. The file's texts are held in memory, hidden states of one batch alone."""

    run: Positional[Place]
    """Work directory of the run, or a Hugging Face folder."""
    word: str
    """What to look for; several words are compared with as many that follow each other."""
    texts: Path
    """File to look in: a text a line, or .tsv, .csv, .jsonl or .parquet with a column of texts."""
    context: str | None = None
    """A text with the word; by default the word alone."""
    text: str = "text"
    """Column of the texts."""
    layer: int | None = None
    """Which, 0: embeddings; by default the last."""
    number: int = 10
    """How many to print."""
    step: int | None = None
    """Which checkpoint; by default the newest."""
    length: int = 128
    """Tokens of a text, at most."""

    def __post_init__(self):
        check_options(self, {"layer": COUNT_OR_NONE, "number": COUNT, "length": LENGTH})


def main(arguments: Sequence[str]) -> int:
    options = parse(Neighbours, arguments, "python -m finetune neighbours")
    show(neighbours(options))
    return 0


def neighbours(options: Neighbours) -> list[dict]:
    """A line for each, the nearest first."""
    from finetune.neighbours import WORD, look_at, nearest, place_of, texts_to_look_at, vector_of
    from pretrain.training.opened import open_model

    context = options.word if options.context is None else options.context
    place_of(options.word, context)  # before anything is read
    texts = _texts(options)
    opened = open_model(options.run, options.step)
    length, look = fitting(options.length, opened.config), look_at(options.layer, options.run)
    with busy("looking for neighbours"):
        wanted = vector_of(opened, options.word, context, look, length)
        of = texts_to_look_at(opened, list(texts.values()), list(texts), length)
        found = nearest(opened, wanted, of, len(WORD.findall(options.word)), look, options.number)
    if not found:
        raise UserError(f"--texts {options.texts}: has no words; give another file")
    wheres = list(texts)
    return [
        {
            "cosine": one.similarity,
            "line": wheres[one.text].rpartition(" ")[2],
            "text": _marked(of.texts[one.text], one),
        }
        for one in found
    ]


def _marked(text: str, one: "Near") -> str:
    """A word with what is around it, on a line."""
    begin, end = one.span
    around = text[max(0, begin - AROUND) : begin], text[begin:end], text[end : end + AROUND]
    return " ".join("{}**{}**{}".format(*around).split())


def _texts(options: Neighbours) -> dict[str, str]:
    """Those of the file that are not blank, by where they are."""
    file = options.texts
    if file.suffix in FORMS:
        found = {
            one.where: as_text(one, options.text, one.fields[options.text])
            for one in records(file, {options.text: "--text"})
        }
    else:
        found = {f"{file}, line {at}": text for at, text in enumerate(with_errors(file, text_lines(file)), 1)}
    found = {where: text for where, text in found.items() if text.strip()}
    if not found:
        raise UserError(f"--texts {file}: has no text; give another file")
    return found
