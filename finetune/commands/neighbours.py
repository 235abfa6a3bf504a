"""`python -m finetune neighbours`: finds the words of a file whose hidden states are nearest to a given word's."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from tyro.conf import Positional

import finetune.registry  # noqa: F401 (a run's recipe may name a task)
from data_pipelines.command_line import Place, parse
from data_pipelines.errors import UserError
from data_pipelines.progress import busy
from finetune.files import FORMS, Told, as_text, records, tell, text_lines, with_errors
from finetune.inside import layer_states, looked
from finetune.rows import Row, Rows, joined
from finetune.tables import show
from finetune.texts import encodings, fitting
from models.core.ranges import COUNT, COUNT_OR_NONE
from pretrain.options import check_options
from pretrain.recipe import LENGTH
from pretrain.training.opened import Opened, open_model

AROUND = 50  # characters of context to show on each side of a word
ALONE = r"\u3040-\u30ff\u3400-\u9fff"  # scripts without spaces, where each character counts as a word
WORD = re.compile(rf"[{ALONE}]|[^\W{ALONE}]+")
AT_ONCE = 1 << 10  # texts to encode at once

Span = tuple[int, int]  # begin and end in characters
Look = Callable[..., jax.Array]


class Texts(NamedTuple):
    """rows: the encoded texts.   offsets: i32[tokens, 2], begin and end of each token in characters, empty for special
    tokens."""

    texts: Sequence[str]
    rows: Rows
    offsets: np.ndarray


class Near(NamedTuple):
    """similarity: the cosine.   text: index of the text."""

    similarity: float
    text: int
    span: Span


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
    show(neighbours(parse(Neighbours, arguments, "python -m finetune neighbours")))
    return 0


def neighbours(options: Neighbours) -> list[dict]:
    """Return a table row for each word found, the nearest first."""
    context = options.word if options.context is None else options.context
    place_of(options.word, context)  # fail before reading any file
    texts = _texts(options)
    opened, wheres = open_model(options.run, options.step), list(texts)
    length, look = fitting(options.length, opened.config), look_at(options.layer, options.run)
    with busy("looking for neighbours"):
        wanted = vector_of(opened, options.word, context, look, length)
        rows = texts_to_look_at(opened, list(texts.values()), wheres, length)
        found = nearest(opened, wanted, rows, len(WORD.findall(options.word)), look, options.number)
    if not found:
        raise UserError(f"--texts {options.texts}: has no words; give another file")
    lines = [wheres[one.text].rpartition(" ")[2] for one in found]
    marked = [_marked(texts[wheres[one.text]], one) for one in found]
    return [{"cosine": one.similarity, "line": n, "text": t} for one, n, t in zip(found, lines, marked, strict=True)]


def _marked(text: str, one: Near) -> str:
    """Return a word, marked with **, and its context on one line."""
    begin, end = one.span
    around = text[max(0, begin - AROUND) : begin], text[begin:end], text[end : end + AROUND]
    return " ".join("{}**{}**{}".format(*around).split())


def _texts(options: Neighbours) -> dict[str, str]:
    """Return the non-blank texts of the file by their place (file and line)."""
    file = options.texts
    if file.suffix in FORMS:
        column, found = options.text, records(file, {options.text: "--text"})
        found = {one.where: as_text(one, column, one.fields[column]) for one in found}
    else:
        found = {f"{file}, line {line}": text for line, text in enumerate(with_errors(file, text_lines(file)), 1)}
    found = {where: text for where, text in found.items() if text.strip()}
    if not found:
        raise UserError(f"--texts {file}: has no texts; give another file")
    return found


def texts_to_look_at(opened: Opened, texts: Sequence[str], wheres: Sequence[str], length: int) -> Texts:
    """Encode texts as rows of at most `length` tokens.   wheres: file and line of each text, for warnings."""
    rows, offsets, told = [], [], Told(list)
    for first in range(0, len(texts), AT_ONCE):  # encodings take much memory
        part = slice(first, first + AT_ONCE)
        for one in encodings(opened.tokenizer, [(text,) for text in texts[part]], wheres[part], length, told):
            rows.append(Row(np.array(one.ids, np.int32), np.array(one.type_ids, np.int32)))
            offsets.append(np.array(one.offsets, np.int32).reshape(-1, 2))
    tell(told)
    return Texts(texts, joined(rows), np.concatenate(offsets))


def spans(text: str, words: int) -> list[Span]:
    """Return the spans of all runs of `words` consecutive words."""
    found = [match.span() for match in WORD.finditer(text)]
    return [(begin, end) for (begin, _), (_, end) in zip(found, found[words - 1 :], strict=False)]


def place_of(word: str, context: str) -> Span:
    """Return the first span of one or more words in a context. UserError if it does not contain them."""
    if not (words := len(WORD.findall(word))):
        raise UserError(f"--word {word}: has no letters or digits; give a word")
    for begin, end in spans(context, words):
        if WORD.findall(context[begin:end].casefold()) == WORD.findall(word.casefold()):
            return begin, end
    raise UserError(f"--word {word}: does not occur in --context {context!r}; give a context with it")


def vectors(states: np.ndarray, offsets: np.ndarray, given: Sequence[Span]) -> tuple[np.ndarray, list[Span]]:
    """Return unit vectors f32[n, width], the normalized means of states [tokens, width] over the pieces of spans, and
    those spans. Spans that were cut off are left out."""
    begins, ends = np.array(given, np.int32).reshape(-1, 2).T
    is_of = (offsets[:, 0] < ends[:, None]) & (offsets[:, 1] > begins[:, None])
    kept = is_of.any(1)
    found = is_of[kept].astype(np.float32) @ states
    found /= np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-30)
    return found, [span for span, there in zip(given, kept, strict=True) if there]


def vector_of(opened: Opened, word: str, context: str, look: Look, length: int) -> np.ndarray:
    """Return the unit vector f32[width] of a word in its context."""
    place = place_of(word, context)
    asked = texts_to_look_at(opened, [context], ["--context"], length)
    ((_, states),) = looked(opened, asked.rows, look)
    found, there = vectors(states[0, 0, : len(asked.offsets)], asked.offsets, [place])
    if not there:
        raise UserError(f"--word {word}: is not in the first --length {length} tokens of --context; raise --length")
    return found[0]


def nearest(opened: Opened, wanted: np.ndarray, texts: Texts, words: int, look: Look, number: int) -> list[Near]:
    """Return the `number` nearest runs of `words` consecutive words in texts, the nearest first.
    wanted: unit vector f32[width]. Only the hidden states of one batch are in memory."""
    found: list[Near] = []
    for numbers, states in looked(opened, texts.rows, look):
        for at, text in enumerate(numbers.tolist()):
            begin, end = texts.rows.starts[text : text + 2]
            found_spans = spans(texts.texts[text], words)
            rows, given = vectors(states[0, at, : end - begin], texts.offsets[begin:end], found_spans)
            found += [Near(float(close), text, span) for close, span in zip(rows @ wanted, given, strict=True)]
        found = sorted(found, key=lambda one: (-one.similarity, one.text, one.span))[:number]
    return found


def look_at(layer: int | None, source: Path) -> Look:
    """Return a function for hidden states [1, rows, length, width] of a layer (0: embeddings; None: the last).
    It raises UserError if there is no such layer."""

    def look(model, params, batch):
        states = layer_states(model, params, batch)
        last = len(states) - 1
        if layer is not None and layer > last:
            raise UserError(f"--layer {layer}: {source} has {last} layers; use 0 (embeddings) to {last}")
        return states[last if layer is None else layer][None]

    return look
