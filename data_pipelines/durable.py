"""Files that a power cut leaves whole: on disk before they have their name, which is there before one goes on."""

import errno
import os
import shutil
import socket
import threading
from pathlib import Path


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


def ours() -> str:
    """A name that no other thread of any process has, on any host."""
    return f"{socket.gethostname()}-{os.getpid()}-{threading.get_ident()}"
