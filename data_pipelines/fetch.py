"""A corpus in Google Cloud Storage, copied once to this host.

    $XDG_CACHE_HOME (else ~/.cache)/pretrain/corpora/
        FINGERPRINT.lock            held by the process that copies
        FINGERPRINT/                the corpus; a file NAME.partial is being copied
        FINGERPRINT/manifest.json   written last: its presence says that the copy is whole
"""

import fcntl
import hashlib
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from data_pipelines.cloud import SCHEME, cloud_errors, filesystem
from data_pipelines.durable import put
from data_pipelines.errors import UserError
from data_pipelines.manifest import parse_manifest

BLOCK = 16 << 20  # bytes asked for at a time
ASKED_AT_ONCE = 8  # one stream does not fill a host's network
SAY_EVERY = 10  # seconds


class File(NamedTuple):
    size: int
    sha256: str | None  # None for tokenizer files of corpora whose manifest does not list them


def fetch(source: str) -> Path:
    """The folder with this host's copy of the corpus at a gs:// path, copying what is not there yet.

    Of several processes one copies and the others wait. Every file's hash is checked while it is copied. After a kill
    the next call checks what is there and copies the rest.
    UserError when the corpus cannot be read, is not what `prepare` wrote, or does not fit on the disk.
    """
    source, setting = source.rstrip("/"), f"--corpus {source}"
    with cloud_errors(setting):
        content = filesystem().cat_file(f"{source}/manifest.json")
    manifest = parse_manifest(source, content)
    folder = cache() / manifest["fingerprint"]
    try:
        with _alone(folder), cloud_errors(setting):
            wanted = _wanted(manifest, source, folder, content)
            if wanted:
                _copy_all(source, folder, wanted)
                _write_whole(folder / "manifest.json", [content])
    except OSError as error:
        raise UserError(
            f"{setting}: cannot be copied to {folder} ({error.strerror or error}); "
            "free space, or set XDG_CACHE_HOME to a folder on another disk"
        ) from error
    return folder


def cache() -> Path:
    """The folder with the copies of all corpora."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "pretrain" / "corpora"


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """While the context lasts, no other process of this host copies to this folder; a killed one lets go."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(folder.name + ".lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"waiting for another process, which copies the corpus to {folder}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _wanted(manifest: dict, source: str, folder: Path, content: bytes) -> dict[str, File]:
    """What has to be copied: {} where the copy is whole."""
    listed = {name: File(file["bytes"], file["sha256"]) for name, file in _listed(manifest).items()}
    done = folder / "manifest.json"
    if done.is_file() and done.read_bytes() == content and all(_has_size(folder, *item) for item in listed.items()):
        return {}
    done.unlink(missing_ok=True)
    start = f"{source}/".removeprefix(SCHEME)
    found = {name.removeprefix(start): info["size"] for name, info in filesystem().find(source, detail=True).items()}
    if "tokenizer" not in manifest:
        listed |= {name: File(size, None) for name, size in found.items() if name.startswith("tokenizer/")}
    for name, file in listed.items():
        if found.get(name) != file.size:
            has = f"has {found[name]} bytes, the manifest says {file.size}" if name in found else "is missing"
            raise UserError(f"--corpus {source}: {name} {has}; copy the corpus to the bucket again")
    return {name: file for name, file in listed.items() if not _is_there(folder, name, file)}


def _listed(manifest: dict) -> dict[str, dict]:
    return manifest["files"] | manifest.get("tokenizer", {})


def _has_size(folder: Path, name: str, file: File) -> bool:
    return (folder / name).is_file() and (folder / name).stat().st_size == file.size


def _is_there(folder: Path, name: str, file: File) -> bool:
    """Whether an earlier copy of a file is whole."""
    if file.sha256 is None or not _has_size(folder, name, file):
        return False
    with open(folder / name, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest() == file.sha256


def _copy_all(source: str, folder: Path, wanted: dict[str, File]) -> None:
    total, free = sum(file.size for file in wanted.values()), shutil.disk_usage(folder).free
    if free < total:
        raise UserError(
            f"--corpus {source}: {total / 1e6:,.1f} MB are to be copied to {folder} and {free / 1e6:,.1f} MB are free; "
            "free space, or set XDG_CACHE_HOME to a folder on another disk"
        )
    _say(f"copying {source} to {folder}: {total / 1e6:,.1f} MB")
    progress = _progress(total)
    for name, file in wanted.items():
        hashed = hashlib.sha256()
        _write_whole(folder / name, _checked(source, name, file, hashed, progress))
    _say("the copy is whole")


def _checked(source: str, name: str, file: File, hashed, progress: Callable[[int], None]) -> Iterator[bytes]:
    """The blocks of an object; UserError after the last if they are not what the manifest says."""
    for block in _blocks(f"{source}/{name}", file.size):
        hashed.update(block)
        progress(len(block))
        yield block
    if file.sha256 not in (None, hashed.hexdigest()):
        raise UserError(
            f"--corpus {source}: the content of {name} is not what prepare wrote (its hash differs); "
            "copy the corpus to the bucket again"
        )


def _blocks(path: str, size: int) -> Iterator[bytes]:
    """An object's content in order, several blocks asked for at once."""
    files, waiting = filesystem(), deque()
    with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
        for start in range(0, size, BLOCK):
            waiting.append(pool.submit(files.cat_file, path, start=start, end=min(start + BLOCK, size)))
            if len(waiting) == ASKED_AT_ONCE:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _write_whole(path: Path, blocks) -> None:
    """Write a file under a temporary name; it gets its own when it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with open(partial, "wb") as file:
        for block in blocks:
            file.write(block)
    put(partial, path)


def _progress(total: int) -> Callable[[int], None]:
    """A function to be told of bytes that have arrived, which says now and then how far it is."""
    began = said = time.monotonic()
    done = 0

    def advance(size: int) -> None:
        nonlocal done, said
        done += size
        if time.monotonic() - said >= SAY_EVERY:
            said = time.monotonic()
            _say(f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB, {done / (said - began) / 1e6:.0f} MB/s")

    return advance


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
