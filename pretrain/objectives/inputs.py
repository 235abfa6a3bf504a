"""What a model is given of a batch: the arrays that its family declares, by name."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from models.core.family import Inputs
from models.core.parameters import Params
from models.families.registry import family_of
from pretrain.objectives.objective import Batch, Spec


def inputs_of(model: nn.Module, batch: Batch) -> Inputs:
    """The declared arrays that a batch has."""
    return {name: batch[name] for name in family_of(model.config).inputs if name in batch}


def initialise(key: Array, model: nn.Module, spec: Spec) -> Params:
    """Random parameters of a model for batches of a spec; one row of zeros stands for the batch."""
    row = inputs_of(model, {name: jnp.zeros((1, *shape), dtype) for name, (shape, dtype) in spec.items()})
    return jax.jit(model.init)(key, row)["params"]
