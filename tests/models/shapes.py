"""Parameters as shapes, without computing them."""

import functools
import inspect

import jax
import numpy as np

from models.core.program import Program
from models.families.registry import family_of


@functools.cache
def parameter_shapes(config):
    """The nested parameter dict of a config's model, with jax.ShapeDtypeStructs as leaves."""
    row = jax.ShapeDtypeStruct((1, 8), np.int32)
    module = family_of(config).module(config, Program(dtype="float32", depth="scan"))
    arguments = inspect.signature(module.__call__).parameters.values()
    inputs = sum(argument.default is argument.empty for argument in arguments)
    return jax.eval_shape(module.init, jax.random.key(0), *(row,) * inputs)["params"]
