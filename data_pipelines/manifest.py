"""The manifest of a stored corpus: read it, check its values and file names, and compare the sizes of its files."""

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from data_pipelines.errors import UserError
from data_pipelines.store.fields import Field, check_name

SPLITS, SIZES = ("train", "heldout"), ("documents", "sentences", "tokens")
VERSION = 2
FILE = re.compile(r"(\w[\w.+-]*/){0,3}\w[\w.+-]*", re.ASCII)
DIGEST = re.compile(r"[0-9a-f]{64}")


class PartEntry(NamedTuple):
    """path: in the corpus. files: name in the part -> {bytes, sha256}. splits: {split: {documents, sentences, tokens}}.
    characters: of the text. values: field -> the texts that the part's numbers stand for."""

    path: str
    fingerprint: str
    files: dict[str, dict]
    splits: dict[str, dict[str, int]]
    characters: int
    values: dict[str, list[str]]


def read_manifest(folder: Path) -> dict:
    """Return the manifest of a corpus folder. Raises UserError without a finished corpus of a readable version."""
    file = folder / "manifest.json"
    prepare = f"python -m data_pipelines prepare --out {folder}"
    if not folder.is_dir():
        raise UserError(f"corpus {folder} does not exist; make it with `{prepare} ...`")
    if not file.exists():
        if (folder / ".partial").exists():
            raise UserError(f"corpus {folder} is unfinished; rerun its `{prepare} ...`, which continues it")
        raise UserError(f"corpus {folder} has no manifest.json, so it is not a corpus; make one with `{prepare} ...`")
    try:
        return parse_manifest(folder, file.read_bytes())
    except OSError as error:
        raise UserError(f"corpus {folder}: manifest.json cannot be read ({error}); rerun prepare") from error


def parse_manifest(corpus: Path | str, content: bytes) -> dict:
    """Parse a manifest. Raises UserError for file names that must not become paths, and for invalid sizes, ids or
    types. corpus: its location, for the message."""
    try:
        manifest = json.loads(content.decode())
        version = manifest["version"]
        wrong = next((what for what, holds in _described(manifest) if not holds), None) if version == VERSION else None
    except UserError as error:
        raise UserError(f"corpus {corpus}: manifest.json: {error}; rerun prepare") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"corpus {corpus}: manifest.json cannot be read ({error!r}); rerun prepare") from error
    if version != VERSION:
        raise UserError(f"corpus {corpus} has format version {version!r}, this program reads {VERSION}; rerun prepare")
    if wrong:
        raise UserError(f"corpus {corpus}: manifest.json is not as prepare wrote it ({wrong}); copy it again")
    return manifest


def parts_of(manifest: dict) -> list[PartEntry]:
    """Return the parts of a corpus, in order. Raises UserError for a name that must not become a path."""
    entries = []
    for number, part in enumerate(manifest["parts"]):
        files, characters, values = _checked(part["files"]), part["characters"], part["values"]
        entries.append(PartEntry(part_name(number), _digest(part), files, part["splits"], characters, values))
    return entries


def part_name(number: int) -> str:
    """Return the path of a part in its corpus."""
    return f"parts/{number:06}"


def fields_of(manifest: dict) -> dict[str, Field]:
    return {check_name(name): Field.of_json(field) for name, field in manifest["fields"].items()}


def files_of(manifest: dict) -> dict[str, dict]:
    """Return the files that all parts share, the tokenizer's and the tables by token: name -> {bytes, sha256}."""
    _digest(manifest)
    return _checked(manifest["tokenizer"] | manifest["tables"])


def fingerprint(manifest: dict, parts: list[str]) -> str:
    """Return the fingerprint of a corpus: sha256 over its parts' fingerprints and over what its tokens mean (tokenizer,
    special tokens, fields and tables), but no path, time or other setting."""
    meaning = {name: manifest[name] for name in ("vocab_size", "special", "tokenizer", "tables")}
    meaning["fields"] = {name: field | {"values": None} for name, field in manifest["fields"].items()}
    return hashlib.sha256(json.dumps([meaning, parts], sort_keys=True).encode()).hexdigest()


def part_fingerprint(files: dict[str, dict], values: dict[str, list[str]]) -> str:
    """Return the fingerprint of a part: a hash of its content without the names of its sources."""
    content = {"files": {name: file["sha256"] for name, file in files.items()}}
    content["values"] = {name: texts for name, texts in values.items() if name != "sources"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def total(splits: Iterable[dict[str, dict[str, int]]]) -> dict[str, dict[str, int]]:
    """Return the sums of the sizes of parts: {split: {documents, sentences, tokens}}."""
    sums = {split: dict.fromkeys(SIZES, 0) for split in SPLITS}
    for sizes in splits:
        for split, name in itertools.product(SPLITS, SIZES):
            sums[split][name] += sizes[split][name]
    return sums


def _described(manifest: dict) -> Iterator[tuple[str, bool]]:
    """Yield (name of an entry, whether it is valid)."""
    number = lambda value, below: isinstance(value, int) and 0 <= value < below
    parts, _ = parts_of(manifest), files_of(manifest)
    yield "vocab_size", number(manifest["vocab_size"], 2**31 + 1) and manifest["vocab_size"] > 0
    special = manifest["special"]
    yield "special", all(number(index, manifest["vocab_size"]) for index in special.values())
    yield "fields.tokens", fields_of(manifest)["tokens"].dtype in ("uint16", "uint32")
    yield "counts", isinstance(manifest["counts"], dict)
    yield "parts", bool(parts)
    for part in parts:
        sizes = [part.splits[split][name] for split in SPLITS for name in SIZES]
        yield f"sizes of {part.path}", all(number(size, 2**40) for size in sizes) and isinstance(part.values, dict)


def check_sizes(folder: Path, files: dict[str, dict]) -> None:
    """Raise UserError if a file of a corpus is missing or has another size."""
    for name, file in files.items():
        found = (folder / name).stat().st_size if (folder / name).exists() else None
        if found != file["bytes"]:
            problem = "is missing" if found is None else f"has {found} bytes, the manifest says {file['bytes']}"
            raise UserError(f"corpus {folder}: {name} {problem}; copy the corpus again or rerun prepare")


def _checked(files: dict[str, dict]) -> dict[str, dict]:
    for name, file in files.items():
        if not FILE.fullmatch(name):
            raise UserError(f"{name!r} is not a valid file name in a corpus")
        if not isinstance(file["bytes"], int) or not DIGEST.fullmatch(file["sha256"]):
            raise UserError(f"{name} has no size or no hash")
    return files


def _digest(said: dict) -> str:
    """Return the fingerprint, which names the folder of a copy."""
    if not DIGEST.fullmatch(said["fingerprint"]):
        raise UserError(f"fingerprint {said['fingerprint']!r} is not a sha256")
    return said["fingerprint"]
