"""One file from a storage to this host's disk: hashed on the way, tried again where the network fails for now."""

import hashlib
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from data_pipelines.cloud import PAUSES, cloud_errors, filesystem, may_pass, message_of, patiently, refusal, status
from data_pipelines.durable import put
from data_pipelines.errors import UserError
from data_pipelines.processes import in_turn

BLOCK = 16 << 20  # bytes asked for at a time
ASKED_AT_ONCE = 8  # one stream does not fill a host's network
SAY_EVERY = 10  # seconds
NOT_IN_OBJECT = 416  # HTTP: the object ends before the bytes that were asked for
Value = TypeVar("Value")


class Cut(ConnectionError):
    """Fewer bytes came than were asked for."""


def copy_file(source: str, name: str, file: dict, path: Path, suffix: str) -> None:
    """Copy the file `name` of the corpus at `source` to a local path, where it is only when it is whole.

    file: {bytes, sha256 or None where no manifest says it}. suffix: of its name until then. UserError when it is not
    what the manifest says or cannot be read; OSError when the disk fails.
    """
    hashed, advance, new = hashlib.sha256(), _progress(name, file["bytes"]), path.with_name(path.name + suffix)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(new, "wb") as stream:
        for block in _blocks(source, name, file["bytes"]):
            hashed.update(block)
            stream.write(block)
            advance(len(block))
    if file["sha256"] not in (None, hashed.hexdigest()):
        raise UserError(
            f"--corpus {source}: the content of {name} is not what prepare wrote (its hash differs); "
            "copy the corpus to the bucket again"
        )
    put(new, path)


def read_object(source: str, name: str) -> bytes:
    """The content of a small file of the corpus at `source`; UserError when it cannot be read."""
    path = f"{source}/{name}"
    return _asked(source, lambda: filesystem(path).cat_file(path), _once(source))


def sizes_below(source: str, folder: str) -> dict[str, int]:
    """{name: bytes} of the files in a folder of the corpus at `source`; UserError when it cannot be listed."""
    path = f"{source}/{folder}"
    found = _asked(source, lambda: filesystem(path).find(path, detail=True), _once(source))
    return {f"{folder}/{name.rpartition(f'/{folder}/')[2]}": info["size"] for name, info in found.items()}


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _blocks(source: str, name: str, size: int) -> Iterator[bytes]:
    """A file's content in order, several blocks asked for at once."""
    pool, told = ThreadPoolExecutor(ASKED_AT_ONCE), _once(source)
    read = lambda start: _asked(source, partial(_block, source, name, size, start, min(start + BLOCK, size)), told)
    try:
        yield from in_turn(pool, read, range(0, size, BLOCK), ASKED_AT_ONCE)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # where one block fails the others are not waited for


def _block(source: str, name: str, size: int, start: int, end: int) -> bytes:
    """Bytes [start, end) of a file that has `size` of them."""
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
        raise UserError(
            f"--corpus {source}: {name} has {found} bytes, the manifest says {size}; "
            "copy the corpus to the bucket again"
        )
    raise Cut(f"{len(block)} of {end - start} bytes came")


def _asked(source: str, read: Callable[[], Value], told: Callable[[Exception], None]) -> Value:
    """What read() gives, patiently; UserError where it fails for good."""
    with cloud_errors(f"--corpus {source}", _reason):
        return patiently(read, told)


def _reason(error: Exception) -> str | None:
    """Why a storage cannot be read, with the cure; None for an error that no storage makes."""
    if may_pass(error):
        return (
            f"cannot be read ({message_of(error)}), {len(PAUSES) + 1} times in a row; "
            "start the same command again, it goes on with what is copied"
        )
    return refusal(error) or (f"cannot be read ({message_of(error)})" if isinstance(error, OSError) else None)


def _once(source: str) -> Callable[[Exception], None]:
    """A function to be told of failures that may pass, which says the first."""
    before = []

    def told(error: Exception) -> None:
        if not before:
            before.append(error)
            say(f"{source} cannot be read for now ({message_of(error)}): trying again, up to {len(PAUSES)} times")

    return told


def _progress(name: str, total: int) -> Callable[[int], None]:
    """A function to be told of bytes that have arrived, which says now and then how far it is."""
    began = said = time.monotonic()
    done = 0

    def advance(size: int) -> None:
        nonlocal done, said
        done += size
        if time.monotonic() - said >= SAY_EVERY:
            said = time.monotonic()
            say(f"{name}: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB, {done / (said - began) / 1e6:.0f} MB/s")

    return advance
