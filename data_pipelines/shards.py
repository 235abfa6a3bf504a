"""One unit of work: documents to tokens, written as a folder of raw arrays that appears only when it is complete.

    tokens.bin         uint16 or uint32 [tokens]
    word_starts.bin    bool [tokens]
    sentences.bin      uint32 [sentences]       tokens of each
    documents.bin      DOCUMENT [documents]     where each begins, and its hash
    summary.json       characters in the sentences; problems: what could not be read

Sentences before the first document continue the last document of the shard before. Which split a document goes to is
decided when shards are joined.
"""

import hashlib
import json
import os
import shutil
from functools import partial
from pathlib import Path

import numpy as np

from data_pipelines.durable import put
from data_pipelines.formats.problems import EMPTY, PLAIN_SPACES, Problems
from data_pipelines.formats.source import Range, Source
from data_pipelines.formats.table import read
from data_pipelines.text.encoding import Encoded, Encoder
from data_pipelines.text.sentences import starts

BATCH = 1 << 20  # characters encoded at a time
DOCUMENT = np.dtype([("start", np.int64), ("hash", np.uint64), ("part", np.int64)])  # start: a sentence; part: a range


def token_dtype(vocab_size: int) -> np.dtype:
    return np.dtype(np.uint16 if vocab_size <= 65536 else np.uint32)


def write(folder: Path, unit: tuple[Range, ...], sources: list[Source], encoder: Encoder, language: str, dtype) -> None:
    """Make the shard `folder` from the ranges of a unit. One that exists is left alone."""
    if folder.exists():
        return
    temporary = folder.with_name(f"{folder.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    problems = Problems()
    with _Arrays(temporary, encoder, dtype) as arrays:
        for index, part in enumerate(unit):
            for document in read(sources[part.source], part, problems):
                text = "\n\n".join(segment.text for segment in document.segments)
                if not document.continues:
                    arrays.begin(text, index)
                plainly = partial(problems.note, PLAIN_SPACES, part.path)
                arrays.add(text, starts(text, language, plainly))
        for index in arrays.finish():
            problems.note(EMPTY, unit[index].path)
    (temporary / "summary.json").write_text(json.dumps({"characters": arrays.characters, "problems": problems}))
    try:
        put(temporary, folder)
    except OSError:  # another worker, left over from a run that was killed, was faster
        shutil.rmtree(temporary, ignore_errors=True)
        if not folder.exists():
            raise


class _Arrays:
    """The open files of a shard, and sentences that wait to be encoded."""

    def __init__(self, folder: Path, encoder: Encoder, dtype):
        self.encoder, self.dtype = encoder, dtype
        names = ("tokens", "word_starts", "sentences", "documents")
        self.files = {name: open(folder / f"{name}.bin", "wb") for name in names}  # noqa: SIM115
        self.waiting = []  # (text, where its sentences start)
        self.waiting_characters = self.waiting_sentences = 0
        self.begun = []  # (sentence among those waiting, hash, part)
        self.documents = []  # arrays of DOCUMENT
        self.sentences = self.characters = 0  # written

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for file in self.files.values():
            file.close()

    def begin(self, text: str, part: int) -> None:
        """A document begins, whose (first piece of) text decides the split."""
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        self.begun.append((self.waiting_sentences, int.from_bytes(digest, "little"), part))

    def add(self, text: str, starts: np.ndarray) -> None:
        """A text and where its sentences start; the white space of one without sentences is left out."""
        if len(starts):
            self.waiting.append((text, starts))
            self.waiting_sentences += len(starts)
            self.waiting_characters += len(text)
        if self.waiting_characters >= BATCH:
            self._flush()

    def finish(self) -> np.ndarray:
        """Write what waits and the documents; the range of each document that has no tokens."""
        self._flush()
        documents = np.concatenate([np.zeros(0, DOCUMENT), *self.documents])
        full = np.diff(documents["start"], append=self.sentences) > 0
        self.files["documents"].write(documents[full].tobytes())
        return documents["part"][~full]

    def _flush(self) -> None:
        texts, starts = [text for text, _ in self.waiting], [starts for _, starts in self.waiting]
        encoded = self.encoder.encode(texts, starts)
        tokens, word_starts = encoded.tokens, encoded.word_starts
        if word_starts is None:
            word_starts = self.encoder.word_starts[tokens]
        lengths = sentence_lengths(encoded, np.array([len(some) for some in starts], np.int64))
        kept = np.concatenate([[0], np.cumsum(lengths > 0)])  # a sentence of control characters has no tokens
        documents = np.array(self.begun, DOCUMENT)
        documents["start"] = self.sentences + kept[documents["start"]]
        self.documents.append(documents)
        self.files["tokens"].write(tokens.astype(self.dtype).tobytes())
        self.files["word_starts"].write(word_starts.tobytes())
        self.files["sentences"].write(lengths[lengths > 0].astype(np.uint32).tobytes())
        self.sentences += int(kept[-1])
        self.characters += self.waiting_characters
        self.waiting, self.begun = [], []
        self.waiting_characters = self.waiting_sentences = 0


def sentence_lengths(encoded: Encoded, sentences: np.ndarray) -> np.ndarray:
    """i64 [sentences]: the tokens of each. The places in a text, of which each has at least one, are where its sentences
    start. A token belongs to the sentence in which it ends; what ends before the first belongs to the first."""
    ends = np.cumsum(encoded.lengths)
    begin = encoded.ended + np.repeat(ends - encoded.lengths, sentences)
    first = np.cumsum(sentences) - sentences
    begin[first] = ends - encoded.lengths
    return np.diff(begin, append=ends[-1:])
