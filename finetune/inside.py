"""The hidden states and attention probabilities of each layer of a model, which it records while it runs."""

from collections.abc import Callable, Iterator, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from data_pipelines.errors import UserError
from data_pipelines.tokenizers.made import Made
from finetune.rows import Rows, TaskRows, buckets
from finetune.task import hidden_states
from models.core.family import unfit_inputs
from models.core.inside import HIDDEN, SHARES, of_layers, states
from models.core.parameters import Params
from models.core.program import Program
from models.families.registry import family_of, name_of
from pretrain.objectives.objective import Batch, Spec
from pretrain.objectives.protocols import CausalDecoder, EncoderDecoder
from pretrain.training.opened import Opened

TOKENS = 1 << 12  # in a batch
LONGEST = 2**31 - 1  # longest row of a model without positions


def plain(opened: Opened, spec: Spec) -> nn.Module:
    """Return the model without kernels. UserError if it does not read these arrays."""
    module = opened.module
    declared = {name: one for name, one in family_of(module.config).inputs.items() if one.required}
    reads = isinstance(module, CausalDecoder) or hasattr(module, "encode") and not isinstance(module, EncoderDecoder)
    if not reads or unfit_inputs(declared, spec):
        raise UserError(f"{opened.source}: {name_of(module.config)} models are not supported here; use another model")
    return module.clone(program=Program(module.program.dtype))


def looked(
    opened: Opened, rows: Rows, look: Callable[[nn.Module, Params, Batch], Array], tokens: int = TOKENS
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield (row indices i64[n], result of `look` [layers, n, ...]) for all rows, in batches of similar length.
    tokens: approximate size of a batch; its whole result is in memory at once."""
    lengths, above = np.maximum(rows.lengths, 1), 0  # also keep rows without tokens
    for length in buckets(lengths, longest=getattr(opened.config, "positions", LONGEST)):
        layout = TaskRows(length, above, ())
        model = plain(opened, layout.spec)
        apply = jax.jit(look, static_argnums=0)  # which further calls share
        which, above = np.flatnonzero((lengths > above) & (lengths <= length)), length
        size = min(max(1, tokens // length), len(which))
        for first in range(0, len(which), size):
            part = which[first : first + size]
            filled = np.resize(part, size)  # one shape for all batches
            yield part, np.asarray(apply(model, opened.params, layout.padded(rows, filled)))[:, : len(part)]


def are_special(made: Made, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return which tokens are special, bool[tokens]. The unknown token counts as text."""
    return np.isin(tokens, [token for role, token in made.special.items() if role != "unk"])


def layer_states(model: nn.Module, params: Params, batch: Batch) -> Array:
    """Return f32[depth + 1, rows, length, width]: the embeddings and each layer's output, the last as heads see it."""
    last, found = hidden_states(model, params, batch, mutable=[HIDDEN])
    return states(found, last).astype(jnp.float32)


def attention_shares(model: nn.Module, params: Params, batch: Batch) -> Array:
    """Return attention probabilities f32[depth, rows, heads, queries, keys] (Vaswani et al. 2017, equation 1)."""
    _, found = hidden_states(model, params, batch, mutable=[SHARES])
    shares = of_layers(found, SHARES)
    if shares is None:
        raise UserError(f"attention: {name_of(model.config)} models have no such attention; use another model")
    return shares
