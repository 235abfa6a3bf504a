"""Units of work joined to a part of a corpus: memmappable arrays for each split, described by a summary.

    {train,heldout}/tokens.npy, sentences.npy, documents.npy and an array for each other stored field
    train/token_counts.npy      int64 [vocab]
    summary.json                written last: splits, characters, counts, values, files, fingerprint

Memory: about 80 bytes per document of the part, and what is needed of one unit.
"""

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_pipelines.durable import ours, put
from data_pipelines.errors import UserError
from data_pipelines.formats.problems import EMPTY, Problems
from data_pipelines.manifest import SPLITS, part_fingerprint
from data_pipelines.store import heldout
from data_pipelines.store.fields import TEXT, check_values, valued
from data_pipelines.store.files import NpyFile, describe_files, write_json
from data_pipelines.store.job import Job
from data_pipelines.store.units import VALUE, Unit, check_unit, read_unit

CHUNK = 1 << 22  # tokens that are copied at a time
CUT = "documents cut at the end of a part"


class Documents(NamedTuple):
    """The documents of a part, without empty ones. starts: the first sentence of each, then their number, int64
    [documents + 1]. tokens: int64 [documents]. rows: `document_dtype` [documents]."""

    starts: np.ndarray
    tokens: np.ndarray
    rows: np.ndarray


def part_name(number: int) -> str:
    """Where a part of a corpus is in it."""
    return f"parts/{number:06}"


def write_part(folder: Path, units: list[Path], job: Job, choose: Callable | None = None) -> dict:
    """Make the folder from the folders of units; returns its summary. A part that is there is left alone.

    choose: (documents, job) -> bool [documents], which are held out; as `prepare` does it unless given.
    UserError for a damaged unit, whose folder is removed.
    """
    if (folder / "summary.json").exists():
        return read_summary(folder)
    temporary = folder.with_name(f"{folder.name}.{ours()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    documents, numbered, said = _documents(units, job)
    if choose is None:
        held = heldout.choose(documents.rows["hash"], documents.tokens, job.heldout, job.parts)
        documents, held = _with_end_held(documents, held, units, job)
    else:
        held = choose(documents, job)
    sizes = _write_splits(temporary, documents, held, units, job, numbered)
    files = describe_files(temporary, "*/*.npy")
    summary = {"fingerprint": part_fingerprint(files, said["values"]), "splits": sizes, **said, "files": files}
    write_json(temporary / "summary.json", summary)
    folder.parent.mkdir(parents=True, exist_ok=True)
    put(temporary, folder)
    return summary


def read_summary(folder: Path) -> dict:
    """The summary of a part. UserError where it is damaged, or a file has another size."""
    said = f"is not what was written; delete {folder} and start the command again"
    try:
        summary = json.loads((folder / "summary.json").read_text("utf-8"))
        files = {name: file["bytes"] for name, file in summary["files"].items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{folder}: summary.json {said}") from error
    for name, size in files.items():
        if not (folder / name).is_file() or (folder / name).stat().st_size != size:
            raise UserError(f"{folder}: {name} {said}")
    return summary


def _documents(folders: list[Path], job: Job) -> tuple[Documents, dict[str, dict[str, int]], dict]:
    """All documents of the units, the number of each text of a field, and what the summaries say together: characters,
    counts and values."""
    found, offsets, empty, cut, path = [], [], {}, None, None
    texts_of = {name: field.values for name, field in job.fields.items() if field.values is not None}
    numbered = {name: {text: number for number, text in enumerate(texts)} for name, texts in texts_of.items()}
    problems, characters, sentences, tokens, number = Problems(), 0, 0, 0, 0
    for folder in folders:
        check_unit(folder)
        unit = read_unit(folder, job)
        problems.merge(unit.summary["problems"])
        characters, documents = characters + unit.summary["characters"], unit.documents
        for name, texts in unit.summary["values"].items():
            numbers = [numbered[name].setdefault(text, len(numbered[name])) for text in texts]
            check_values(name, job.fields[name], len(numbered[name]))
            if VALUE + name in documents.dtype.names:
                documents[VALUE + name] = np.array(numbers, np.int64)[documents[VALUE + name]]
        paths = unit.summary["paths"]
        offset, end = tokens + unit.sentences[documents["start"]], tokens + int(unit.sentences[-1])
        for at in np.flatnonzero(np.diff(offset, append=end) == 0):
            empty[number + int(at)] = paths[documents["range"][at]]
        for at in np.flatnonzero(documents["continues"]):
            before = paths[documents["range"][at - 1]] if at else path
            # Of a file whose beginning could not be read, the rest is no other file's
            documents["continues"][at] = before in (None, paths[documents["range"][at]])
        if len(documents):
            cut = cut or paths[documents["range"][0]]
            path = paths[documents["range"][-1]]
        documents["start"] += sentences
        found.append(documents)
        offsets.append(offset)
        number, sentences, tokens = number + len(documents), sentences + len(unit.sentences) - 1, end
    documents, offset = np.concatenate(found), np.concatenate(offsets)
    begins = ~documents["continues"]
    begins[:1] = True  # no document crosses parts
    begins = np.flatnonzero(begins)
    size = np.diff(offset[begins], append=tokens)
    if len(documents) and documents["continues"][0] and size[0]:
        problems.note(CUT, cut)
    for document in begins[(size == 0) & ~documents["continues"][begins]].tolist():
        problems.note(EMPTY, empty[document])
    documents, size = documents[begins[size > 0]], size[size > 0]
    starts = np.append(documents["start"], sentences)
    values = {name: [] if job.fields[name].kept == TEXT else list(numbers) for name, numbers in numbered.items()}
    said = {"characters": characters, "counts": problems, "values": values}
    return Documents(starts, size, documents), numbered, said


def _with_end_held(documents: Documents, held: np.ndarray, folders: list[Path], job: Job):
    """Where one document has most of the part, so that it cannot be held out and the others are too few, its last
    sentences are a document of their own that is held out."""
    total, has = int(documents.tokens.sum()), int(documents.tokens[held].sum())
    wanted = heldout.missing(has, total, job.heldout, job.parts)
    longest = int(documents.tokens.argmax()) if total else 0
    if wanted <= 0 or 2 * documents.tokens[longest] <= total:
        return documents, held
    lengths = np.concatenate([np.diff(read_unit(folder, job).sentences) for folder in folders])
    lengths = lengths[documents.starts[longest] : documents.starts[longest + 1]]
    count = heldout.end_to_hold(lengths, wanted, total // 2 - has)
    if not count:
        return documents, held
    after = longest + 1
    tokens = int(lengths[-count:].sum())
    sizes = np.insert(documents.tokens, after, tokens)
    sizes[longest] -= tokens
    return Documents(
        np.insert(documents.starts, after, documents.starts[after] - count),
        sizes,
        np.insert(documents.rows, after, documents.rows[longest]),
    ), np.insert(held, after, True)


def _write_splits(
    to: Path, documents: Documents, held: np.ndarray, folders: list[Path], job: Job, numbered: dict[str, dict[str, int]]
) -> dict:
    """Write the arrays of both splits; returns {split: {documents, sentences, tokens}}."""
    splits = [_Split(to / name, job, counted=name == "train") for name in SPLITS]
    first = 0  # sentence of the unit
    for folder in folders:
        unit = read_unit(folder, job)
        numbers = {
            name: np.array([numbered[name][text] for text in texts], job.fields[name].dtype)
            for name, texts in unit.summary["values"].items()
            if job.fields[name].per != "document"
        }
        last = first + len(unit.sentences) - 1
        inside = slice(*np.searchsorted(documents.starts[:-1], [first, last]))
        bounds = np.concatenate([[first], documents.starts[:-1][inside], [last]])
        before = max(inside.start - 1, 0)  # the document that goes on
        split = np.concatenate([held[before : before + 1], held[inside]])
        begins = np.flatnonzero(np.diff(split, prepend=~split[:1]))  # runs of documents that go the same way
        for run, following in itertools.pairwise([*begins.tolist(), len(split)]):
            starts = bounds[max(run, 1) : following] - bounds[run]
            splits[int(split[run])].add(unit, bounds[run] - first, bounds[following] - first, starts, numbers)
        first = last
    sources = documents.rows["source"]
    languages = [job.fields["languages"].values.index(source.language) for source in job.sources]
    columns = {"sources": sources, "languages": np.array(languages, np.uint16)[sources]}
    columns |= {name: documents.rows[VALUE + name] for name in valued(job.fields)}
    for name, here in itertools.product(SPLITS, columns):
        column = columns[here][held == (name == "heldout")]
        if job.fields[here].kept == TEXT:
            texts = [text.encode() for text in np.array([*numbered[here]], object)[column]]
            np.save(to / name / f"{here}.starts.npy", np.cumsum([0, *map(len, texts)]))
            column = np.frombuffer(b"".join(texts), np.uint8)
        np.save(to / name / f"{here}.npy", column)
    return {name: split.finish() for name, split in zip(SPLITS, splits, strict=True)}


class _Split:
    """The files of a split, written from front to back."""

    def __init__(self, folder: Path, job: Job, counted: bool):
        folder.mkdir()
        self.folder, self.job = folder, job

        def open_file(name, dtype, shape=()):
            return NpyFile(folder / f"{name}.npy", dtype, shape)

        self.starts = {name: open_file(name, np.int64) for name in ("sentences", "documents")}
        self.fields = {
            per: {name: open_file(name, field.dtype, field.shape) for name, field in job.stored(per).items()}
            for per in ("token", "sentence")
        }
        self.tokens = 0
        self.counts = np.zeros(job.vocab_size, np.int64) if counted else None

    def add(self, unit: Unit, first: int, last: int, starts: np.ndarray, numbers: dict[str, np.ndarray]) -> None:
        """Sentences [first, last) of a unit, and which of them documents begin with, counted from the first. numbers:
        of fields, the part's number for each of the unit's."""
        of_part = lambda name, array: numbers[name][array] if name in numbers else array
        if first == last:
            return
        self.starts["documents"].write(starts + self.starts["sentences"].length)
        begin, end = int(unit.sentences[first]), int(unit.sentences[last])
        self.starts["sentences"].write(self.tokens + unit.sentences[first:last] - begin)
        self.tokens += end - begin
        for name, file in self.fields["sentence"].items():
            file.write(of_part(name, unit.fields[name][first:last]))
        for at in range(begin, end, CHUNK):
            stop = min(end, at + CHUNK)
            for name, file in self.fields["token"].items():
                file.write(of_part(name, unit.fields[name][at:stop]))
            if self.counts is not None:
                self.counts += np.bincount(unit.fields["tokens"][at:stop], minlength=len(self.counts))

    def finish(self) -> dict[str, int]:
        sizes = {name: self.starts[name].length for name in ("documents", "sentences")} | {"tokens": self.tokens}
        self.starts["documents"].write(np.array([sizes["sentences"]]))
        self.starts["sentences"].write(np.array([sizes["tokens"]]))
        for file in (*self.starts.values(), *self.fields["token"].values(), *self.fields["sentence"].values()):
            file.close()
        if self.counts is not None:
            np.save(self.folder / "token_counts.npy", self.counts)
        return sizes
