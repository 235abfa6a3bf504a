"""Block-sparse attention by plain operations, on every platform; time and memory are linear in the length.

`near`, `columns`, `drawn` and `gathered` collect the keys that each block of queries reads; `mix` computes attention to
them. The dense definition is `plain.attention`; both draw the same dropout.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from models.attention import exchange
from models.attention.exchange import WHOLE, Part
from models.attention.layouts import HEADS_APART, Mixing
from models.attention.mask import Mask
from models.attention.patterns.blocks import Blocks
from models.blocks.products import contraction
from models.core.noise import bits_at, stays
from models.core.parameters import Noise
from models.core.sharding import current_rules

BEYOND, HIDDEN = -1, -2  # segments of positions beyond the row's end, and of keys that are read but not seen


class Queries(NamedTuple):
    """Arrays [batch, heads, blocks, queries, ...]; batch or heads may be 1.
    q: scaled.   segments, positions: of the queries in the row.   thresholds: of a mask with ranks."""

    q: Array
    segments: Array
    positions: Array
    thresholds: Array | None


class Keys(NamedTuple):
    """Arrays [batch, heads, blocks, keys, ...]; batch or heads may be 1, and blocks if all read the same keys.

    segments: HIDDEN for keys that are not seen.   ranks: of a mask that has them.
    near: bool[heads or 1, 1, queries, keys], which keys at the offsets a block sees; None for all.
    """

    k: Array
    v: Array
    segments: Array
    positions: Array
    ranks: Array | None
    near: Array | None = None


class Draw(NamedTuple):
    """Dropout on probabilities.   keys: u32[batch, 2].   shape: (heads, length, length) of whole rows.
    heads: i32[heads], the numbers of this device's heads."""

    rate: float
    keys: Array
    shape: tuple[int, int, int]
    heads: Array


def crossover(blocks: Blocks) -> int:
    """Return the length beyond which `attention` is faster than the dense form: the pairs that it computes for each
    query, which are the keys that it reads and its share of the whole rows that `blocks.rows` read.
    Measured only on a CPU, with BigBird's pattern (512 + 128 pairs) and width 768, forward and backward. Time relative
    to the dense form: 1.25 for rows of 512 tokens, 1.06 for 640, 0.58 for 768, 0.39 for 1,024."""
    named = len(blocks.offsets) + len(blocks.columns) + len(blocks.rows) + blocks.drawn.shape[-1]
    return named * blocks.block


def attention(q: Array, k: Array, v: Array, mask: Mask, *, dropout_rate: float, noise: Noise) -> Array:
    """Compute `plain.attention` of a mask with blocks -> [batch, length, heads, head_dim], the same up to rounding."""
    rules, heads = current_rules(), jnp.arange(q.shape[2])
    attend = functools.partial(_attend, rate=dropout_rate, shape=(q.shape[2], q.shape[1], q.shape[1]))
    operands = (q, k, v, mask, heads, noise if dropout_rate else None)
    if rules is None:
        return attend(*operands, WHOLE)
    spec = rules.spec(("batch", "length", "heads", None), q.shape)
    attend = functools.partial(attend, part=Part(spec[1], rules.mesh.shape[spec[1]]) if spec[1] else WHOLE)
    specs = (spec, spec, spec, _mask_specs(mask, spec), PartitionSpec(spec[2]), PartitionSpec(spec[0]))
    return jax.shard_map(attend, mesh=rules.mesh, in_specs=specs, out_specs=spec, check_vma=False)(*operands)


BLOCKED = Mixing(HEADS_APART, attention)


def _mask_specs(mask: Mask, spec: PartitionSpec) -> Mask:
    """Return how a mask's arrays are sharded if queries [batch, length, heads, head_dim] have this spec: each device
    has the segments and ranks of its whole rows, which are small, and its own queries' part of the tables."""
    rows = lambda array: None if array is None else PartitionSpec(spec[0])
    heads = lambda array: spec[2] if array.shape[0] > 1 else None
    of_heads = lambda array: None if array is None else PartitionSpec(heads(array))
    blocks = mask.blocks
    drawn = PartitionSpec(heads(blocks.drawn), spec[1])
    blocks = dataclasses.replace(blocks, drawn=drawn, reach=of_heads(blocks.reach), dilation=of_heads(blocks.dilation))
    fields = {name: rows(getattr(mask, name)) for name in ("segments", "ranks", "thresholds", "globals")}
    return dataclasses.replace(mask, blocks=blocks, **fields)


def _attend(
    q: Array,
    k: Array,
    v: Array,
    mask: Mask,
    heads: Array,
    noise: Noise,
    part: Part,
    rate: float,
    shape: tuple[int, int, int],
) -> Array:
    """Compute `attention` for the queries of a part of the rows and for some heads, whose numbers are `heads`."""
    blocks, length = mask.blocks, q.shape[1]
    draw = None if noise is None else Draw(rate, noise, shape, heads)
    queries, keys = cut(q, k, v, mask)
    unique_keys = keys  # a key that is read in several ways must be seen only once
    if mask.globals is not None:
        at = _where(mask.globals, mask.segments.shape[1])
        is_global = jnp.zeros(mask.segments.shape, bool).at[at].set(True, mode="drop")
        unique_keys = unique_keys._replace(
            segments=jnp.where(_cut(is_global[:, None], blocks.block, False), HIDDEN, unique_keys.segments)
        )
    read = [near(unique_keys, blocks, part)]
    read += [columns(unique_keys, blocks.columns, part)] if blocks.columns else []
    read += [drawn(unique_keys, blocks, part)] if blocks.drawn.shape[-1] else []
    read += [gathered(keys, mask.globals, part)] if mask.globals is not None else []
    mixed = mix(of_part(queries, part), read, mask, draw)
    everything = [whole(of_part(keys, part))]
    if blocks.rows:
        of_rows = mix(columns(queries, blocks.rows, part), everything, mask, draw, part)
        of_rows = of_rows.reshape(*of_rows.shape[:2], len(blocks.rows), blocks.block, -1)
        mixed = mixed.at[:, :, part.places(blocks.rows, mixed.shape[2])].set(of_rows, mode="drop")
    mixed = mixed.reshape(*mixed.shape[:2], -1, mixed.shape[-1])[:, :, :length].swapaxes(1, 2)
    if mask.globals is not None and not mask.globals_apart:
        of_globals = mix(gathered(queries, mask.globals, part), everything, mask, draw, part)[:, :, 0]
        at = _where(mask.globals - part.first(length), length)
        mixed = mixed.at[at].set(of_globals.swapaxes(1, 2), mode="drop")
    return mixed


def _where(positions: Array, length: int) -> tuple[Array, Array]:
    """Return indices into [batch, length] of positions i32[batch, n]; negative ones, which would count from the end,
    are out of bounds instead."""
    return jnp.arange(positions.shape[0])[:, None], jnp.where(positions < 0, length, positions)


def cut(q: Array, k: Array, v: Array, mask: Mask) -> tuple[Queries, Keys]:
    """Cut q, k, v [batch, length, heads, head_dim] of a part, and the mask's arrays of whole rows, into blocks; the
    last block is padded."""
    block = mask.blocks.block
    of_heads = lambda x: _cut(x.swapaxes(1, 2), block, 0)
    of_rows = lambda x, fill: None if x is None else _cut(x[:, None], block, fill)
    segments, positions = of_rows(mask.segments, BEYOND), of_rows(jnp.arange(mask.segments.shape[1])[None], 0)
    queries = Queries(of_heads(q * q.shape[-1] ** -0.5), segments, positions, of_rows(mask.thresholds, 0))
    return queries, Keys(of_heads(k), of_heads(v), segments, positions, of_rows(mask.ranks, 0))


def _cut(x: Array, block: int, fill) -> Array:
    """Cut x [batch, heads, length, ...] into blocks [batch, heads, blocks, block, ...]."""
    short = -x.shape[2] % block
    x = jnp.pad(x, [(0, 0), (0, 0), (0, short)] + [(0, 0)] * (x.ndim - 3), constant_values=fill)
    return x.reshape(*x.shape[:2], -1, block, *x.shape[3:])


def _read(tokens: Keys | Queries, of_parts: Callable, of_rows: Callable):
    """Apply `of_parts` to q, k and v, of which a device may have a part, and `of_rows` to the arrays of whole rows."""

    def read(name, x):
        return x if x is None else of_parts(x) if name in ("q", "k", "v") else of_rows(x)

    return tokens._replace(**{name: read(name, x) for name, x in tokens._asdict().items()})


def of_part(tokens: Keys | Queries, part: Part):
    """Return the tokens of this part only."""
    number = tokens[0].shape[2]
    return _read(tokens, lambda x: x, lambda x: part.cut(x, number))


def near(keys: Keys, blocks: Blocks, part: Part) -> Keys:
    """Return the keys that each block reads at the offsets; those that it also reads as columns are hidden."""
    number, before, after = keys.k.shape[2], max(0, -blocks.offsets[0]), max(0, blocks.offsets[-1])
    is_column = jnp.isin(jnp.arange(keys.segments.shape[2]), jnp.array(blocks.columns, jnp.int32))[:, None]
    ends = lambda x: [(0, 0), (0, 0), (before, after)] + [(0, 0)] * (x.ndim - 3)

    def shifted(x):
        return jnp.concatenate([x[:, :, before + o :][:, :, :number] for o in blocks.offsets], axis=3)

    def of_row(x: Array, fill: int = 0) -> Array:
        return shifted(part.cut(jnp.pad(x, ends(x), constant_values=fill), number, before + after))

    segments = of_row(jnp.where(is_column, HIDDEN, keys.segments), HIDDEN)
    read = _read(keys, lambda x: shifted(exchange.around(x, before, after, part)), of_row)
    return read._replace(segments=segments, near=_reached(blocks))


def _reached(blocks: Blocks) -> Array | None:
    """Return which keys at the offsets any block's queries see: bool[heads or 1, 1, block, keys]."""
    if blocks.reach is None:
        return None
    queries = np.arange(blocks.block)
    keys = (np.array(blocks.offsets)[:, None] * blocks.block + queries).reshape(-1)
    distance = np.abs(keys - queries[:, None])
    of_heads = lambda array: array[:, None, None, None]
    return (distance <= of_heads(blocks.reach)) & (distance % of_heads(blocks.dilation) == 0)


def columns(tokens: Keys | Queries, numbers: tuple[int, ...], part: Part):
    """Join the tokens of a few blocks, which all queries read, into one block."""
    at = lambda x: jnp.concatenate([x[:, :, n : n + 1] for n in numbers], axis=3)
    taken = lambda x: exchange.blocks_at(x, numbers, part)
    return _read(tokens, lambda x: (y := taken(x)).reshape(*y.shape[:2], 1, -1, y.shape[-1]), at)


def drawn(keys: Keys, blocks: Blocks, part: Part) -> Keys:
    """Return the keys that each block reads by `blocks.drawn`."""
    table = blocks.drawn

    def joined(x):
        return x.reshape(*x.shape[:3], -1, *x.shape[5:])  # from [batch, heads, blocks, n, block, ...]

    taken = lambda x: joined(exchange.drawn(x, blocks, part))
    read = _read(keys, taken, lambda x: joined(x[:, 0, jnp.maximum(table, 0)]))
    named = jnp.repeat(table >= 0, blocks.block, axis=-1)[None]
    return read._replace(segments=jnp.where(named, read.segments, HIDDEN))


def whole(tokens: Keys | Queries):
    """Join all tokens into one block."""
    return jax.tree.map(lambda x: x.reshape(*x.shape[:2], 1, -1, *x.shape[4:]), tokens)


def gathered(tokens: Keys | Queries, positions: Array, part: Part):
    """Collect the tokens at positions i32[batch, n] into one block; position -1 gives a hidden token."""

    def taken(x, part):
        return exchange.tokens_at(jnp.broadcast_to(x, (len(positions), *x.shape[1:])), positions, part)

    tokens = _read(tokens, lambda x: taken(x, part)[:, :, None], lambda x: taken(x, WHOLE)[:, :, None])
    return tokens._replace(segments=jnp.where(positions[:, None, None] < 0, HIDDEN, tokens.segments))


def mix(queries: Queries, read: list[Keys], mask: Mask, draw: Draw | None, part: Part = WHOLE) -> Array:
    """Attend from queries to all keys that they read -> like queries.q, in its dtype.
    part: given if the keys are only this device's part of those that the queries see; the parts are then combined."""
    lowest = jnp.finfo(jnp.float32).min
    scores = [jnp.where(_seen(queries, keys, mask), _product(queries.q, keys.k, "k"), lowest) for keys in read]
    tops = [s.max(-1, keepdims=True) for s in scores]
    top = jax.lax.stop_gradient(functools.reduce(jnp.maximum, tops))
    weights = [jnp.exp(s - top) for s in scores]
    total = sum(w.sum(-1, keepdims=True) for w in weights)
    if draw is not None:
        weights = [_dropped(w, queries, keys, draw) for w, keys in zip(weights, read, strict=True)]
    mixed = sum(_product(w.astype(keys.v.dtype), keys.v, "v") for w, keys in zip(weights, read, strict=True))
    top, total, mixed = exchange.combined(top, total, mixed, part)
    mixed = mixed / total
    if mask.blind:
        mixed = jnp.where(top > lowest, mixed, 0)
    return mixed.astype(queries.q.dtype)


def _product(x: Array, y: Array, kind: str) -> Array:
    """Multiply queries x with keys y (kind 'k'), or probabilities x with values y ('v') -> float32."""
    inner = {"k": "qd,{0}kd->{0}qk", "v": "qk,{0}kd->{0}qd"}[kind]

    def multiply(lead, x, y):
        return jnp.einsum(lead + inner.format(lead), x, y, preferred_element_type=jnp.float32)

    if y.shape[2] > 1 or x.shape[2] == 1:
        return multiply("bhn", x, y) if kind == "k" else contraction("bhnqk,bhnkd->bhnqd", x, y.astype(jnp.float32))
    # All queries as one matrix: with two axes of rows XLA:CPU takes twice the time.
    flat = multiply("bh", x.reshape(*x.shape[:2], -1, x.shape[-1]), y[:, :, 0])
    return flat.reshape(*x.shape[:-1], -1)


def _seen(queries: Queries, keys: Keys, mask: Mask) -> Array:
    """Return which keys queries see: bool[batch or 1, heads or 1, blocks, queries, keys]."""
    of_queries = lambda array: array[..., :, None]
    of_keys = lambda array: array[..., None, :]
    seen = of_queries(queries.segments) == of_keys(keys.segments)
    query_positions, key_positions = of_queries(queries.positions), of_keys(keys.positions)
    if mask.ranks is not None:
        reached = of_keys(keys.ranks) < of_queries(queries.thresholds)
        seen &= reached | (key_positions == query_positions) if mask.itself else reached
    if mask.causal:
        seen &= key_positions <= query_positions
    return seen if keys.near is None else seen & keys.near


def _dropped(weights: Array, queries: Queries, keys: Keys, draw: Draw) -> Array:
    """Apply the part of the whole rows' `dropout` that falls on these weights."""
    at = (draw.heads[:, None, None, None], queries.positions[..., :, None], keys.positions[..., None, :])
    at = [index[(None,) * (5 - index.ndim)] for index in at]
    kept = stays(bits_at(draw.keys, draw.shape, at), draw.rate)
    return jnp.where(kept, weights * (1.0 / (1.0 - draw.rate)), 0)
