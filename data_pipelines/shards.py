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
from pathlib import Path

import numpy as np

from data_pipelines import sentences
from data_pipelines.durable import put
from data_pipelines.encoding import Encoder
from data_pipelines.formats.problems import EMPTY, Problems
from data_pipelines.formats.source import Range, Source
from data_pipelines.formats.table import read

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
                arrays.add(sentences.split(text, language))
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
        self.waiting, self.waiting_characters = [], 0
        self.begun = []  # (index in waiting, hash, part)
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
        self.begun.append((len(self.waiting), int.from_bytes(digest, "little"), part))

    def add(self, found: list[str]) -> None:
        self.waiting += found
        self.waiting_characters += sum(map(len, found))
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
        tokens, word_starts, lengths = self.encoder.encode(self.waiting)
        kept = np.concatenate([[0], np.cumsum(lengths > 0)])  # a sentence of control characters has no tokens
        documents = np.array(self.begun, DOCUMENT)
        documents["start"] = self.sentences + kept[documents["start"]]
        self.documents.append(documents)
        self.files["tokens"].write(tokens.astype(self.dtype).tobytes())
        self.files["word_starts"].write(word_starts.tobytes())
        self.files["sentences"].write(lengths[lengths > 0].astype(np.uint32).tobytes())
        self.sentences += int(kept[-1])
        self.characters += self.waiting_characters
        self.waiting, self.waiting_characters, self.begun = [], 0, []
