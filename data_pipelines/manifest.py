"""The manifest of a stored corpus: what it says, and whether its files have the sizes that it gives."""

import json
from pathlib import Path
from typing import NamedTuple

from data_pipelines.errors import UserError

VERSION = 1


def read_manifest(folder: Path) -> dict:
    """The manifest of a corpus folder; UserError when there is no finished corpus of this version."""
    file = folder / "manifest.json"
    prepare = f"python -m data_pipelines prepare --out {folder}"
    if not folder.is_dir():
        raise UserError(f"corpus {folder} does not exist; make it with `{prepare} ...`")
    if not file.exists():
        if (folder / ".partial").exists():
            raise UserError(f"corpus {folder} is unfinished; rerun its `{prepare} ...`, which continues it")
        raise UserError(f"corpus {folder} has no manifest.json, so it is none; make one with `{prepare} ...`")
    try:
        return parse_manifest(folder, file.read_bytes())
    except OSError as error:
        raise UserError(f"corpus {folder}: manifest.json cannot be read ({error}); rerun prepare") from error


def parse_manifest(corpus: Path | str, content: bytes) -> dict:
    """The manifest from its file's content; corpus: where it is, for the message of a UserError."""
    try:
        manifest = json.loads(content.decode())
        version = manifest["version"]
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"corpus {corpus}: manifest.json cannot be read ({error}); rerun prepare") from error
    if version != VERSION:
        raise UserError(
            f"corpus {corpus} has format version {version!r} and this program reads {VERSION}; rerun prepare"
        )
    return manifest


def check_size(folder: Path, name: str, size: int) -> None:
    """UserError when a file of a corpus is missing or has another size."""
    file = folder / name
    if not file.exists():
        raise UserError(f"corpus {folder}: {name} is missing; copy the corpus again or rerun prepare")
    found = file.stat().st_size
    if found != size:
        raise UserError(
            f"corpus {folder}: {name} has {found} bytes, the manifest says {size}; "
            "copy the corpus again or rerun prepare"
        )


class PartEntry(NamedTuple):
    path: str  # in the corpus
    fingerprint: str
    files: dict[str, dict]  # {name in the part: {bytes, sha256}}


def parts_of(manifest: dict) -> list[PartEntry]:
    if "parts" not in manifest:
        return [PartEntry(".", manifest["fingerprint"], manifest["files"])]
    parts = enumerate(manifest["parts"])
    return [PartEntry(f"parts/{number:06}", part["fingerprint"], part["files"]) for number, part in parts]
