"""Attention of whole rows as one TPU kernel, from the products of the projections to the mixed values.

Splash attention walks over blocks of long rows, wants heads apart, has no dropout, and writes its statistics 128 times
over. A row of up to 1,024 tokens needs no walk: all scores of a query fit into vector memory, and a block of 128 lanes
holds whole heads as the projections write them. Scores lie here as [keys, queries]: the softmax then reduces over
sublanes, its statistics are single rows, and products with values and gradients fill the matrix units, [head_dim,
keys] @ [keys, queries]. Dropout's noise is `noise.dropout`'s, drawn again in the backward pass.
"""

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from models.attention.kernels.kernel import Attention, cuts, of_heads, of_length
from models.attention.kernels.lanes import across, along, iota, only
from models.attention.layouts import INTERLEAVED, LANES, Mixing
from models.attention.mask import Mask
from models.core import noise as counted
from models.core.parameters import Noise
from models.core.program import kept
from models.core.sharding import current_rules

LONGEST = 1024  # tokens; all parts of a row are code of their own
HEAD_DIMS = (32, 64, 128)  # of which blocks of 128 lanes hold whole heads
# Queries that are computed at a time, and of how many more of their units the products have begun: what XLA:TPU
# scheduled best, of what was tried.
_PART = 128
_AHEAD = 2
_HIDDEN = float(jnp.finfo(jnp.float32).min)


class Setting(NamedTuple):
    """head_dim.   rate: of dropout.   causal: whether a query sees no key after itself.   interpret: run as plain
    operations, on any platform."""

    head_dim: int
    rate: float = 0.0
    causal: bool = False
    interpret: bool = False


def obstacles(attention: Attention) -> list[str]:
    """Why rows within segments, as a mesh cuts them, are too long or their heads do not fill lanes."""
    (length, width, heads), (cut, shared), found = attention[:3], cuts(attention), []
    if attention.context:
        found.append("keys are those of a second sequence")
    if length > LONGEST:
        found.append(f"length={length}: choose at most {LONGEST}")
    if width / heads not in HEAD_DIMS:
        found.append(f"{of_heads(attention)} have {width // heads} numbers each: choose 32, 64 or 128")
    elif shared > 1 and width // shared % LANES:
        found.append(f"--mesh tensor={shared} cuts {of_heads(attention)}: its parts do not fill blocks of {LANES}")
    if cut > 1:
        found.append(f"--mesh sequence={cut} cuts rows: leave sequence out")
    return found


def fits(attention: Attention) -> bool:
    """Whether the kernel computes it."""
    return not of_length(attention) + obstacles(attention)


def mixing(attention: Attention) -> Mixing:
    """For what `fits`."""
    return Mixing(INTERLEAVED, functools.partial(by_rows, head_dim=attention.width // attention.heads))


def by_rows(
    products: Array,
    biases: Array,
    mask: Mask,
    *,
    head_dim: int,
    dropout_rate: float,
    noise: Noise,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """`attend_rows` with what it needs of a mask."""
    setting = Setting(head_dim, 0.0 if noise is None else dropout_rate, mask.causal, interpret)
    return attend_rows(products, biases, mask.segments, noise if setting.rate else None, setting)


def attend_rows(products: Array, biases: Array, segments: Array, noise: Noise, setting: Setting) -> tuple[Array, Array]:
    """`row_attention` on a mesh: each device attends with its rows and heads."""
    noise = jnp.zeros((len(segments), 2), jnp.uint32) if noise is None else noise
    rules = current_rules()
    if rules is None:
        return row_attention(products, biases, segments, noise, setting)
    spec = lambda x, *axes: rules.spec(axes, x.shape)
    specs = (spec(products, "batch", None, "heads"), spec(biases, "heads"), spec(segments, "batch", None))
    specs = (*specs, spec(noise, "batch", None))

    def attend(products: Array, biases: Array, segments: Array, noise: Array) -> tuple[Array, Array]:
        (_, length, tripled), shared = products.shape, specs[0][2]
        heads = tripled // 3 // setting.head_dim
        first = 0 if shared is None else jax.lax.axis_index(shared) * heads  # of this device's heads
        return row_attention(products, biases, segments, counted.ahead(noise, first * length**2), setting)

    attend = jax.shard_map(attend, mesh=rules.mesh, in_specs=specs, out_specs=(specs[0],) * 2, check_vma=False)
    return attend(products, biases, segments, noise)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def row_attention(
    products: Array, biases: Array, segments: Array, noise: Array, setting: Setting
) -> tuple[Array, Array]:
    """dropout(softmax(q k^T / sqrt(head_dim))) v within segments -> [batch, length, width], heads side by side; and the
    same as it is `kept`, for `product` to hold: no gradient comes back through it.

    products: [batch, length, 3 * width], x @ the `interleaved` kernels of q, k and v.
    biases: f32[3 * width], interleaved, still to be added.   segments: i32[batch, length].
    noise: u32[batch, 2], not read at a rate of 0.   Sizes: see `fits`.
    """
    return _forward(products, biases, segments, noise, setting)[0]


def _forward(products, biases, segments, noise, setting: Setting):
    batch, length, tripled = products.shape
    out = jax.ShapeDtypeStruct((batch, length, tripled // 3), products.dtype)
    spread = jax.ShapeDtypeStruct((batch, tripled // 3 // LANES, LANES // setting.head_dim, length), jnp.float32)
    inputs = (segments[:, None], biases[None], products)
    out, spread = _call(_forward_kernel, "forward", 2, setting, noise, inputs, (out, spread))
    held, spread = kept(out), kept(spread)
    return (out, held), (products, biases, segments, noise, held, spread)


def _backward(setting: Setting, residuals, gradients):
    g, _ = gradients
    products, biases, segments, noise, out, spread = residuals
    sums = jax.ShapeDtypeStruct((products.shape[0], 1, biases.shape[0]), jnp.float32)
    inputs = (segments[:, None], biases[None], products, out, g, spread)
    # Scores again, then the gradients of values, probabilities, queries and keys.
    d_products, sums = _call(_backward_kernel, "backward", 5, setting, noise, inputs, (products, sums))
    return d_products, sums.sum((0, 1)), None, None


row_attention.defvjp(_forward, _backward)


def _call(kernel, name, times, setting: Setting, noise, inputs, results):
    """The kernel for each row and each 128 lanes of its heads.   times: products of queries and keys in it."""
    segments, biases, products = inputs[:3]
    batch, length, tripled = products.shape
    blocks = tripled // 3 // LANES

    def spec(a) -> pl.BlockSpec:
        if a is segments:
            return pl.BlockSpec((None, *a.shape[1:]), lambda row, block: (row, 0, 0))
        if a is biases:
            return pl.BlockSpec((1, 3 * LANES), lambda row, block: (0, block))
        if a.ndim == 4:  # statistics
            return pl.BlockSpec((None, None, *a.shape[2:]), lambda row, block: (row, block, 0, 0))
        return pl.BlockSpec((None, a.shape[1], a.shape[2] // blocks), lambda row, block: (row, 0, block))

    of_head = _units(length, _forward_part(length, setting) if name == "forward" else _PART, setting)[
        :: LANES // setting.head_dim
    ]
    pairs = batch * sum((unit.part.stop - unit.part.start) * unit.seen for unit in of_head)
    # Flat: a line of scalar memory for each row would take 512 bytes.
    drawn, kernel = ([noise.reshape(-1)], kernel) if setting.rate else ([], functools.partial(kernel, None))
    return pl.pallas_call(
        functools.partial(kernel, setting=setting),
        grid=(batch, blocks),
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM) for _ in drawn] + [spec(a) for a in inputs],
        out_specs=[spec(a) for a in results],
        out_shape=[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in results],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        cost_estimate=pl.CostEstimate(
            flops=2 * times * pairs * tripled // 3,
            bytes_accessed=sum(a.size * a.dtype.itemsize for a in (*inputs, *results)),
            transcendentals=pairs * (tripled // 3 // setting.head_dim),
        ),
        name=f"row_attention_{name}",
        interpret=setting.interpret,
    )(*drawn, *inputs)


class _Unit(NamedTuple):
    """What is computed at a time: the scores of a head's queries `part` with the first keys, as many as these see."""

    head: int
    part: slice
    seen: int


def _units(length: int, size: int, setting: Setting) -> list[_Unit]:
    """All of a turn, `size` queries each, the row's last first: these see all keys."""
    parts = [slice(start, min(start + size, length)) for start in reversed(range(0, length, size))]
    heads = range(LANES // setting.head_dim)
    return [_Unit(head, part, part.stop if setting.causal else length) for part in parts for head in heads]


def _forward_part(length: int, setting: Setting) -> int:
    """How many queries the forward kernel computes at a time: with more, products begin seldom."""
    return _PART if setting.causal else length if length <= 512 else 2 * _PART


def _begun(units: list[_Unit], products: Callable) -> Iterator:
    """Each unit with its products, which begin while the units before it are computed with: the compiler seldom moves
    them there."""
    begun = [products(unit) for unit in units[:_AHEAD]]
    for index, unit in enumerate(units):
        begun += [products(later) for later in units[index + _AHEAD : index + _AHEAD + 1]]
        yield unit, begun[index]


def _forward_kernel(noise, segments, biases, products, out, spread, *, setting: Setting):
    head_dim, (q, k, v) = setting.head_dim, _projected(products, biases, setting.head_dim)
    vt, length = v.T, len(q)
    units = _units(length, _forward_part(length, setting), setting)

    def dots(unit):  # -> [keys, queries]
        return across(k[: unit.seen], only(q[unit.part], unit.head, head_dim))

    mixed = []
    for unit, scores in _begun(units, dots):
        visible = _visible(segments, unit, setting)
        scores = jnp.where(visible, scores, _HIDDEN)
        most = scores.max(0, keepdims=True)
        p = jnp.exp(scores - most)
        total = p.sum(0, keepdims=True)
        if setting.rate:
            p = jnp.where(_keep(noise, unit, length, setting), p, 0.0)
        of_head = along(_rows(vt, unit, setting)[:, : unit.seen], p.astype(v.dtype))  # [head_dim, queries]
        mixed.append(of_head / (total * (1.0 - setting.rate)))
        spread[unit.head : unit.head + 1, unit.part] = most + jnp.log(total)
        if len(mixed) == LANES // head_dim:
            out[unit.part, :] = jnp.concatenate(mixed).T.astype(out.dtype)
            mixed = []


def _backward_kernel(noise, segments, biases, products, out, g, spread, d_products, d_biases, *, setting: Setting):
    head_dim, (q, k, v), g = setting.head_dim, _projected(products, biases, setting.head_dim), g[...]
    qt, kt, gt, length = q.T, k.T, g.T, len(q)
    weighted = (g.astype(jnp.float32) * out[...].astype(jnp.float32)).T  # [lanes, queries]
    heads = range(LANES // head_dim)
    of_queries, of_keys, of_values = ([None for _ in heads] for _ in range(3))  # gradients, [head_dim, length] each

    def dots(unit: _Unit) -> tuple[Array, Array]:
        return tuple(across(x[: unit.seen], only(y[unit.part], unit.head, head_dim)) for x, y in ((k, q), (v, g)))

    for unit, (scores, dp) in _begun(_units(length, _PART, setting), dots):
        head, part, seen = unit
        head_rows = functools.partial(_rows, unit=unit, setting=setting)
        visible = _visible(segments, unit, setting)
        p = jnp.exp(jnp.where(visible, scores, _HIDDEN) - spread[head : head + 1, part])
        dropped = p
        if setting.rate:
            keep = _keep(noise, unit, length, setting)
            dp, dropped = jnp.where(keep, dp, 0.0), jnp.where(keep, p, 0.0)
        # The factor of what dropout keeps is in none of these: the gradients get it at the end.
        delta = head_rows(weighted)[:, part].sum(0, keepdims=True) * (1.0 - setting.rate)
        ds = (p * (dp - delta)).astype(g.dtype)
        of_values[head] = _added(of_values[head], across(head_rows(gt)[:, part], dropped.astype(g.dtype)))
        of_queries[head] = _before(along(head_rows(kt)[:, :seen], ds) * head_dim**-0.5, of_queries[head])
        of_keys[head] = _added(of_keys[head], across(head_rows(qt)[:, part], ds))
    for index, gradients in enumerate((of_queries, of_keys, of_values)):
        gradient = jnp.concatenate(gradients).T * (1.0 / (1.0 - setting.rate))
        columns = slice(index * LANES, (index + 1) * LANES)
        d_products[:, columns] = gradient.astype(d_products.dtype)
        d_biases[:, columns] = gradient.sum(0, keepdims=True)


def _before(part: Array, rest: Array | None) -> Array:
    """part [n, queries] and those after them."""
    return part if rest is None else jnp.concatenate([part, rest], axis=1)


def _added(total: Array | None, part: Array) -> Array:
    """total [n, keys] with part [n, first of them] added."""
    if total is None or part.shape == total.shape:
        return part if total is None else total + part
    seen = part.shape[1]
    return jnp.concatenate([total[:, :seen] + part, total[:, seen:]], axis=1)


def _projected(products, biases, head_dim):
    """q, scaled, k and v, each [length, lanes]."""
    sums = products[...].astype(jnp.float32) + biases[...]
    q, k, v = (sums[:, index * LANES : (index + 1) * LANES] for index in range(3))
    return [x.astype(products.dtype) for x in (q * head_dim**-0.5, k, v)]


def _visible(segments, unit: _Unit, setting: Setting) -> Array:
    """bool[keys, queries]"""
    _, part, seen = unit
    keys = jnp.broadcast_to(segments[:, :seen], (LANES, seen)).T
    visible = jnp.tile(keys, (1, (part.stop - part.start) // LANES)) == segments[:, part]
    return visible & (iota(visible.shape, 0) <= part.start + iota(visible.shape, 1)) if setting.causal else visible


def _keep(noise, unit: _Unit, length: int, setting: Setting) -> Array:
    """bool[keys, queries]: what `noise.dropout` keeps of these elements of [heads, length, length].   noise: u32[2 *
    batch].

    LONGEST keeps them far below the number that `noise.bits` counts, so all have the row's own key.
    """
    row, block, part = pl.program_id(0), pl.program_id(1), unit.part
    first = (block * (LANES // setting.head_dim) + unit.head) * length + part.start
    of_query = counted.spread(((first + iota((1, part.stop - part.start), 1)) * length).astype(jnp.uint32))
    of_key = counted.spread(iota((unit.seen, 1), 0).astype(jnp.uint32))
    bits = counted.hashed(of_query + noise[2 * row] + of_key, noise[2 * row + 1])
    return counted.stays(bits, setting.rate)


def _rows(x: Array, unit: _Unit, setting: Setting) -> Array:
    """x [lanes, n] -> those of the unit's head."""
    return x[unit.head * setting.head_dim : (unit.head + 1) * setting.head_dim]
