"""Compute a causal decoder's hidden states, likelihoods of targets, greedy answers, and their metrics with errors."""

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

TARGETS = 256  # target tokens whose logits are computed at once, to save memory
# Row lengths are powers of two, so that few programs are compiled.
SHORTEST = 32  # shortest row, in tokens
BATCH = 4096  # tokens per batch

Figure = tuple[float, float | None]  # (value, standard error; None for a single example)


def hidden_states(
    model: nn.Module, params: Params, texts: Sequence[np.ndarray], mesh: Mesh
) -> Iterator[tuple[list[int], Array]]:
    """Yield (indices of texts, their hidden states [rows, length, width] in a causal decoder, on the mesh, padded at
    the end of rows and batch), the longest texts first, so that a lack of memory shows at once.

    texts: i32[tokens] each, at most as many as the model has positions.   params: on the mesh.
    """

    def decode(params: Params, inputs: Inputs) -> Array:
        with placed_by(activation_rules(mesh)), matmul_precision(model.program.dtype):
            return model.apply({"params": params}, inputs, method="decode")

    decode = jax.jit(decode, compiler_options=compiler_options(mesh))
    by_length: dict[int, list[int]] = {}
    for index, text in enumerate(texts):
        by_length.setdefault(min(max(SHORTEST, power_of_two(len(text))), model.config.positions), []).append(index)
    for length, indices in sorted(by_length.items(), reverse=True):
        number = min(max(BATCH // length, 1), len(indices))
        number = -(-number // mesh.size) * mesh.size
        for begin in range(0, len(indices), number):
            chosen = indices[begin : begin + number]
            tokens, segments = np.zeros((2, number, length), np.int32)
            for row, index in enumerate(chosen):
                tokens[row, : len(texts[index])], segments[row, : len(texts[index])] = texts[index], 1
            inputs = place_rows({"tokens": tokens, "segments": segments}, np.arange(number), number, mesh)
            yield chosen, decode(params, inputs)


def log_likelihoods(model: nn.Module, params: Params, prompts: Sequence[Prompt], mesh: Mesh) -> list[np.ndarray]:
    """Compute ln p(target | prompt) by a causal decoder with parameters on the mesh -> f64[texts] for each prompt."""

    def of_targets(params: Params, hidden: Array, row: Array, column: Array, target: Array) -> Array:
        with placed_by(activation_rules(mesh)), matmul_precision(model.program.dtype):
            logits = model.apply({"params": params}, hidden[row, column][None], method="token_logits")
            return jnp.take_along_axis(jax.nn.log_softmax(logits), target[:, None], axis=1)[:, 0]

    of_targets = jax.jit(of_targets, compiler_options=compiler_options(mesh))
    texts = [text for prompt in prompts for text in prompt.texts]
    total = np.zeros(len(texts))
    for chosen, hidden in hidden_states(model, params, [text.tokens[:-1] for text in texts], mesh):
        # For each target token: its row, the column that predicts it, the token
        places = [
            (row, column - 1, texts[index].tokens[column])
            for row, index in enumerate(chosen)
            for column in range(texts[index].first, len(texts[index].tokens))
        ]
        targets = np.array(places, np.int32).T
        for begin in range(0, targets.shape[1], TARGETS):
            block = targets[:, begin : begin + TARGETS]
            number = block.shape[1]
            values = of_targets(params, hidden, *np.pad(block, ((0, 0), (0, TARGETS - number))))
            np.add.at(total, np.array(chosen)[block[0]], np.asarray(values, np.float64)[:number])
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
    """Decode greedily after each prompt, up to `stop`, the end of a document, or `max_tokens` tokens -> texts.
    UserError if the tokenizer never produces `stop`."""
    if not prompter.keeps(stop):
        raise UserError(f"--stop {stop!r}: the run's tokenizer drops it, no text ends; give another, like --stop .")
    tokenizer = prompter.tokenizer
    alone = tokenizer.decode_batch([[token] for token in range(tokenizer.get_vocab_size())])
    last = {token for token, text in enumerate(alone) if stop in text} | ({prompter.end} - {None})
    questions = [prompt.texts[0].tokens.tolist() for prompt in prompts]
    decoding = Decoding(max_tokens=max_tokens, stop=tuple(sorted(last)))
    written = generate(model, ready(model, params), questions, decoding, mesh=mesh)
    whole = [before + after for before, (after,) in zip(questions, written, strict=True)]
    # Decode prompt and answer together: some tokenizers drop the blank before a first word.
    pairs = zip(tokenizer.decode_batch(questions), tokenizer.decode_batch(whole), strict=True)
    return [text[len(before) :].split(stop)[0] for before, text in pairs]


def of_likelihoods(prompts: Sequence[Prompt], found: Sequence[np.ndarray]) -> dict[str, Figure]:
    """Compute metrics of `log_likelihoods`.   found: for each prompt, ln p of its targets, f64[texts]. -> nats per
    token and per UTF-8 byte of the right targets; for examples with choices, the accuracy of taking the choice with the
    highest likelihood in total ("by sum"), per token or per byte."""
    tokens = [np.array([len(text.tokens) - text.first for text in prompt.texts]) for prompt in prompts]
    sizes = [np.array([len(choice.encode()) for choice in prompt.example.choices]) for prompt in prompts]
    right = [prompt.example.answer for prompt in prompts]

    def of_right(arrays):
        return np.array([array[answer] for array, answer in zip(arrays, right, strict=True)])

    figures = {
        "nats per token": _ratio(-of_right(found), of_right(tokens)),
        "nats per byte": _ratio(-of_right(found), of_right(sizes)),
    }
    with_choices = [index for index, prompt in enumerate(prompts) if len(prompt.texts) > 1]
    by = {"by sum": [1] * len(prompts), "per token": tokens, "per byte": sizes}
    for name, weights in by.items() if with_choices else ():
        best = [(found[index] / weights[index]).argmax() for index in with_choices]
        correct = [choice == right[index] for choice, index in zip(best, with_choices, strict=True)]
        figures[f"accuracy {name}"] = mean(correct)
    return figures


def of_answers(prompts: Sequence[Prompt], texts: Sequence[str]) -> dict[str, Figure]:
    """Compute the share of texts that equal their target, ignoring white space around both."""
    pairs = zip(prompts, texts, strict=True)
    return {"exact match": mean([text.strip() == prompt.example.target.strip() for prompt, text in pairs])}


def mean(values: Sequence[float]) -> Figure:
    """Return the mean with its standard error."""
    values = np.asarray(values, np.float64)
    return float(values.mean()), float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else None


def with_error(figure: Figure) -> str:
    """Format a value with its standard error."""
    value, error = figure
    return f"{value:.4f}" + ("" if error is None else f" ± {error:.4f}")


def _ratio(above: np.ndarray, below: np.ndarray) -> Figure:
    """Return the ratio of sums, with its standard error to first order."""
    ratio = above.sum() / below.sum()
    return float(ratio), mean((above - ratio * below) / below.mean())[1]
