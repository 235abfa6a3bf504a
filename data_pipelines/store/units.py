"""The files of a unit of work: a folder of raw arrays that appears only when it is complete.

    tokens.bin         uint16 or uint32 [tokens], and so for each other field that is stored by token or sentence
    sentences.bin      uint32 [sentences]       tokens of each
    documents.bin      DOCUMENT [documents], and a column for each of their values
    summary.json       characters; problems: what could not be read; paths: of the ranges; values: what the numbers of
                       fields stand for in this unit; files: sizes and hashes

A document that goes on from the unit before is the first here, and `continues`. Documents without tokens are here too:
which are empty is known when units are joined to a part, and so is to which split a document goes.
"""

import hashlib
import json
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_pipelines.durable import ours, put
from data_pipelines.errors import UserError
from data_pipelines.store.fields import TEXT, valued
from data_pipelines.store.files import Written
from data_pipelines.store.job import Job

VALUE = "value "  # begins the columns of values
# start: its first sentence; hash: of its first piece; range: of the unit, where it is
DOCUMENT = np.dtype([("start", "<i8"), ("hash", "<u8"), ("source", "<u2"), ("range", "<u2"), ("continues", "?")])
LENGTH = np.dtype("<u4")


def document_dtype(job: Job) -> np.dtype:
    """Of the documents of a unit: those of DOCUMENT, then their values, of texts their numbers."""
    columns = (
        (VALUE + name, "u4" if field.kept == TEXT else field.dtype) for name, field in valued(job.fields).items()
    )
    return np.dtype([*DOCUMENT.descr, *columns])


class Unit(NamedTuple):
    """A unit of work read back. fields: name -> [tokens or sentences, ...], mapped. sentences: int64 [sentences + 1],
    the token at which each begins, then their number."""

    fields: dict[str, np.ndarray]
    sentences: np.ndarray
    documents: np.ndarray
    summary: dict


def is_whole(folder: Path) -> bool:
    """Whether a unit is there with all its files, of the sizes that they had."""
    try:
        files = json.loads((folder / "summary.json").read_text("utf-8"))["files"]
        return all((folder / name).stat().st_size == file["bytes"] for name, file in files.items())
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return False


def check_unit(folder: Path) -> None:
    """UserError for a unit whose content is not what was written; its folder is removed, so that it is made again."""
    whole = is_whole(folder)
    summary = json.loads((folder / "summary.json").read_text("utf-8")) if whole else {"files": {}}
    for name, file in summary["files"].items():
        with open(folder / name, "rb") as stream:
            whole &= hashlib.file_digest(stream, "sha256").hexdigest() == file["sha256"]
    if not whole:
        shutil.rmtree(folder, ignore_errors=True)
        raise UserError(f"{folder} is damaged: a file has changed since it was written; start the same command again")


def read_unit(folder: Path, job: Job) -> Unit:
    lengths = np.fromfile(folder / "sentences.bin", LENGTH)
    bounds = np.append(0, np.cumsum(lengths, dtype=np.int64))
    number = {"token": int(bounds[-1]), "sentence": len(lengths)}
    fields = {}
    for per, count in number.items():
        for name, field in job.stored(per).items():
            fields[name] = _mapped(folder / f"{name}.bin", field.dtype, (count, *field.shape))
    summary = json.loads((folder / "summary.json").read_text("utf-8"))
    return Unit(fields, bounds, np.fromfile(folder / "documents.bin", document_dtype(job)), summary)


def _mapped(path: Path, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    return np.memmap(path, dtype, "r", shape=shape) if path.stat().st_size else np.zeros(shape, dtype)


class UnitFiles:
    """The files of a unit while they are written; `finish` gives them their folder."""

    def __init__(self, folder: Path, job: Job):
        self.folder = folder
        self.temporary = folder.with_name(f"{folder.name}.{ours()}")
        shutil.rmtree(self.temporary, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)  # damaged
        self.temporary.mkdir(parents=True)
        self.dtypes = {"sentences": LENGTH, "documents": document_dtype(job)}
        self.dtypes |= {name: np.dtype(f.dtype) for name, f in (job.stored("token") | job.stored("sentence")).items()}
        self.files = {name: Written(self.temporary / f"{name}.bin") for name in self.dtypes}
        self.sentences = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for file in self.files.values():
            file.close()

    def add(self, lengths: np.ndarray, documents: np.ndarray, **fields: np.ndarray) -> None:
        """Sentences of lengths i64 [sentences]; documents (of `document_dtype`, start counted from the first of these
        sentences); the values of every stored field by token and by sentence."""
        documents = documents.copy()
        documents["start"] += self.sentences
        self.sentences += len(lengths)
        for name, array in {"sentences": lengths, "documents": documents, **fields}.items():
            self.files[name].write(array.astype(self.dtypes[name]))

    def finish(self, characters: int, problems: dict, paths: list[str], values: dict[str, list[str]]) -> None:
        """values: of fields whose numbers stand for texts, those of this unit."""
        files = {f"{name}.bin": file.close() for name, file in self.files.items()}
        said = {"characters": characters, "problems": problems, "paths": paths, "values": values}
        summary = said | {"files": files}
        (self.temporary / "summary.json").write_text(json.dumps(summary), "utf-8")
        try:
            put(self.temporary, self.folder)
        except OSError:  # another worker, left over from a run that was killed, was faster
            shutil.rmtree(self.temporary, ignore_errors=True)
            if not is_whole(self.folder):
                raise
