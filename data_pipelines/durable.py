"""Write files that survive a power cut: files are on disk before they are renamed, and names before work goes on."""

import contextlib
import errno
import fcntl
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from data_pipelines.errors import UserError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # errors of a full disk
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)  # errors of network file systems without locks


def put(new: Path, place: Path) -> None:
    """Give a file or folder that has a temporary name its final one, replacing a file of that name."""
    sync(new)
    os.replace(new, place)
    _sync(place.parent)


def put_folder(new: Path, place: Path) -> None:
    """Like `put`, for a folder. If its place is taken by a folder of the same content, that one stays."""
    try:
        put(new, place)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        shutil.rmtree(new)


def put_new(new: Path, place: Path) -> None:
    """Like `put`, for a file, but replace none: of several processes the first one's file stays."""
    sync(new)
    try:
        os.link(new, place)
    except FileExistsError:
        pass
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):  # a file system without links
            raise
        os.replace(new, place)
    new.unlink(missing_ok=True)
    _sync(place.parent)


def sync(path: Path) -> None:
    """Wait until a file, or a folder with its content, is on disk."""
    for entry in (*path.rglob("*"), path):
        _sync(entry)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems raise it for folders
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def writing(out: Path) -> Iterator[None]:
    """Raise UserError naming --out if writing in this context fails."""
    try:
        yield
    except OSError as error:
        raise UserError(f"--out {out}: cannot write there ({error.strerror or error}); choose another place") from None


def locked(path: Path, operation: int) -> IO | None:
    """Return an open file that holds the lock until it is closed; None on a disk without locks. Raises BlockingIOError
    if LOCK_NB is given and another process holds the lock, FileNotFoundError if the folder does not exist."""
    file = open(path, "a+")  # noqa: SIM115, over a network a shared lock needs read access
    try:
        fcntl.flock(file, operation)
    except OSError as error:
        file.close()
        if error.errno in NO_LOCKS:
            return None
        raise
    return file


def ours() -> str:
    """Return a name that no other thread of any process has, on any host."""
    return f"{socket.gethostname()}-{os.getpid()}-{threading.get_ident()}"
