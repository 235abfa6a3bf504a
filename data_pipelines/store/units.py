"""Units of work: encode documents, many at a time, into a folder of arrays that appears only when it is complete.

    FIELD.npy          [tokens or sentences, ...], each field that is stored by token or sentence
    sentences.npy      uint32 [sentences], tokens of each sentence
    documents.npy      DOCUMENT [documents], and a column for each of their values
    summary.json       characters; problems: what could not be read; paths: of the ranges; values: what the numbers of
                       fields stand for in this unit; words: how many words of several characters each of the job's
                       segmenters has found; files: sizes and hashes

A document that continues from the unit before is the first here, and `continues` is true. Documents without tokens are
included: only when units are joined to a part is it known which documents are empty, and which split each goes to.
"""

import functools
import hashlib
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_pipelines.document import Annotation, Document, Segment
from data_pipelines.durable import put_folder
from data_pipelines.errors import UserError
from data_pipelines.formats.problems import PLAIN_SPACES, Problems
from data_pipelines.formats.source import Range
from data_pipelines.formats.table import read
from data_pipelines.store.fields import PLANNED, TEXT, check_values, valued
from data_pipelines.store.files import SUMMARY, NpyFile, beside, describe_files, is_whole, read_summary, write_json
from data_pipelines.store.job import Job
from data_pipelines.text.encoding import Encoded, Encoder
from data_pipelines.text.sentences import starts
from data_pipelines.text.steps import run
from data_pipelines.text.words import edges, mark, segmenter, several

BATCH = 1 << 20  # characters encoded at a time
VALUE = "value "  # prefix of the columns of values
# start: first sentence; hash: of the first piece; range: number of the unit's range that it is in
DOCUMENT = np.dtype([("start", "<i8"), ("hash", "<u8"), ("source", "<u2"), ("range", "<u2"), ("continues", "?")])


def write_unit(folder: Path, unit: tuple[Range, ...], job: Job, encoder: Encoder) -> None:
    """Write the folder of a unit from its ranges. A folder that is whole is left alone."""
    if is_whole(folder):
        return
    problems, files = Problems(), UnitFiles(folder, job)
    batches = Batches(files, encoder, job)
    for index, part in enumerate(unit):
        source, plainly = job.sources[part.source], functools.partial(problems.note, PLAIN_SPACES, part.path)
        drop = functools.partial(problems.note, where=part.path)
        for document in run(job.steps, read(source, part, problems), drop):
            begins = [starts(each.text, each.language or source.language, plainly) for each in document.segments]
            batches.add(document, begins, part.source, index, source.language)
    batches.flush()
    files.finish(problems=problems, paths=[part.path for part in unit], **batches.described())


class UnitFiles:
    """The files of a unit while they are written; `finish` moves them to their folder. dtype: of documents, the columns
    of DOCUMENT and then their values (of texts, numbers)."""

    def __init__(self, folder: Path, job: Job):
        self.folder, self.temporary = folder, beside(folder)
        shutil.rmtree(folder, ignore_errors=True)  # damaged
        fields = job.stored("token") | job.stored("sentence")
        self.files = {name: NpyFile(self._place(name), field.dtype, field.shape) for name, field in fields.items()}
        self.files["sentences"] = NpyFile(self._place("sentences"), "<u4")
        kinds = ((name, "u4" if field.kept == TEXT else field.dtype) for name, field in valued(job.fields).items())
        self.dtype = np.dtype([*DOCUMENT.descr, *((VALUE + name, kind) for name, kind in kinds)])
        self.documents = [np.zeros(0, self.dtype)]

    def _place(self, name: str) -> Path:
        return self.temporary / f"{name}.npy"

    def add(self, lengths: np.ndarray, documents: np.ndarray, **fields: np.ndarray) -> None:
        """Add sentences of lengths i64 [sentences]; documents (of `UnitFiles.dtype`, with start counted from the first
        of these sentences); and the values of every field that is stored by token or sentence."""
        documents = documents.copy()
        documents["start"] += self.files["sentences"].length
        self.documents.append(documents)
        for name, array in {"sentences": lengths, **fields}.items():
            self.files[name].write(array)

    def finish(self, **summary) -> None:
        """Close the files and put the folder in its place.   summary: its entries but for `files`."""
        for file in self.files.values():
            file.close()
        np.save(self._place("documents"), np.concatenate(self.documents))
        write_json(self.temporary / SUMMARY, summary | {"files": describe_files(self.temporary, "*.npy")})
        put_folder(self.temporary, self.folder)


class _Text(NamedTuple):
    """A segment that waits to be encoded; places are in characters."""

    segment: Segment
    language: str
    starts: np.ndarray  # i64: where sentences start, at least one
    notes: list[Annotation]


class Batches:
    """Writes documents to the files of a unit. characters: number of characters in the texts so far."""

    def __init__(self, files: UnitFiles, encoder: Encoder, job: Job):
        self.files, self.encoder, self.fields = files, encoder, job.fields
        self.cuts = {field: segmenter(spec, digest) for field, spec, digest in job.units}
        self.words = dict.fromkeys(self.cuts, 0)
        self.characters, self.range = 0, None  # range: of the document before
        # values: for fields of texts, text -> its number in this unit; by token and sentence, 0 means no value
        self.valued = valued(job.fields)
        others = {*PLANNED, *self.valued, *self.cuts}
        self.annotated = {name: field for name, field in job.fields.items() if name not in others}
        self.values = {name: {"": 0} for name, field in self.annotated.items() if field.values is not None}
        self.values |= {name: {} for name, field in self.valued.items() if field.values is not None}
        self._empty()

    def _empty(self) -> None:
        self.texts: list[_Text] = []
        self.size = self.sentences = 0
        self.begun = []  # rows of `UnitFiles.dtype`

    def add(self, document: Document, starts: list[np.ndarray], source: int, index: int, language: str = "") -> None:
        """Add a document of a source, or a piece of one, from range `index` of the unit. The text (of the first piece)
        decides the split. starts: where sentences start in each segment; a segment without sentences is only white
        space and left out. language: of segments that name none."""
        if not document.continues or index != self.range:
            text = "\n\n".join(segment.text for segment in document.segments)
            digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
            values = (self._number(name, document.values[name]) for name in self.valued)
            self.begun.append((self.sentences, digest, source, index, document.continues, *values))
        self.range = index
        for number, (segment, begins) in enumerate(zip(document.segments, starts, strict=True)):
            if len(begins):
                notes = [note for note in document.annotations if note.segment == number]
                self.texts.append(_Text(segment, segment.language or language, begins, notes))
                self.sentences += len(begins)
                self.size += len(segment.text)
            if self.size >= BATCH:
                self.flush()

    def flush(self) -> None:
        """Encode and write the texts that wait."""
        found = [[edges(text.segment.text, text.starts, cut) for cut in self.cuts.values()] for text in self.texts]
        places = [
            np.concatenate([text.starts, *_spans(text.notes), *(each[:, 0] for each in of_text)])
            for text, of_text in zip(self.texts, found, strict=True)
        ]
        encoded = self.encoder.encode([text.segment.text for text in self.texts], places)
        counts = np.array([(len(text.starts), len(text.notes)) for text in self.texts], np.int64).reshape(-1, 2)
        of_cuts = np.array([[*map(len, of_text)] for of_text in found], np.int64).reshape(len(found), len(self.cuts))
        encoded, *by_cut = _divided(encoded, np.column_stack([counts @ [1, 2], of_cuts]))
        lengths, begin, end = _cut(encoded, *counts.T)
        kept = lengths > 0  # a sentence of control characters has no tokens
        documents = np.array(self.begun, self.files.dtype)
        documents["start"] = np.append(0, np.cumsum(kept))[documents["start"]]
        fields = {"tokens": encoded.tokens, **self._annotated(len(encoded.tokens), begin, end, kept)}
        if "word_starts" in self.files.files or self.cuts:
            by_token = encoded.word_starts is None
            word_starts = self.encoder.word_starts[encoded.tokens] if by_token else encoded.word_starts
            fields |= self._marked(word_starts, found, by_cut)
        names, languages = [text.segment.name for text in self.texts], [text.language for text in self.texts]
        for name, of_texts in (("segments", names), ("segment_languages", languages)):
            if name in self.fields:
                numbers = np.array([self.fields[name].values.index(text) for text in of_texts], self.fields[name].dtype)
                fields[name] = np.repeat(numbers, counts[:, 0])[kept]
        self.files.add(lengths[kept], documents, **fields)
        self.characters += self.size
        self._empty()

    def described(self) -> dict:
        """Return the summary's entries on the documents."""
        values = {name: list(numbers) for name, numbers in self.values.items()}
        return {"characters": self.characters, "values": values, "words": self.words}

    def _marked(self, word_starts: np.ndarray, found: list, by_cut: list[Encoded]) -> dict[str, np.ndarray]:
        """Return where words begin, for each stored field: name -> bool [tokens]. word_starts: the tokenizer's. found:
        for each text, its `edges` by each segmenter; by_cut: the texts with these as their places."""
        marked = {"word_starts": word_starts} if "word_starts" in self.files.files else {}
        for index, (name, encoded) in enumerate(zip(self.cuts, by_cut, strict=True)):
            of_texts = [of_text[index] for of_text in found]
            places, begins = np.concatenate([np.zeros((0, 2), np.int64), *of_texts]).T
            self.words[name] += several(places, begins == 1)
            marked[name] = mark(word_starts, encoded, begins == 1, np.array([*map(len, of_texts)], np.int64))
        return marked

    def _annotated(self, tokens: int, begin: np.ndarray, end: np.ndarray, kept: np.ndarray) -> dict[str, np.ndarray]:
        """Return the values of annotations: name -> [tokens or sentences, ...]. begin, end: i64 [annotations]."""
        sizes = {"token": tokens, "sentence": len(kept)}
        fields = self.annotated.items()
        arrays = {name: np.zeros((sizes[field.per], *field.shape), field.dtype) for name, field in fields}
        at = first = 0
        for text in self.texts:
            for note in text.notes:
                if self.fields[note.field].per == "token":
                    place = slice(begin[at], end[at])
                else:
                    place = first + max(int(np.searchsorted(text.starts, note.start, "right")) - 1, 0)
                arrays[note.field][place] = self._number(note.field, note.value)
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


def _spans(notes: list[Annotation]) -> np.ndarray:
    """Return where annotations begin and end, in characters: i64 [2, notes]."""
    return np.array([(note.start, note.end) for note in notes], np.int64).reshape(-1, 2).T


def _divided(encoded: Encoded, sizes: np.ndarray) -> list[Encoded]:
    """Return the encoded texts with each kind of places. sizes: i64 [texts, kinds], of the places of each text."""
    kind = np.repeat(np.tile(np.arange(sizes.shape[1]), len(sizes)), sizes.ravel())
    of_kind = (kind == index for index in range(sizes.shape[1]))
    return [encoded._replace(ended=encoded.ended[of], straddled=encoded.straddled[of]) for of in of_kind]


def _cut(encoded: Encoded, sentences: np.ndarray, spans: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the number of tokens in each sentence, and where the spans begin and end in tokens: i64 each.

    sentences, spans: i64 [texts], the number in each text. The places in a text are where its sentences start, at least
    one, then where spans begin, then where they end.

    A token belongs to the sentence in which it ends; a token that ends before the first sentence belongs to the first.
    A span has all tokens of which it has a character.
    """
    kinds = np.repeat(np.tile([0, 1, 2], len(spans)), np.stack([sentences, spans, spans], 1).ravel())
    first = np.cumsum(encoded.lengths) - encoded.lengths  # token of each text
    text = np.repeat(np.arange(len(sentences)), sentences + 2 * spans)
    at = first[text] + encoded.ended
    begin = at[kinds == 0]
    begin[np.cumsum(sentences) - sentences] = first
    lengths = np.diff(begin, append=len(encoded.tokens))
    return lengths, at[kinds == 1], (at + encoded.straddled)[kinds == 2]


class Unit(NamedTuple):
    """A unit of work read back. fields: name -> [tokens or sentences, ...], mapped. sentences: int64 [sentences + 1],
    the token at which each begins, then the number of tokens."""

    fields: dict[str, np.ndarray]
    sentences: np.ndarray
    documents: np.ndarray
    summary: dict


def read_unit(folder: Path, hashed: bool = False) -> Unit:
    """Read a unit. If it is not what was written (with `hashed`, to the last byte), remove it and raise UserError."""
    try:
        summary = read_summary(folder, hashed)
    except (UserError, FileNotFoundError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        cure = "a file has changed since it was written; start the same command again"
        raise UserError(f"{folder} is damaged: {cure}") from error
    arrays = {name.removesuffix(".npy"): np.load(folder / name, mmap_mode="r") for name in summary["files"]}
    bounds = np.append(0, np.cumsum(arrays.pop("sentences"), dtype=np.int64))
    return Unit(arrays, bounds, np.array(arrays.pop("documents")), summary)
