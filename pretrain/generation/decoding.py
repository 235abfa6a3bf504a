"""Continue prompts with a causal model or an encoder-decoder (`generate`), or fill masks (`fill`)."""

import math
import operator
from collections.abc import Callable, Iterator, Sequence

import flax.linen as nn
import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh

from data_pipelines.errors import UserError
from data_pipelines.examples.masking import global_positions
from models.blocks.heads import TOKENS
from models.core.noise import row_keys
from models.core.parameters import Params
from models.families.registry import FAMILIES, family_of, name_of
from pretrain.generation.loop import program
from pretrain.generation.settings import Decoding
from pretrain.objectives.objective import inputs_of
from pretrain.objectives.protocols import ClozeWriter, Encoder, EncoderDecoder, Generator, Remembering, Writer
from tpu.batches import on_host
from tpu.mesh import mesh_shape, row_mesh

ROWS = 64  # most rows of a batch
SHORTEST = 16  # shortest padded prompt; lengths are powers of two, so that few programs are compiled


def generate(
    model: nn.Module,
    params: Params,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    seed: int = 0,
    number: int = 1,
    mesh: Mesh | None = None,
    program: Callable = program,
    tell: Callable[[int], object] = lambda texts: None,
) -> list[list[list[int]]]:
    """Generate `number` continuations of each prompt, without the prompt, up to and with the first stop token.

    Samples depend on the seed, the index of the prompt and the index of the continuation only.
    mesh: of the parameters, if they are sharded.   program: makes the compiled loop, like `loop.program`.
    tell: called after each batch with its number of prompts.   UserError for what cannot be continued.
    """
    _check(model, prompts, decoding, number)
    mesh = mesh or row_mesh(jax.local_devices(), [1])
    write = program(model, decoding, mesh)
    samples = number if decoding.beams == 1 else 1
    order = sorted(range(len(prompts)), key=lambda prompt: len(prompts[prompt]))  # batch prompts of similar length
    rows = [(prompt, sample) for prompt in order for sample in range(samples)]
    results = [[] for _ in prompts]
    for batch in _batches(rows, max(1, ROWS // decoding.beams), mesh_shape(mesh).batch_parts):
        tokens, segments = left_padded([prompts[prompt] for prompt, _ in batch])
        of_prompts, of_samples = np.array(batch, np.uint32).T
        noise = row_keys(seed, of_samples, of_prompts)
        texts = on_host(write(params, tokens, segments, noise))  # [rows, texts of each, n]
        for (prompt, sample), written in zip(batch, texts, strict=True):
            if len(results[prompt]) == sample:  # else a row that pads the batch
                for text in written[:number].tolist():
                    end = next((place for place, token in enumerate(text) if token in decoding.stop), len(text))
                    results[prompt].append(text[: end + 1])
        tell(len({prompt for prompt, _ in batch}))
    return results


def check_whole_rows(text: str | None, mesh: Mesh) -> None:
    """Raise UserError if a mesh shards sequences, which grow token by token here.   text: value of --mesh."""
    if mesh_shape(mesh).sequence > 1:
        raise UserError(f"--mesh {text}: generation cannot shard over sequence; use data, fsdp or tensor")


def left_padded(prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Pad texts on the left -> (tokens, segments), i32[rows, places] each."""
    places = max(SHORTEST, power_of_two(max(map(len, prompts))))
    tokens, segments = np.zeros((2, len(prompts), places), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, places - len(prompt) :] = prompt
        segments[row, places - len(prompt) :] = 1
    return tokens, segments


def _check(model: nn.Module, prompts: Sequence[Sequence[int]], decoding: Decoding, number: int) -> None:
    if not isinstance(model, Writer) or isinstance(model, ClozeWriter) and not fills(model):
        able = [name for name, family in FAMILIES.items() if issubclass(family.trunk, Writer)]
        heads = ", ".join(head.name for head in getattr(model, "heads", ()))
        named = f"a {name_of(model.config)} model with the heads {heads or 'none'}"
        raise UserError(f"{named} neither fills masks nor continues texts; use one of {', '.join(able)}")
    if cut := getattr(model, "clusters", ()):
        raise UserError(f"model.cutoffs={cut}: an adaptive softmax cannot continue texts; train one without cutoffs")
    vocab_size, positions = model.config.vocab_size, getattr(model.config, "positions", math.inf)
    for field in "beams", "top_k":
        if (value := getattr(decoding, field)) > vocab_size:
            raise UserError(f"--{field.replace('_', '-')} {value}: the vocabulary has {vocab_size} tokens; give less")
    several = decoding.beams if decoding.beams > 1 else number if decoding.sample else 1
    if not 1 <= number <= several:
        cure = f"give up to --beams {decoding.beams}" if decoding.beams > 1 else "add --sample, or --beams"
        raise UserError(f"--number {number}: greedy decoding and beam search give fewer texts per prompt; {cure}")
    apart = isinstance(model, EncoderDecoder)  # whether prompt and text have positions of their own
    longest, both = (max, "or") if apart else (operator.add, "and")
    for index, prompt in enumerate(prompts, 1):
        if not len(prompt):
            raise UserError(f"prompt {index}: has no tokens; write some text")
        size = len(prompt) - isinstance(model, ClozeWriter)  # the [MASK] has the place of the first token
        if longest(size, decoding.max_tokens) > positions:
            raise UserError(
                f"prompt {index}: {size} tokens {both} --max-tokens {decoding.max_tokens} exceed the model's "
                f"{positions} positions; shorten the prompt, or lower --max-tokens"
            )


def _batches(rows: list[tuple[int, int]], most: int, parts: int) -> Iterator[list[tuple[int, int]]]:
    """Split rows into batches whose size is a power of two, so that few programs are compiled, and a multiple of the
    mesh's parts. The last batch is padded with copies of its last row."""
    for begin in range(0, len(rows), most):
        batch = rows[begin : begin + most]
        yield batch + batch[-1:] * (math.lcm(power_of_two(len(batch)), parts) - len(batch))


def power_of_two(number: int) -> int:
    """Round up to a power of two."""
    return 1 << (number - 1).bit_length()


def fills(model: nn.Module) -> bool:
    """Return whether a model predicts masked tokens."""
    masked = isinstance(model, Encoder) and TOKENS in (head.name for head in getattr(model, "heads", ()))
    # XLNet encodes, too, but each token sees itself
    others = isinstance(model, Writer | Remembering) and not isinstance(model, ClozeWriter)
    return masked and not others or isinstance(model, Generator)


def fill(
    model: nn.Module, params: Params, row: list[int], mask: int, length: int, number: int, global_tokens: int = 0
) -> list[list[tuple[int, float]]]:
    """Predict each mask of a row, while the other masks stay: `number` pairs (token, probability) each, best first.

    length: of the model's training rows, to which the row is padded.   global_tokens: number of global tokens: the
    row's first token, then separators.   UserError if the masks cannot be filled.
    """
    if len(row) > length:
        raise UserError(f"the prompt's {len(row)} tokens exceed the model's rows of {length}; shorten the prompt")
    if not 1 <= number <= model.config.vocab_size:
        raise UserError(f"--number {number}: must be from 1 to the {model.config.vocab_size} tokens of the vocabulary")
    slots = np.flatnonzero(np.array(row) == mask)[None].astype(np.int32)
    tokens = np.pad(np.array(row, np.int32), (0, length - len(row)))[None]
    segments = (np.arange(length) < len(row))[None].astype(np.int32)
    batch = {"tokens": tokens, "segments": segments, "types": np.zeros_like(tokens)}
    if global_tokens:
        batch["globals"] = global_positions(np.array([row], np.int32), row[-1], global_tokens)
    if lacking := [name for name, one in family_of(model.config).inputs.items() if one.required and name not in batch]:
        raise UserError(f"a model of {name_of(model.config)} needs {lacking[0]!r} besides text; use another model")
    scores = jax.jit(log_probabilities, static_argnums=0)(model, params, inputs_of(model, batch), slots)
    values, tokens = jax.lax.top_k(scores, number)
    of_masks = zip(tokens.tolist(), np.exp(values).tolist(), strict=True)
    return [list(zip(*of_mask, strict=True)) for of_mask in of_masks]


def log_probabilities(model: nn.Module, params: Params, inputs: dict[str, Array], slots: Array) -> Array:
    """Compute log probabilities f32[rows * n, vocab] of the tokens at slots i32[rows, n]."""

    def apply(*arguments, method):
        return model.apply({"params": params}, *arguments, method=method)

    if isinstance(model, Generator):
        return jax.nn.log_softmax(apply(inputs, slots, method="generate"))
    return jax.nn.log_softmax(apply(apply(inputs, None, slots, method="encode"), method="token_logits"))
