"""Generate texts that are steered towards an attribute, in one compiled loop: before each token, gradient steps change
the cache of keys and values (Dathathri et al. 2020, section 3.2, equations 3 and 4)."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from data_pipelines.errors import UserError
from data_pipelines.text.encoding import Encoder
from models.attention.cache import Cache
from models.core.parameters import Params
from models.core.sharding import placed_by
from models.families.registry import name_of
from pretrain.generation.loop import of_next, of_texts, write_texts
from pretrain.generation.settings import Decoding, Steering
from pretrain.objectives.protocols import CausalDecoder
from tpu.rules import activation_rules
from tpu.xla import compiler_options, matmul_precision

SMALL = 1e-15  # added to norms, which may be 0


class Aim(NamedTuple):
    """What a text is steered towards: a bag of words, a label of a discriminator, or both.

    words: bool[padded vocab], the tokens of the bag, or None.   discriminator: (kernel f32[width, labels] and bias
    f32[labels] on the mean of a text's hidden states, label i32[]), or None.
    """

    words: Array | None = None
    discriminator: tuple[Array, Array, Array] | None = None


class Read(NamedTuple):
    """State of texts without their last token.

    cache: the steered cache, in float32, since steps may be small; changes are kept.   plain: the unsteered cache.
    hidden: f32[rows, width], the sum of unsteered hidden states.   norms: f32[depth, rows], norms of the gradients of a
    layer's keys and values; for a bag of words the largest so far, so that steps are small if no word is likely.
    """

    cache: Cache
    plain: Cache
    hidden: Array
    norms: Array


class Text(NamedTuple):
    """Texts being generated, with the model's unsteered output.

    last: i32[rows, 1], the last tokens, which `read` lacks.   lengths: i32[rows], tokens without the last.
    logits: f32[rows, padded vocab], unsteered, after the last token.   plain: the unsteered cache of all tokens.
    """

    last: Array
    lengths: Array
    read: Read
    logits: Array
    plain: Cache


def bag(path: Path, encoder: Encoder, vocab: int) -> tuple[np.ndarray, list[str]]:
    """Read a bag of words, one per line -> (bool[vocab] tokens of the words inside a text, words that are left out).
    Words of several tokens are left out, as in the authors' code. UserError if no word is left."""
    try:
        words = [word for line in path.read_text("utf-8").splitlines() if (word := line.strip())]
    except (OSError, ValueError) as error:
        raise UserError(f"--words {path}: cannot be read as text ({error}); give a file of one word per line") from None
    if not words:
        raise UserError(f"--words {path}: has no words; write one per line")
    texts = encoder.tokens([f" {word}" for word in words])
    tokens = [int(text[0]) for text in texts if len(text) == 1]
    if not tokens:
        raise UserError(f"--words {path}: none of its {len(words)} words is a single token of this model; give others")
    return np.isin(np.arange(vocab), tokens), [word for word, text in zip(words, texts, strict=True) if len(text) != 1]


def steered_program(aim: Aim, steering: Steering) -> Callable:
    """Return a program for `generate` that steers texts."""

    def program(model: nn.Module, decoding: Decoding, mesh: Mesh) -> Callable[[Params, Array, Array, Array], Array]:
        if not isinstance(model, CausalDecoder):
            raise UserError(f"--words, --discriminator: {name_of(model.config)} has no keys to steer; use a gpt2")
        if decoding.beams > 1:
            raise UserError(f"--beams {decoding.beams}: steering works without beam search only; leave --beams out")
        return functools.partial(_program(model, decoding, steering, mesh), aim)

    return program


@functools.cache
def _program(model: nn.Module, decoding: Decoding, steering: Steering, mesh: Mesh) -> Callable:
    def write(aim: Aim, params: Params, tokens: Array, segments: Array, noise: Array) -> Array:
        with placed_by(activation_rules(mesh)), matmul_precision(model.program.dtype):
            following = functools.partial(_following, model, params, aim, steering, decoding.temperature)
            read = _read(model, params, tokens[:, :-1], segments[:, :-1], 1 + decoding.max_tokens)
            first = following(tokens[:, -1:], segments.sum(1) - 1, read)
            # `_following` has already applied the temperature.
            chosen = dataclasses.replace(decoding, temperature=1.0)
            return write_texts(chosen, first, following, tokens, segments, noise)[:, None]

    return jax.jit(write, compiler_options=compiler_options(mesh))


def _read(model: nn.Module, params: Params, tokens: Array, segments: Array, more: int) -> Read:
    """Read left-padded texts into a state with room for `more` tokens."""
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
    """Read one more token i32[rows, 1] -> (logits of the next token f32[rows, padded vocab]: steered log probabilities
    fused with unsteered ones; the new state)."""
    hidden, logits, plain = extend(model, params, last, lengths, read.plain)
    cache, norms = perturbed(model, params, aim, steering, Text(last, lengths, read, logits, plain))
    _, steered, cache = extend(model, params, last, lengths, cache)
    fused = steering.fusion * jax.nn.log_softmax(steered / temperature)
    fused += (1 - steering.fusion) * jax.nn.log_softmax(logits)
    fused = jnp.where(jnp.arange(fused.shape[1]) < model.config.vocab_size, fused, -jnp.inf)
    return fused, Read(cache, plain, read.hidden + hidden[:, 0], norms)


def extend(model: nn.Module, params: Params, tokens: Array, lengths: Array, cache: Cache):
    """Read one more token, see `of_next` -> (hidden [rows, 1, width], logits f32[rows, padded vocab], new cache)."""
    hidden, cache = model.apply({"params": params}, of_next(tokens, lengths), cache, method="advance")
    return hidden, model.apply({"params": params}, hidden, method="token_logits"), cache


def perturbed(model: nn.Module, params: Params, aim: Aim, steering: Steering, text: Text) -> tuple[Cache, Array]:
    """Take `iterations` gradient steps on the cache -> (the new cache, the new norms)."""
    cache = text.read.cache
    places = jnp.arange(cache.segments.shape[1])
    steered = places < cache.filled
    if steering.window:
        # The authors' code changes the first tokens instead, unlike section 3.2 of their paper.
        steered &= places >= cache.filled - steering.window
    steered = steered[:, None]  # of keys and values [depth, rows, heads, places, head_dim]

    def step(_, state: tuple[Cache, Array]) -> tuple[Cache, Array]:
        cache, norms = state

        def total(keys: Array, values: Array) -> Array:
            return loss(model, params, aim, steering, text, cache._replace(keys=keys, values=values))

        gradients = [jnp.where(steered, g, 0) for g in jax.grad(total, (0, 1))(cache.keys, cache.values)]
        new = jnp.sqrt(sum(jnp.sum(gradient**2, axis=(2, 3, 4)) for gradient in gradients))
        norms = new if aim.discriminator else jnp.maximum(norms, new)
        rate = rates(steering, norms)[:, :, None, None, None]
        keys, values = (array - rate * g for array, g in zip((cache.keys, cache.values), gradients, strict=True))
        return cache._replace(keys=keys, values=values), norms

    return jax.lax.fori_loop(0, steering.iterations, step, (cache, text.read.norms))


def rates(steering: Steering, norms: Array) -> Array:
    """Compute the factors of gradients; 0 for a norm of 0, to which squares of tiny gradients underflow."""
    return jnp.where(norms > 0, steering.step_size / (norms + SMALL) ** steering.gamma, 0)


def loss(model: nn.Module, params: Params, aim: Aim, steering: Steering, text: Text, cache: Cache) -> Array:
    """Compute -ln p(attribute | text) with this cache, plus the KL divergence from the unsteered next token, summed
    over rows, which are independent -> f32[]."""
    hidden, logits, _ = extend(model, params, text.last, text.lengths, cache)
    log_probs, total = jax.nn.log_softmax(logits), jnp.zeros(len(logits))
    if aim.words is not None:
        total -= jax.nn.logsumexp(jnp.where(aim.words, log_probs, -jnp.inf), axis=1)
    if aim.discriminator is not None:
        kernel, bias, label = aim.discriminator
        # Look one token ahead, at the expected embedding of the next token; only that token's state is steered.
        next_one = jax.nn.softmax(logits)[:, None]
        ahead, *_ = extend(model, params, next_one, text.lengths + 1, text.plain)
        states = text.read.hidden + jax.lax.stop_gradient(hidden[:, 0]) + ahead[:, 0]
        scores = states / (text.lengths[:, None] + 2) @ kernel + bias
        total -= jax.nn.log_softmax(scores)[:, label]
    if steering.kl_scale:
        real = slice(model.config.vocab_size)
        unsteered = jax.nn.log_softmax(text.logits)
        total += steering.kl_scale * jnp.sum(jnp.exp(log_probs[:, real]) * (log_probs - unsteered)[:, real], axis=1)
    return total.sum()
