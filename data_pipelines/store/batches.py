"""Documents to arrays: tokens, sentences, and the values of fields; a batch of texts is encoded at a time."""

import functools
import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_pipelines.document import Document
from data_pipelines.formats.problems import PLAIN_SPACES, Problems
from data_pipelines.formats.source import Range
from data_pipelines.formats.table import read
from data_pipelines.store.fields import Field, annotated, check_values
from data_pipelines.store.files import is_whole
from data_pipelines.store.job import Job
from data_pipelines.store.units import DOCUMENT, UnitFiles
from data_pipelines.text.encoding import Encoded, Encoder
from data_pipelines.text.sentences import starts
from data_pipelines.text.steps import run

BATCH = 1 << 20  # characters encoded at a time


def write_unit(folder: Path, unit: tuple[Range, ...], job: Job, encoder: Encoder) -> None:
    """Make the folder from the ranges of a unit. One that exists and is whole is left alone."""
    if is_whole(folder):
        return
    problems, files = Problems(), UnitFiles(folder, job)
    batches = Batches(files, encoder, job.fields)
    for index, part in enumerate(unit):
        source, plainly = job.sources[part.source], functools.partial(problems.note, PLAIN_SPACES, part.path)
        drop = functools.partial(problems.note, where=part.path)
        for document in run(job.steps, read(source, part, problems), drop):
            begins = [starts(segment.text, source.language, plainly) for segment in document.segments]
            batches.add(document, begins, part.source, index, document.code or "".join(source.codes[:1]))
    batches.flush()
    values = {name: list(numbers) for name, numbers in batches.values.items()}
    files.finish(batches.characters, problems, [part.path for part in unit], values)


class _Text(NamedTuple):
    """A segment that waits to be encoded; places are characters."""

    text: str
    segment: int  # which of the segments' names
    code: int  # which of the control codes its document has
    starts: np.ndarray  # i64: where sentences start, at least one
    values: list  # (field, start, end, value) of its annotations


class Batches:
    """Writes documents to the files of a unit. characters: of the texts so far."""

    def __init__(self, files: UnitFiles, encoder: Encoder, fields: dict[str, Field]):
        self.files, self.encoder, self.fields = files, encoder, fields
        self.characters, self.range = 0, None  # of the document before
        self.segments = {name: at for at, name in enumerate(fields["segments"].values)} if "segments" in fields else {}
        self.codes = {name: at for at, name in enumerate(fields["codes"].values)} if "codes" in fields else {}
        # Of fields of texts: text -> its number in this unit; 0 is where nothing is said
        self.values = {name: {"": 0} for name, field in annotated(fields).items() if field.values is not None}
        self._empty()

    def _empty(self) -> None:
        self.texts: list[_Text] = []
        self.size = self.sentences = 0
        self.begun = []  # a row of DOCUMENT each

    def add(self, document: Document, starts: list[np.ndarray], source: int, index: int, code: str = "") -> None:
        """A document of a source, from a range of the unit, or a piece of one; its (first piece of) text decides the
        split. starts: where sentences start in each segment; the white space of one without sentences is left out.
        code: its control code, where documents have one."""
        if not document.continues or index != self.range:
            text = "\n\n".join(segment.text for segment in document.segments)
            digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
            self.begun.append((self.sentences, digest, source, index, document.continues))
        self.range = index
        for number, (segment, begins) in enumerate(zip(document.segments, starts, strict=True)):
            if len(begins):
                values = [
                    (note.field, note.start, note.end, note.value)
                    for note in document.annotations
                    if note.segment == number
                ]
                numbers = self.segments.get(segment.name, 0), self.codes.get(code, 0)
                self.texts.append(_Text(segment.text, *numbers, begins, values))
                self.sentences += len(begins)
                self.size += len(segment.text)
            if self.size >= BATCH:
                self.flush()

    def flush(self) -> None:
        """Encode and write what waits."""
        spans = [_spans(text.values) for text in self.texts]
        places = [np.concatenate([text.starts, *span]) for text, span in zip(self.texts, spans, strict=True)]
        encoded = self.encoder.encode([text.text for text in self.texts], places)
        counts = np.array([(len(text.starts), len(text.values)) for text in self.texts], np.int64).reshape(-1, 2)
        lengths, begin, end = _cut(encoded, *counts.T)
        kept = lengths > 0  # a sentence of control characters has no tokens
        documents = np.array(self.begun, DOCUMENT)
        documents["start"] = np.append(0, np.cumsum(kept))[documents["start"]]
        fields = {"tokens": encoded.tokens, **self._annotated(len(encoded.tokens), begin, end, kept)}
        if "word_starts" in self.files.files:
            by_token = encoded.word_starts is None
            fields["word_starts"] = self.encoder.word_starts[encoded.tokens] if by_token else encoded.word_starts
        of_texts = {"segments": self.segments and "segment", "codes": self.codes and "code"}
        for name, attribute in of_texts.items():
            if attribute:
                numbers = np.array([getattr(text, attribute) for text in self.texts], self.fields[name].dtype)
                fields[name] = np.repeat(numbers, counts[:, 0])[kept]
        self.files.add(lengths[kept], documents, **fields)
        self.characters += self.size
        self._empty()

    def _annotated(self, tokens: int, begin: np.ndarray, end: np.ndarray, kept: np.ndarray) -> dict[str, np.ndarray]:
        """The values of annotations: name -> [tokens or sentences, ...]. begin, end: i64 [annotations], in tokens."""
        sizes = {"token": tokens, "sentence": len(kept)}
        fields = annotated(self.fields)
        arrays = {name: np.zeros((sizes[field.per], *field.shape), field.dtype) for name, field in fields.items()}
        at = first = 0
        for text in self.texts:
            for name, start, _, value in text.values:
                if self.fields[name].per == "token":
                    place = slice(begin[at], end[at])
                else:
                    place = first + max(int(np.searchsorted(text.starts, start, "right")) - 1, 0)
                arrays[name][place] = self._number(name, value)
                at += 1
            first += len(text.starts)
        by_sentence = {name: arrays[name][kept] for name in arrays if self.fields[name].per == "sentence"}
        return arrays | by_sentence

    def _number(self, name: str, value):
        if name not in self.values:
            return value
        number = self.values[name].setdefault(value, len(self.values[name]))
        check_values(name, self.fields[name], number + 1)
        return number


def _spans(values: list) -> np.ndarray:
    """i64 [2, values]: where they begin and end, in characters."""
    return np.array([(start, end) for _, start, end, _ in values], np.int64).reshape(-1, 2).T


def _cut(encoded: Encoded, sentences: np.ndarray, spans: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """i64: the tokens of each sentence, and where the spans begin and end in tokens.

    sentences, spans: i64 [texts], how many each has. The places in a text are where its
    sentences start, at least one, then where spans begin, then where they end.

    A token belongs to the sentence in which it ends; what ends before the first belongs to the first. A span has all
    tokens that it has a character of.
    """
    kinds = np.repeat(np.tile([0, 1, 2], len(spans)), np.stack([sentences, spans, spans], 1).ravel())
    first = np.cumsum(encoded.lengths) - encoded.lengths  # token of each text
    text = np.repeat(np.arange(len(sentences)), sentences + 2 * spans)
    at = first[text] + encoded.ended
    begin = at[kinds == 0]
    begin[np.cumsum(sentences) - sentences] = first
    lengths = np.diff(begin, append=len(encoded.tokens))
    return lengths, at[kinds == 1], (at + encoded.straddled)[kinds == 2]
