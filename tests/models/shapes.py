"""Parameters as shapes, without computing them, and random ones: a model's own take long to compile."""

import functools

import jax
import numpy as np

from models.blocks.heads import PAIR, TOKENS
from models.core.program import Program
from models.families.registry import family_of


def usual_heads(config):
    """Those with which a paper trains a model: with types of segments, one for pairs of them."""
    family, pairs = family_of(config), getattr(type(config), "types", 1) > 1
    return family.heads_with([head.name for head in family.heads if head.name in (TOKENS, *[PAIR] * pairs)])


@functools.cache
def parameter_shapes(config, heads=None):
    """The nested parameter dict of a config's model, with jax.ShapeDtypeStructs as leaves.   heads: its names."""
    family = family_of(config)
    longest = getattr(config, "positions", 8)  # which serves any pattern that it has
    size = lambda axis: {"length": longest}.get(axis, 8) if isinstance(axis, str) else axis
    row = {
        name: jax.ShapeDtypeStruct((1, *map(size, given.shape)), given.dtype) for name, given in family.inputs.items()
    }
    heads = usual_heads(config) if heads is None else heads
    module = family.module(config, Program(dtype="float32", depth="scan"), heads)
    return jax.eval_shape(module.init, jax.random.key(0), row)["params"]


def random_params(config, deviation=0.3):
    """The nested parameter dict of a config's model."""
    draw = lambda leaf: np.random.default_rng(leaf.size).normal(0, deviation, leaf.shape).astype(np.float32)
    return jax.tree.map(draw, parameter_shapes(config))
