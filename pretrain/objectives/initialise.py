"""Random parameters of a model for the arrays that its batches have."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from models.core.parameters import Params
from pretrain.objectives.objective import Spec


def initialise(key: Array, model: nn.Module, spec: Spec, inputs: tuple[str, ...]) -> Params:
    """Parameters for model(*inputs), where inputs name arrays of the spec; one row of zeros stands for the batch."""
    row = [jnp.zeros((1, *spec[name][0]), spec[name][1]) for name in inputs]
    return jax.jit(model.init)(key, *row)["params"]
