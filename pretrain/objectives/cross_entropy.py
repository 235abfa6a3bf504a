"""Losses per prediction, in float32."""

import jax
import jax.numpy as jnp
from jax import Array


def cross_entropy(logits: Array, targets: Array) -> tuple[Array, Array]:
    """logits f32[n, vocab], targets i32[n] -> (-log p(target) in nats f32[n], whether it is the best guess f32[n])."""
    # A comparison instead of a gather: its gradient is a select that fuses with the softmax, not a scatter.
    is_target = jnp.arange(logits.shape[-1]) == targets[:, None]
    target = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
    best = jax.lax.stop_gradient(logits.max(axis=-1))
    return jax.nn.logsumexp(logits, axis=-1) - target, (target >= best).astype(jnp.float32)


def binary_cross_entropy(logits: Array, labels: Array) -> Array:
    """-log p(label) in nats for labels in {0, 1}, where sigmoid(logit) = p(1); any equal shapes, float32."""
    return jnp.maximum(logits, 0.0) - logits * labels + jnp.log1p(jnp.exp(-jnp.abs(logits)))
