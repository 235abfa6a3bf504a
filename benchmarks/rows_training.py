"""Training, by the project's own step, on rows that a benchmark makes; and the losses of single tokens afterwards."""

import functools
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from data_pipelines.examples.masking import Masking
from models.core.parameters import Params, leaves, nest
from pretrain.huggingface.beginning import as_ours
from pretrain.objectives.cross_entropy import cross_entropy
from pretrain.objectives.inputs import inputs_of
from pretrain.objectives.layouts import PACKED_ACROSS
from pretrain.objectives.masked_language_model import MaskedLanguageModel
from pretrain.optimizers import Optimizer
from pretrain.recipe import Phase, Recipe, phase_at
from pretrain.schedules import Schedule
from pretrain.training.assembly import Assembly, assemble, initial_params, initial_state
from pretrain.training.placement import Stage, stages
from tpu.batches import place_rows
from tpu.mesh import row_mesh

Batch = Mapping[str, np.ndarray]
Rows = Callable[[int, int], dict[str, np.ndarray]]  # (phase, step) -> batch
POSITIONS = "embeddings/positions"  # the path of a table whose last rows are those of the positions
SAVE_EVERY = 60  # seconds


class Trained(NamedTuple):
    """losses, hits: f32[steps], of the training batches.   minutes: CPU, all threads."""

    assembly: Assembly
    stage: Stage
    params: Params
    losses: np.ndarray
    hits: np.ndarray
    minutes: float


def masked_recipe(name: str, model, phases: tuple[Phase, ...], steps: int, seed: int, peak: float) -> Recipe:
    """Of masked tokens alone; rows bring their own."""
    objective = MaskedLanguageModel(PACKED_ACROSS, next_sentence=False, masking=Masking())
    return Recipe(name, "", model, objective, Optimizer(), Schedule(peak=peak, warmup=0.05), phases, steps, seed)


def batch_of(tokens: np.ndarray, positions: np.ndarray, mask: int) -> dict[str, np.ndarray]:
    """Rows i32[n, length] whose tokens at positions [n, k] are masked, and asked."""
    at = positions.astype(np.int32)
    targets = np.take_along_axis(tokens, at, 1)
    hidden = tokens.copy()
    np.put_along_axis(hidden, at, np.int32(mask), 1)
    weights = np.ones(at.shape, np.float32)
    zeros = np.zeros_like(tokens)
    asked = {"prediction_positions": at, "prediction_targets": targets, "prediction_weights": weights}
    return {"tokens": hidden, "types": zeros, "segments": zeros + 1} | asked


def train(recipe: Recipe, rows: Rows, file: Path, start: Trained | None = None) -> Trained:
    """Train all of a recipe's steps; what `file` holds is not trained again, be it a part.

    start: with whose weights to begin, positions copied on where there are more.
    """
    assembly = assemble(recipe)
    placed = stages(assembly, row_mesh(jax.local_devices()[:1], [phase.batch_size for phase in recipe.phases]))
    params = initial_params(assembly) if start is None else _begun(start, recipe.model)
    state, frozen = initial_state(assembly, params, 0)
    state, done = _saved(file, state)
    saved, before = time.monotonic(), time.process_time() - 60 * done["minutes"]
    while (step := int(state.step)) < recipe.steps:
        stage = placed[phase_at(recipe, step)]
        batch = rows(stage.index, step)
        state, metrics = stage.train.run(state, frozen, _on(stage, batch))
        done["losses"].append(float(metrics.loss))
        done["hits"].append(float(metrics.counts["mlm_hits"] / metrics.counts["mlm_total"]))
        done["minutes"] = (time.process_time() - before) / 60
        if time.monotonic() - saved > SAVE_EVERY or step + 1 == recipe.steps:
            _save(file, state, done)
            saved = time.monotonic()
            print(f"{file.stem}: {_says(done)}", flush=True)
    losses, hits = np.array(done["losses"]), np.array(done["hits"])
    return Trained(assembly, placed[-1], state.params, losses, hits, done["minutes"])


def predicted(trained: Trained, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """(loss in nats, whether the best guess is right), each f32[rows, k], of what a batch asks."""
    losses, hits = _predict(trained.assembly.model)(trained.params, dict(batch))
    shape = batch["prediction_targets"].shape
    return np.asarray(losses).reshape(shape), np.asarray(hits).reshape(shape)


def gradient_reaches(trained: Trained, batch: Batch) -> np.ndarray:
    """bool[length]: the tokens of a single row on which its one prediction depends: the loss's gradient with respect to
    what is added to each token for its position is not exactly 0."""
    flat, length = dict(leaves(trained.params)), batch["tokens"].shape[1]
    loss = lambda table: _losses(trained.assembly.model, nest(flat | {POSITIONS: table}), batch)[0].sum()
    gradient = np.asarray(jax.jit(jax.grad(loss))(flat[POSITIONS]))
    return np.any(gradient != 0, axis=1)[-length:]


def _losses(model, params, batch):
    variables = {"params": params}
    hidden = model.apply(variables, inputs_of(model, batch), None, batch["prediction_positions"], method="encode")
    logits = model.apply(variables, hidden, method="token_logits")
    return cross_entropy(logits, batch["prediction_targets"].reshape(-1))


@functools.cache
def _predict(model):
    return jax.jit(lambda params, batch: _losses(model, params, batch))


def _begun(start: Trained, config) -> Params:
    theirs = {path: np.asarray(leaf) for path, leaf in leaves(start.params)}
    return nest(as_ours("the start", theirs, start.assembly.recipe.model, config))


def _on(stage: Stage, batch: Batch):
    size = len(batch["tokens"])
    return place_rows(batch, np.arange(size), size, stage.mesh)


def _save(file: Path, state, done: dict) -> None:
    """The state and what is known of its training, whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(".partial.npz")
    arrays = {f"leaf{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(state))}
    np.savez(temporary, done=json.dumps(done), **arrays)
    os.replace(temporary, file)


def _saved(file: Path, state):
    """(the state in a file, what is known of its training), or those of the beginning."""
    if not file.is_file():
        return state, {"losses": [], "hits": [], "minutes": 0.0}
    with np.load(file) as stored:
        done = json.loads(str(stored["done"]))
        arrays = [jnp.asarray(stored[f"leaf{i}"]) for i in range(len(stored.files) - 1)]
    return jax.tree.unflatten(jax.tree.structure(state), arrays), done


def _says(done: dict) -> str:
    last = slice(-20, None)
    loss, hits = np.mean(done["losses"][last]), np.mean(done["hits"][last])
    return f"step {len(done['losses'])}, loss {loss:.3f}, accuracy {hits:.3f}, {done['minutes']:.1f} CPU minutes"
