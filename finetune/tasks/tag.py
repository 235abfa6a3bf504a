"""Tagging of words, as with parts of speech or the spans of names (Devlin et al. 2019, section 5.3), each by itself or
a sentence together by a conditional random field."""

import dataclasses
import logging
from collections import Counter
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from data_pipelines.command_line import unknown
from data_pipelines.errors import UserError
from data_pipelines.examples.layout import Feature
from data_pipelines.formats.conll import Options
from finetune import metrics
from finetune.rows import Rows, joined
from finetune.sentences import NONE, Pieces, Sentence, rows_of, sentences
from finetune.task import FinetuningTask, apply_head, hidden_states
from models.blocks.crf import CRF, Transitions, best_path, log_likelihood
from models.blocks.heads import TAGGER
from models.blocks.positions import gather_positions
from pretrain.objectives.objective import Batch, Term

PIECES = "first", "all"
OUTSIDE = "O"  # the tag of words that are in no span

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Tag(FinetuningTask):
    """A head tells a tag for each word."""

    # Of a file of a word a line: its word, counted from 1, by default the first, in CoNLL-U the second; and its tag, by
    # default the last, in CoNLL-U the fourth, UPOS
    token_column: int | None = None
    label_column: int | None = None
    words: str = "words"  # the column of a .jsonl or .parquet file with the list of words
    tags: str = "tags"  # that with the list of their tags
    pieces: str = "first"  # those of a word that are trained to tell its tag, first or all; the first one answers
    crf: bool = False  # whether tags that follow each other are scored, too, and a sentence's are decoded together

    def __post_init__(self):
        self._options()
        if self.pieces not in PIECES:
            raise ValueError(unknown("--pieces: there is no", self.pieces, PIECES))
        if self.crf and self.pieces == "all":
            raise ValueError("--crf: reads each word once; leave out --pieces all")

    def _options(self) -> Options:
        return Options(token_column=self.token_column, label_column=self.label_column)

    @property
    def asks(self):
        return (TAGGER, CRF) if self.crf else (TAGGER,)

    @property
    def of_tokens(self):
        return dict.fromkeys(("labels", "words"), Feature((), np.int32, NONE))

    def read(self, file, is_labelled=True):
        return sentences(file, self._options(), (self.words, self.tags), is_labelled)

    def labels_of(self, examples):
        """The most frequent first, which is that of words without a piece."""
        counts = Counter(tag for example in examples for tag in example.label)
        if len(counts) < 2:
            raise UserError(f"--train: all of its words have the tag {next(iter(counts))}; give two tags or more")
        return tuple(sorted(counts, key=lambda tag: (-counts[tag], tag)))

    def encode(self, examples, made, labels, length):
        rows = rows_of(made, [example.words for example in examples], length)
        number = {label: index for index, label in enumerate(labels)}
        targets = [_numbers(example, number, labels) for example in examples]
        of_row = [(row, sentence) for sentence, of in enumerate(rows) for row in of]
        if not of_row:
            raise UserError(f"{examples[0].file}: no word has a piece in this vocabulary; give another file or model")
        _tell(examples, rows)

        def trained(row, sentence: int) -> np.ndarray:
            at = row.words if self.pieces == "first" else row.owners
            return np.where(at == NONE, NONE, targets[sentence][at])

        tokens, types, words = ([getattr(row, name) for row, _ in of_row] for name in ("tokens", "types", "words"))
        of_tokens = {"labels": [trained(*of) for of in of_row], "words": words}
        return joined(tokens, types, {"sentence": np.array([of for _, of in of_row])}, of_tokens)

    def scores(self, model, params, batch, noise=None):
        hidden = hidden_states(model, params, batch, noise)
        own = slice(*self.part) if self.part[1] else slice(None)
        logits = apply_head(model, params, TAGGER, hidden, noise).reshape(*hidden.shape[:2], -1)[..., own]
        if not self.crf:
            return {"logits": logits, "tags": logits.argmax(2).astype(jnp.int32)}
        slots, logits, labels, is_word = _side_by_side(logits, batch)
        start, end, between = apply_head(model, params, CRF, hidden, noise)
        transitions = Transitions(start[own], end[own], between[own, own])
        path = best_path(transitions, logits, is_word)
        tags = jnp.put_along_axis(jnp.zeros_like(slots), slots, path, axis=1, inplace=False)
        return {"nats": -log_likelihood(transitions, logits, labels, is_word & (labels != NONE)), "tags": tags}

    def said(self, model, params, batch, moment):
        outputs, terms = super().said(model, params, batch, moment)
        return {"tags": outputs["tags"]}, terms  # what answers are made of, alone, leaves the device

    def weights(self, batch):
        return {"tag": (batch["labels"] != NONE).sum().astype(jnp.float32)}

    def coefficients(self, step):
        return {"tag": 1.0}

    def terms(self, outputs, batch):
        if self.crf:
            return {"tag": Term(outputs["nats"].sum())}
        labels, log_shares = batch["labels"], jax.nn.log_softmax(outputs["logits"])
        likely = jnp.take_along_axis(log_shares, jnp.maximum(labels, 0)[:, :, None], axis=2)[:, :, 0]
        hits = jnp.sum(outputs["tags"] == labels).astype(jnp.float32)
        return {"tag": Term(-jnp.sum(likely * (labels != NONE)), hits)}

    def answers(self, examples, rows, outputs, labels):
        return [
            {"words": [*example.words], "tags": tags}
            for example, tags in zip(examples, tags_of(examples, rows, outputs["tags"], labels), strict=True)
        ]

    def figures(self, examples, answers, labels):
        right, given = [list(one.label) for one in examples], [one["tags"] for one in answers]
        return metrics.with_score(metrics.of_tags(right, given, labels))


def _numbers(example: Sentence, number: dict[str, int], labels: Sequence[str]) -> np.ndarray:
    """i32[words], NONE without tags."""
    if example.label is None:
        return np.full(len(example.words), NONE)
    for index, tag in enumerate(example.label):
        if tag not in number:
            raise UserError(f"{example.where_of(index)}: " + unknown("--train has no tag", tag, labels))
    return np.array([number[tag] for tag in example.label])


def _tell(examples: Sequence[Sentence], rows: Sequence[Sequence[Pieces]]) -> None:
    """Say what of a file is read otherwise than as it stands there."""
    file, cut = examples[0].file, sum(len(of) > 1 for of in rows)
    if cut:
        log.warning("%s: %s of %s sentences are longer than --length: each is cut into rows", file, cut, len(examples))
    without = []
    for example, of in zip(examples, rows, strict=True):
        read = {word for row in of for word in row.words.tolist()}
        without += [example.where_of(word) for word in range(len(example.words)) if word not in read]
    if without:
        lack = "%s: %s words have no piece in this vocabulary, the first one in line %s: they are given the tag of most"
        log.warning(lack, file, len(without), without[0].rpartition(" ")[2])


def _side_by_side(logits: Array, batch: Batch) -> tuple[Array, Array, Array, Array]:
    """(where the first pieces of words are, i32[rows, length], then other places; logits, labels, whether it is a word
    at each of these)."""
    slots = jnp.argsort(batch["words"] == NONE, axis=1, stable=True).astype(jnp.int32)
    labels, words = (jnp.take_along_axis(batch[name], slots, axis=1) for name in ("labels", "words"))
    return slots, gather_positions(logits, slots), labels, words != NONE


def tags_of(
    examples: Sequence[Sentence], rows: Rows, tags: Sequence[np.ndarray], labels: Sequence[str]
) -> list[list[str]]:
    """The tag of each word.   tags: of each row, i32[its length or more], by token."""
    usual = OUTSIDE if OUTSIDE in labels else labels[0]
    found = [[usual] * len(example.words) for example in examples]
    for row, sentence in enumerate(rows.columns["sentence"].tolist()):
        words = rows.of_tokens["words"][rows.starts[row] : rows.starts[row + 1]]
        for at in np.flatnonzero(words != NONE).tolist():
            found[sentence][words[at]] = labels[tags[row][at]]
    return found
