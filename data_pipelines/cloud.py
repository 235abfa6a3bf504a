"""Paths in Google Cloud Storage, gs://BUCKET/NAME, beside local ones. gcsfs is imported with the first such path.

In Cloud Storage a write replaces a whole object or nothing, and nothing can be appended to an object. A folder is only
a common prefix of names, so it cannot be renamed in one operation.
"""

import contextlib
import functools
import importlib.util
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath
from typing import TypeVar

from data_pipelines.errors import PassingError, UserError

SCHEME = "gs://"
OBJECT_ROLE, BUCKET_ROLE = "roles/storage.objectUser", "roles/storage.legacyBucketReader"  # Orbax asks for its metadata
LOGIN = "log in with `gcloud auth application-default login`"
PAUSES = (1, 2, 4, 8, 16, 32)  # seconds before each retry
PASSING = (408, 425, 429, 500, 502, 503, 504)  # HTTP statuses after which a retry may succeed
CLIENTS = ("aiohttp", "botocore", "gcsfs", "google", "requests", "urllib3")  # packages that talk to storages
Value = TypeVar("Value")


def in_cloud(path: str | PurePath) -> bool:
    return str(path).startswith(SCHEME)


def is_remote(path: str | PurePath) -> bool:
    """Return whether fsspec reads the path: gs://, s3://, https:// and the like."""
    return "://" in str(path)


def place(path: str | PurePath) -> Path:
    """Return pathlib's Path for a local path, or etils' epath.Path, which has the same methods, for a gs:// path.
    Raises UserError if the package for gs:// is not installed."""
    if not in_cloud(path):
        return Path(path)
    _configure()
    from etils import epath

    return epath.Path(str(path))


def filesystem(path: str = SCHEME):
    """Return the fsspec file system of a path such as gs://... or https://... Raises UserError if there is none."""
    if in_cloud(path):
        _configure()
    import fsspec

    scheme = path.partition("://")[0]
    try:
        return fsspec.filesystem(scheme)
    except (ImportError, ValueError) as error:  # the package for it is not installed; no such scheme
        raise UserError(f"{path}: {scheme}:// cannot be read ({error})") from error


@functools.cache
def _configure() -> None:
    """Set options that gcsfs and etils read when they are first used, here and inside Orbax."""
    if importlib.util.find_spec("gcsfs") is None:
        raise UserError("gs:// paths need gcsfs: pip install -r requirements-gcs.txt")
    os.environ.setdefault("EPATH_USE_TF", "false")
    # Otherwise every call asks a second API for the bucket's kind, which few service accounts may use.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it also raises the errors that it logs
    import fsspec

    fsspec.config.conf.setdefault("gcs", {})["use_listings_cache"] = False  # other processes write there too


def is_file(path: Path) -> bool:
    """Return path.is_file(). Raises UserError if the cloud refuses to answer."""
    if not in_cloud(path):
        return path.is_file()
    with cloud_errors(str(path)):
        try:
            return filesystem().info(str(path))["type"] == "file"
        except FileNotFoundError:
            return False


def entries(folder: Path) -> list[Path]:
    """Return the content of a folder, [] if it does not exist. Raises UserError as `is_file` does."""
    if not in_cloud(folder):
        return list(folder.iterdir()) if folder.is_dir() else []
    with cloud_errors(str(folder)):
        try:
            return [place(f"{SCHEME}{name}") for name in filesystem().ls(str(folder), detail=False)]
        except FileNotFoundError:
            return []


def upload(folder: Path, to: Path, last: str | None = None) -> None:
    """Copy the files below a local folder to the same names below a gs:// folder; files named `last` come last."""
    for file in sorted(filter(Path.is_file, folder.rglob("*")), key=lambda file: (file.name == last, file)):
        upload_file(file, to / file.relative_to(folder).as_posix())


def upload_file(file: Path, to: Path) -> None:
    """Copy a local file to a gs:// object, which is replaced as a whole."""
    filesystem().put_file(str(file), str(to))


def remove_folder(folder: Path) -> None:
    """Remove a folder with its content, if it exists."""
    if in_cloud(folder):
        folder.rmtree(missing_ok=True)
    else:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def local_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder for code that reads local files: the folder itself, or a temporary copy, which errors do not name.
    Raises UserError for a gs:// folder that cannot be read."""
    if not in_cloud(folder):
        yield folder
        return
    with tempfile.TemporaryDirectory() as copy:
        with cloud_errors(str(folder)):
            filesystem().get(f"{folder}/", f"{copy}/", recursive=True)
        try:
            yield Path(copy)
        except UserError as error:
            raise UserError(str(error).replace(copy, str(folder))) from error.__cause__


def check_rights(folder: Path, setting: str) -> None:
    """Do in a gs:// folder everything that a run does there, with an empty object. Raises UserError that names the
    refused operation and the role that allows it, PassingError without an answer."""
    files, probe, bucket = filesystem(), f"{folder}/.writable", str(folder).removeprefix(SCHEME).partition("/")[0]
    steps = (
        ("write", OBJECT_ROLE, lambda: files.pipe_file(probe, b"")),
        ("read", OBJECT_ROLE, lambda: files.cat_file(probe)),
        ("list", OBJECT_ROLE, lambda: files.ls(str(folder), detail=False)),
        ("delete", OBJECT_ROLE, lambda: files.rm_file(probe)),
        ("ask about the bucket", BUCKET_ROLE, lambda: files.call("GET", f"b/{bucket}", json_out=True)),
    )
    for what, role, take in steps:
        with cloud_errors(setting, functools.partial(_refused_step, bucket, what, role)):
            take()


def _refused_step(bucket: str, what: str, role: str, error: Exception) -> str | None:
    """Like `refusal`, with the one role that is missing."""
    if not _denied(error):
        return refusal(error)
    if "scope" in str(error).lower():
        denied = f"the machine's access scopes do not let it {what} ({message_of(error)})"
        return f"{denied}; create the machine with scope cloud-platform"
    return (
        f"no access to {what} there ({message_of(error)}); {LOGIN}, or give the machine's service account {role}: "
        f"gcloud storage buckets add-iam-policy-binding gs://{bucket} --role={role} --member=serviceAccount:EMAIL"
    )


@contextlib.contextmanager
def cloud_errors(setting: str, why: Callable[[Exception], str | None] | None = None) -> Iterator[None]:
    """Turn a storage's refusal into a UserError that begins with the setting, such as '--corpus gs://B/C'.

    why: returns the reason and the cure, or None for an error of another kind; default: `refusal`.
    """
    try:
        yield
    except Exception as error:
        reason = (why or refusal)(error)
        if reason is None:
            raise
        raise (PassingError if may_pass(error) else UserError)(f"{setting}: {reason}") from error


def refusal(error: Exception) -> str | None:
    """Return what the storage or its credentials lack, with the cure; None for an error of another kind."""
    if type(error) is FileNotFoundError or status(error) == 404:
        return f"no such bucket or object ({message_of(error)}); look with `gcloud storage ls`"
    if _denied(error) or type(error).__module__.startswith("google.auth"):
        roles = f"{OBJECT_ROLE} and {BUCKET_ROLE}"
        return f"no access ({message_of(error)}); {LOGIN}, or give the machine's service account {roles} on the bucket"
    if type(error).__module__.split(".")[0] in CLIENTS:
        return f"Google Cloud Storage failed ({message_of(error)}); start the same command again"
    return None


def _denied(error: Exception) -> bool:
    """Return whether the account is unknown or lacks the permission."""
    denied = ("Forbidden", "PERMISSION_DENIED", "UNAUTHENTICATED")  # gcsfs; TensorStore, inside Orbax
    return status(error) in (401, 403) or message_of(error).startswith(denied)


def message_of(error: Exception) -> str:
    """Return the error's message as one line, or the name of its type."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def patiently(read: Callable[[], Value], told: Callable[[Exception], object]) -> Value:
    """Return read(). After a failure that may pass, call it again after each of PAUSES. `told` is called with every
    failure except the last, which is raised as it is."""
    for pause in PAUSES:
        try:
            return read()
        except Exception as error:
            if not may_pass(error):
                raise
            told(error)
        time.sleep(pause)
    return read()


def may_pass(error: Exception) -> bool:
    """Return whether a read over the network may succeed later: after a time-out, a lost connection, a busy server."""
    if status(error) is not None:
        return status(error) in PASSING
    if isinstance(error, OSError):  # also of requests and aiohttp; gcsfs has one without a status for refused access
        final = isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError | NotADirectoryError)
        return not final and not str(error).startswith("Forbidden")
    return getattr(error, "retryable", type(error).__module__.split(".")[0] in CLIENTS)  # set by google.auth


def status(error: Exception) -> int | None:
    """Return the HTTP status of an error, None if it has none."""
    code = str(getattr(error, "code", None) or getattr(error, "status", None))
    return int(code) if code.isdigit() else None
