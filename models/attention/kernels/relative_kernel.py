"""Relative attention as one TPU kernel: scores, their shift by distance, masks and dropout never leave the chip.

A grid step has 128 queries of a row and 128 lanes of whole heads, as the projections write them. Scores lie as
[queries, keys]. Queries are multiplied only with the window of distances that they can reach. Each query's scores by
distance are then shifted to its keys, by whole blocks of 128 lanes and, within a block, by a lookup among lanes.
"""

import functools
import math
from itertools import pairwise
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from models.attention.kernels.kernel import Attention, Kernel, cuts, of_cut, of_heads, of_length
from models.attention.kernels.lanes import HIDDEN, across, along, iota, only
from models.attention.layouts import HEADS_BESIDE, Mixing
from models.attention.mask import Mask
from models.attention.operands import LANES, Biases, Context, Types
from models.core import noise as counted
from models.core.noise import ahead
from models.core.parameters import Noise
from models.core.program import kept
from models.core.sharding import current_rules

_BITS = 7  # of a lane's index
LONGEST = 2048  # distances; the scores of 128 queries then take 1 MiB


class Operands(NamedTuple):
    """The kernel's inputs, heads side by side in the width.

    q [batch, n, width], k, v [batch, keys, width], r [batch or 1, distances, width].
    biases: f32[4, width]: u, v, the bias of types, and the difference of the type keys, 'other' minus 'same'.
    queries: i32[batch, 4, n], thresholds, segments, types, starts.   keys: i32[batch, 3, keys], ranks, segments, types.
    noise: u32[batch, 2].
    """

    q: Array
    k: Array
    v: Array
    r: Array
    biases: Array
    queries: Array
    keys: Array
    noise: Array


class Setting(NamedTuple):
    """n: queries per row, without padding.   rate: of dropout.   chosen: whether the queries are chosen positions with
    starts, or the whole row.   types: whether keys are scored by type.   itself: whether queries see themselves.
    interpret: run as plain operations, on any platform."""

    head_dim: int
    n: int
    rate: float
    chosen: bool
    types: bool
    itself: bool
    interpret: bool = False


def reach(length: int, chosen: bool) -> int:
    """Return how many distances the kernel needs beyond one for each key.   chosen: whether queries are chosen ones."""
    return LANES * 2 ** max(0, math.ceil(math.log2(length / LANES))) if chosen else length


def by_kernel(
    q: Array,
    context: Context,
    biases: Biases,
    mask: Mask,
    types: Types | None,
    heads: int,
    *,
    dropout_rate: float,
    noise: Noise,
    interpret: bool = False,
) -> Array:
    """Compute `relative_attention` by the kernel; on a mesh each device attends with its rows and heads.
    interpret: run as plain operations, on any platform."""
    setting = Setting(
        head_dim=q.shape[2] // heads,
        n=q.shape[1],
        rate=0.0 if noise is None else dropout_rate,
        chosen=mask.after is not None,
        types=types is not None,
        itself=mask.itself,
        interpret=interpret,
    )
    inputs = packed(q, context, biases, mask, types, noise)
    rules = current_rules()
    if rules is None:
        return relative_kernel(inputs, setting)[:, : setting.n]
    of_row = ("batch", None, "heads")
    axes = Operands(*[of_row] * 4, (None, "heads"), ("batch", None, None), ("batch", None, None), ("batch", None))
    axes = axes._replace(r=(None if inputs.r.shape[0] == 1 else "batch", None, "heads"))
    specs = Operands(*(rules.spec(names, x.shape) for names, x in zip(axes, inputs, strict=True)))

    def attend(part: Operands) -> Array:
        shared, local = specs.q[2], part.q.shape[2] // setting.head_dim
        first = 0 if shared is None else jax.lax.axis_index(shared) * local  # of this device's heads
        drawn = ahead(part.noise, first * setting.n * part.k.shape[1])
        return relative_kernel(part._replace(noise=drawn, r=part.r.astype(q.dtype)), setting)

    attend = jax.shard_map(attend, mesh=rules.mesh, in_specs=(specs,), out_specs=specs.q, check_vma=False)
    # In float32, because devices add up the gradient of the distances, which all rows share.
    return attend(inputs._replace(r=inputs.r.astype(jnp.float32)))[:, : setting.n]


def packed(q: Array, context: Context, biases: Biases, mask: Mask, types: Types | None, noise: Noise) -> Operands:
    """Return the kernel's inputs, padded to whole blocks of lanes."""
    batch, n, _ = q.shape
    fill = lambda x, like: jnp.zeros_like(like) if x is None else x
    of_queries, of_keys = types or (None, None)
    queries = [
        mask.thresholds,
        mask.query_segments,
        fill(of_queries, mask.query_segments),
        fill(mask.after, mask.query_segments),
    ]
    of_keys = [mask.ranks, mask.segments, fill(of_keys, mask.segments)]
    content, position, kind, pair = biases
    other = None if pair is None else pair[1] - pair[0]  # the softmax ignores what both have in common
    whole = -(-n // LANES) * LANES
    length = n if mask.after is None else context.r.shape[1] - context.k.shape[1]
    long = lambda x, size: jnp.pad(x, ((0, 0), (0, size - x.shape[1]), (0, 0)))
    return Operands(
        q=long(q, whole),
        k=context.k,
        v=context.v,
        r=long(context.r, context.k.shape[1] + reach(length, mask.after is not None)),
        biases=jnp.stack([content, position, fill(kind, content), fill(other, content)]),
        # No key has segment -1, so padding queries see nothing.
        queries=jnp.pad(jnp.stack(queries, axis=1), ((0, 0), (0, 0), (0, whole - n)), constant_values=-1),
        keys=jnp.stack(of_keys, axis=1),
        noise=jnp.zeros((batch, 2), jnp.uint32) if noise is None else noise,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def relative_kernel(inputs: Operands, setting: Setting) -> Array:
    """Compute `relative.relative_attention` -> [batch, n, width].
    n, keys and distances (keys plus `reach`) are multiples of 128; `_obstacles` lists the other conditions."""
    return _forward(inputs, setting)[0]


def _forward(inputs: Operands, setting: Setting):
    batch, n, width = inputs.q.shape
    statistics = (batch, width // LANES, LANES // setting.head_dim, n)
    out = jax.ShapeDtypeStruct(inputs.q.shape, inputs.q.dtype), _OF_QUERIES
    spread = jax.ShapeDtypeStruct(statistics, jnp.float32), _statistics(statistics)
    results = _call(_forward_kernel, "forward", (2, 1), setting, inputs, [], [out, spread], [])
    out, spread = map(kept, results)
    return out, (inputs, out, spread)


def _backward(setting: Setting, residuals, g: Array):
    inputs, out, spread = residuals
    q, k, v, r, biases = inputs[:5]
    batch, keys, width = k.shape
    extra = [(out, _OF_QUERIES), (g, _OF_QUERIES), (spread, _statistics(spread.shape))]
    per_row = jax.ShapeDtypeStruct((batch, *r.shape[1:]), r.dtype)
    sums = jax.ShapeDtypeStruct((batch, *biases.shape), jnp.float32)
    results = [(q, _OF_QUERIES), *((x, _whole(x.shape)) for x in (k, v, per_row, sums))]
    scratch = [pltpu.VMEM((LANES, rows), jnp.float32) for rows in (keys, keys, r.shape[1])]
    # The scores again, then the gradients of values, probabilities, queries and keys, by content and by distance.
    dq, dk, dv, dr, sums = _call(_backward_kernel, "backward", (5, 3), setting, inputs, extra, results, scratch)
    if r.shape[0] == 1:
        dr = dr.astype(jnp.float32).sum(0, keepdims=True).astype(r.dtype)
    return (Operands(dq, dk, dv, dr, sums.sum(0), None, None, None),)


relative_kernel.defvjp(_forward, _backward)


# The part of an array that a grid step (row, 128 lanes, 128 queries) reads.
_OF_QUERIES = pl.BlockSpec((None, LANES, LANES), lambda row, block, part: (row, part, block))


def _whole(shape: tuple[int, ...]) -> pl.BlockSpec:
    """Return a block with the whole row, or with the one that all rows share."""
    return pl.BlockSpec((None, shape[1], LANES), lambda row, block, part: (row if shape[0] > 1 else 0, 0, block))


def _statistics(shape: tuple[int, ...]) -> pl.BlockSpec:
    return pl.BlockSpec((None, None, shape[2], LANES), lambda row, block, part: (row, block, 0, part))


def _call(kernel, name: str, times, setting: Setting, inputs: Operands, extra: list, results: list, scratch: list):
    """Run the kernel on its inputs.   extra, results: (further inputs, shapes of results), each with its spec.
    times: how many products of queries with keys, and with distances, the kernel computes."""
    (batch, n, width), keys = inputs.q.shape, inputs.k.shape[1]
    inputs = inputs._replace(noise=inputs.noise.reshape(-1))  # a line of scalar memory would take 512 bytes
    distances = inputs.r.shape[1] if setting.chosen else keys + LANES  # with which 128 queries are multiplied
    moved = [*inputs, *(a for a, _ in (*extra, *results))]
    specs = Operands(
        q=_OF_QUERIES,
        k=_whole(inputs.k.shape),
        v=_whole(inputs.v.shape),
        r=_whole(inputs.r.shape),
        biases=pl.BlockSpec((4, LANES), lambda row, block, part: (0, block)),
        queries=pl.BlockSpec((None, 4, LANES), lambda row, block, part: (row, 0, part)),
        keys=pl.BlockSpec((None, *inputs.keys.shape[1:]), lambda row, block, part: (row, 0, 0)),
        noise=pl.BlockSpec(memory_space=pltpu.SMEM),
    )
    return pl.pallas_call(
        functools.partial(kernel, setting=setting),
        grid=(batch, width // LANES, n // LANES),
        in_specs=[*specs, *(spec for _, spec in extra)],
        out_specs=[spec for _, spec in results],
        out_shape=[jax.ShapeDtypeStruct(a.shape, a.dtype) for a, _ in results],
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * batch * n * width * (times[0] * keys + times[1] * distances),
            bytes_accessed=sum(a.size * a.dtype.itemsize for a in moved),
            transcendentals=batch * n * keys * width // setting.head_dim,
        ),
        name=f"relative_{'chosen' if setting.chosen else 'whole'}_{name}",
        interpret=setting.interpret,
    )(*inputs, *(a for a, _ in extra))


def _forward_kernel(*refs, setting: Setting):
    inputs, (out, spread) = Operands(*refs[:8]), refs[8:]
    stand, q, r = _standing(inputs, setting), _biased(inputs, setting), inputs.r[_window(inputs, setting), :]
    mixed = jnp.zeros((LANES, LANES), jnp.float32)
    statistics = jnp.zeros((LANES, LANES), jnp.float32)  # a column for each head
    every = [_scores(inputs, q, r, stand, head, setting) for head in range(LANES // setting.head_dim)]
    for head, scores in enumerate(every):
        most = scores.max(1, keepdims=True)
        p = jnp.exp(scores - most)
        total = p.sum(1, keepdims=True)
        p = jnp.where(_keep(inputs, head, setting), p, 0.0) if setting.rate else p
        seen = most > 0.5 * HIDDEN
        of_head = along(p.astype(out.dtype), only(inputs.v[...], head, setting.head_dim))
        mixed += jnp.where(seen, of_head / (total * (1.0 - setting.rate)), 0.0)
        column = iota(statistics.shape, 1) == head
        statistics = jnp.where(column, jnp.where(seen, most + jnp.log(total), 0.0), statistics)
    out[...] = mixed.astype(out.dtype)
    spread[...] = statistics.T[: LANES // setting.head_dim]


def _backward_kernel(*refs, setting: Setting):
    inputs, (out, g, spread, dq, dk, dv, dr, sums, dkt, dvt, drt) = Operands(*refs[:8]), refs[8:]

    @pl.when(pl.program_id(2) == 0)
    def _():
        for total in (sums, dkt, dvt, drt):
            total[...] = jnp.zeros_like(total)

    stand, q, window = _standing(inputs, setting), _biased(inputs, setting), _window(inputs, setting)
    k, v, r, g = inputs.k[...], inputs.v[...], inputs.r[window, :], g[...]
    transposed = [x.T for x in (*q[:2], g)]
    weighted = g.astype(jnp.float32) * out[...].astype(jnp.float32)
    spreads = jnp.tile(spread[...], (setting.head_dim, 1)).T  # [queries, lanes], the heads' columns repeated
    by_kind = [jnp.zeros((LANES, LANES), jnp.float32) for _ in range(3)]
    types = jnp.zeros((1, LANES), jnp.float32)
    every = [_scores(inputs, q, r, stand, head, setting) for head in range(LANES // setting.head_dim)]
    for head, scores in enumerate(every):
        head_lanes, rows = functools.partial(only, head=head, head_dim=setting.head_dim), _rows(head, setting)
        p = jnp.exp(scores - spreads[:, head : head + 1])
        dp, dropped = across(head_lanes(g), v), p
        if setting.rate:
            factor = jnp.where(_keep(inputs, head, setting), 1.0 / (1.0 - setting.rate), 0.0)
            dp, dropped = dp * factor, p * factor
        ds = p * (dp - head_lanes(weighted).sum(1, keepdims=True))
        at_distances = _to_distances(ds, stand.starts, r.shape[0]).astype(g.dtype)
        low = ds.astype(g.dtype)
        by_kind[0] += along(low, head_lanes(k))
        by_kind[1] += along(at_distances, head_lanes(r))
        dkt[rows, :] += along(transposed[0][rows], low)
        dvt[rows, :] += along(transposed[2][rows], dropped.astype(g.dtype))
        drt[rows, window] += along(transposed[1][rows], at_distances)
        if setting.types:
            dt = (stand.other * ds).sum(1, keepdims=True)
            by_kind[2] += dt * head_lanes(inputs.biases[3:4, :])
            types += (dt * head_lanes(q[2])).sum(0, keepdims=True)
    by_kind = [x * setting.head_dim**-0.5 for x in by_kind]
    dq[...] = sum(by_kind).astype(dq.dtype)
    for kind, x in enumerate(by_kind):
        sums[kind : kind + 1, :] += x.sum(0, keepdims=True)
    sums[3:4, :] += types

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        dk[...] = dkt[...].T.astype(dk.dtype)
        dv[...] = dvt[...].T.astype(dv.dtype)
        dr[...] = drt[...].T.astype(dr.dtype)


class _Standing(NamedTuple):
    """The relation of queries to keys.

    starts: i32[queries, 1], in the window of distances.   hidden: f32[queries, keys], added to the scores.
    other: f32[queries, keys], 1 where the key has another type. They are float32 because boolean masks would be
    unpacked for every head.
    """

    starts: Array
    hidden: Array
    other: Array | None


def _standing(inputs: Operands, setting: Setting) -> _Standing:
    columns = jnp.tile(inputs.queries[...], (LANES // 4, 1)).T  # [queries, lanes], the four columns repeated
    thresholds, segments, types, starts = (columns[:, index : index + 1] for index in range(4))
    ranks, key_segments, key_types = (inputs.keys[index : index + 1, :] for index in range(3))
    visible = ranks < thresholds
    if setting.itself:
        shape, keys = (LANES, ranks.shape[1]), ranks.shape[1]
        if setting.chosen:
            visible |= iota(shape, 1) == keys - 1 - starts
        else:
            visible |= iota(shape, 1) - iota(shape, 0) == keys - setting.n + pl.program_id(2) * LANES
    visible &= key_segments == segments
    if not setting.chosen:
        starts = LANES - 1 - iota((LANES, 1), 0)
    other = jnp.where(key_types != types, 1.0, 0.0) if setting.types else None
    return _Standing(starts, jnp.where(visible, 0.0, HIDDEN), other)


def _biased(inputs: Operands, setting: Setting) -> tuple[Array, Array, Array]:
    """Return the scaled queries for scores by content, position and type."""
    q, scale = inputs.q[...], setting.head_dim**-0.5
    wide = q.astype(jnp.float32)
    content, position, kind = ((wide + inputs.biases[index : index + 1, :]) * scale for index in range(3))
    return content.astype(q.dtype), position.astype(q.dtype), kind


def _window(inputs: Operands, setting: Setting) -> slice | pl.Slice:
    """Return the window of distances that the queries of this grid step reach."""
    if setting.chosen:
        return slice(None)
    later = pl.num_programs(2) - 1 - pl.program_id(2)
    return pl.ds(pl.multiple_of(later * LANES, LANES), inputs.k.shape[0] + LANES)


def _scores(inputs: Operands, q, r: Array, stand: _Standing, head: int, setting: Setting) -> Array:
    """Return the scores of a head, f32[queries, keys]."""
    content, position, kind = (only(x, head, setting.head_dim) for x in q)
    k = inputs.k[...]
    scores = across(content, k) + _to_keys(across(position, r), stand.starts, k.shape[0])
    if setting.types:
        scores += stand.other * (kind * inputs.biases[3:4, :]).sum(1, keepdims=True)
    return scores + stand.hidden


def _keep(inputs: Operands, head: int, setting: Setting) -> Array:
    """Return bool[queries, keys]: what `noise.dropout` keeps of these elements of [heads, n, keys].
    LONGEST keeps their number far below `noise.COUNTED`, so all of them use the row's key."""
    keys, (row, block, part) = inputs.k.shape[0], (pl.program_id(axis) for axis in range(3))
    first = (block * (LANES // setting.head_dim) + head) * setting.n + part * LANES
    lines = counted.spread(((first + iota((LANES, 1), 0)) * keys).astype(jnp.uint32))
    columns = counted.spread(iota((1, keys), 1).astype(jnp.uint32)) + inputs.noise[2 * row]
    return counted.stays(counted.hashed(lines + columns, inputs.noise[2 * row + 1]), setting.rate)


def _to_keys(x: Array, starts: Array, keys: int) -> Array:
    """Shift x [queries, distances] -> [queries, keys]: each query's first key is at its start."""
    blocks, lanes = starts >> _BITS, starts & LANES - 1
    step = (x.shape[1] - keys) // LANES // 2
    while step:
        size = keys + step * LANES
        x = jnp.where(blocks & step != 0, x[:, step * LANES : step * LANES + size], x[:, :size])
        step //= 2
    lane = iota((LANES, LANES), 1)
    parts = [x[:, first : first + LANES] for first in range(0, keys + LANES, LANES)]
    both = [jnp.where(lane >= lanes, *pair) for pair in pairwise(parts)]
    return jnp.concatenate([_at_lanes(part, lane + lanes & LANES - 1) for part in both], axis=1)


def _to_distances(x: Array, starts: Array, distances: int) -> Array:
    """Apply the transpose of `_to_keys`: x [queries, keys] -> [queries, distances], zero where there is no key."""
    blocks, lanes, keys = starts >> _BITS, starts & LANES - 1, x.shape[1]
    lane, zeros = iota((LANES, LANES), 1), jnp.zeros((LANES, LANES), x.dtype)
    parts = [x[:, first : first + LANES] for first in range(0, keys, LANES)]
    turned = [zeros, *(_at_lanes(part, lane - lanes & LANES - 1) for part in parts), zeros]
    x = jnp.concatenate([jnp.where(lane >= lanes, after, before) for before, after in pairwise(turned)], axis=1)
    while x.shape[1] < distances:
        step = (x.shape[1] - keys) // LANES
        padding = jnp.tile(zeros, (1, step))
        later, sooner = jnp.concatenate([padding, x], axis=1), jnp.concatenate([x, padding], axis=1)
        x = jnp.where(blocks & step != 0, later, sooner)
    return x


def _at_lanes(x: Array, lanes: Array) -> Array:
    """Look up x [queries, lanes] at lanes i32[queries, lanes]."""
    return jnp.take_along_axis(x, lanes, axis=1, mode="promise_in_bounds")


def _rows(head: int, setting: Setting) -> slice:
    return slice(head * setting.head_dim, (head + 1) * setting.head_dim)


def _obstacles(attention: Attention) -> list[str]:
    length, memory, width, heads = attention.length, attention.memory, attention.width, attention.heads
    (_, shared), obstacles = cuts(attention), of_length(attention)
    if attention.causal:
        obstacles.append("the mask has causal=True, which it does not read: express it by ranks and thresholds only")
    elif not attention.ranked:
        obstacles.append("the mask has no ranks, which it needs: give it ranks and thresholds")
    if memory % LANES:
        obstacles.append(f"memory={memory}: choose a multiple of {LANES}")
    distances = memory + length + reach(length, attention.chosen)
    if distances > LONGEST:
        row = f"length={length} with memory={memory}"
        obstacles.append(f"{row} has {distances} distances, more than {LONGEST}: lower them")
    if width % LANES or LANES % (width // heads):
        obstacles.append(f"{of_heads(attention)} do not fill blocks of {LANES}")
    elif width // shared % LANES:
        obstacles.append(f"--mesh tensor={shared} cuts {of_heads(attention)}: its parts do not fill blocks of {LANES}")
    return obstacles + of_cut(attention)


KERNEL = Kernel("relative", "relative", ("tpu",), _obstacles, lambda attention: Mixing(HEADS_BESIDE, by_kernel))
