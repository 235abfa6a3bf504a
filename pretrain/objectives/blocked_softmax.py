"""The loss of next tokens in blocks of positions, so that the logits [tokens, vocabulary] are never all in memory.

The forward pass computes the gradients of a block together with its loss, while its logits are in memory, so that
nothing as wide as the vocabulary is stored or recomputed.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from models.blocks.products import row_product, table_scores
from models.core.sharding import constrain, current_rules, parts_of
from pretrain.objectives.cross_entropy import at_targets
from pretrain.objectives.matching import soft_of_stored

LOGITS = 2**26  # per device at once: 256 MiB, and on TPUs large enough to hide the sum of table gradients


class Sums(NamedTuple):
    """Sums over tokens f32[sets], one per set of weights: -log p(target), correct predictions, squared log-normaliser,
    how much the mean of -log p over the vocabulary exceeds -log p(target) (0 without smoothing), and the loss of soft
    targets, if there are any.

    Only `nats` is differentiated, and its gradient is that of nats + z_loss * squares + smoothing * excess: a loss that
    adds these must divide all sums by the same weight. With soft targets, `soft` is differentiated too, for one loss
    alone: `own` * nats + `factor` * soft, divided by that weight.
    """

    nats: Array
    hits: Array
    squares: Array
    excess: Array
    soft: Array | None = None


class Soft(NamedTuple):
    """Soft targets of the tokens of one set of weights, as `matching.largest` stores them: ids [rows, length, k], logs
    [rows, length, k + 1].   own, factor: of the losses of targets and of soft targets."""

    ids: Array
    logs: Array
    temperature: Array | float
    own: Array | float
    factor: Array | float


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def softmax_sums(
    hidden: Array,
    table: Array,
    bias: Array,
    targets: Array,
    weights: Array,
    z_loss: float = 0.0,
    axis: str | None = "length",
    smoothing: float = 0.0,
    soft: Soft | None = None,
) -> Sums:
    """Compute sums over the tokens of a batch with logits hidden @ table.T + bias.

    hidden [rows, length, width], table f32[vocab, width], bias f32[vocab] (-inf in padding), targets i32[rows, length],
    weights f32[sets, rows, length].   axis: name of the length axis, for the mesh.   smoothing: share of the target
    that is spread over the vocabulary, without its padding.
    """
    cuts = _cuts(targets.shape, table.shape, axis)
    table = constrain(table.astype(hidden.dtype), "vocab", None)
    shares = _shares(bias) if smoothing else None

    def block(inputs):
        x, targets, *stored = inputs
        logits = _logits(x, table, bias, axis)
        figures, (best, total) = _figures(logits, targets, shares)
        return _with_soft(figures, logits, best + jnp.log(total), *stored, soft.temperature)[0] if soft else figures

    figures = jax.lax.map(block, (_cut(hidden, cuts), _cut(targets, cuts), *_stored(soft, cuts)))
    return _sums(figures, weights, cuts)


def _forward(hidden, table, bias, targets, weights, z_loss, axis, smoothing, soft):
    cuts, sets = _cuts(targets.shape, table.shape, axis), weights.shape[0]
    shares = _shares(bias) if smoothing else None
    table = constrain(table.astype(hidden.dtype), "vocab", None)

    def block(gradients, inputs):
        of_table, of_bias = gradients
        x, targets, weights, *stored = inputs
        logits = _logits(x, table, bias, axis)
        figures, (best, total) = _figures(logits, targets, shares)
        factor = (1.0 + 2.0 * z_loss * (best + jnp.log(total))) / total
        wanted = jnp.arange(logits.shape[-1]) == targets[..., None]
        if smoothing:
            wanted = (1.0 - smoothing) * wanted + smoothing * shares
        gradient = jnp.exp(logits - best[..., None]) * factor[..., None] - wanted
        if soft:
            shown = _with_soft(figures, logits, best + jnp.log(total), *stored, soft.temperature)
            figures, (of_stored, of_total) = shown
            factor = soft.factor * of_total / total
            gradient = soft.own * gradient + jnp.exp(logits - best[..., None]) * factor[..., None]
            gradient = _added(gradient, stored[0], soft.factor * of_stored)
        of_bias += jnp.einsum("dsnk,dsnv->dskv", weights, gradient)
        gradient = gradient.astype(x.dtype)
        weighted = (weights.astype(x.dtype)[..., None] * x[..., None, :]).reshape(*x.shape[:-1], -1)
        of_table = constrain(of_table + _table_gradient(gradient, weighted), "batch", axis, "vocab", None)
        return (of_table, of_bias), (figures, jnp.einsum("dsnv,vw->dsnw", gradient, table))

    devices = (cuts.batch, cuts.length)
    zeros = jnp.zeros((*devices, table.shape[0], sets * table.shape[1])), jnp.zeros((*devices, sets, table.shape[0]))
    inputs = _cut(hidden, cuts), _cut(targets, cuts), _cut(jnp.moveaxis(weights, 0, -1), cuts), *_stored(soft, cuts)
    (of_table, of_bias), (figures, of_hidden) = jax.lax.scan(block, zeros, inputs)
    of_table = of_table.sum((0, 1)).reshape(table.shape[0], sets, table.shape[1])
    of_hidden = _joined(of_hidden, cuts, targets.shape)
    factors = soft and soft.own + soft.factor
    return _sums(figures, weights, cuts), (of_hidden, of_table, of_bias.sum((0, 1)), weights, factors)


def _backward(z_loss, axis, smoothing, residuals, cotangents):
    of_hidden, of_table, of_bias, weights, factors = residuals
    g = cotangents.nats if factors is None else (cotangents.nats + cotangents.soft) / factors
    scaled = of_hidden * jnp.tensordot(g, weights, 1)[..., None]
    return scaled.astype(of_hidden.dtype), jnp.einsum("k,vkw->vw", g, of_table), g @ of_bias, None, None, None


softmax_sums.defvjp(_forward, _backward)


def _sums(figures: Array, weights: Array, cuts: "_Cuts") -> Sums:
    whole = _joined(figures, cuts, weights.shape[1:])
    return Sums(*jnp.einsum("krl,rlf->fk", weights, whole, precision="highest"))


def _logits(x: Array, table: Array, bias: Array, axis: str | None) -> Array:
    """Compute logits: x [devices, devices, n, width] -> f32[devices, devices, n, vocab]."""
    if current_rules() is None:
        return table_scores(x[0, 0], table, bias)[None, None]
    logits = jnp.einsum("dsnw,vw->dsnv", x, table, preferred_element_type=jnp.float32)
    return constrain(logits + bias, "batch", axis, None, "vocab")


def _shares(bias: Array) -> Array:
    """Return what each token has of a distribution that is even over the vocabulary: f32[vocab], 0 in padding."""
    is_real = bias > -jnp.inf
    return is_real / is_real.sum()


def _figures(logits: Array, targets: Array, shares: Array | None) -> tuple[Array, tuple[Array, Array]]:
    """Compute ([..., n, 4]: the figures of `Sums`; (largest logit, sum of exponentials relative to it)). All exponents
    are relative to the largest logit, as in `cross_entropy`."""
    best = logits.max(-1)
    total = jnp.exp(logits - best[..., None]).sum(-1)
    target, rest = at_targets(logits, targets), jnp.log(total)
    excess = jnp.zeros_like(rest)
    if shares is not None:
        excess = target - jnp.sum(jnp.where(shares > 0, logits, 0.0) * shares, -1)
    figures = rest - (target - best), (target >= best).astype(jnp.float32), jnp.square(best + rest), excess
    return jnp.stack(figures, -1), (best, total)


def _with_soft(figures, logits, log_total, ids, logs, temperature):
    """Add the loss of soft targets to figures -> (figures, its gradients by the logits of ids, and by log_total)."""
    of_ids = jnp.take_along_axis(logits, ids, -1)
    losses, pull = jax.vjp(lambda *of: soft_of_stored(*of, logs, temperature), of_ids, log_total)
    return jnp.concatenate([figures, losses[..., None]], -1), pull(jnp.ones_like(losses))


_added = jax.vmap(jax.vmap(jax.vmap(lambda x, ids, values: x.at[ids].add(values))))  # [devices, devices, n, ...]


def _stored(soft: Soft | None, cuts: "_Cuts") -> list[Array]:
    return [_cut(x, cuts) for x in (soft[:2] if soft else ())]


def _table_gradient(gradient: Array, x: Array) -> Array:
    """Multiply gradient [.., n, vocab] and x [.., n, width] -> f32[.., vocab, width], without a sum over devices."""
    if current_rules() is None:
        return row_product(gradient[0, 0], x[0, 0])[None, None]
    return jnp.einsum("dsnv,dsnw->dsvw", gradient, x, preferred_element_type=jnp.float32)


class _Cuts(NamedTuple):
    """How tokens are split.   axis: of positions.   batch, length: numbers of devices over rows and over positions.
    blocks, size: number of blocks per device, and positions per block."""

    axis: str | None
    batch: int
    length: int
    blocks: int
    size: int


def _cuts(tokens: tuple[int, int], table: tuple[int, int], axis: str | None) -> _Cuts:
    """Choose the split from the shapes of targets and table."""
    batch, length = parts_of(("batch", axis), tokens)
    vocab = table[0] // parts_of(("vocab", None), table)[0]
    rows, positions = tokens[0] // batch, tokens[1] // length
    blocks = min(-(-rows * positions * vocab // LOGITS), positions)
    size = -(-positions // blocks)
    return _Cuts(axis, batch, length, -(-positions // size), size)


def _cut(x: Array, cuts: _Cuts) -> Array:
    """Split [rows, length, ...] -> [blocks, batch, length, n, ...], each device its own part, padded with zeros."""
    rows, length, *rest = x.shape
    x = x.reshape(cuts.batch, rows // cuts.batch, cuts.length, length // cuts.length, *rest)
    padding = cuts.blocks * cuts.size - x.shape[3]
    x = jnp.pad(x, [(0, padding if axis == 3 else 0) for axis in range(x.ndim)])
    x = jnp.moveaxis(x.reshape(*x.shape[:3], cuts.blocks, cuts.size, *rest), (3, 0, 2), (0, 1, 2))
    return constrain(x.reshape(*x.shape[:3], -1, *rest), None, "batch", cuts.axis, None, *(None for _ in rest))


def _joined(x: Array, cuts: _Cuts, tokens: tuple[int, int]) -> Array:
    """Invert `_cut`: [blocks, batch, length, n, ...] -> [rows, length, ...]."""
    rest = x.shape[4:]
    x = x.reshape(*x.shape[:3], tokens[0] // cuts.batch, cuts.size, *rest)
    x = jnp.moveaxis(x, (0, 1, 2), (3, 0, 2)).reshape(cuts.batch, x.shape[3], cuts.length, -1, *rest)
    x = x[:, :, :, : tokens[1] // cuts.length].reshape(*tokens, *rest)
    return constrain(x, "batch", cuts.axis, *(None for _ in rest))
