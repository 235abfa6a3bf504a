"""From the logits of next tokens to the one that is taken."""

import jax
import jax.numpy as jnp
from jax import Array

from models.core.noise import gumbel
from pretrain.generation.settings import Decoding


def penalised(logits: Array, seen: Array | None, penalty: float) -> Array:
    """Logits or log probabilities f32[rows, vocab], less for tokens seen, bool[rows, vocab]."""
    if seen is None:
        return logits
    return jnp.where(seen, jnp.where(logits < 0, logits * penalty, logits / penalty), logits)


def likeliest(logits: Array, top_k: int, top_p: float) -> Array:
    """Logits f32[rows, vocab], -inf for tokens that are not among the likeliest; of equal ones all or none."""
    if top_k:
        kept = jax.lax.top_k(logits, top_k)[0]  # descending
        logits = jnp.where(logits < kept[:, -1:], -jnp.inf, logits)
    elif top_p < 1:
        kept = -jnp.sort(-logits)
    if top_p < 1:
        shares = jax.nn.softmax(kept)
        before = jnp.cumsum(shares, axis=-1) - shares  # of likelier tokens
        last = jnp.maximum((before < top_p).sum(-1, keepdims=True), 1) - 1
        logits = jnp.where(logits < jnp.take_along_axis(kept, last, 1), -jnp.inf, logits)
    return logits


def choose(logits: Array, noise: Array, decoding: Decoding) -> Array:
    """logits f32[rows, vocab], noise u32[rows, 2] -> tokens i32[rows]."""
    if decoding.sample:
        logits = likeliest(logits / decoding.temperature, decoding.top_k, decoding.top_p)
        logits += gumbel(noise, logits.shape[1:])
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def first_seen(shape: tuple[int, int], tokens: Array, segments: Array, decoding: Decoding) -> Array | None:
    """Which tokens stand in left-padded prompts, bool[rows, vocab]; None where no penalty asks."""
    if decoding.repetition_penalty == 1:
        return None
    return with_seen(jnp.zeros(shape, bool), tokens, segments > 0)


def with_seen(seen: Array, tokens: Array, real: Array | bool) -> Array:
    """seen bool[rows, vocab] and tokens i32[rows, n], where they are real."""
    return seen.at[jnp.arange(len(tokens))[:, None], tokens].max(real)
