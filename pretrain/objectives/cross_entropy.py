"""Cross-entropy losses of predictions, in float32."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array

from models.core.sharding import current_rules
from pretrain.objectives.objective import Term

BLOCK = 256  # targets of a cluster whose logits are computed at a time


def cross_entropy(logits: Array, targets: Array) -> tuple[Array, Array]:
    """logits f32[n, vocab], targets i32[n] -> f32[n] each: -log p(target) in nats, 1 if the target is the best
    guess."""
    best = jax.lax.stop_gradient(logits.max(axis=-1))
    losses, target = _negative_log_likelihood(logits, targets, best)
    return losses, (target >= best).astype(jnp.float32)


def predicted(logits: Array, targets: Array, weights: Array) -> Term:
    """Compute the term of n predictions.   logits: f32[n, vocab].   targets i32, weights f32: n in any shape."""
    losses, hits = cross_entropy(logits, targets.reshape(-1))
    weights = weights.reshape(-1)
    return Term(jnp.sum(losses * weights), jnp.sum(hits * weights))


@jax.custom_vjp
def _negative_log_likelihood(logits: Array, targets: Array, best: Array) -> tuple[Array, Array]:
    """Compute (-log p(target), the target's logit), both f32[n].   best: f32[n], the largest logit. Only the first is
    differentiated: its gradient, softmax - target, is one pass over the logits and needs no scatter."""
    return _with_residuals(logits, targets, best)[0]


def _with_residuals(logits, targets, best):
    # Everything is relative to the best: adding it to the logarithm would lose digits of large logits.
    total = jnp.log(jnp.sum(jnp.exp(logits - best[:, None]), axis=-1))
    target = at_targets(logits, targets)
    return (total - (target - best), target), (logits, targets, best, total)


def at_targets(logits: Array, targets: Array) -> Array:
    """Select logits f32[..., vocab] at targets i32[...] -> f32[...]."""
    if current_rules() is None:
        return jnp.take_along_axis(logits, targets[..., None], axis=-1, mode="clip")[..., 0]
    # A gather would all-gather a vocabulary that is sharded over devices.
    return jnp.sum(jnp.where(jnp.arange(logits.shape[-1]) == targets[..., None], logits, 0.0), axis=-1)


def _gradients(residuals, cotangents):
    logits, targets, best, total = residuals
    is_target = jnp.arange(logits.shape[-1]) == targets[:, None]
    gradient = jnp.exp((logits - best[:, None]) - total[:, None]) - is_target
    return gradient * cotangents[0][:, None], None, None


_negative_log_likelihood.defvjp(_with_residuals, _gradients)


def binary_cross_entropy(logits: Array, labels: Array) -> Array:
    """Compute -log p(label) in nats for labels in {0, 1}, where p(1) = sigmoid(logit); equal shapes, float32."""
    return jnp.maximum(logits, 0.0) - logits * labels + jnp.log1p(jnp.exp(-jnp.abs(logits)))


def adaptive_cross_entropy(
    head: Array, tails: Sequence[tuple[Array, Array, Array]], targets: Array, cutoffs: Sequence[int]
) -> Array:
    """Compute the loss of an adaptive softmax (Grave et al. 2017, arXiv:1609.04309, section 4): -log p(target) in nats
    f32[n], where p(token) = p(cluster) * p(token in the cluster).

    A cluster's logits are computed only for its own targets, one block at a time, and again for the gradient: of
    WikiText-103's 267,735 columns a target then needs 20,003 and, one time in twenty, those of its cluster.

    head: logits f32[n, shortlist + clusters].   tails: for each cluster (hidden [n, width], table f32[rows, width],
    bias f32[rows], -inf in padding rows), with logits hidden @ table.T + bias.
    targets: i32[n], numbered by falling frequency.   cutoffs: first token of each cluster, ascending.
    """
    cluster = sum((targets >= start).astype(jnp.int32) for start in cutoffs)  # 0: the shortlist
    losses, _ = cross_entropy(head, jnp.where(cluster == 0, targets, cutoffs[0] + cluster - 1))
    for number, (tail, start) in enumerate(zip(tails, cutoffs, strict=True), 1):
        inside = jnp.clip(targets - start, 0, tail[1].shape[0] - 1)
        losses += _on_each_device(*tail, inside, cluster == number)
    return losses


def _on_each_device(hidden: Array, table: Array, bias: Array, targets: Array, members: Array) -> Array:
    """Compute `_member_losses` on each device for its own rows; sorting over all devices would move rows."""
    rules = current_rules()
    if rules is None:
        return _member_losses(hidden, table, bias, targets, members)
    axes = (("batch", None), (None, None), (None,), ("batch",), ("batch",))
    specs = tuple(map(rules.spec, axes, (x.shape for x in (hidden, table, bias, targets, members))))
    losses = jax.shard_map(_member_losses, mesh=rules.mesh, in_specs=specs, out_specs=specs[-1], check_vma=False)
    return losses(hidden, table, bias, targets, members)


@jax.custom_vjp
def _member_losses(hidden: Array, table: Array, bias: Array, targets: Array, members: Array) -> Array:
    """Compute the cross-entropy f32[n] of rows that are members (bool[n]), 0 for the others.   targets: i32[n]."""
    return _forward(hidden, table, bias, targets, members)[0]


def _forward(hidden, table, bias, targets, members):
    table = table.astype(hidden.dtype)

    def block(rows: Array, losses: Array) -> Array:
        of_rows, _ = cross_entropy(_logits(_taken(hidden, rows), table, bias), _taken(targets, rows))
        return losses.at[rows].set(of_rows, mode="drop")

    losses = _over_blocks(members, block, jnp.zeros(targets.shape, jnp.float32))
    return jnp.where(members, losses, 0.0), (hidden, table, bias, targets, members)


def _backward(residuals, g):
    hidden, table, bias, targets, members = residuals
    g = jnp.where(members, g, 0.0)

    def block(rows: Array, gradients: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        d_hidden, d_table, d_bias = gradients
        of_rows = _taken(hidden, rows)
        probabilities = jax.nn.softmax(_logits(of_rows, table, bias))
        is_target = jnp.arange(table.shape[0]) == _taken(targets, rows)[:, None]
        d_logits = (probabilities - is_target) * _taken(g, rows)[:, None]
        d_bias += d_logits.sum(0)
        d_logits = d_logits.astype(table.dtype)
        d_table += jnp.einsum("nv,nw->vw", d_logits, of_rows, preferred_element_type=jnp.float32)
        return d_hidden.at[rows].set(d_logits @ table, mode="drop"), d_table, d_bias

    zeros = jnp.zeros_like(hidden), jnp.zeros(table.shape, jnp.float32), jnp.zeros_like(bias)
    d_hidden, d_table, d_bias = _over_blocks(members, block, zeros)
    return d_hidden, d_table, d_bias, None, None


_member_losses.defvjp(_forward, _backward)


def _over_blocks(members: Array, block, state):
    """Apply block(rows i32[BLOCK], state) -> state to blocks that cover all members; rows of n or more are padding."""
    n = members.shape[0]
    size = min(BLOCK, n)
    order = jnp.pad(jnp.argsort(~members, stable=True), (0, -n % size), constant_values=n)
    count = members.sum()

    def turn(carried):
        start, state = carried
        return start + size, block(jax.lax.dynamic_slice(order, (start,), (size,)), state)

    return jax.lax.while_loop(lambda carried: carried[0] < count, turn, (jnp.zeros_like(count), state))[1]


def _taken(x: Array, rows: Array) -> Array:
    return x.at[rows].get(mode="fill", fill_value=0)


def _logits(hidden: Array, table: Array, bias: Array) -> Array:
    """Compute logits f32[n, rows]."""
    return jnp.einsum("nw,vw->nv", hidden, table, preferred_element_type=jnp.float32) + bias
