"""Texts steered towards an aim in one compiled loop, token by token: before each token the cache is changed so that
what comes next has more of an attribute: section 3.2 and equations 3 and 4 of Dathathri et al. 2020."""

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

SMALL = 1e-15  # beside a norm of 0


class Aim(NamedTuple):
    """What a text is steered towards, by words, by a discriminator, or both.

    words: bool[padded vocab], the tokens of a bag; None without.
    discriminator: kernel f32[width, labels] and bias f32[labels] on the mean of a text's hidden states, and the label
    i32[]; None without.
    """

    words: Array | None = None
    discriminator: tuple[Array, Array, Array] | None = None


class Read(NamedTuple):
    """What is known of texts but for their last token.

    cache: as steered so far, in float32, since steps may be small; what is changed stays so.   plain: as it was read.
    hidden: f32[rows, width], the sum of unsteered hidden states.   norms: f32[depth, rows], of gradients of a layer's
    keys and values so far, by whose largest those towards a bag of words are divided, so that steps are small where
    none of its words is near.
    """

    cache: Cache
    plain: Cache
    hidden: Array
    norms: Array


class Text(NamedTuple):
    """Texts that go on, and what the model says of them without steering.

    last: i32[rows, 1], the tokens that `read` does not know.   lengths: i32[rows], tokens without the last.
    logits: f32[rows, padded vocab], unsteered, after the last token.   plain: the unsteered cache of all tokens.
    """

    last: Array
    lengths: Array
    read: Read
    logits: Array
    plain: Cache


def bag(path: Path, encoder: Encoder, vocab: int) -> tuple[np.ndarray, list[str]]:
    """The words of a file, one a line -> (bool[vocab]: the tokens that are one of them in the middle of a text; the
    words of several tokens, which no next token can be and which are left out, as by PPLM's authors).

    UserError where no word is left.
    """
    try:
        words = [word for line in path.read_text("utf-8").splitlines() if (word := line.strip())]
    except (OSError, ValueError) as error:
        raise UserError(f"--words {path}: cannot be read as text ({error}); give a file with a word a line") from None
    if not words:
        raise UserError(f"--words {path}: holds no word; write one on each line")
    texts = encoder.tokens([f" {word}" for word in words])
    tokens = [int(text[0]) for text in texts if len(text) == 1]
    if not tokens:
        raise UserError(f"--words {path}: none of its {len(words)} words is one token of this model; give others")
    return np.isin(np.arange(vocab), tokens), [word for word, text in zip(words, texts, strict=True) if len(text) != 1]


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
    cache, norms = perturbed(model, params, aim, steering, Text(last, lengths, read, logits, plain))
    _, steered, cache = extend(model, params, last, lengths, cache)
    fused = steering.fusion * jax.nn.log_softmax(steered / temperature)
    fused += (1 - steering.fusion) * jax.nn.log_softmax(logits)
    fused = jnp.where(jnp.arange(fused.shape[1]) < model.config.vocab_size, fused, -jnp.inf)
    return fused, Read(cache, plain, read.hidden + hidden[:, 0], norms)


def extend(model: nn.Module, params: Params, tokens: Array, lengths: Array, cache: Cache):
    """One more token, see `of_next` -> (hidden [rows, 1, width], logits f32[rows, padded vocab], the cache with it)."""
    hidden, cache = model.apply({"params": params}, of_next(tokens, lengths), cache, method="advance")
    return hidden, model.apply({"params": params}, hidden, method="token_logits"), cache


def perturbed(model: nn.Module, params: Params, aim: Aim, steering: Steering, text: Text) -> tuple[Cache, Array]:
    """The cache after `iterations` gradient steps, and the norms with those of its gradients."""
    cache = text.read.cache
    places = jnp.arange(cache.segments.shape[1])
    steered = places < cache.filled
    if steering.window:
        # The authors' program changes the first tokens' instead, against section 3.2 of its paper.
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
    """What gradients are multiplied by; 0 where the norm is, as squares of what is too small are lost in it."""
    return jnp.where(norms > 0, steering.step_size / (norms + SMALL) ** steering.gamma, 0)


def loss(model: nn.Module, params: Params, aim: Aim, steering: Steering, text: Text, cache: Cache) -> Array:
    """-ln p(attribute | text) with this cache in place of the text's, and the divergence from the unsteered next token;
    summed over rows, which know nothing of one another: f32[]."""
    hidden, logits, _ = extend(model, params, text.last, text.lengths, cache)
    said, total = jax.nn.log_softmax(logits), jnp.zeros(len(logits))
    if aim.words is not None:
        total -= jax.nn.logsumexp(jnp.where(aim.words, said, -jnp.inf), axis=1)
    if aim.discriminator is not None:
        kernel, bias, label = aim.discriminator
        # One token ahead of what is said, as a mean over what it may be; only that one's state is steered.
        next_one = jax.nn.softmax(logits)[:, None]
        ahead, *_ = extend(model, params, next_one, text.lengths + 1, text.plain)
        states = text.read.hidden + jax.lax.stop_gradient(hidden[:, 0]) + ahead[:, 0]
        scores = states / (text.lengths[:, None] + 2) @ kernel + bias
        total -= jax.nn.log_softmax(scores)[:, label]
    if steering.kl_scale:
        real = slice(model.config.vocab_size)
        unsteered = jax.nn.log_softmax(text.logits)
        total += steering.kl_scale * jnp.sum(jnp.exp(said[:, real]) * (said - unsteered)[:, real], axis=1)
    return total.sum()
