"""How likely a causal decoder finds targets after their prompts."""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from models.core.parameters import Params
from models.core.sharding import placed_by
from pretrain.prompting.batches import hidden_states
from pretrain.prompting.prompts import Prompt, Tokens
from tpu.rules import activation_rules
from tpu.xla import compiler_options, matmul_precision

TARGETS = 256  # whose logits are computed at once, so that they need little memory


def log_likelihoods(model: nn.Module, params: Params, prompts: Sequence[Prompt], mesh: Mesh) -> list[np.ndarray]:
    """ln p(target | prompt) by a causal decoder whose parameters lie on the mesh: f64[texts] of each prompt."""

    def of_targets(params: Params, hidden: Array, row: Array, column: Array, target: Array) -> Array:
        with placed_by(activation_rules(mesh)), matmul_precision(model.program.dtype):
            logits = model.apply({"params": params}, hidden[row, column][None], method="token_logits")
            return jnp.take_along_axis(jax.nn.log_softmax(logits), target[:, None], axis=1)[:, 0]

    of_targets = jax.jit(of_targets, compiler_options=compiler_options(mesh))
    texts = [text for prompt in prompts for text in prompt.texts]
    total = np.zeros(len(texts))
    for chosen, hidden in hidden_states(model, params, [text.tokens[:-1] for text in texts], mesh):
        targets = _targets(texts, chosen)
        for begin in range(0, targets.shape[1], TARGETS):
            asked = targets[:, begin : begin + TARGETS]
            number = asked.shape[1]
            found = of_targets(params, hidden, *np.pad(asked, ((0, 0), (0, TARGETS - number))))
            np.add.at(total, np.array(chosen)[asked[0]], np.asarray(found, np.float64)[:number])
    return np.split(total, np.cumsum([len(prompt.texts) for prompt in prompts])[:-1])


def _targets(texts: Sequence[Tokens], chosen: Sequence[int]) -> np.ndarray:
    """Of all targets' tokens the row, the column that predicts it, and itself: i32[3, tokens]."""
    found = [
        (row, column - 1, texts[index].tokens[column])
        for row, index in enumerate(chosen)
        for column in range(texts[index].first, len(texts[index].tokens))
    ]
    return np.array(found, np.int32).T
