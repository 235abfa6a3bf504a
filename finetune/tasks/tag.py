"""Tagging of words, such as parts of speech or named entities (Devlin et al. 2019, section 5.3), independently or with
a conditional random field over the sentence."""

import dataclasses
import logging
from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

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
from finetune.task import Examples, apply_head, hidden_states
from finetune.teaching import Taught
from models.blocks.crf import CRF, Transitions, best_path, log_likelihood
from models.blocks.heads import TAGGER
from models.blocks.positions import gather_positions
from pretrain.objectives.objective import Batch, Term

PIECES = "first", "all"
OUTSIDE = "O"  # the tag of words outside all spans

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Tag(Taught):
    """A head predicts a tag for each word."""

    term: ClassVar[str] = "tag"

    # Columns, counted from 1, of files with one word a line: the word, by default the first, in CoNLL-U the second; and
    # the tag, by default the last, in CoNLL-U the fourth, UPOS
    token_column: int | None = None
    label_column: int | None = None
    words: str = "words"  # column of a .jsonl or .parquet file with the list of words
    tags: str = "tags"  # column with the list of their tags
    pieces: str = "first"  # pieces of a word to train on: first or all; predictions use the first
    crf: bool = False  # use a conditional random field over the tags of a sentence

    def __post_init__(self):
        super().__post_init__()
        self._options()
        if self.pieces not in PIECES:
            raise ValueError(unknown("--pieces: unknown value", self.pieces, PIECES))
        if self.crf and self.pieces == "all":
            raise ValueError("--crf: reads only the first piece of a word; leave out --pieces all")
        if self.crf and self.teacher:
            raise ValueError("--crf: has no probabilities of single words for --teacher; leave one of them out")

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
        """Return the tags, the most frequent first; words without pieces get that one."""
        counts = Counter(tag for example in examples for tag in example.label)
        if len(counts) < 2:
            raise UserError(f"--train: all words have the tag {next(iter(counts))}; give at least two tags")
        return tuple(sorted(counts, key=lambda tag: (-counts[tag], tag)))

    def encode(self, examples, made, labels, length):
        rows = rows_of(made, [example.words for example in examples], length)
        number = {label: index for index, label in enumerate(labels)}
        targets = [_numbers(example, number, labels) for example in examples]
        of_row = [(row, sentence) for sentence, rows_of_it in enumerate(rows) for row in rows_of_it]
        if not of_row:
            raise UserError(f"{examples[0].file}: no word has a piece in this vocabulary; give another file or model")
        _tell(examples, rows)

        def trained(row, sentence: int) -> np.ndarray:
            at = row.words if self.pieces == "first" else row.owners
            return np.where(at == NONE, NONE, targets[sentence][at])

        of_tokens = {"labels": [trained(*one) for one in of_row], "words": [row.words for row, _ in of_row]}
        sentences = np.array([sentence for _, sentence in of_row])
        return joined([row for row, _ in of_row], {"sentence": sentences}, of_tokens)

    def scores(self, model, params, batch, noise=None):
        hidden = hidden_states(model, params, batch, noise)
        part = slice(*self.part) if self.part[1] else slice(None)
        logits = apply_head(model, params, TAGGER, hidden, noise).reshape(*hidden.shape[:2], -1)[..., part]
        if not self.crf:
            return {"logits": logits, "tags": logits.argmax(2).astype(jnp.int32)}
        slots, logits, labels, is_word = _side_by_side(logits, batch)
        start, end, between = apply_head(model, params, CRF, hidden, noise)
        transitions = Transitions(start[part], end[part], between[part, part])
        path = best_path(transitions, logits, is_word)
        tags = jnp.put_along_axis(jnp.zeros_like(slots), slots, path, axis=1, inplace=False)
        return {"nats": -log_likelihood(transitions, logits, labels, is_word & (labels != NONE)), "tags": tags}

    def forward(self, model, params, batch, moment):
        outputs, terms = super().forward(model, params, batch, moment)
        return {"tags": outputs["tags"]}, terms  # only what answers need leaves the device

    def loss_weights(self, batch):
        return (batch["labels"] != NONE).astype(jnp.float32)

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
    """Return tag indices i32[words], NONE for a sentence without tags."""
    if example.label is None:
        return np.full(len(example.words), NONE)
    for index, tag in enumerate(example.label):
        if tag not in number:
            raise UserError(f"{example.where_of(index)}: " + unknown("--train has no tag", tag, labels))
    return np.array([number[tag] for tag in example.label])


def _tell(examples: Sequence[Sentence], rows: Sequence[Sequence[Pieces]]) -> None:
    """Log which sentences of a file are cut and which words are left out."""
    file, cut = examples[0].file, sum(len(rows_of_it) > 1 for rows_of_it in rows)
    if cut:
        message = "%s: %s of %s sentences are longer than --length: each is split into rows"
        log.warning(message, file, cut, len(examples))
    without = []
    for example, rows_of_it in zip(examples, rows, strict=True):
        read = {word for row in rows_of_it for word in row.words.tolist()}
        without += [example.where_of(word) for word in range(len(example.words)) if word not in read]
    if without:
        message = "%s: %s words have no piece in this vocabulary, the first in line %s: they get the most frequent tag"
        log.warning(message, file, len(without), without[0].rpartition(" ")[2])


def _side_by_side(logits: Array, batch: Batch) -> tuple[Array, Array, Array, Array]:
    """Move the first pieces of words to the front of each row. Return the token positions i32[rows, length] in that
    order, and their logits, labels and whether each is a word."""
    slots = jnp.argsort(batch["words"] == NONE, axis=1, stable=True).astype(jnp.int32)
    labels, words = (jnp.take_along_axis(batch[name], slots, axis=1) for name in ("labels", "words"))
    return slots, gather_positions(logits, slots), labels, words != NONE


def tags_of(examples: Examples, rows: Rows, tags: Sequence[np.ndarray], labels: Sequence[str]) -> list[list[str]]:
    """Return the tag of each word.   tags: for each row, i32[its length or more], by token."""
    usual = OUTSIDE if OUTSIDE in labels else labels[0]
    found = [[usual] * len(example.words) for example in examples]
    for row, sentence in enumerate(rows.columns["sentence"].tolist()):
        words = rows.of_tokens["words"][rows.starts[row] : rows.starts[row + 1]]
        for token in np.flatnonzero(words != NONE).tolist():
            found[sentence][words[token]] = labels[tags[row][token]]
    return found
