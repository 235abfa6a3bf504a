"""What a model is given of a batch: the arrays that its family declares, by name."""

import flax.linen as nn
import jax
from jax import Array
from jax.sharding import Sharding

from models.core.family import Inputs
from models.core.parameters import Params
from models.families.registry import family_of
from pretrain.objectives.objective import Batch, Spec


def inputs_of(model: nn.Module, batch: Batch) -> Inputs:
    """The declared arrays that a batch has."""
    return {name: batch[name] for name in family_of(model.config).inputs if name in batch}


def shapes_of(spec: Spec, rows: int, sharding: Sharding | None = None) -> dict[str, jax.ShapeDtypeStruct]:
    """A batch of so many rows, as shapes and dtypes."""
    of = jax.ShapeDtypeStruct
    return {name: of((rows, *one.shape), one.dtype, sharding=sharding) for name, one in spec.items()}


def initialise(key: Array, model: nn.Module, spec: Spec) -> Params:
    """Random parameters of a model for batches of a spec; one blank row stands for the batch."""
    row = inputs_of(model, {name: one.blank(1) for name, one in spec.items()})
    return jax.jit(model.init)(key, row)["params"]
