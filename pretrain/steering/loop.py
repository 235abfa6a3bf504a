"""Texts steered towards an aim in one compiled loop, token by token."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from data_pipelines.errors import UserError
from models.attention.cache import Cache
from models.core.parameters import Params
from models.core.sharding import placed_by
from models.families.registry import name_of
from pretrain.generation.loop import write_texts
from pretrain.generation.reading import of_texts
from pretrain.generation.settings import Decoding
from pretrain.objectives.protocols import CausalDecoder
from pretrain.steering.perturbation import Aim, Text, extend, perturbed
from pretrain.steering.settings import Steering
from tpu.rules import activation_rules
from tpu.xla import compiler_options, matmul_precision


class Read(NamedTuple):
    """What is known of texts but for their last token.

    cache: as steered so far, in float32, since steps may be small; what is changed stays so.   plain: as it was read.
    hidden: f32[rows, width], the sum of unsteered hidden states.   norms: f32[depth, rows], as of `perturbed`.
    """

    cache: Cache
    plain: Cache
    hidden: Array
    norms: Array


def steered_program(aim: Aim, steering: Steering) -> Callable:
    """What `generate` takes for its program."""

    def program(model: nn.Module, decoding: Decoding, mesh: Mesh) -> Callable[[Params, Array, Array, Array], Array]:
        if not isinstance(model, CausalDecoder):
            raise UserError(
                f"--words, --discriminator: a model of {name_of(model.config)} has no keys and values to steer; "
                "take one that has, like gpt2"
            )
        if decoding.beams > 1:
            raise UserError(f"--beams {decoding.beams}: a steered text is drawn or greedy; leave --beams out")
        return functools.partial(_program(model, decoding, steering, mesh), aim)

    return program


@functools.cache
def _program(model: nn.Module, decoding: Decoding, steering: Steering, mesh: Mesh) -> Callable:
    def write(aim: Aim, params: Params, tokens: Array, segments: Array, noise: Array) -> Array:
        with placed_by(activation_rules(mesh)), matmul_precision(model.program.dtype):
            following = functools.partial(_following, model, params, aim, steering, decoding.temperature)
            read = _read(model, params, tokens[:, :-1], segments[:, :-1], 1 + decoding.max_tokens)
            first = following(tokens[:, -1:], segments.sum(1) - 1, read)
            # What the temperature divides has been divided by it.
            chosen = dataclasses.replace(decoding, temperature=1.0)
            return write_texts(chosen, first, following, tokens, segments, noise)[:, None]

    return jax.jit(write, compiler_options=compiler_options(mesh))


def _read(model: nn.Module, params: Params, tokens: Array, segments: Array, more: int) -> Read:
    """Left-padded texts, with room for `more` tokens."""
    hidden, plain = model.apply({"params": params}, of_texts(tokens, segments), more, method="begin")
    cache = plain._replace(keys=plain.keys.astype(jnp.float32), values=plain.values.astype(jnp.float32))
    hidden = jnp.sum(hidden.astype(jnp.float32) * segments[..., None], axis=1)
    return Read(cache, plain, hidden, jnp.zeros((len(cache.keys), len(tokens))))


def _following(
    model: nn.Module,
    params: Params,
    aim: Aim,
    steering: Steering,
    temperature: float,
    last: Array,
    lengths: Array,
    read: Read,
) -> tuple[Array, Read]:
    """One more token i32[rows, 1] -> (what next tokens are drawn by, f32[rows, padded vocab]: their steered log
    probabilities fused with the unsteered ones; what is known with the token)."""
    hidden, logits, plain = extend(model, params, last, lengths, read.plain)
    text = Text(last, lengths, read.cache, logits, plain, read.hidden)
    cache, norms = perturbed(model, params, aim, steering, text, read.norms)
    _, steered, cache = extend(model, params, last, lengths, cache)
    fused = steering.fusion * jax.nn.log_softmax(steered / temperature)
    fused += (1 - steering.fusion) * jax.nn.log_softmax(logits)
    fused = jnp.where(jnp.arange(fused.shape[1]) < model.config.vocab_size, fused, -jnp.inf)
    return fused, Read(cache, plain, read.hidden + hidden[:, 0], norms)
