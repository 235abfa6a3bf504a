"""Parts become a corpus: a manifest that lists them. No array is moved or read."""

import hashlib
import json
from pathlib import Path

import numpy as np

from data_pipelines.durable import sync
from data_pipelines.formats.problems import Problems
from data_pipelines.manifest import VERSION
from data_pipelines.store.fields import Field
from data_pipelines.store.files import describe_files
from data_pipelines.store.job import Job


def write_tables(out: Path, job: Job, word_starts: np.ndarray | None) -> None:
    """The fields that are looked up by token, into OUT/tables/. word_starts: bool [vocab], None where it is stored."""
    (out / "tables").mkdir(exist_ok=True)
    if word_starts is not None:
        missing = job.vocab_size - len(word_starts)  # ids that no text has
        np.save(out / "tables" / "word_starts.npy", np.pad(word_starts, (0, missing), constant_values=True))
    sync(out / "tables")


def finish(
    out: Path, summaries: list[dict], job: Job, special: dict[str, int], before: dict | None = None, **described
) -> dict:
    """The manifest of the corpus at `out`, where its tokenizer/ and tables/ are.

    summaries: of its parts. special: role -> token. before: the manifest of the corpus that these parts are added to,
    whose parts come first. described: what else the manifest says.
    """
    parts = [*(before["parts"] if before else []), *summaries]
    spec = {
        "vocab_size": job.vocab_size,
        "special": special,
        "fields": {name: field._replace(values=None).to_json() for name, field in job.fields.items()},
        "tokenizer": describe_files(out, "tokenizer/*"),
        "tables": describe_files(out, "tables/*"),
    }
    history = list(before["history"]) if before else []
    if before:
        history.append({"fingerprint": before["fingerprint"], "parts": len(before["parts"])})
    counts = Problems()
    for part in parts:
        counts.merge(part["counts"])
    return {
        "version": VERSION,
        "fingerprint": fingerprint(spec, [part["fingerprint"] for part in parts]),
        **spec,
        "fields": {name: _with_values(name, field, parts).to_json() for name, field in job.fields.items()},
        "parts": parts,
        "history": history,
        **described,
        "counts": counts,
    }


def fingerprint(spec: dict, parts: list[str]) -> str:
    """sha256 over what a corpus's tokens mean and the parts' own; no path, time or setting."""
    return hashlib.sha256(json.dumps([spec, parts], sort_keys=True).encode()).hexdigest()


def _with_values(name: str, field: Field, parts: list[dict]) -> Field:
    """The union of the parts' values, in their order."""
    if field.values is None:
        return field
    return field._replace(values=tuple(dict.fromkeys(value for part in parts for value in part["values"][name])))
