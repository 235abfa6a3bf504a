"""The cache of a text changed so that what comes next has more of an attribute: section 3.2 and equations 3 and 4 of
Dathathri et al. 2020."""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from models.attention.cache import Cache
from models.core.parameters import Params
from pretrain.generation.reading import of_next
from pretrain.steering.settings import Steering

SMALL = 1e-15  # beside a norm of 0


class Aim(NamedTuple):
    """What a text is steered towards, by words, by a discriminator, or both.

    words: bool[padded vocab], the tokens of a bag; None without.
    discriminator: kernel f32[width, labels] and bias f32[labels] on the mean of a text's hidden states, and the label
    i32[]; None without.
    """

    words: Array | None = None
    discriminator: tuple[Array, Array, Array] | None = None


class Text(NamedTuple):
    """Texts that go on, and what the model says of them without steering.

    last: i32[rows, 1], the tokens that are not in `cache` yet.   lengths: i32[rows], tokens without the last.
    cache: of those, as steered so far.   logits: f32[rows, padded vocab], unsteered, after the last token.
    plain: the unsteered cache of all tokens.   hidden: f32[rows, width], the sum of the unsteered hidden states of all
    tokens but the last.
    """

    last: Array
    lengths: Array
    cache: Cache
    logits: Array
    plain: Cache
    hidden: Array


def extend(model: nn.Module, params: Params, tokens: Array, lengths: Array, cache: Cache):
    """One more token, see `of_next` -> (hidden [rows, 1, width], logits f32[rows, padded vocab], the cache with it)."""
    hidden, cache = model.apply({"params": params}, of_next(tokens, lengths), cache, method="advance")
    return hidden, model.apply({"params": params}, hidden, method="token_logits"), cache


def perturbed(
    model: nn.Module, params: Params, aim: Aim, steering: Steering, text: Text, norms: Array
) -> tuple[Cache, Array]:
    """The cache after `iterations` gradient steps, and the norms with those of its gradients.

    norms: f32[depth, rows], of gradients of a layer's keys and values so far, by whose largest those towards a bag of
    words are divided, so that steps are small where none of its words is near.
    """
    cache, places = text.cache, jnp.arange(text.cache.segments.shape[1])
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

    return jax.lax.fori_loop(0, steering.iterations, step, (cache, norms))


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
        states = text.hidden + jax.lax.stop_gradient(hidden[:, 0]) + ahead[:, 0]
        scores = states / (text.lengths[:, None] + 2) @ kernel + bias
        total -= jax.nn.log_softmax(scores)[:, label]
    if steering.kl_scale:
        real = slice(model.config.vocab_size)
        unsteered = jax.nn.log_softmax(text.logits)
        total += steering.kl_scale * jnp.sum(jnp.exp(said[:, real]) * (said - unsteered)[:, real], axis=1)
    return total.sum()
