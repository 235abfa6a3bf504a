"""What a causal decoder says after prompts: how likely their targets are, or token by token what is likeliest."""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from data_pipelines.errors import UserError
from models.core.parameters import Params
from models.core.sharding import placed_by
from pretrain.generation.decoding import generate
from pretrain.generation.loop import ready
from pretrain.generation.settings import Decoding
from pretrain.prompting.batches import hidden_states
from pretrain.prompting.prompts import Prompt, Prompter
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
        # Of all targets' tokens the row, the column that predicts it, and itself
        found = [
            (row, column - 1, texts[index].tokens[column])
            for row, index in enumerate(chosen)
            for column in range(texts[index].first, len(texts[index].tokens))
        ]
        targets = np.array(found, np.int32).T
        for begin in range(0, targets.shape[1], TARGETS):
            asked = targets[:, begin : begin + TARGETS]
            number = asked.shape[1]
            found = of_targets(params, hidden, *np.pad(asked, ((0, 0), (0, TARGETS - number))))
            np.add.at(total, np.array(chosen)[asked[0]], np.asarray(found, np.float64)[:number])
    return np.split(total, np.cumsum([len(prompt.texts) for prompt in prompts])[:-1])


def answers(
    model: nn.Module,
    params: Params,
    prompts: Sequence[Prompt],
    prompter: Prompter,
    stop: str,
    max_tokens: int,
    mesh: Mesh,
) -> list[str]:
    """The text after each prompt without its target, up to `stop`, the end of a document, or `max_tokens` tokens.

    UserError for a `stop` that the tokenizer never writes.
    """
    if not prompter.keeps(stop):
        raise UserError(f"--stop {stop!r}: the run's tokenizer loses it, no text ends; give another, like --stop .")
    tokenizer = prompter.tokenizer
    alone = tokenizer.decode_batch([[token] for token in range(tokenizer.get_vocab_size())])
    last = {token for token, text in enumerate(alone) if stop in text} | ({prompter.end} - {None})
    asked = [prompt.texts[0].tokens.tolist() for prompt in prompts]
    decoding = Decoding(max_tokens=max_tokens, stop=tuple(sorted(last)))
    written = generate(model, ready(model, params), asked, decoding, mesh=mesh)
    whole = [before + after for before, (after,) in zip(asked, written, strict=True)]
    # Cut from the whole: some tokenizers write a first word without its blank.
    pairs = zip(tokenizer.decode_batch(asked), tokenizer.decode_batch(whole), strict=True)
    return [text[len(before) :].split(stop)[0] for before, text in pairs]
