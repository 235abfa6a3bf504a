"""Files of a corpus as they are written: arrays whose length is known at the end, sizes and hashes."""

import hashlib
import io
import json
from pathlib import Path

import numpy as np

from data_pipelines.durable import put

HEADER = 128  # bytes of an .npy header; room for any shape of ours


class Written:
    """A file that is written from front to back, with its hash."""

    def __init__(self, path: Path):
        self.file, self.hash, self.bytes = open(path, "wb"), hashlib.sha256(), 0  # noqa: SIM115

    def write(self, array: np.ndarray) -> None:
        data = memoryview(np.ascontiguousarray(array)).cast("B") if array.size else b""
        self.file.write(data)
        self.hash.update(data)
        self.bytes += len(data)

    def close(self) -> dict:
        """{bytes, sha256} of what was written."""
        self.file.close()
        return {"bytes": self.bytes, "sha256": self.hash.hexdigest()}


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
    found = {}
    for path in sorted(folder.glob(pattern)):
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        found[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": digest}
    return found


def write_json(path: Path, content: dict) -> None:
    """Atomically."""
    temporary = path.with_name(path.name + ".new")
    written = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    temporary.write_bytes(written.encode("utf-8", "backslashreplace"))  # a path that is not UTF-8: JSON's \udcff
    put(temporary, path)
