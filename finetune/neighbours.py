"""The words of a file whose hidden states are nearest to those of a word in its context."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from data_pipelines.errors import UserError
from finetune.files import Told, tell
from finetune.inside import layer_states, looked
from finetune.rows import Rows, joined
from finetune.texts import encodings
from pretrain.training.opened import Opened

ALONE = r"\u3040-\u30ff\u3400-\u9fff"  # characters of languages without spaces, each of which is a word here
WORD = re.compile(rf"[{ALONE}]|[^\W{ALONE}]+")
AT_ONCE = 1 << 10  # texts


Span = tuple[int, int]  # where characters begin and end
Look = Callable[..., jax.Array]


class Texts(NamedTuple):
    """rows: what a model reads of each text.   offsets: i32[tokens, 2], the characters of each token, of a special one
    none."""

    texts: Sequence[str]
    rows: Rows
    offsets: np.ndarray


class Near(NamedTuple):
    """similarity: the cosine.   text: its number."""

    similarity: float
    text: int
    span: Span


def texts_to_look_at(opened: Opened, texts: Sequence[str], wheres: Sequence[str], length: int) -> Texts:
    """Rows of at most so many tokens.   wheres: of each text, to say which is cut."""
    tokens, types, offsets, told = [], [], [], Told(list)
    for first in range(0, len(texts), AT_ONCE):  # what a tokenizer makes of a text is large
        part = slice(first, first + AT_ONCE)
        for one in encodings(opened.tokenizer, [(text,) for text in texts[part]], wheres[part], length, told):
            tokens.append(np.array(one.ids, np.int32))
            types.append(np.array(one.type_ids, np.int32))
            offsets.append(np.array(one.offsets, np.int32).reshape(-1, 2))
    tell(told)
    return Texts(texts, joined(tokens, types, {}), np.concatenate(offsets))


def spans(text: str, words: int) -> list[Span]:
    """The characters of each so many words that follow each other."""
    found = [match.span() for match in WORD.finditer(text)]
    return [(begin, end) for (begin, _), (_, end) in zip(found, found[words - 1 :], strict=False)]


def place_of(word: str, context: str) -> Span:
    """The characters of a word, or of several, where they are first in a context. UserError where they are not."""
    if not (words := len(WORD.findall(word))):
        raise UserError(f"--word {word}: has no letter and no digit; give a word")
    for begin, end in spans(context, words):
        if WORD.findall(context[begin:end].casefold()) == WORD.findall(word.casefold()):
            return begin, end
    raise UserError(f"--word {word}: is not in --context {context!r}; give a context with it")


def vectors(states: np.ndarray, offsets: np.ndarray, given: Sequence[Span]) -> tuple[np.ndarray, list[Span]]:
    """(f32[n, width] of length 1, means of states [tokens, width] over the pieces of spans; those spans: one that a row
    had no room for is left out)."""
    begins, ends = np.array(given, np.int32).reshape(-1, 2).T
    is_of = (offsets[:, 0] < ends[:, None]) & (offsets[:, 1] > begins[:, None])
    kept = is_of.any(1)
    found = is_of[kept].astype(np.float32) @ states
    found /= np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-30)
    return found, [span for span, there in zip(given, kept, strict=True) if there]


def vector_of(opened: Opened, word: str, context: str, look: Look, length: int) -> np.ndarray:
    """f32[width] of length 1: of a word in its context."""
    place = place_of(word, context)
    asked = texts_to_look_at(opened, [context], ["--context"], length)
    ((_, states),) = looked(opened, asked.rows, look)
    found, there = vectors(states[0, 0, : len(asked.offsets)], asked.offsets, [place])
    if not there:
        raise UserError(f"--word {word}: has no piece in the first --length {length} tokens of --context; give more")
    return found[0]


def nearest(opened: Opened, wanted: np.ndarray, of: Texts, words: int, look: Look, number: int) -> list[Near]:
    """So many of the words of texts, or of each so many words that follow each other, the nearest first.

    wanted: f32[width] of length 1. Of hidden states those of one batch are in memory.
    """
    found: list[Near] = []
    for numbers, states in looked(opened, of.rows, look):
        for at, text in enumerate(numbers.tolist()):
            begin, end = of.rows.starts[text : text + 2]
            rows, given = vectors(states[0, at, : end - begin], of.offsets[begin:end], spans(of.texts[text], words))
            found += [Near(float(close), text, span) for close, span in zip(rows @ wanted, given, strict=True)]
        found = sorted(found, key=lambda one: (-one.similarity, one.text, one.span))[:number]
    return found


def look_at(layer: int | None, source: Path) -> Look:
    """For hidden states [1, rows, length, width] of a layer, 0 of the embeddings, by default of the last. UserError
    where there is no such layer."""

    def look(model, params, batch):
        states = layer_states(model, params, batch)
        last = len(states) - 1
        if layer is not None and layer > last:
            raise UserError(f"--layer {layer}: {source} has {last}; give 0 (embeddings) to {last}")
        return states[last if layer is None else layer][None]

    return look
