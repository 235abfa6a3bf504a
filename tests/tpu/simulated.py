"""A recipe trained on each of several meshes, in a process with 8 simulated devices; prints JSON. For test_meshes.py.

Arguments: 'albert', 'bert', 'bigbird' and 'longformer' (BERT with these patterns, in blocks on meshes, dense on one
device), 'electra', 'etc', 'gpt2', 'transformer-xl', 'adaptive' (the same with clusters), 'xlnet' or 'toy', number of
steps, meshes ('one' for a single device, MESH/4 for 4 microbatches, MESH/4/unroll/full for another program).
"""

import json
import sys

import jax
import numpy as np

from models.attention.patterns.pattern import Pattern
from models.core.program import Program
from models.families.registry import FAMILIES
from pretrain.recipe import Phase
from pretrain.training import placement
from pretrain.training.assembly import assemble, initial_params, initial_state
from tests.pretrain import tiny, toys
from tests.pretrain.reference import random_batch
from tests.pretrain.test_options import replaced
from tpu.batches import host_rows, place_rows
from tpu.mesh import MeshShape, make_mesh, parse_mesh

ROWS = 16
QUICK = {"xla_backend_optimization_level": 0}  # to compile
PATTERNS = {
    "bigbird": Pattern("bigbird", block=4, random=1),
    "longformer": Pattern("longformer", block=2, windows=(14, 6)),
}


def recipe(name):
    """Wide enough for 8 heads in every tower."""
    if name == "toy":
        FAMILIES["bag"] = toys.FAMILY
        return toys.recipe(phases=(Phase(1.0, 32, ROWS),))
    recipes = {"albert": tiny.albert, "bert": tiny.bert, "electra": tiny.electra, "etc": tiny.etc, "gpt2": tiny.gpt2}
    recipes["xlnet"] = tiny.xlnet
    recipes |= dict.fromkeys(PATTERNS, tiny.bert)
    found = replaced(recipes.get(name, tiny.transformer_xl)(), "phases.0.batch_size", ROWS)
    if name == "adaptive":
        found = replaced(found, "model.cutoffs", (40, 100))
    if name in PATTERNS:
        found = replaced(found, "model.pattern", PATTERNS[name])
    for tower in ("discriminator.", "generator.") if name == "electra" else ("",):
        found = replaced(found, f"model.{tower}heads", 8)
    return found


def rows_of(recipe, number):
    """A random global batch of a recipe's objective."""
    length = recipe.phases[0].length
    batch = random_batch(tiny.BERT, number, rows=ROWS, length=length)
    batch |= {"targets": np.roll(batch["tokens"], -1, axis=1), "weights": (batch["segments"] > 0).astype(np.float32)}
    batch["sentence_order"] = batch["next_sentence"]
    batch["reversed"] = np.arange(ROWS, dtype=np.int32) % 2
    rng = np.random.default_rng(number)
    batch["ranks"] = rng.permuted(np.tile(np.arange(length, dtype=np.int32), (ROWS, 1)), axis=1)
    batch["thresholds"] = batch["ranks"]
    batch["global_of"] = np.where(batch["segments"] > 0, np.arange(length) // 10, -1).astype(np.int32)
    batch["global_segments"] = np.ones((ROWS, length), np.int32)
    spec = recipe.objective.spec(recipe.phases[0])
    cut = lambda array, shape: array[:, : shape[0]] if shape else array
    return {key: _padded(cut(batch[key], shape), shape) for key, (shape, _) in spec.items()}


def _padded(array, shape):
    """With zeros where a row has room for more predictions than were drawn."""
    return np.pad(array, ((0, 0), (0, shape[0] - array.shape[1]))) if shape else array


def train(name, steps, text):
    """(losses, state) after some steps."""
    given = text.split("/")
    text, parts, depth, remat = (*given, *("1", "scan", "none")[len(given) - 1 :])
    attention = "xla" if name not in PATTERNS else "dense" if text == "one" else "blocked"
    devices = jax.devices() if text != "one" else jax.devices()[:1]
    mesh = make_mesh(parse_mesh(text, len(devices)) if text != "one" else MeshShape(), devices)
    assembly = assemble(recipe(name), Program(depth=depth, remat=remat, attention=attention))
    stage = placement.stages(assembly, mesh, int(parts))[0]
    where = placement.shardings((stage.state, stage.frozen))
    first = jax.jit(lambda: initial_state(assembly, initial_params(assembly), 0), out_shardings=where)
    state, frozen = first()
    mine = host_rows(mesh, ROWS)
    step, losses = stage.train.run, []
    for number in range(steps):
        batch = place_rows(rows_of(recipe(name), number), mine, ROWS, mesh)
        if number == 0:
            step = step.lower(state, frozen, batch).compile(compiler_options=QUICK)
        state, metrics = step(state, frozen, batch)
        losses.append(float(metrics.loss))
    return losses, state


def main(name, steps, *meshes):
    found, reference = {}, None
    for text in meshes:
        losses, state = train(name, int(steps), text)
        params = jax.device_get(state.params)
        reference = reference or params
        moved = lambda path, a, b: 0.0 if "key']['bias" in jax.tree_util.keystr(path) else float(np.abs(a - b).max())
        arrays = jax.tree.leaves((state.params, state.opt_state))
        found[text] = {
            "losses": losses,
            "moved": max(jax.tree.leaves(jax.tree_util.tree_map_with_path(moved, params, reference))),
            "bytes": sum(array.addressable_shards[0].data.nbytes for array in arrays),
            "whole": sum(array.nbytes for array in arrays),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
