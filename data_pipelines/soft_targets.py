"""Soft targets: a teacher's likeliest tokens at each predicted place of a corpus's training rows, stored once.

A folder written by `python -m pretrain annotate`:

    manifest.json           what determines rows and values, and the number of rows in a part
    lock                    held by the process that writes
    000000/values.npy       [rows, places] of `value_type`: all rows of the first copy, then those of the second, ...
    000000/summary.json     the file's hash; without it a part is not finished
"""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from data_pipelines.batches import RowExamples
from data_pipelines.errors import UserError
from data_pipelines.store.files import SUMMARY, read_summary

IDS, LOGS = "soft_ids", "soft_logs"  # arrays of a batch
VALUES = "values.npy"
AGAIN = "annotate again on the same kind of device, or restore a copy"
PART_BYTES = 1 << 28  # most in a part, which is what a killed `annotate` loses


def places(layout) -> int:
    """Return the number of places of a row that may be predicted."""
    return layout.spec.get("prediction_positions", layout.spec["tokens"]).shape[0]


def value_type(k: int, vocab_size: int) -> np.dtype:
    """Return the type of a place: k tokens, their log-probabilities, and that of all other tokens together."""
    return np.dtype([(IDS, np.uint16 if vocab_size <= 1 << 16 else np.uint32, k), (LOGS, np.float16, k + 1)])


def settings_of(examples: RowExamples) -> dict[str, Any]:
    """Return what determines the rows of these examples, as JSON holds it."""
    found = {"corpus": examples.corpus.fingerprint, "seed": examples.seed, "layout": type(examples.layout).__name__}
    for name, value in dataclasses.asdict(examples.layout).items():
        found |= value if isinstance(value, dict) else {name: value}  # of a `Masking` its fields
    return json.loads(json.dumps(found))


class SoftTargets:
    """A finished folder; UserError if it is not.   digest: of all that it holds. Files that are read are hashed too."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self.manifest = json.loads((path / "manifest.json").read_text())
            self.parts = [path / f"{part:06}" for part in range(self.manifest["parts"])]
            written = [self.manifest, *map(self.read_summary, self.parts)]
        except (FileNotFoundError, NotADirectoryError):
            raise self.lacks("manifest.json") from None
        except (ValueError, KeyError, TypeError):
            raise self.damaged() from None
        self.digest = hashlib.sha256(json.dumps(written).encode()).hexdigest()[:16]

    def wrong(self, what: str) -> UserError:
        return UserError(f"--soft-targets {self.path}: {what}")

    def damaged(self) -> UserError:
        return self.wrong("manifest.json is none of `annotate`, or damaged; annotate again, into a new folder")

    def lacks(self, name: str) -> UserError:
        return self.wrong(f"lacks {name}; write it with `python -m pretrain annotate`")

    def read_summary(self, part: Path, hashed: bool = False) -> dict:
        """Return the summary of a part. UserError if there is none, or as the function of this name."""
        try:
            return read_summary(part, hashed, AGAIN)
        except (FileNotFoundError, NotADirectoryError):
            raise self.lacks(f"{part.name}/{SUMMARY}") from None

    def check(self, examples: RowExamples) -> None:
        """Raise UserError unless these are of the rows of these examples."""
        had, wanted = self.manifest["settings"], settings_of(examples)
        if had["corpus"] != wanted["corpus"]:
            raise self.wrong("is of another corpus; annotate this one")
        pairs = ((name, had.get(name), wanted.get(name)) for name in had | wanted)
        if changed := [f"{name}: {old} -> {new}" for name, old, new in pairs if old != new]:
            raise self.wrong(f"is of other rows ({'; '.join(changed)}); give the old values, or annotate again")
        if len(self.parts) != self.manifest["copies"] * -(-examples.number // self.manifest["rows"]):
            raise self.damaged()

    def share(self, examples: RowExamples) -> float:
        """Return how much of the teacher's probability the k tokens of a place have, a mean over 1,000 rows."""
        number = np.concatenate([*examples.fixed(1000)])
        batch, rest = examples.build(0, number), self.read(0, number)[0][LOGS][..., -1]
        weights = batch.get("prediction_weights", batch.get("weights"))
        return 1.0 - float(np.average(np.exp(rest.astype(np.float32)), weights=weights))

    def read(self, copy: np.ndarray | int, number: np.ndarray) -> tuple[np.ndarray, list[Path]]:
        """Read what is stored of examples in their copies, int64 [n] -> (values [n, places], the parts they are in)."""
        copies, rows = self.manifest["copies"], self.manifest["rows"]
        part, row = np.divmod(number, rows)
        part = part + copy % copies * (len(self.parts) // copies)
        order = np.argsort(part, kind="stable")
        parts, begins = np.unique(part[order], return_index=True)
        folders, rows = [self.parts[each] for each in parts], np.split(row[order], begins[1:])
        found = [np.load(folder / VALUES, mmap_mode="r")[here] for folder, here in zip(folders, rows, strict=True)]
        return np.concatenate(found)[np.argsort(order)], folders


class SoftExamples(RowExamples):
    """Training rows with what is stored of them: soft_ids i32[n, places, k] and soft_logs f16[n, places, k + 1]."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        if self.corpus.soft_targets is None:
            raise UserError("--soft-targets: the recipe learns from them; give the folder that `annotate` wrote")
        self.corpus.soft_targets.check(self)

    def at(self, lane, step, row):
        chosen, keys = self.choose(lane, step * self.rows + row)
        values, folders = self.corpus.soft_targets.read(chosen.epoch, chosen.number)
        self.corpus.checks.add(*((-1, str(folder)) for folder in folders))
        return self.layout.build(chosen, keys) | {IDS: values[IDS].astype(np.int32), LOGS: values[LOGS]}
