"""Write files of a corpus: arrays whose length is known only at the end, and folders with a summary."""

import hashlib
import io
import json
import shutil
from pathlib import Path

import numpy as np

from data_pipelines.durable import ours, put
from data_pipelines.errors import UserError

HEADER = 128  # bytes of an .npy header, enough for all shapes here
SUMMARY = "summary.json"  # the last file to be written in a folder


class NpyFile:
    """An .npy file whose length is known only at the end. shape: of one value."""

    def __init__(self, path: Path, dtype, shape: tuple[int, ...] = ()):
        self.file, self.dtype, self.shape, self.length = open(path, "wb"), np.dtype(dtype), shape, 0  # noqa: SIM115
        self.file.write(bytes(HEADER))

    def write(self, array: np.ndarray) -> None:
        self.file.write(np.ascontiguousarray(array, self.dtype).data if array.size else b"")
        self.length += len(array)

    def close(self) -> None:
        header = io.BytesIO()
        description = {"descr": self.dtype.str, "fortran_order": False, "shape": (self.length, *self.shape)}
        np.lib.format.write_array_header_1_0(header, description)
        self.file.seek(0)
        self.file.write(header.getvalue())
        self.file.close()


def describe_files(folder: Path, pattern: str) -> dict[str, dict]:
    """Return {name: {bytes, sha256}} of the files below a folder that match."""
    return {path.relative_to(folder).as_posix(): _described(path) for path in sorted(folder.glob(pattern))}


def _described(path: Path) -> dict:
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def write_json(path: Path, content: dict) -> None:
    """Write a JSON file atomically."""
    temporary = path.with_name(path.name + ".new")
    written = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    temporary.write_bytes(written.encode("utf-8", "backslashreplace"))  # a path that is not UTF-8: JSON's \udcff
    put(temporary, path)


def beside(folder: Path) -> Path:
    """Return an empty folder next to a folder, in which to make that folder."""
    temporary = folder.with_name(f"{folder.name}.{ours()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    return temporary


def read_summary(folder: Path, hashed: bool = False, again: str = "start the command again") -> dict:
    """Return the summary of a part or of a unit. Raises UserError if it is damaged, or if a file has another size or,
    with `hashed`, other content; FileNotFoundError if there is none.   again: what cures it, once it is deleted."""
    problem = f"is not what was written; delete {folder} and {again}"
    try:
        summary = json.loads((folder / SUMMARY).read_text("utf-8"))
        files = {name: (file["bytes"], file["sha256"]) for name, file in summary["files"].items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{folder}: {SUMMARY} {problem}") from error
    for name, (size, digest) in files.items():
        place = folder / name
        if not place.is_file() or place.stat().st_size != size or hashed and _described(place)["sha256"] != digest:
            raise UserError(f"{folder}: {name} {problem}")
    return summary


def is_whole(folder: Path) -> bool:
    """Return whether a folder has its summary and all its files with their sizes."""
    try:
        return bool(read_summary(folder))
    except (UserError, FileNotFoundError, NotADirectoryError):
        return False
