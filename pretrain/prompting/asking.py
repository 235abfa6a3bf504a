"""What a causal decoder makes of texts: hidden states, how likely targets of prompts are, or what is likeliest after
them, token by token; and what its answers come to, with standard errors."""

from collections.abc import Iterator, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from data_pipelines.errors import UserError
from models.core.family import Inputs
from models.core.parameters import Params
from models.core.sharding import placed_by
from pretrain.generation.decoding import generate, power_of_two
from pretrain.generation.loop import ready
from pretrain.generation.settings import Decoding
from pretrain.prompting.prompts import Prompt, Prompter
from tpu.batches import place_rows
from tpu.rules import activation_rules
from tpu.xla import compiler_options, matmul_precision

TARGETS = 256  # whose logits are computed at once, so that they need little memory
# Texts of different length come in few kinds of batches, so that few programs are compiled.
SHORTEST = 32  # tokens of the rows of the first kind; those of the next have twice as many
BATCH = 4096  # tokens of a batch of rows

Figure = tuple[float, float | None]  # and its standard error, which one example does not tell


def hidden_states(
    model: nn.Module, params: Params, texts: Sequence[np.ndarray], mesh: Mesh
) -> Iterator[tuple[list[int], Array]]:
    """(which texts, then rows of their states by a causal decoder, [rows, length, width] on the mesh, with padding
    behind and below), the longest first: memory is short at once or never.

    texts: i32[tokens] each, at most as many as the model has positions.   params: on the mesh.
    """

    def decode(params: Params, inputs: Inputs) -> Array:
        with placed_by(activation_rules(mesh)), matmul_precision(model.program.dtype):
            return model.apply({"params": params}, inputs, method="decode")

    decode = jax.jit(decode, compiler_options=compiler_options(mesh))
    kinds: dict[int, list[int]] = {}
    for index, text in enumerate(texts):
        kinds.setdefault(min(max(SHORTEST, power_of_two(len(text))), model.config.positions), []).append(index)
    for length, inside in sorted(kinds.items(), reverse=True):
        number = min(max(BATCH // length, 1), len(inside))
        number = -(-number // mesh.size) * mesh.size
        for begin in range(0, len(inside), number):
            chosen = inside[begin : begin + number]
            tokens, segments = np.zeros((2, number, length), np.int32)
            for row, index in enumerate(chosen):
                tokens[row, : len(texts[index])], segments[row, : len(texts[index])] = texts[index], 1
            inputs = place_rows({"tokens": tokens, "segments": segments}, np.arange(number), number, mesh)
            yield chosen, decode(params, inputs)


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


def of_likelihoods(prompts: Sequence[Prompt], found: Sequence[np.ndarray]) -> dict[str, Figure]:
    """found: f64[texts of the prompt] for each, ln p of its targets.

    -> the right targets' nats per token and per byte of UTF-8, and in how many of the examples with choices the right
    one has the highest likelihood: as a whole ("by sum"), per token, and per byte.
    """
    tokens = [np.array([len(text.tokens) - text.first for text in prompt.texts]) for prompt in prompts]
    sizes = [np.array([len(choice.encode()) for choice in prompt.example.choices]) for prompt in prompts]
    right = [prompt.example.answer for prompt in prompts]

    def of_right(arrays):
        return np.array([of[answer] for of, answer in zip(arrays, right, strict=True)])

    figures = {
        "nats per token": _ratio(-of_right(found), of_right(tokens)),
        "nats per byte": _ratio(-of_right(found), of_right(sizes)),
    }
    asked = [index for index, prompt in enumerate(prompts) if len(prompt.texts) > 1]
    by = {"by sum": [1] * len(prompts), "per token": tokens, "per byte": sizes}
    for name, weights in by.items() if asked else ():
        best = [(found[index] / weights[index]).argmax() for index in asked]
        figures[f"accuracy {name}"] = mean([choice == right[index] for choice, index in zip(best, asked, strict=True)])
    return figures


def of_answers(prompts: Sequence[Prompt], texts: Sequence[str]) -> dict[str, Figure]:
    """How many of the texts are the target, but for white space around both."""
    pairs = zip(prompts, texts, strict=True)
    return {"exact match": mean([text.strip() == prompt.example.target.strip() for prompt, text in pairs])}


def mean(values: Sequence[float]) -> Figure:
    """With its standard error."""
    values = np.asarray(values, np.float64)
    return float(values.mean()), float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else None


def with_error(figure: Figure) -> str:
    """In words."""
    value, error = figure
    return f"{value:.4f}" + ("" if error is None else f" ± {error:.4f}")


def _ratio(above: np.ndarray, below: np.ndarray) -> Figure:
    """The ratio of sums, with its standard error to first order."""
    ratio = above.sum() / below.sum()
    return float(ratio), mean((above - ratio * below) / below.mean())[1]
