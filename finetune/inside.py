"""What the layers of a model compute on the way: their hidden states, and how much each token takes of each other.

Nothing in the models says it. Flax lets calls of modules be seen while a model runs, layer by layer.
"""

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
from models.attention.multi_head import MultiHeadAttention
from models.core.family import unfit_inputs
from models.core.parameters import Params
from models.core.program import Program
from models.families.registry import family_of, name_of
from pretrain.objectives.objective import Batch, Spec
from pretrain.objectives.protocols import CausalDecoder, EncoderDecoder
from pretrain.training.opened import Opened

TOKENS = 1 << 12  # of a batch
LONGEST = 2**31 - 1  # row of a model without positions


def unrolled(opened: Opened, spec: Spec) -> nn.Module:
    """The module of a model as one whose layers can be seen.   UserError where it does not read rows of such arrays."""
    module = opened.module
    declared = {name: one for name, one in family_of(module.config).inputs.items() if one.required}
    reads = isinstance(module, CausalDecoder) or hasattr(module, "encode") and not isinstance(module, EncoderDecoder)
    if not reads or unfit_inputs(declared, spec):
        raise UserError(f"{opened.source}: into a model of {name_of(module.config)} there is no look yet; take another")
    return module.clone(program=Program(module.program.dtype, depth="unroll"))


def looked(
    opened: Opened, rows: Rows, look: Callable[[nn.Module, Params, Batch], Array], tokens: int = TOKENS
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(numbers of some rows i64[n], what a look says of these [layers, n, ...]) until all rows were there: those of
    about the same length together.

    tokens: of a batch, about, all of which is in memory at once.
    """
    lengths, above = np.maximum(rows.lengths, 1), 0  # one without a token is a row, too
    for length in buckets(lengths, longest=getattr(opened.config, "positions", LONGEST)):
        layout = TaskRows(length, above, ())
        model = unrolled(opened, layout.spec)
        says = jax.jit(lambda params, batch, model=model: look(model, params, batch))
        which, above = np.flatnonzero((lengths > above) & (lengths <= length)), length
        size = min(max(1, tokens // length), len(which))
        for first in range(0, len(which), size):
            part = which[first : first + size]
            filled = np.resize(part, size)  # one shape for all
            yield part, np.asarray(says(opened.params, layout.padded(rows, filled)))[:, : len(part)]


def are_special(made: Made, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
    """bool[tokens]: which are no part of a text; the one for what is not in the vocabulary is."""
    return np.isin(tokens, [token for role, token in made.special.items() if role != "unk"])


def layer_states(model: nn.Module, params: Params, batch: Batch) -> Array:
    """[depth + 1, rows, length, width]: the embeddings, each layer's, and of the last one what heads read."""
    states: list[Array] = []

    def keep(call: Callable, args, kwargs, context: nn.module.InterceptorContext):
        of = context.module
        # `stack` applies each layer as a module of its own
        if context.method_name == "__call__" and of.scope.path == () and type(of) is not type(model):
            states.append(args[0])
        return call(*args, **kwargs)

    with nn.intercept_methods(keep):
        last = hidden_states(model, params, batch)
    return jnp.stack([*states, last]).astype(jnp.float32)


def attention_shares(model: nn.Module, params: Params, batch: Batch) -> Array:
    """f32[depth, rows, heads, queries, keys]: the probabilities of attention (Vaswani et al. 2017, equation 1)."""
    found: list[Array] = []

    def keep(call: Callable, args, kwargs, context: nn.module.InterceptorContext):
        if context.method_name == "__call__" and isinstance(context.module, MultiHeadAttention):
            found.append(context.module.shares(*args[:2]))
        return call(*args, **kwargs)

    with nn.intercept_methods(keep):
        hidden_states(model, params, batch)
    if not found:
        raise UserError(f"attention: {name_of(model.config)} has another form of it; take another model")
    return jnp.stack(found)
