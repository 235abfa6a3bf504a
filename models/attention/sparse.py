"""Attention by a sparse pattern's blocks in plain operations: time and memory are linear in the length, everywhere.

What each block of queries reads (`near`, `columns`, `drawn`, `gathered`: arrays of keys) is apart from what it computes
of that (`mix`). The definition, dense, is `plain.attention`; both draw the same dropout.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from models.attention.mask import Mask
from models.attention.patterns.blocks import Blocks
from models.core.noise import bits_at, stays
from models.core.parameters import Noise
from models.core.sharding import current_rules

BEYOND, HIDDEN = -1, -2  # segments of positions beyond the row's end, and of keys that nobody sees where they are read


class Queries(NamedTuple):
    """Arrays [batch, heads, blocks, queries, ...], or with 1 for batch or heads.

    q: scaled.   segments, positions: in the row.   thresholds: of a mask with ranks.
    """

    q: Array
    segments: Array
    positions: Array
    thresholds: Array | None


class Keys(NamedTuple):
    """Arrays [batch, heads, blocks, keys, ...], or with 1 for batch or heads, for blocks where all read the same.

    segments: HIDDEN where a key is not seen.   ranks: of a mask that has them.
    reach, dilation: i32[heads or 1] of what is read by offsets, as in `Blocks`.
    """

    k: Array
    v: Array
    segments: Array
    positions: Array
    ranks: Array | None
    reach: Array | None = None
    dilation: Array | None = None


class Draw(NamedTuple):
    """Dropout on probabilities. keys: u32[batch, 2].   shape: (heads, length, length) of whole rows.
    heads: i32[heads], those that are here."""

    rate: float
    keys: Array
    shape: tuple[int, int, int]
    heads: Array


def wins(mask: Mask) -> bool:
    """Whether `attention` is faster than the dense form for a mask's blocks."""
    blocks = mask.blocks
    read = (len(blocks.offsets) + len(blocks.columns) + len(blocks.rows) + blocks.drawn.shape[-1]) * blocks.block
    return mask.segments.shape[1] > read


def attention(q: Array, k: Array, v: Array, mask: Mask, *, dropout_rate: float, noise: Noise) -> Array:
    """`plain.attention` of a mask with blocks -> [batch, length, heads, head_dim]; the same but for rounding."""
    rules, heads = current_rules(), jnp.arange(q.shape[2])
    attend = functools.partial(_attend, rate=dropout_rate, shape=(q.shape[2], q.shape[1], q.shape[1]))
    operands = (q, k, v, mask, heads, noise if dropout_rate else None)
    if rules is None:
        return attend(*operands)
    whole = rules.spec(("batch", None, "heads", None), q.shape)
    specs = (whole, whole, whole, _mask_specs(mask, whole), PartitionSpec(whole[2]), PartitionSpec(whole[0]))
    return jax.shard_map(attend, mesh=rules.mesh, in_specs=specs, out_specs=whole, check_vma=False)(*operands)


def _mask_specs(mask: Mask, whole: PartitionSpec) -> Mask:
    """How a mask's arrays are cut like queries [batch, length, heads, head_dim] that are cut so."""
    rows = lambda array: None if array is None else PartitionSpec(whole[0])
    heads = lambda array: None if array is None else PartitionSpec(whole[2] if array.shape[0] > 1 else None)
    own = mask.blocks
    own = dataclasses.replace(own, drawn=heads(own.drawn), reach=heads(own.reach), dilation=heads(own.dilation))
    fields = {name: rows(getattr(mask, name)) for name in ("segments", "ranks", "thresholds", "globals")}
    return dataclasses.replace(mask, blocks=own, **fields)


def _attend(
    q: Array, k: Array, v: Array, mask: Mask, heads: Array, noise: Noise, rate: float, shape: tuple[int, int, int]
) -> Array:
    """`attention` of whole rows and of some heads, numbered `heads`."""
    blocks, length = mask.blocks, q.shape[1]
    draw = None if noise is None else Draw(rate, noise, shape, heads)
    queries, keys = cut(q, k, v, mask)
    few = keys  # what is read once only is hidden where it is read besides
    if mask.globals is not None:
        is_global = jnp.zeros(mask.segments.shape, bool).at[_where(mask.globals, length)].set(True, mode="drop")
        few = few._replace(segments=jnp.where(_cut(is_global[:, None], blocks.block, False), HIDDEN, few.segments))
    read = [near(few, blocks)]
    read += [columns(few, blocks.columns)] if blocks.columns else []
    read += [drawn(few, blocks.drawn)] if blocks.drawn.shape[-1] else []
    read += [gathered(whole(keys), mask.globals)] if mask.globals is not None else []
    mixed = mix(queries, read, mask, draw)
    if blocks.rows:
        of_rows = mix(columns(queries, blocks.rows), [whole(keys)], mask, draw)
        for number, row in enumerate(blocks.rows):
            mixed = mixed.at[:, :, row].set(of_rows[:, :, 0, number * blocks.block :][:, :, : blocks.block])
    mixed = mixed.reshape(*mixed.shape[:2], -1, mixed.shape[-1])[:, :, :length].swapaxes(1, 2)
    if mask.globals is not None:
        of_globals = mix(gathered(whole(queries), mask.globals), [whole(keys)], mask, draw)[:, :, 0].swapaxes(1, 2)
        mixed = mixed.at[_where(mask.globals, length)].set(of_globals, mode="drop")
    return mixed


def _where(positions: Array, length: int) -> tuple[Array, Array]:
    """Indices of positions i32[batch, n] in [batch, length]; beyond it for -1, which would be the last."""
    return jnp.arange(positions.shape[0])[:, None], jnp.where(positions < 0, length, positions)


def cut(q: Array, k: Array, v: Array, mask: Mask) -> tuple[Queries, Keys]:
    """q, k, v [batch, length, heads, head_dim] as blocks; the last one is filled up."""
    block = mask.blocks.block
    of_heads = lambda x: _cut(x.swapaxes(1, 2), block, 0)
    of_rows = lambda x, fill: None if x is None else _cut(x[:, None], block, fill)
    segments, positions = of_rows(mask.segments, BEYOND), of_rows(jnp.arange(q.shape[1])[None], 0)
    queries = Queries(of_heads(q * q.shape[-1] ** -0.5), segments, positions, of_rows(mask.thresholds, 0))
    return queries, Keys(of_heads(k), of_heads(v), segments, positions, of_rows(mask.ranks, 0))


def _cut(x: Array, block: int, fill) -> Array:
    """x [batch, heads, length, ...] -> [batch, heads, blocks, block, ...]."""
    short = -x.shape[2] % block
    x = jnp.pad(x, [(0, 0), (0, 0), (0, short)] + [(0, 0)] * (x.ndim - 3), constant_values=fill)
    return x.reshape(*x.shape[:2], -1, block, *x.shape[3:])


def near(keys: Keys, blocks: Blocks) -> Keys:
    """What each block reads at the offsets, but for what it reads as columns."""
    number, before, after = keys.k.shape[2], max(0, -blocks.offsets[0]), max(0, blocks.offsets[-1])

    def shifted(x: Array | None, fill: int = 0) -> Array | None:
        if x is None:
            return None
        ends = [(0, 0), (0, 0), (before, after)] + [(0, 0)] * (x.ndim - 3)
        x = jnp.pad(x, ends, constant_values=fill)
        return jnp.concatenate([x[:, :, before + o :][:, :, :number] for o in blocks.offsets], axis=3)

    is_column = jnp.isin(jnp.arange(number), jnp.array(blocks.columns, jnp.int32))[:, None]
    segments = shifted(jnp.where(is_column, HIDDEN, keys.segments), HIDDEN)
    k, v, _, positions, ranks = map(shifted, keys[:5])
    return Keys(k, v, segments, positions, ranks, blocks.reach, blocks.dilation)


def columns(tokens: Keys | Queries, numbers: tuple[int, ...]):
    """The tokens of a few blocks, which all read, as one."""
    return jax.tree.map(lambda x: jnp.concatenate([x[:, :, n : n + 1] for n in numbers], axis=3), tokens)


def drawn(keys: Keys, table: Array) -> Keys:
    """What each block reads by a table i32[heads or 1, blocks, n] of its own; -1 for nothing."""

    def taken(x: Array) -> Array:
        if table.shape[0] == 1:
            y = x[:, :, table[0]]
        else:
            of_heads = None if x.shape[1] == 1 else 1
            x = x[:, 0] if of_heads is None else x
            y = jax.vmap(lambda x, numbers: x[:, numbers], (of_heads, 0), 1)(x, table)
        return y.reshape(*y.shape[:3], -1, *y.shape[5:])

    read = jax.tree.map(taken, keys)
    named = jnp.repeat(table >= 0, keys.k.shape[3], axis=-1)
    return read._replace(segments=jnp.where(named, read.segments, HIDDEN))


def whole(tokens: Keys | Queries):
    """All tokens of the row as one block."""
    return jax.tree.map(lambda x: x.reshape(*x.shape[:2], 1, -1, *x.shape[4:]), tokens)


def gathered(tokens: Keys | Queries, positions: Array):
    """The tokens of one block at positions i32[batch, n]; hidden where that is -1."""
    take = jax.vmap(lambda x, at: jnp.take(x, at, axis=2, mode="clip"))
    rows = positions.shape[0]
    tokens = jax.tree.map(lambda x: take(jnp.broadcast_to(x, (rows, *x.shape[1:])), positions), tokens)
    return tokens._replace(segments=jnp.where(positions[:, None, None] < 0, HIDDEN, tokens.segments))


def mix(queries: Queries, read: list[Keys], mask: Mask, draw: Draw | None) -> Array:
    """Softmax over all that queries read, and the sum of values -> like queries.q, in its dtype."""
    seen = [_seen(queries, keys, mask) for keys in read]
    lowest = jnp.finfo(jnp.float32).min
    scores = [jnp.where(s, _product(queries.q, keys.k, "k"), lowest) for s, keys in zip(seen, read, strict=True)]
    tops = [part.max(-1, keepdims=True) for part in scores]
    top = jax.lax.stop_gradient(functools.reduce(jnp.maximum, tops))
    weights = [jnp.exp(part - top) for part in scores]
    total = sum(part.sum(-1, keepdims=True) for part in weights)
    if draw is not None:
        weights = [_dropped(part, queries, keys, draw) for part, keys in zip(weights, read, strict=True)]
    mixed = sum(_product(part.astype(keys.v.dtype), keys.v, "v") for part, keys in zip(weights, read, strict=True))
    mixed = mixed / total
    if mask.ranks is not None:  # else every query sees itself
        mixed = jnp.where(functools.reduce(jnp.logical_or, [s.any(-1, keepdims=True) for s in seen]), mixed, 0)
    return mixed.astype(queries.q.dtype)


def _product(x: Array, y: Array, of: str) -> Array:
    """Scores of queries x and keys y ('k'), or probabilities x of values y ('v'), as float32."""
    shared = y.shape[2] == 1
    inner = {"k": ("qd", "kd", "qk"), "v": ("qk", "kd", "qd")}[of]
    equation = "bhn{},bhn{}->bhn{}" if not shared else "bhn{},bh{}->bhn{}"
    y = y[:, :, 0] if shared else y
    return jnp.einsum(equation.format(*inner), x, y, preferred_element_type=jnp.float32)


def _seen(queries: Queries, keys: Keys, mask: Mask) -> Array:
    """bool[batch or 1, heads or 1, blocks, queries, keys]."""
    of_queries = lambda array: array[..., :, None]
    of_keys = lambda array: array[..., None, :]
    seen = of_queries(queries.segments) == of_keys(keys.segments)
    own, theirs = of_queries(queries.positions), of_keys(keys.positions)
    if mask.ranks is not None:
        reached = of_keys(keys.ranks) < of_queries(queries.thresholds)
        seen &= reached | (theirs == own) if mask.itself else reached
    if mask.causal:
        seen &= theirs <= own
    if keys.reach is not None:
        of_heads = lambda array: array[:, None, None, None]
        distance = jnp.abs(theirs - own)
        seen &= (distance <= of_heads(keys.reach)) & (distance % of_heads(keys.dilation) == 0)
    return seen


def _dropped(weights: Array, queries: Queries, keys: Keys, draw: Draw) -> Array:
    """`dropout` of the probabilities of whole rows, as far as they are here."""
    at = (draw.heads[:, None, None, None], queries.positions[..., :, None], keys.positions[..., None, :])
    at = [index[(None,) * (5 - index.ndim)] for index in at]
    kept = stays(bits_at(draw.keys, draw.shape, at), draw.rate)
    return jnp.where(kept, weights * (1.0 / (1.0 - draw.rate)), 0)
