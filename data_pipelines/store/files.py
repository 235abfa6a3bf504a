"""Files of a corpus as they are written: arrays whose length is known at the end, folders with a summary of them."""

import hashlib
import io
import json
import shutil
from pathlib import Path

import numpy as np

from data_pipelines.durable import ours, put
from data_pipelines.errors import UserError

HEADER = 128  # bytes of an .npy header; room for any shape of ours
SUMMARY = "summary.json"  # of a folder, written last


class NpyFile:
    """An .npy file whose length is known at the end only; shape: of one value."""

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
    """{name: {bytes, sha256}} of the files below a folder that match."""
    return {path.relative_to(folder).as_posix(): _described(path) for path in sorted(folder.glob(pattern))}


def _described(path: Path) -> dict:
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def write_json(path: Path, content: dict) -> None:
    """Atomically."""
    temporary = path.with_name(path.name + ".new")
    written = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    temporary.write_bytes(written.encode("utf-8", "backslashreplace"))  # a path that is not UTF-8: JSON's \udcff
    put(temporary, path)


def beside(folder: Path) -> Path:
    """An empty folder, in which another is made."""
    temporary = folder.with_name(f"{folder.name}.{ours()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    return temporary


def read_summary(folder: Path, hashed: bool = False) -> dict:
    """The summary of a part or of a unit. UserError where it is damaged, or a file has another size, or, hashed, other
    content; FileNotFoundError where there is none."""
    said = f"is not what was written; delete {folder} and start the command again"
    try:
        summary = json.loads((folder / SUMMARY).read_text("utf-8"))
        files = {name: (file["bytes"], file["sha256"]) for name, file in summary["files"].items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{folder}: {SUMMARY} {said}") from error
    for name, (size, digest) in files.items():
        place = folder / name
        if not place.is_file() or place.stat().st_size != size or hashed and _described(place)["sha256"] != digest:
            raise UserError(f"{folder}: {name} {said}")
    return summary


def is_whole(folder: Path) -> bool:
    """Whether a folder is there with its summary and all its files, of the sizes that they had."""
    try:
        return bool(read_summary(folder))
    except (UserError, FileNotFoundError, NotADirectoryError):
        return False
