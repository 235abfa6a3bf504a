"""What a masked language model puts in the place of masks."""

import flax.linen as nn
import jax
import numpy as np
from jax import Array

from data_pipelines.errors import UserError
from data_pipelines.examples.masking import global_positions
from models.core.parameters import Params
from models.families.registry import family_of, name_of
from pretrain.objectives.objective import inputs_of
from pretrain.objectives.protocols import Encoder, Generator, TokenPredictor


def fills(model: nn.Module) -> bool:
    """Whether a model says which tokens stand at masks."""
    return isinstance(model, Generator) or isinstance(model, Encoder) and isinstance(model, TokenPredictor)


def fill(
    model: nn.Module, params: Params, row: list[int], mask: int, length: int, number: int, global_tokens: int = 0
) -> list[list[tuple[int, float]]]:
    """For each mask in a row of tokens the likeliest (token, its probability), best first, the others staying masks.

    length: of the rows that the model was trained on, to which this is padded.   global_tokens: so many that it names,
    its first, then those like its last, which separates.   UserError for what cannot be filled.
    """
    if len(row) > length:
        raise UserError(f"{len(row)} tokens are more than the {length} of the model's rows; shorten the prompt")
    if not 1 <= number <= model.config.vocab_size:
        raise UserError(f"--number {number}: must be from 1 to the {model.config.vocab_size} tokens of the vocabulary")
    slots = np.flatnonzero(np.array(row) == mask)[None].astype(np.int32)
    tokens = np.pad(np.array(row, np.int32), (0, length - len(row)))[None]
    segments = (np.arange(length) < len(row))[None].astype(np.int32)
    batch = {"tokens": tokens, "segments": segments, "types": np.zeros_like(tokens)}
    if global_tokens:
        batch["globals"] = global_positions(np.array([row], np.int32), row[-1], global_tokens)
    if lacking := [name for name, one in family_of(model.config).inputs.items() if one.required and name not in batch]:
        raise UserError(f"a model of {name_of(model.config)} reads {lacking[0]!r} beside text; it fills no masks here")
    scores = jax.jit(_log_probabilities, static_argnums=0)(model, params, inputs_of(model, batch), slots)
    values, found = jax.lax.top_k(scores, number)
    of_masks = zip(found.tolist(), np.exp(values).tolist(), strict=True)
    return [list(zip(*of_mask, strict=True)) for of_mask in of_masks]


def _log_probabilities(model: nn.Module, params: Params, inputs: dict[str, Array], slots: Array) -> Array:
    """Of the tokens at slots i32[1, n]: f32[n, vocab]."""

    def apply(*arguments, method):
        return model.apply({"params": params}, *arguments, method=method)

    if isinstance(model, Generator):
        return jax.nn.log_softmax(apply(inputs, slots, method="generate"))
    return jax.nn.log_softmax(apply(apply(inputs, None, slots, method="encode"), method="token_logits"))
