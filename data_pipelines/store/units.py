"""The files of a unit of work: a folder of arrays that appears only when it is complete.

    FIELD.npy          [tokens or sentences, ...], each field that is stored by token or sentence
    sentences.npy      uint32 [sentences]       tokens of each
    documents.npy      DOCUMENT [documents], and a column for each of their values
    summary.json       characters; problems: what could not be read; paths: of the ranges; values: what the numbers of
                       fields stand for in this unit; files: sizes and hashes

A document that goes on from the unit before is the first here, and `continues`. Documents without tokens are here too:
which are empty is known when units are joined to a part, and so is to which split a document goes.
"""

import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_pipelines.durable import put_folder
from data_pipelines.errors import UserError
from data_pipelines.store.fields import TEXT, valued
from data_pipelines.store.files import SUMMARY, NpyFile, beside, describe_files, read_summary, write_json
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


def read_unit(folder: Path, hashed: bool = False) -> Unit:
    """UserError where it is not what was written (hashed: to the last byte); its folder is removed, so that it is made
    again."""
    try:
        summary = read_summary(folder, hashed)
    except (UserError, FileNotFoundError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        cure = "a file has changed since it was written; start the same command again"
        raise UserError(f"{folder} is damaged: {cure}") from error
    arrays = {name.removesuffix(".npy"): np.load(folder / name, mmap_mode="r") for name in summary["files"]}
    bounds = np.append(0, np.cumsum(arrays.pop("sentences"), dtype=np.int64))
    return Unit(arrays, bounds, np.array(arrays.pop("documents")), summary)


class UnitFiles:
    """The files of a unit while they are written; `finish` gives them their folder."""

    def __init__(self, folder: Path, job: Job):
        self.folder, self.temporary = folder, beside(folder)
        shutil.rmtree(folder, ignore_errors=True)  # damaged
        fields = job.stored("token") | job.stored("sentence")
        self.files = {name: NpyFile(self._place(name), field.dtype, field.shape) for name, field in fields.items()}
        self.files["sentences"] = NpyFile(self._place("sentences"), LENGTH)
        self.dtype = document_dtype(job)
        self.documents = [np.zeros(0, self.dtype)]

    def _place(self, name: str) -> Path:
        return self.temporary / f"{name}.npy"

    def add(self, lengths: np.ndarray, documents: np.ndarray, **fields: np.ndarray) -> None:
        """Sentences of lengths i64 [sentences]; documents (of `document_dtype`, start counted from the first of these
        sentences); the values of every stored field by token and by sentence."""
        documents = documents.copy()
        documents["start"] += self.files["sentences"].length
        self.documents.append(documents)
        for name, array in {"sentences": lengths, **fields}.items():
            self.files[name].write(array)

    def finish(self, characters: int, problems: dict, paths: list[str], values: dict[str, list[str]]) -> None:
        """values: of fields whose numbers stand for texts, those of this unit."""
        for file in self.files.values():
            file.close()
        np.save(self._place("documents"), np.concatenate(self.documents))
        said = {"characters": characters, "problems": problems, "paths": paths, "values": values}
        write_json(self.temporary / SUMMARY, said | {"files": describe_files(self.temporary, "*.npy")})
        put_folder(self.temporary, self.folder)
