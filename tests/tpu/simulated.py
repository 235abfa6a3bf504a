"""Recipes for meshes of 8 simulated devices, and batches for them."""

import dataclasses
import math
import re

import jax
import numpy as np

from data_pipelines.examples.masking import Masking
from data_pipelines.soft_targets import IDS, LOGS
from finetune.tasks.classify import Classify
from models.attention.patterns.pattern import Pattern
from models.families.registry import FAMILIES
from pretrain.optimizers import Optimizer
from pretrain.recipe import Phase
from pretrain.training.teaching import of_stored
from tests.pretrain import tiny, toys
from tests.pretrain.fields import replaced
from tests.pretrain.reference import random_batch
from tpu import hlo
from tpu.collectives import of_runs
from tpu.mesh import make_mesh, parse_mesh

ROWS = 16
BUCKETS = 1 << 16
PATTERNS = {
    "bigbird": Pattern("bigbird", block=4, random=1),
    "longformer": Pattern("longformer", block=2, windows=(14, 6)),
}


def collectives(module):
    """Every collective of a program; a -start and its -done, and the copies in fusions, count once."""
    found = of_runs(hlo.runs(module), module.devices)
    copies = {collective.channel: collective for collective in found if collective.channel}
    return [c for c in found if not c.channel or copies.pop(c.channel, None)]


def check_close(found, expected, atol):
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=0, atol=atol), found, expected)


def mesh_of(text):
    """The mesh 'data=2,fsdp=2' of as many devices, or 'one'."""
    shape = parse_mesh("data=1" if text == "one" else text, math.prod(map(int, re.findall(r"=(\d+)", text))))
    return make_mesh(shape, jax.devices()[: shape.size])


def recipe(name):
    """Two layers in every tower, wide enough for 8 heads."""
    FAMILIES["bag"] = toys.FAMILY
    if name == "toy":
        return toys.recipe(phases=(Phase(1.0, 32, ROWS),))
    if name == "two lengths":
        return toys.recipe(objective=toys.WhatFollows(), phases=(toys.TwoLengths(1.0, 32, ROWS, target_length=12),))
    if name in ("grams", "factored"):
        FAMILIES["grams"], sparse = toys.GRAMS, name == "grams"
        model = toys.GramsConfig(vocab_size=256, buckets=BUCKETS, sparse=sparse)
        optimizer, phases = Optimizer("adamw" if sparse else "adafactor"), (Phase(1.0, 32, ROWS),)
        return toys.recipe(model=model, objective=toys.NextOfGrams(), optimizer=optimizer, phases=phases)
    recipes = {"albert": tiny.albert, "bert": tiny.bert, "electra": tiny.electra, "etc": tiny.etc, "gpt2": tiny.gpt2}
    recipes |= {"t5": tiny.t5, "xlnet": tiny.xlnet}
    recipes |= dict.fromkeys((*PATTERNS, "classify", "student"), tiny.bert)
    found = replaced(recipes.get(name, tiny.transformer_xl)(), "phases.0.batch_size", ROWS)
    if name == "classify":
        found = dataclasses.replace(replaced(found, "model.labels", ("no", "perhaps", "yes")), objective=Classify())
    if name == "student":
        # Soft targets are of fixed masks
        found = of_stored(replaced(found, "objective.masking", Masking(copies=1)), k=3)
    if name == "adaptive":
        found = replaced(found, "model.cutoffs", (40, 100))
    if name in PATTERNS:
        found = replaced(found, "model.pattern", PATTERNS[name])
    for tower in ("discriminator.", "generator.") if name == "electra" else ("",):
        found = replaced(replaced(found, f"model.{tower}heads", 8), f"model.{tower}depth", 2)
    return found


def rows_of(recipe, number):
    """A random global batch of a recipe's objective."""
    length, rows = recipe.phases[0].length, recipe.phases[0].batch_size
    batch = random_batch(tiny.BERT, number, rows=rows, length=length)
    batch |= {"targets": np.roll(batch["tokens"], -1, axis=1), "weights": (batch["segments"] > 0).astype(np.float32)}
    batch["sentence_order"] = batch["next_sentence"]
    batch["reversed"] = np.arange(rows, dtype=np.int32) % 2
    batch["even"] = batch["reversed"].astype(np.int8)
    batch |= {"decoder_tokens": batch["tokens"][::-1], "decoder_segments": np.ones_like(batch["segments"])}
    rng = np.random.default_rng(number)
    batch["bigrams"] = rng.integers(0, BUCKETS, (rows, length), dtype=np.int32)
    batch["ranks"] = rng.permuted(np.tile(np.arange(length, dtype=np.int32), (rows, 1)), axis=1)
    batch["thresholds"] = batch["ranks"]
    batch["global_of"] = np.where(batch["segments"] > 0, np.arange(length) // 10, -1).astype(np.int32)
    batch["global_segments"] = np.ones((rows, length), np.int32)
    spec = recipe.objective.spec(recipe.phases[0])
    if IDS in spec:
        likely = rng.dirichlet(np.ones(spec[LOGS].shape[-1]), (rows, spec[LOGS].shape[0]))
        vocab = np.tile(np.arange(tiny.BERT.vocab_size, dtype=np.int32), (*likely.shape[:2], 1))
        batch[IDS] = rng.permuted(vocab, axis=-1)[..., : spec[IDS].shape[-1]]  # different tokens
        batch[LOGS] = np.log(likely).astype(np.float16)
    cut = lambda array, shape: array[:, : shape[0]] if shape else array
    return {key: _padded(cut(batch[key], one.shape), one.shape) for key, one in spec.items()}


def _padded(array, shape):
    """With zeros where a row has room for more predictions than were drawn."""
    rest = [(0, 0)] * (array.ndim - 2)
    return np.pad(array, ((0, 0), (0, shape[0] - array.shape[1]), *rest)) if shape else array
