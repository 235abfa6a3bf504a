"""Files that a power cut leaves whole: on disk before they have their name, which is there before one goes on."""

import errno
import fcntl
import os
import shutil
import socket
import threading
from pathlib import Path
from typing import IO

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # what a disk without room answers
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)  # what some network file systems answer


def put(new: Path, place: Path) -> None:
    """Give a file or folder that was written under a temporary name its own, replacing what a file had there."""
    sync(new)
    os.replace(new, place)
    _sync(place.parent)


def put_folder(new: Path, place: Path) -> None:
    """The same for a folder, unless its place is taken by one of the same content."""
    try:
        put(new, place)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        shutil.rmtree(new)


def put_new(new: Path, place: Path) -> None:
    """As `put`, for a file where none may be replaced: of several processes the first keeps the name."""
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
    """Wait until a file, or a folder with all that is in it, is on disk."""
    for entry in (*path.rglob("*"), path):
        _sync(entry)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # which some network file systems answer for folders
            raise
    finally:
        os.close(descriptor)


def locked(path: Path, operation: int) -> IO | None:
    """An open file that holds the lock until it is closed; None where the disk has no locks. BlockingIOError where
    LOCK_NB was asked for and another holds it; FileNotFoundError where the folder is not there."""
    file = open(path, "a+")  # noqa: SIM115, over a network a shared lock needs a file that can be read
    try:
        fcntl.flock(file, operation)
    except OSError as error:
        file.close()
        if error.errno in NO_LOCKS:
            return None
        raise
    return file


def ours() -> str:
    """A name that no other thread of any process has, on any host."""
    return f"{socket.gethostname()}-{os.getpid()}-{threading.get_ident()}"
