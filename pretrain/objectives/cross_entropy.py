"""Losses per prediction, in float32."""

import jax
import jax.numpy as jnp
from jax import Array

from models.core.sharding import current_rules
from pretrain.objectives.objective import Term


def cross_entropy(logits: Array, targets: Array) -> tuple[Array, Array]:
    """logits f32[n, vocab], targets i32[n] -> (-log p(target) in nats f32[n], whether it is the best guess f32[n])."""
    best = jax.lax.stop_gradient(logits.max(axis=-1))
    losses, target = _negative_log_likelihood(logits, targets, best)
    return losses, (target >= best).astype(jnp.float32)


def predicted(logits: Array, targets: Array, weights: Array) -> Term:
    """The term of n predictions.   logits: f32[n, vocab].   targets, weights: i32 and f32, n in any one shape."""
    losses, hits = cross_entropy(logits, targets.reshape(-1))
    weights = weights.reshape(-1)
    return Term(jnp.sum(losses * weights), jnp.sum(hits * weights))


@jax.custom_vjp
def _negative_log_likelihood(logits: Array, targets: Array, best: Array) -> tuple[Array, Array]:
    """(-log p(target), the target's logit), both f32[n]; best f32[n]: the largest logit. Only the first is
    differentiated: its gradient, softmax - target, is one pass over the logits and needs no scatter."""
    return _with_residuals(logits, targets, best)[0]


def _with_residuals(logits, targets, best):
    # Relative to the best throughout: adding it to the logarithm would round away digits of large logits.
    total = jnp.log(jnp.sum(jnp.exp(logits - best[:, None]), axis=-1))
    target = at_targets(logits, targets)
    return (total - (target - best), target), (logits, targets, best, total)


def at_targets(logits: Array, targets: Array) -> Array:
    """logits f32[..., vocab] at targets i32[...] -> f32[...]."""
    if current_rules() is None:
        return jnp.take_along_axis(logits, targets[..., None], axis=-1, mode="clip")[..., 0]
    # A gather would collect the whole vocabulary where that is cut over devices.
    return jnp.sum(jnp.where(jnp.arange(logits.shape[-1]) == targets[..., None], logits, 0.0), axis=-1)


def _gradients(residuals, cotangents):
    logits, targets, best, total = residuals
    is_target = jnp.arange(logits.shape[-1]) == targets[:, None]
    gradient = jnp.exp((logits - best[:, None]) - total[:, None]) - is_target
    return gradient * cotangents[0][:, None], None, None


_negative_log_likelihood.defvjp(_with_residuals, _gradients)


def binary_cross_entropy(logits: Array, labels: Array) -> Array:
    """-log p(label) in nats for labels in {0, 1}, where sigmoid(logit) = p(1); any equal shapes, float32."""
    return jnp.maximum(logits, 0.0) - logits * labels + jnp.log1p(jnp.exp(-jnp.abs(logits)))
