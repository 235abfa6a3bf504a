"""Read a corpus from a bucket, part by part: copy files to this host's disk when they are needed, hash them on the way,
retry after network failures, and drop them after use.

    $XDG_CACHE_HOME (else ~/.cache)/pretrain/corpora/
        manifests/HASH/manifest.json        with tokenizer/ and tables/; HASH is the manifest's
        FINGERPRINT/{train,heldout}/        arrays of a part, by the part's fingerprint: a corpus that grows keeps them
        FINGERPRINT/GROUP.lock              held by the process that copies files of the group: train, heldout, counts
        FINGERPRINT/GROUP.used              held by every process that reads them: such files are not dropped

A file gets its name when it is complete and its hash is checked; until then it is NAME.partial.
"""

import errno
import fcntl
import hashlib
import itertools
import os
import shutil
import sys
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, TypeVar

from data_pipelines.cloud import PAUSES, cloud_errors, filesystem, may_pass, message_of, patiently, refusal, status
from data_pipelines.durable import FULL, locked, ours, put
from data_pipelines.errors import AGAIN, PassingError, UserError
from data_pipelines.manifest import SPLITS, files_of, parse_manifest, parts_of
from data_pipelines.processes import in_turn

COUNTS = "token_counts.npy"  # read of all parts at once, by readers that need no other file
ROOM = 0.9  # share of the free disk that a corpus may fill if it is kept
BLOCK = 16 << 20  # bytes per request
ASKED_AT_ONCE = 8  # requests: a single stream does not fill a host's network
SAY_EVERY = 10  # seconds between lines of progress
NOT_IN_OBJECT = 416  # HTTP: the object ends before the requested bytes
GROUPS = (*SPLITS, "counts")
Key = tuple[int, str]  # a part's number, and a group of its files
Value = TypeVar("Value")


class Cut(ConnectionError):
    """Fewer bytes arrived than were requested."""


def open_copy(source: str) -> "Copy":
    """Open a corpus at a path that fsspec reads (gs://, s3://, https://): copy its manifest, tokenizer and tables.
    Raises UserError if it cannot be read or is not what `prepare` wrote."""
    source = source.rstrip("/")
    content = _asked(source, lambda: filesystem(source).cat_file(f"{source}/manifest.json"), _once(source))
    manifest = parse_manifest(source, content)
    folder = cache() / "manifests" / hashlib.sha256(content).hexdigest()
    with _disk_errors(source, folder):
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder.with_suffix(".lock")) as suffix:
            for name, file in files_of(manifest).items():
                if not _is_there(folder / name, file):
                    copy_file(source, name, file, folder / name, suffix)
            new = folder / f"manifest.json{suffix}"
            new.write_bytes(content)
            put(new, folder / "manifest.json")
    return Copy(source, folder, _has_room(source, manifest))


def cache() -> Path:
    """Return the folder with the copies of all corpora."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "pretrain" / "corpora"


class Copy:
    """This host's copy of a corpus. Safe to use from several threads and processes; picklable.

    Attributes: `source`, `folder` (with manifest.json, tokenizer/ and tables/), `keeps`: whether the disk had room for
    the whole corpus when it was opened. If so, released parts stay; else they are deleted as soon as no process of this
    host reads them. (On a disk without locks nothing can be deleted safely, so everything stays.)
    """

    def __init__(self, source: str, folder: Path, keeps: bool):
        self.source, self.folder, self.keeps = source, folder, keeps
        manifest = parse_manifest(source, (folder / "manifest.json").read_bytes())
        self._parts = parts_of(manifest)
        self._lock, self._copying = threading.Lock(), defaultdict(threading.Lock)
        self._held: dict[Key, IO | None] = {}  # locks on the files that this process reads
        self._inside, self._leaving = Counter(), set()  # readers of each key now; keys to drop after them
        self._wanted, self._queue, self._thread = set(), deque(), None

    def __reduce__(self):
        return Copy, (self.source, self.folder, self.keeps)

    @contextmanager
    def file(self, number: int, name: str) -> Iterator[Path]:
        """Yield the local path of a part's file, copied first if it is missing. It stays in the context, and until
        `release`.   number: of the part; name: as in its summary, such as 'train/tokens.npy'. One process copies while
        others wait. A complete copy by another process is used, an incomplete one is made again."""
        key = number, _group(name)
        path, file = self.path(number, name), self._parts[number].files[name]
        disk_errors = lambda: _disk_errors(self.source, path.parent)
        with disk_errors():
            self._enter(key)
        try:
            if not _is_there(path, file):
                with disk_errors():
                    self._copy(key, name, file, path)
            yield path
        finally:
            self._exit(key)

    def want(self, split: str, numbers: Sequence[int]) -> None:
        """Copy the files of parts in the background, in order. What fails is tried again when the file is read."""
        with self._lock:
            new = [(number, split) for number in numbers if (number, split) not in self._wanted]
            self._wanted.update(new)
            self._queue.extend(new)
            if self._queue and self._thread is None:
                self._thread = threading.Thread(target=self._work, name="corpus", daemon=True)
                self._thread.start()

    def release(self, split: str, numbers: Sequence[int]) -> None:
        """Mark parts as done. If files of them are read later, those that were dropped are copied again."""
        with self._lock:
            for key in [(number, split) for number in numbers]:
                self._wanted.discard(key)
                if self._inside[key]:
                    self._leaving.add(key)
                elif key in self._held:
                    self._leave(key)

    def path(self, number: int, name: str) -> Path:
        """Return the local path of a part's file, whether or not it exists."""
        return _path(self._parts[number].fingerprint, name)

    def _names(self, key: Key) -> list[str]:
        return [name for name in self._parts[key[0]].files if _group(name) == key[1]]

    def _mark(self, key: Key, kind: str) -> Path:
        return self.path(key[0], f"{key[1]}.{kind}")

    def _enter(self, key: Key) -> None:
        with self._lock:
            if key not in self._held:
                self._mark(key, "used").parent.mkdir(parents=True, exist_ok=True)
                self._held[key] = locked(self._mark(key, "used"), fcntl.LOCK_SH)
            self._inside[key] += 1

    def _exit(self, key: Key) -> None:
        with self._lock:
            self._inside[key] -= 1
            if not self._inside[key] and (key in self._leaving or key[1] == "counts"):
                self._leaving.discard(key)
                self._leave(key)

    def _leave(self, key: Key) -> None:
        held = self._held.pop(key)
        if held is not None:
            held.close()
        if not self.keeps and key[1] != "counts":
            self._drop(key)

    def _drop(self, key: Key) -> bool:
        """Delete a part's files unless a process reads them. Returns whether it did."""
        try:
            used = locked(self._mark(key, "used"), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, FileNotFoundError):  # another process reads it; it was never copied
            return False
        if used is None:
            return False
        with used, suppress(OSError):  # a file that stays is noticed when the disk is full
            for name in self._names(key):
                self.path(key[0], name).unlink(missing_ok=True)
        return True

    def _copy(self, key: Key, name: str, file: dict, path: Path) -> None:
        with self._copying[key], _alone(self._mark(key, "lock")) as suffix:
            if not _is_there(path, file):
                self._make_room(file["bytes"])
                copy_file(self.source, f"{self._parts[key[0]].path}/{name}", file, path, suffix)

    def _make_room(self, size: int) -> None:
        """If the disk is full, drop files that no process reads. Raises OSError (ENOSPC) if that is not enough."""
        free = lambda: shutil.disk_usage(self.folder).free
        all_keys = itertools.product(range(len(self._parts)), GROUPS)
        for key in [one for one in all_keys if one not in self._held]:
            if free() >= size:
                return
            self._drop(key)
        if free() < size:
            raise OSError(errno.ENOSPC, f"{size / 1e6:,.1f} MB are needed, {free() / 1e6:,.1f} MB are free")

    def _work(self) -> None:
        """Copy queued files until the queue is empty."""
        while True:
            with self._lock:
                if not self._queue:
                    self._thread = None
                    return
                key = self._queue.popleft()
            for name in self._names(key):
                if key not in self._wanted:
                    break
                with suppress(Exception), self.file(key[0], name):  # raised when the file is read
                    pass


def _group(name: str) -> str:
    """Return the group in which a part's file is dropped: its split, but for token counts "counts"."""
    return "counts" if name.endswith(COUNTS) else name.partition("/")[0]


def _has_room(source: str, manifest: dict) -> bool:
    """Return, and print, whether the disk has room for the files of all parts that are not copied yet."""
    files = [(_path(part.fingerprint, name), file) for part in parts_of(manifest) for name, file in part.files.items()]
    missing = sum(file["bytes"] for path, file in files if not _is_there(path, file))
    free = shutil.disk_usage(cache()).free
    if missing:
        room = "room for all" if missing <= ROOM * free else "no room for all: parts are dropped after use"
        _say(f"copying {source} to {cache()}: {missing / 1e6:,.1f} MB, part by part, {free / 1e6:,.0f} MB free: {room}")
    return missing <= ROOM * free


def _path(fingerprint: str, name: str) -> Path:
    """Return where a part's file is on this host."""
    return cache() / fingerprint / name


def _is_there(path: Path, file: dict) -> bool:
    try:
        return path.stat().st_size == file["bytes"]
    except FileNotFoundError:
        return False


@contextmanager
def _alone(path: Path) -> Iterator[str]:
    """Hold the lock at a path during the context, against other processes of this host. A killed process lets go.
    Yields the suffix of incomplete files, which is unique on a disk without locks."""
    try:
        lock = locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _say(f"waiting for another process that is copying the corpus to {path.with_suffix('')}")
        lock = locked(path, fcntl.LOCK_EX)
    if lock is None:
        yield f".{ours()}.partial"
        return
    with lock:
        yield ".partial"


@contextmanager
def _disk_errors(source: str, folder: Path) -> Iterator[None]:
    """Turn an error of the disk into a UserError with the cure that fits."""
    try:
        yield
    except OSError as error:
        kind = UserError
        if error.errno in FULL:
            cure = "free space, or set XDG_CACHE_HOME to a folder on another disk"
        elif error.errno in (errno.EIO, errno.ETIMEDOUT, errno.ESTALE):
            kind = PassingError
            cure = f"{AGAIN}; if the error stays, set XDG_CACHE_HOME to another disk"
        else:
            cure = "set XDG_CACHE_HOME to a folder that can be written"
        reason = error.strerror or error
        raise kind(f"--corpus {source}: cannot be copied to {folder} ({reason}); {cure}") from error


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def copy_file(source: str, name: str, file: dict, path: Path, suffix: str) -> None:
    """Copy the file `name` of the corpus at `source` to a local path, which exists only once the copy is complete.
    file: {bytes, sha256}. suffix: of the incomplete file. Raises UserError if the file cannot be read or is not what
    the manifest says; OSError if the disk fails."""
    hashed, advance, new = hashlib.sha256(), _progress(name, file["bytes"]), path.with_name(path.name + suffix)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(new, "wb") as stream:
        for block in _blocks(source, name, file["bytes"]):
            hashed.update(block)
            stream.write(block)
            advance(len(block))
    if file["sha256"] != hashed.hexdigest():
        raise UserError(f"--corpus {source}: {name} is not what prepare wrote (its hash differs); copy it there again")
    put(new, path)


def _blocks(source: str, name: str, size: int) -> Iterator[bytes]:
    """Yield a file's content in order, with several requests at once."""
    pool, told = ThreadPoolExecutor(ASKED_AT_ONCE), _once(source)
    read = lambda start: _asked(source, partial(_block, source, name, size, start, min(start + BLOCK, size)), told)
    try:
        yield from in_turn(pool, read, range(0, size, BLOCK), ASKED_AT_ONCE)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # if one block fails, do not wait for the others


def _block(source: str, name: str, size: int, start: int, end: int) -> bytes:
    """Read bytes [start, end) of a file of `size` bytes."""
    path = f"{source}/{name}"
    try:
        block = filesystem(path).cat_file(path, start=start, end=end)
    except FileNotFoundError as error:
        raise UserError(f"--corpus {source}: {name} is missing; copy the corpus to the bucket again") from error
    except Exception as error:
        if status(error) != NOT_IN_OBJECT:
            raise
        block = b""
    if len(block) == end - start:
        return block
    if (found := filesystem(path).info(path)["size"]) != size:
        raise UserError(f"--corpus {source}: {name} has {found} bytes, not {size}; copy the corpus there again")
    raise Cut(f"{len(block)} of {end - start} bytes arrived")


def _asked(source: str, read: Callable[[], Value], told: Callable[[Exception], None]) -> Value:
    """Return read(), with retries. Raises UserError if it fails for good."""
    with cloud_errors(f"--corpus {source}", _reason):
        return patiently(read, told)


def _reason(error: Exception) -> str | None:
    """Return why a storage cannot be read, with the cure; None for an error that comes from no storage."""
    if may_pass(error):
        return f"cannot be read ({message_of(error)}), {len(PAUSES) + 1} times in a row; {AGAIN} from what is copied"
    return refusal(error) or (f"cannot be read ({message_of(error)})" if isinstance(error, OSError) else None)


def _once(source: str) -> Callable[[Exception], None]:
    """Return a callback for failures that may pass. It prints the first."""
    before = []

    def told(error: Exception) -> None:
        if not before:
            before.append(error)
            _say(f"{source} cannot be read for now ({message_of(error)}): retrying up to {len(PAUSES)} times")

    return told


def _progress(name: str, total: int) -> Callable[[int], None]:
    """Return a callback for bytes that have arrived. It prints the progress every SAY_EVERY seconds."""
    began = last = time.monotonic()
    done = 0

    def advance(size: int) -> None:
        nonlocal done, last
        done += size
        if time.monotonic() - last >= SAY_EVERY:
            last = time.monotonic()
            _say(f"{name}: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB, {done / (last - began) / 1e6:.0f} MB/s")

    return advance
