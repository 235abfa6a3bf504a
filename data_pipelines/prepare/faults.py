"""What the operating system refuses while a corpus is made, as one line that says what to do about it."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import PurePath

from data_pipelines.cloud import may_pass, refusal
from data_pipelines.errors import AGAIN, PassingError, UserError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ENOENT)
GONE = (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST)


@contextlib.contextmanager
def faults(out: PurePath, processes: int) -> Iterator[None]:
    """An OSError or a lack of memory within becomes a UserError."""
    try:
        yield
    except OSError as error:
        raise explain(error, out) from error
    except MemoryError as error:
        raise UserError(f"--processes {processes}: memory ran out; use fewer, {AGAIN}") from error


def explain(error: OSError, out: PurePath) -> UserError:
    """A full disk, a place that refuses, or a fault that may pass: each has a cure of its own."""
    said = (error.strerror or str(error) or type(error).__name__).strip()
    where = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else ""
    if (reason := refusal(error)) is not None and not error.errno:
        return (PassingError if may_pass(error) else UserError)(f"{where or out}: {reason}")
    if error.errno in FULL:
        return UserError(f"--out {out}: cannot write there ({said}); free space or choose another directory; {AGAIN}")
    ours = not os.path.dirname(where) or _inside(where, out)  # a lone name: of a folder that is removed
    if error.errno in GONE and ours:
        return PassingError(f"{where or out}: {said}; if another process makes the same, wait for it; {AGAIN}")
    if error.errno in REFUSED and not ours:
        return UserError(f"--source: cannot read {where} ({said}); make it readable or leave it out")
    if error.errno in REFUSED:
        cure = f"make it writable or choose another directory; {AGAIN}"
        return UserError(f"--out {out}: cannot write there ({said}); {cure}")
    return PassingError(f"{where or out}: reading or writing failed ({said}), which may pass; {AGAIN}")


def _inside(path: str, out: PurePath) -> bool:
    """Whether a path is that of the corpus, of something in it or of a folder that it is in."""
    path, out = os.path.abspath(path), os.path.abspath(out)
    return os.path.commonpath((path, out)) in (path, out)
