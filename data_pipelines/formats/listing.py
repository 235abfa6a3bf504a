"""List the files of a source: local files, and through fsspec those of gs://, s3://, https:// and the like."""

import functools
import glob
import os
import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path, PurePath, PurePosixPath
from typing import NamedTuple

from data_pipelines import cloud
from data_pipelines.cloud import filesystem, is_remote
from data_pipelines.errors import UserError
from data_pipelines.formats.problems import CORPUS, HIDDEN, LINKED, OTHER, OWN, Problems, printable
from data_pipelines.formats.source import Source

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
EXPANDS = 4  # estimated ratio of the text in a compressed file to its size
VERSIONS = ("generation", "etag", "ETag", "md5Hash", "Content-MD5", "LastModified", "Last-Modified", "mtime", "created")


class Found(NamedTuple):
    """A file of a source."""

    path: str
    size: int | None  # bytes; None if a server does not tell
    version: str  # changes with the content: time and size, or a store's version of an object

    @property
    def text_size(self) -> int:
        """Estimated bytes of text."""
        return (self.size or 0) * (EXPANDS if is_compressed(self.path) else 1)


def is_compressed(path: str) -> bool:
    return _suffix(path) in COMPRESSED


def _suffix(path: str) -> str:
    return os.path.splitext(path)[1].lower()


def look(path: str) -> Found:
    """Return the file with this path."""
    return _remote(path, filesystem(path).info(path)) if is_remote(path) else _local(path)


def _local(path: str) -> Found:
    status = os.stat(path)
    return Found(path, status.st_size, f"{status.st_mtime_ns}-{status.st_size}")


def _remote(path: str, info: dict) -> Found:
    version = next((info[name] for name in VERSIONS if info.get(name)), "")
    version = version.timestamp() if isinstance(version, datetime) else version
    return Found(path, info.get("size"), f"{version}-{info.get('size')}")


def find(source: Source, problems: Problems, exclude: Sequence[str] = (), suffixes: Sequence[str] = ()) -> list[Found]:
    """Return the files of a source, sorted: a single file, the matches of a pattern, or the files below a directory
    that have one of the suffixes (also compressed; '' means no suffix; without suffixes: all files). Files that are
    left out are noted. Raises UserError if there is none."""
    excluded = [_place(str(folder)) for folder in exclude]
    if is_remote(source.location):
        folder, paths = _reached(source, problems)
    else:
        folder, paths = _on_disk(os.path.expanduser(source.location), problems, excluded)
    below = lambda path: any(_place(os.path.dirname(path)).is_relative_to(place) for place in excluded)
    paths = [found for found in paths if not _left_out(below(found.path), OWN, found.path, problems)]
    suffix_of = lambda path: _suffix(os.path.splitext(path)[0] if is_compressed(path) else path)
    other = lambda path: bool(folder and suffixes) and suffix_of(path) not in suffixes
    files = [found for found in paths if not _left_out(other(found.path), OTHER, found.path, problems)]
    if not files:
        raise UserError(f"--source {source} {_nothing(folder, paths, suffixes)}")
    if not any(found.size is None or found.size for found in files):
        raise UserError(f"--source {source}: all {len(files)} files are empty; give files with text")
    return sorted(files)


def _nothing(folder: bool, paths: list[Found], suffixes: Sequence[str]) -> str:
    """Return why there is no file, and the cure."""
    if paths:
        named = " ".join(suffix or "(no suffix)" for suffix in suffixes)
        return f"has no files named {named}, but {printable(paths[0].path)}; give a pattern such as 'DIR/**/*.html'"
    exists = "has no files" if folder else "does not exist, and as a pattern matches no file"
    return f"{exists}; give a directory, a file or a quoted pattern such as 'DIR/**/*.txt'"


def _on_disk(location: str, problems: Problems, excluded: Sequence[PurePath]) -> tuple[bool, list[Found]]:
    """Return (whether the location is a folder, its files)."""
    if os.path.isdir(location):
        return True, [_local(path) for path in _walk(location, problems, excluded)]
    if os.path.exists(location):
        return False, [_local(location)]
    if "**" in location:  # glob would follow links forever
        return False, [_local(path) for path in _matching(location, problems, excluded)]
    return False, [_local(path) for path in glob.glob(location) if os.path.isfile(path)]


def _matching(pattern: str, problems: Problems, excluded: Sequence[PurePath]) -> Iterator[str]:
    """Yield the files that match a pattern with **; each folder is read once, as in `_walk`."""
    from fsspec.utils import glob_translate

    parts = pattern.split("/")
    literal = next(index for index, part in enumerate(parts) if glob.has_magic(part))
    root = "/".join(parts[:literal]) or (os.sep if pattern.startswith("/") else os.curdir)
    matches = re.compile(glob_translate("/".join(parts[literal:]))).match
    if os.path.isdir(root):
        yield from (path for path in _walk(root, problems, excluded) if matches(os.path.relpath(path, root)))


def _walk(root: str, problems: Problems, excluded: Sequence[PurePath]) -> Iterator[str]:
    """Yield the files below a folder, also through links, each once; folders that prepare made are left out."""
    seen: set[str] = set()
    waiting = [root]
    while waiting:
        start = waiting.pop(0)
        if os.path.realpath(start) in seen:
            problems.note(LINKED, start)
            continue
        for folder, folders, names in os.walk(start, onerror=_raise):
            seen.add(os.path.realpath(folder))
            is_excluded = _place(folder) in excluded
            unfinished = os.path.exists(os.path.join(folder, ".partial", "state.json"))
            if is_excluded or unfinished or {"manifest.json", "tokenizer"} <= {*folders, *names}:
                problems.note(OWN if is_excluded else CORPUS, folder)
                folders.clear()
                continue
            hidden = [os.path.join(folder, name) for name in (*folders, *names) if name.startswith(".")]
            for path in hidden:
                problems.note(HIDDEN, path)
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            waiting += [path for name in folders if os.path.islink(path := os.path.join(folder, name))]
            yield from (os.path.join(folder, name) for name in names if not name.startswith("."))


def _raise(error: OSError) -> None:
    raise error


def _reached(source: Source, problems: Problems) -> tuple[bool, list[Found]]:
    """Like `_on_disk`, for a remote location."""
    location = source.location
    files = filesystem(location)
    with cloud.cloud_errors(f"--source {source}", _unlisted):
        if glob.has_magic(location) and not location.startswith("http"):
            found = files.glob(location, detail=True)
            paths = {files.unstrip_protocol(name): info for name, info in found.items() if info["type"] == "file"}
            return False, [_remote(path, info) for path, info in paths.items()]
        if not files.exists(location):
            return False, []
        info = files.info(location)
        if info["type"] == "file":
            return False, [_remote(location, info)]
        root = files._strip_protocol(location).rstrip("/")
        found = files.find(location, detail=True)
    hidden = lambda name: any(part.startswith(".") for part in PurePosixPath(name[len(root) :]).parts)
    shown = [name for name in found if not _left_out(hidden(name), HIDDEN, name, problems)]
    return True, [_remote(files.unstrip_protocol(name), found[name]) for name in shown]


def _unlisted(error: Exception) -> str | None:
    """Return why a store could not be listed, whatever its package raises."""
    if isinstance(error, UserError):
        return None
    return cloud.refusal(error) or f"cannot be listed ({cloud.message_of(error)})"


def _left_out(left_out: bool, problem: str, path: str, problems: Problems) -> bool:
    """Note a file that is left out. Returns `left_out`."""
    if left_out:
        problems.note(problem, path)
    return left_out


@functools.lru_cache(1024)
def _place(folder: str) -> PurePath:
    """Return a path that is the same however the folder's path is written."""
    if not is_remote(folder):
        return Path(os.path.realpath(folder))
    return PurePosixPath(folder.partition("://")[0], filesystem(folder)._strip_protocol(folder).lstrip("/"))
