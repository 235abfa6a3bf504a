"""Store soft targets: what a teacher predicts at each place of the rows that a recipe makes of a corpus."""

import contextlib
import dataclasses
import fcntl
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from data_pipelines.batches import RowExamples
from data_pipelines.corpus import Corpus, sound
from data_pipelines.durable import locked, put_folder, writing
from data_pipelines.errors import UserError
from data_pipelines.progress import doing
from data_pipelines.soft_targets import (
    IDS,
    LOGS,
    PART_BYTES,
    VALUES,
    SoftTargets,
    places,
    settings_of,
    value_type,
)
from data_pipelines.store.files import SUMMARY, beside, describe_files, is_whole, write_json
from pretrain.objectives.matching import LOGITS_AT_ONCE, Match, largest
from pretrain.objectives.objective import TEACHERS, Bound
from pretrain.recipe import Recipe, every_task, resolve, to_json, with_objectives
from pretrain.steering.discriminator import fingerprint
from pretrain.storage.run_directory import RunDirectory, read_object
from pretrain.training.assembly import assemble, parameter_shapes
from pretrain.training.data import training_batches
from pretrain.training.start import load_weights
from pretrain.training.teaching import of_stored, with_sources
from tpu.batches import place_rows
from tpu.mesh import row_mesh
from tpu.rules import replicated

NAME = "teacher"
ROWS = 256  # most for a device at once


def annotate(recipe: Recipe, source: str, corpus: Corpus, out: Path, k: int) -> tuple[int, int, float]:
    """Store k soft targets of each place of a recipe's training rows -> (parts, how many of them were not there yet,
    how much of the teacher's probability the k tokens have).

    source: of the teacher, as of `run --teacher`.   k: at most the vocabulary.   UserError for mistakes of the user.
    """
    if k < 1:
        raise UserError(f"--k {k}: must be 1 or more")
    if RunDirectory(out).recipe.is_file():
        raise UserError(f"--out {out}: is the work directory of a run; give another folder")
    # Checked as the recipe of its students is; then a recipe whose teacher computes their one loss
    alone = lambda objective: dataclasses.replace(objective, stored=0, losses=(Match(),), taught_by=(NAME,))
    taught = with_objectives(of_stored(recipe, k), alone)
    taught = resolve(with_sources(taught, source, RunDirectory(out)), corpus)
    (teacher,), shapes = taught.teachers, parameter_shapes(taught)[TEACHERS][NAME]
    params = load_weights("--teacher", teacher.source, teacher.model, shapes, corpus)
    tasks = every_task(taught)
    examples, *others = (training_batches(taught, {"": corpus}, phase, task) for _, phase, task in tasks)
    if any(settings_of(other) != settings_of(examples) for other in others):
        raise UserError("phases: soft targets are of rows of one length and objective; give a recipe with one phase")
    examples.check_size()
    kind, number = value_type(k, corpus.vocab_size), examples.number
    rows = min(max(PART_BYTES // (kind.itemsize * places(examples.layout)), 1), number)
    copies, of_copy = max(examples.layout.copies, 1), -(-number // rows)
    module, config = assemble(taught).teachers[NAME], json.loads(to_json(taught))["teachers"][0]["model"]
    manifest = {"teacher": fingerprint(params), "config": config, "k": k, "settings": settings_of(examples)}
    manifest |= {"dtype": module.program.dtype, "platform": jax.default_backend()}  # values differ by rounding
    manifest |= {"copies": copies, "rows": rows, "parts": copies * of_copy}
    objective, bound = tasks[0][2].objective, Bound(NAME, module, params)
    predict = _predictor(lambda *inputs: largest(objective.logits(*inputs), k), bound, examples, kind, rows)
    folders = {part: out / f"{part:06}" for part in range(copies * of_copy)}
    with _alone(out, manifest):
        lacking = {part: folder for part, folder in folders.items() if not is_whole(folder)}
        for part, folder in lacking.items():
            doing(f"annotating part {part + 1} of {len(folders)}")
            copy, first = part // of_copy, part % of_copy * rows
            with sound([corpus]):
                values = predict(copy, np.arange(first, min(first + rows, number)))
            with writing(out):
                shutil.rmtree(folder, ignore_errors=True)  # what is left of a damaged part
                made = beside(folder)
                np.save(made / VALUES, values)
                write_json(made / SUMMARY, {"files": describe_files(made, VALUES)})
                put_folder(made, folder)
    return len(folders), len(lacking), SoftTargets(out).share(examples)


@contextlib.contextmanager
def _alone(out: Path, manifest: dict[str, Any]) -> Iterator[None]:
    """Write the manifest, and keep other processes out during the context; UserError if one writes there, or if the
    folder has another manifest or other files."""
    there = read_object(out / "manifest.json")
    if changed := [name for name in manifest if there != {} and (there or {}).get(name) != manifest[name]]:
        before = f"k={there['k']}" if changed == ["k"] and there else f"other {', '.join(changed)}"
        raise UserError(f"--out {out}: has other contents ({before}); give another folder")
    if there == {} and {path.name for path in out.glob("*")} - {"lock", "manifest.json.new"}:  # of a kill
        raise UserError(f"--out {out}: holds other files than soft targets; give an empty folder, or a new one")
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        try:
            lock = locked(out / "lock", fcntl.LOCK_EX | fcntl.LOCK_NB) or contextlib.nullcontext()
        except BlockingIOError:
            raise UserError(f"--out {out}: another annotate writes here; wait, or give another folder") from None
    with lock:
        with writing(out):
            for left in out.glob("[0-9]" * 6 + ".*"):  # by a kill
                if left.is_dir():
                    shutil.rmtree(left)
            write_json(out / "manifest.json", manifest)
        yield


def _predictor(best: Callable, teacher: Bound, examples: RowExamples, kind: np.dtype, rows: int) -> Callable:
    """Return (copy, numbers of examples) -> values [n, places], of at most `rows` rows of a device at once."""
    of_row, mesh = places(examples.layout), row_mesh(jax.local_devices(), [])
    size = max(min(LOGITS_AT_ONCE // (of_row * examples.corpus.vocab_size), rows, ROWS), 1) * mesh.size
    params = jax.device_put(teacher.params, replicated(mesh))
    of_batch = jax.jit(lambda params, batch: best(teacher._replace(params=params), batch))

    def predict(copy: int, number: np.ndarray) -> np.ndarray:
        values = np.empty((len(number), of_row), kind)
        for first in range(0, len(number), size):
            here = number[first : first + size]
            batch = place_rows(examples.build(copy, np.resize(here, size)), np.arange(size), size, mesh)
            for name, array in zip((IDS, LOGS), jax.device_get(of_batch(params, batch)), strict=True):
                values[name][first : first + size] = array.reshape(size, of_row, -1)[: len(here)]
        return values

    return predict
