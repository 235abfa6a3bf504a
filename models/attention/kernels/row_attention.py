"""Attention of whole rows as one TPU kernel, from the projections' products to the attended values.

Splash attention loops over blocks of long rows, needs heads on an axis of their own, has no dropout, and writes its
statistics 128 times over. A row of up to 1,024 tokens needs no loop: all scores of a query fit into vector memory, and
a block of 128 lanes holds whole heads as the projections write them. Scores lie as [keys, queries]: the softmax then
reduces over sublanes, its statistics are single rows, and products with values and gradients fill the matrix units,
[head_dim, keys] @ [keys, queries]. Dropout noise is that of `noise.dropout`, drawn again in the backward pass.

Queries may see a second sequence, and scores may have a bias by distance.
"""

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from models.attention.distances import shift
from models.attention.kernels.kernel import Attention, cuts, lengths, of_cut, of_heads, of_length
from models.attention.kernels.lanes import HIDDEN, across, along, iota, only
from models.attention.layouts import INTERLEAVED, Mixing
from models.attention.mask import Mask
from models.attention.operands import LANES
from models.core import noise as counted
from models.core.parameters import Noise
from models.core.program import kept
from models.core.sharding import current_rules

LONGEST = 1024  # tokens; each part of a row is separate code
HEAD_DIMS = (32, 64, 128)  # sizes of which 128 lanes hold whole heads
# How many queries are computed at a time, and for how many later units the products are already started: the values
# that XLA:TPU scheduled best, among those tried.
_PART = 128
_AHEAD = 2


class Setting(NamedTuple):
    """n, length: how many queries and keys, without padding.   rate: of dropout.   causal: whether a query sees no key
    after itself.   blind: whether some queries may see nothing; their output is zeros.   interpret: run as plain
    operations, on any platform."""

    head_dim: int
    n: int
    length: int
    rate: float = 0.0
    causal: bool = False
    blind: bool = False
    interpret: bool = False


class Operands(NamedTuple):
    """products: x @ `interleaved` kernels, for queries, keys and values of the same row [batch, length, 3 * width]; or
    for queries [batch, n, width], and for keys and values of a second sequence [batch, length, 2 * width].
    biases: f32[3 * width], or one for each of the two products; the kernel adds them.
    queries, keys: i32[batch, n], i32[batch, length], segments.
    noise: u32[batch, 2], not read at a rate of 0.
    distances: None or f32[heads, n + length - 1], as in `Mask`.
    """

    products: tuple[Array, ...]
    biases: tuple[Array, ...]
    queries: Array
    keys: Array
    noise: Array
    distances: Array | None = None


def obstacles(attention: Attention) -> list[str]:
    """Return the reasons why the kernel cannot compute rows within segments, as the mesh cuts them."""
    (_, width, heads), (_, shared) = attention[:3], cuts(attention)
    found = [] if attention.whole else of_length(attention)  # the kernel itself pads a decoder's rows
    found += [f"{name}={n}: choose at most {LONGEST}" for name, n in lengths(attention).items() if n > LONGEST]
    if width / heads not in HEAD_DIMS:
        found.append(f"{of_heads(attention)} have {width // heads} numbers each: choose 32, 64 or 128")
    elif shared > 1 and width // shared % LANES:
        found.append(f"--mesh tensor={shared} cuts {of_heads(attention)}: its parts do not fill blocks of {LANES}")
    return found + of_cut(attention)


def fits(attention: Attention) -> bool:
    """Whether the kernel can compute the attention."""
    return not obstacles(attention)


def mixing(attention: Attention) -> Mixing:
    """Return how to compute an attention that `fits`."""
    return Mixing(INTERLEAVED, functools.partial(by_rows, head_dim=attention.width // attention.heads))


def by_rows(
    products: tuple[Array, ...],
    biases: tuple[Array, ...],
    mask: Mask,
    *,
    head_dim: int,
    dropout_rate: float,
    noise: Noise,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """Compute `row_attention` with the parts of the mask that it needs; on a mesh each device attends with its rows and
    heads."""
    rate, (n, length) = 0.0 if noise is None else dropout_rate, (products[0].shape[1], products[-1].shape[1])
    setting = Setting(head_dim, n, length, rate, mask.causal, mask.blind, interpret)
    noise = noise if rate else jnp.zeros((len(mask.segments), 2), jnp.uint32)
    inputs = Operands(products, biases, mask.query_segments, mask.segments, noise, mask.distances)
    rules = current_rules()
    if rules is None:
        return row_attention(inputs, setting)
    of_row = ("batch", None, "heads")
    axes = Operands(of_row, ("heads",), *[of_row[:2]] * 3, ("heads", None))
    spec_of = lambda axes, part: jax.tree.map(lambda x: rules.spec(axes, x.shape), part)
    specs = Operands(*map(spec_of, axes, inputs))
    shared = specs.products[0][2]

    def attend(part: Operands) -> tuple[Array, Array]:
        heads = width_of(part) // setting.head_dim
        first = 0 if shared is None else jax.lax.axis_index(shared) * heads  # of this device's heads
        noise = counted.ahead(part.noise, first * setting.n * setting.length)
        return row_attention(part._replace(noise=noise), setting)

    out = specs.products[0]
    return jax.shard_map(attend, mesh=rules.mesh, in_specs=(specs,), out_specs=(out, out), check_vma=False)(inputs)


def width_of(inputs: Operands) -> int:
    """Return the width of all heads together."""
    return sum(products.shape[2] for products in inputs.products) // 3


def row_attention(inputs: Operands, setting: Setting) -> tuple[Array, Array]:
    """Compute dropout(softmax(q k^T / sqrt(head_dim) + bias)) v within segments -> ([batch, n, width], heads side by
    side; the same marked as `kept`, for `product` to hold, through which no gradient flows).   Sizes: see `fits`."""
    segments = lambda x: jnp.pad(x[:, None], ((0, 0), (0, 0), (0, -x.shape[1] % LANES)), constant_values=-1)
    band = None if inputs.distances is None else _band(inputs.distances, width_of(inputs), setting)
    prepared = Operands(
        inputs.products,
        tuple(biases[None] for biases in inputs.biases),
        segments(inputs.queries),
        segments(inputs.keys),
        inputs.noise.reshape(-1) if setting.rate else None,  # a line of scalar memory would take 512 bytes
        band,
    )
    return _attend(prepared, setting)


def _band(distances: Array, width: int, setting: Setting) -> Array:
    """Return biases f32[heads, keys + queries - 128, 128], keys and queries padded to whole blocks. The first `keys`
    lines are added to the scores of the last 128 queries, those from line 128 on to the 128 queries before, and so on.
    """
    n, length = _whole(setting.n), _whole(setting.length)
    beyond = (0, width // setting.head_dim - len(distances)), (n - setting.n, length - setting.length)
    padded = jnp.pad(distances, beyond)
    spread = jnp.broadcast_to(padded[:, None], (len(padded), LANES, padded.shape[1]))
    return shift(spread, length + n - LANES).swapaxes(1, 2)


def _whole(length: int) -> int:
    """Round a length up to whole blocks."""
    return length + -length % LANES


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _attend(inputs: Operands, setting: Setting) -> tuple[Array, Array]:
    """Compute `row_attention` from the arrays that its kernels read: biases [1, ...], segments [batch, 1, ...] in whole
    blocks, flat noise, and the `_band` of the distances."""
    return _forward(inputs, setting)[0]


def _forward(inputs: Operands, setting: Setting):
    batch, width = len(inputs.queries), width_of(inputs)
    out = jax.ShapeDtypeStruct((batch, setting.n, width), inputs.products[0].dtype)
    spread = (batch, width // LANES, LANES // setting.head_dim, _whole(setting.n))
    spread = jax.ShapeDtypeStruct(spread, jnp.float32)
    out, spread = _call(_forward_kernel, "forward", 2, setting, inputs, (), (out, spread))
    held, spread = kept(out), kept(spread)
    return (out, held), (inputs, held, spread)


def _backward(setting: Setting, residuals, gradients):
    (inputs, out, spread), (g, _) = residuals, gradients
    sums = tuple(jax.ShapeDtypeStruct((len(g), *x.shape), jnp.float32) for x in inputs.biases)
    results = Operands(inputs.products, sums, None, None, None, inputs.distances)
    # Five products: the scores again, then the gradients of values, probabilities, queries and keys.
    found = _call(_backward_kernel, "backward", 5, setting, inputs, (out, g, spread), results)
    band = None if found.distances is None else found.distances / (1.0 - setting.rate)
    return (found._replace(biases=tuple(x.sum(0) for x in found.biases), distances=band),)


_attend.defvjp(_forward, _backward)


def _call(kernel, name: str, times: int, setting: Setting, inputs: Operands, extra: tuple, results: tuple):
    """Run the kernel for each row and each 128 lanes of its heads -> like results.
    times: how many query-key products the kernel computes.   extra: inputs besides the operands."""
    batch, width, biased = len(inputs.queries), width_of(inputs), inputs.distances is not None
    blocks = width // LANES

    def spec(a) -> pl.BlockSpec:
        if a.ndim == 1:
            return pl.BlockSpec(memory_space=pltpu.SMEM)
        if a.ndim == 2:  # biases
            shape, index = (1, a.shape[1] // blocks), lambda row, block: (0, block)
        elif a.ndim == 4:  # statistics
            shape, index = (None, None, *a.shape[2:]), lambda row, block: (row, block, 0, 0)
        elif a is inputs.distances:  # and its gradient
            shape, index = (LANES // setting.head_dim, *a.shape[1:]), lambda row, block: (block, 0, 0)
        elif a.dtype == jnp.int32:  # segments
            shape, index = (None, *a.shape[1:]), lambda row, block: (row, 0, 0)
        else:
            lines = a.shape[1] if a.shape[1] == 1 else _whole(a.shape[1])  # sums of a row's gradients have one
            shape, index = (None, lines, a.shape[2] // blocks), lambda row, block: (row, 0, block)
        # With a bias the grid loops over rows innermost, so that a block's bias and its gradient stay on the chip.
        once = {"pipeline_mode": pl.Buffered(1)} if a is inputs.distances else {}
        return pl.BlockSpec(shape, (lambda block, row: index(row, block)) if biased else index, **once)

    size = _forward_part(_whole(setting.n), setting) if name == "forward" else _PART
    of_head = _units(size, setting)[:: LANES // setting.head_dim]
    pairs = batch * sum((unit.part.stop - unit.part.start) * unit.seen for unit in of_head)
    arguments, structure = jax.tree.flatten((inputs, extra))
    outputs, output_structure = jax.tree.flatten(results)

    def body(*refs):
        argument_refs, output_refs = refs[: len(arguments)], refs[len(arguments) :]
        operands, extra_refs = jax.tree.unflatten(structure, argument_refs)
        kernel(operands, *extra_refs, *jax.tree.unflatten(output_structure, output_refs), setting=setting)

    computed = pl.pallas_call(
        body,
        grid=(blocks, batch) if biased else (batch, blocks),
        in_specs=[spec(a) for a in arguments],
        out_specs=[spec(a) for a in outputs],
        out_shape=[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in outputs],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary" if biased else "parallel")),
        cost_estimate=pl.CostEstimate(
            flops=2 * times * pairs * width,
            bytes_accessed=sum(a.size * a.dtype.itemsize for a in (*arguments, *outputs)),
            transcendentals=pairs * (width // setting.head_dim),
        ),
        name=f"row_attention_{name}",
        interpret=setting.interpret,
    )(*arguments)
    return jax.tree.unflatten(output_structure, computed)


class _Unit(NamedTuple):
    """One piece of work: the scores of a head's queries `part` with the first `seen` keys, all that these may see."""

    head: int
    part: slice
    seen: int


def _units(size: int, setting: Setting) -> list[_Unit]:
    """Return all units of a grid step, `size` queries each; the row's last queries come first, as they see all keys."""
    n, length = _whole(setting.n), _whole(setting.length)
    parts = [slice(start, min(start + size, n)) for start in reversed(range(0, n, size))]
    heads = range(LANES // setting.head_dim)
    return [_Unit(head, part, part.stop if setting.causal else length) for part in parts for head in heads]


def _forward_part(length: int, setting: Setting) -> int:
    """Return how many queries the forward kernel computes at a time: the more, the fewer products it has to start."""
    return _PART if setting.causal else length if length <= 512 else 2 * _PART


def _begun(units: list[_Unit], products: Callable) -> Iterator:
    """Yield each unit with its products, starting products while earlier units are computed; the compiler seldom moves
    them there by itself."""
    begun = [products(unit) for unit in units[:_AHEAD]]
    for index, unit in enumerate(units):
        begun += [products(later) for later in units[index + _AHEAD : index + _AHEAD + 1]]
        yield unit, begun[index]


def _forward_kernel(inputs: Operands, out, spread, *, setting: Setting):
    head_dim, (q, k, v) = setting.head_dim, _projected(inputs, setting)
    vt, units = v.T, _units(_forward_part(len(q), setting), setting)

    def dots(unit):  # -> [keys, queries]
        return _biased(inputs, across(k[: unit.seen], only(q[unit.part], unit.head, head_dim)), unit, setting)

    mixed = []
    for unit, scores in _begun(units, dots):
        scores = _of_seen(inputs, scores, unit, setting)
        most = scores.max(0, keepdims=True)
        p = jnp.exp(scores - most)
        total = p.sum(0, keepdims=True)
        if setting.rate:
            p = jnp.where(_keep(inputs, unit, setting), p, 0.0)
        of_head = along(_rows(vt, unit, setting)[:, : unit.seen], p.astype(v.dtype))  # [head_dim, queries]
        of_head, of_scores = of_head / (total * (1.0 - setting.rate)), most + jnp.log(total)
        if setting.blind:
            sees = most > 0.5 * HIDDEN
            of_head, of_scores = (jnp.where(sees, x, 0.0) for x in (of_head, of_scores))
        mixed.append(of_head)
        spread[unit.head : unit.head + 1, unit.part] = of_scores
        if len(mixed) == LANES // head_dim:
            out[unit.part, :] = jnp.concatenate(mixed).T.astype(out.dtype)
            mixed = []


def _backward_kernel(inputs: Operands, out, g, spread, d_products, d_biases, *extra, setting: Setting):
    head_dim, (q, k, v) = setting.head_dim, _projected(inputs, setting)
    g, out = (_real(x[...], setting.n) for x in (g, out))
    qt, kt, gt = q.T, k.T, g.T
    weighted = (g.astype(jnp.float32) * out.astype(jnp.float32)).T  # [lanes, queries]
    heads = range(LANES // head_dim)
    of_queries, of_keys, of_values = ([None for _ in heads] for _ in range(3))  # gradients, [head_dim, length] each
    d_band = extra[-1]
    if d_band is not None:

        @pl.when(_turn(inputs)[0] == 0)
        def _():
            d_band[...] = jnp.zeros_like(d_band)

    def dots(unit: _Unit) -> tuple[Array, Array]:
        scores, dp = (across(x[: unit.seen], only(y[unit.part], unit.head, head_dim)) for x, y in ((k, q), (v, g)))
        return _biased(inputs, scores, unit, setting), dp

    for unit, (scores, dp) in _begun(_units(_PART, setting), dots):
        head, part, seen = unit
        head_rows = functools.partial(_rows, unit=unit, setting=setting)
        p = jnp.exp(_of_seen(inputs, scores, unit, setting) - spread[head : head + 1, part])
        dropped = p
        if setting.rate:
            keep = _keep(inputs, unit, setting)
            dp, dropped = jnp.where(keep, dp, 0.0), jnp.where(keep, p, 0.0)
        # Dropout's factor 1 / (1 - rate) is left out here and applied to the gradients at the end.
        delta = head_rows(weighted)[:, part].sum(0, keepdims=True) * (1.0 - setting.rate)
        ds = p * (dp - delta)
        if d_band is not None:
            d_band[head, _in_band(unit, part.start, setting), :] += ds
        ds = ds.astype(g.dtype)
        of_values[head] = _added(of_values[head], across(head_rows(gt)[:, part], dropped.astype(g.dtype)))
        of_queries[head] = _before(along(head_rows(kt)[:, :seen], ds) * head_dim**-0.5, of_queries[head])
        of_keys[head] = _added(of_keys[head], across(head_rows(qt)[:, part], ds))
    every = zip((of_queries, of_keys, of_values), _columns(d_products), _columns(d_biases), strict=True)
    for gradients, (d_x, lanes), (d_bias, _) in every:
        gradient = jnp.concatenate(gradients).T * (1.0 / (1.0 - setting.rate))
        d_x[:, lanes] = gradient.astype(d_x.dtype)
        d_bias[:, lanes] = gradient.sum(0, keepdims=True)


def _before(part: Array, rest: Array | None) -> Array:
    """Join part [n, queries] with the columns of later queries."""
    return part if rest is None else jnp.concatenate([part, rest], axis=1)


def _added(total: Array | None, part: Array) -> Array:
    """Add part [n, first keys] to total [n, keys]."""
    if total is None or part.shape == total.shape:
        return part if total is None else total + part
    seen = part.shape[1]
    return jnp.concatenate([total[:, :seen] + part, total[:, seen:]], axis=1)


def _columns(arrays: tuple) -> list:
    """Return for queries, keys and values the array that holds them, and their lanes in it."""
    return [(a, slice(first, first + LANES)) for a in arrays for first in range(0, a.shape[-1], LANES)]


def _projected(inputs: Operands, setting: Setting) -> list[Array]:
    """Return scaled q, k and v with their biases, each [length, lanes]."""
    both = zip(_columns(inputs.products), _columns(inputs.biases), strict=True)
    q, k, v = (x[:, lanes].astype(jnp.float32) + bias[:, lanes] for (x, lanes), (bias, _) in both)
    lengths = (setting.n, setting.length, setting.length)
    each = zip((q * setting.head_dim**-0.5, k, v), lengths, strict=True)
    return [_real(x.astype(inputs.products[0].dtype), length) for x, length in each]


def _real(x: Array, length: int) -> Array:
    """Set padding of x [length in whole blocks, lanes] to zero; it may hold arbitrary numbers."""
    return x if len(x) == length else jnp.where(iota(x.shape, 0) < length, x, jnp.zeros_like(x))


def _biased(inputs: Operands, scores: Array, unit: _Unit, setting: Setting) -> Array:
    """Add the bias to scores f32[keys, queries]. This happens where a product starts: when added later, XLA:TPU
    scheduled 1.3 times as many bundles for the backward pass."""
    if inputs.distances is None:
        return scores
    starts = range(unit.part.start, unit.part.stop, LANES)
    bands = [inputs.distances[unit.head, _in_band(unit, start, setting), :] for start in starts]
    return scores + jnp.concatenate(bands, axis=1)


def _of_seen(inputs: Operands, scores: Array, unit: _Unit, setting: Setting) -> Array:
    """Hide the scores f32[keys, queries] of keys that a query does not see."""
    _, part, seen = unit
    keys = jnp.broadcast_to(inputs.keys[:, :seen], (LANES, seen)).T
    visible = jnp.tile(keys, (1, (part.stop - part.start) // LANES)) == inputs.queries[:, part]
    if setting.causal:
        visible &= iota(visible.shape, 0) <= part.start + iota(visible.shape, 1)
    return jnp.where(visible, scores, HIDDEN)


def _in_band(unit: _Unit, start: int, setting: Setting) -> slice:
    """Return the lines of `_band` for the unit's keys and the 128 queries from `start` on."""
    first = _whole(setting.n) - LANES - start
    return slice(first, first + unit.seen)


def _turn(inputs: Operands) -> tuple[Array, Array]:
    """Return the grid step's row and block of lanes."""
    outer, inner = pl.program_id(0), pl.program_id(1)
    return (outer, inner) if inputs.distances is None else (inner, outer)


def _keep(inputs: Operands, unit: _Unit, setting: Setting) -> Array:
    """Return bool[keys, queries]: what `noise.dropout` keeps of these elements of [heads, n, length].
    LONGEST keeps their number far below `noise.COUNTED`, so all of them use the row's key."""
    (row, block), part, noise = _turn(inputs), unit.part, inputs.noise
    first = (block * (LANES // setting.head_dim) + unit.head) * setting.n + part.start
    of_query = counted.spread(((first + iota((1, part.stop - part.start), 1)) * setting.length).astype(jnp.uint32))
    of_key = counted.spread(iota((unit.seen, 1), 0).astype(jnp.uint32))
    bits = counted.hashed(of_query + noise[2 * row] + of_key, noise[2 * row + 1])
    return counted.stays(bits, setting.rate)


def _rows(x: Array, unit: _Unit, setting: Setting) -> Array:
    """Return the lanes of the unit's head: x [lanes, n] -> [head_dim, n]."""
    return x[unit.head * setting.head_dim : (unit.head + 1) * setting.head_dim]
