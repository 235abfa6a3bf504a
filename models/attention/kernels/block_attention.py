"""Block-sparse attention as one TPU kernel: a query reads only the blocks of keys that a table names for it.

Keys and values of a row stay in vector memory while chunks of its queries pass by; 128 lanes hold whole heads, as the
projections write them. A unit is a block of queries of all of these heads side by side. Its scores lie as [keys, (head,
query)], so each head can read different keys although the heads share the matrix units, and a randomly drawn block is
read by a slice. Gradients of keys and values are accumulated in place, block by block.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from models.attention.kernels.lanes import HIDDEN, across, along, iota, only
from models.attention.operands import LANES
from models.core import noise as counted
from models.core.program import kept

_SEES_NOTHING = -3  # the segment of queries that see nothing of a block; no key has it
_TILES = (512, 256, 128, 64, 32, 16)  # how many keys a block of queries that sees all keys reads at a time


class Chosen(NamedTuple):
    """Keys that all queries see, besides those of the table.   k, v: [batch, n, width].
    segments, positions: i32[batch, n, LANES]."""

    k: Array
    v: Array
    segments: Array
    positions: Array


class Operands(NamedTuple):
    """The kernel's inputs: heads side by side in the width, rows padded to whole chunks of blocks. `lanes` are pairs
    (head of a group, query of a block).

    q, k, v: [batch, length, width].   places: i32[blocks, n], the blocks that each block sees in all heads; -1: none.
    drawn: i32[heads or 1, blocks, n] or None, more blocks, by head.   near: f32[groups or 1, keys, lanes] or None,
    added to the scores of the first blocks of `places`.   queries, keys: i32[batch, blocks, lanes],
    i32[batch, length, LANES], segments.   begin: u32[batch, groups, blocks, lanes] or None, where the queries' dropout
    noise begins.   second: u32[batch, groups, 1, lanes], the second word of the noise key.   chosen: tokens that all
    queries see, or None.
    """

    q: Array
    k: Array
    v: Array
    places: Array
    drawn: Array | None
    near: Array | None
    queries: Array
    keys: Array
    begin: Array | None
    second: Array | None
    chosen: Chosen | None


class Setting(NamedTuple):
    """block: tokens of a block.   rows: blocks whose queries see all keys.   rate: of dropout.   causal: as in `Mask`.
    interpret: run as plain operations, on any platform."""

    head_dim: int
    block: int
    rows: tuple[int, ...]
    rate: float
    causal: bool
    interpret: bool = False

    @property
    def heads(self) -> int:
        """Heads in a group, which shares the 128 lanes."""
        return LANES // self.head_dim


def memory(length: int, keys: int, block: int, head_dim: int) -> int:
    """Return the bytes of vector memory that the backward kernel takes.   length: of a padded row; keys: of a unit."""
    of_row = length * LANES * (2 * 2 + 2 * 2 * 2 + 2 * 4 + 4)  # keys, values; their gradients; sums; segments
    of_chunk = 16 * block * LANES * 2 * 2 * 4  # queries, outputs, their gradients
    return of_row + of_chunk + 5 * 4 * keys * block * LANES // head_dim + 2**18


def filled_up(number: int) -> int:
    """Round a row's number of blocks up to whole chunks."""
    return -(-number // chunk_of(number)) * chunk_of(number)


def chunk_of(number: int) -> int:
    """Return the blocks of queries in one grid step."""
    return min(number, 16 if number % 16 == 0 else 8)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def block_attention(inputs: Operands, setting: Setting) -> Array:
    """Attend from each block of queries to the blocks that the table names for it -> like q."""
    return _forward(inputs, setting)[0]


def _forward(inputs: Operands, setting: Setting):
    batch, length, width = inputs.q.shape
    statistics = (batch, width // LANES, length // setting.block, setting.heads * setting.block)
    specs = _specs(inputs, setting)
    results = [(inputs.q, specs.q), (jax.ShapeDtypeStruct(statistics, jnp.float32), _of_lanes(inputs))]
    out, spread = map(kept, _call(_forward_kernel, "forward", 2, setting, inputs, [], results, []))
    return out, (inputs, out, spread)


def _backward(setting: Setting, residuals, g: Array):
    inputs, out, spread = residuals
    sums = [pltpu.VMEM((inputs.k.shape[1], LANES), jnp.float32)] * 2
    # Five products: the scores again, then the gradients of values, probabilities, queries and keys.
    specs = _specs(inputs, setting)
    extra = [(out, specs.q), (g, specs.q), (spread, _of_lanes(inputs))]
    whole = pl.BlockSpec(specs.k.block_shape, specs.k.index_map)
    results = [(inputs.q, specs.q), (inputs.k, whole), (inputs.v, whole)]
    if inputs.chosen is not None:
        sum_of_chosen = jax.ShapeDtypeStruct(inputs.chosen.k.shape, jnp.float32), specs.chosen.k
        results += [sum_of_chosen] * 2
    dq, dk, dv, *d_chosen = _call(_backward_kernel, "backward", 5, setting, inputs, extra, results, sums)
    d_chosen = Chosen(*(x.astype(g.dtype) for x in d_chosen), None, None) if d_chosen else None
    return (Operands(dq, dk, dv, *[None] * (len(Operands._fields) - 4), d_chosen),)


block_attention.defvjp(_forward, _backward)


def _of_lanes(inputs: Operands) -> pl.BlockSpec:
    """Return the block that a grid step reads of [batch, groups, blocks, lanes]."""
    number, lanes = inputs.queries.shape[1:]
    return pl.BlockSpec((None, None, chunk_of(number), lanes), lambda row, group, part, _: (row, group, part, 0))


class _Table(NamedTuple):
    """Layout of the block table in scalar memory: i32[blocks, shared], then i32[heads or 1, blocks, drawn]."""

    blocks: int
    shared: int
    drawn: int
    by_head: bool

    def at(self, table, unit, head, index: int):
        """Return the block that a unit's queries of a head see, for an index below shared + drawn."""
        if index < self.shared:
            return table[unit * self.shared + index]
        line = (head * self.blocks if self.by_head else 0) + unit
        return table[self.blocks * self.shared + line * self.drawn + index - self.shared]


def _call(kernel, name: str, times: int, setting: Setting, inputs: Operands, extra: list, results: list, scratch: list):
    """Run the kernel for each row, group of heads and chunk of queries.   extra: further arrays, results: shapes, each
    with its spec.   times: how many query-key products the kernel computes."""
    batch, length, width = inputs.q.shape
    number, drawn = inputs.queries.shape[1], inputs.drawn
    table = _Table(number, inputs.places.shape[1], *((0, False) if drawn is None else (drawn.shape[2], len(drawn) > 1)))
    entries = [x.reshape(-1) for x in (inputs.places, drawn) if x is not None]
    leaves, structure = jax.tree.flatten(inputs._replace(places=None, drawn=None))
    keys = (table.shared + table.drawn) * setting.block + (0 if inputs.chosen is None else inputs.chosen.k.shape[1])
    pairs = batch * setting.block * (number * keys + len(setting.rows) * length)
    moved = [*leaves, *(x for x, _ in (*extra, *results))]
    return pl.pallas_call(
        functools.partial(kernel, structure=structure, table=table, setting=setting),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, width // LANES, number // chunk_of(number)),
            in_specs=[*jax.tree.leaves(_specs(inputs, setting)), *(spec for _, spec in extra)],
            out_specs=[spec for _, spec in results],
            scratch_shapes=scratch,
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x, _ in results],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=memory(length, keys, setting.block, setting.head_dim),
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * times * pairs * width,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in moved),
            transcendentals=pairs * width // setting.head_dim,
        ),
        name=f"block_attention_{name}",
        interpret=setting.interpret,
    )(jnp.concatenate(entries), *leaves, *(x for x, _ in extra))


def _specs(inputs: Operands, setting: Setting) -> Operands:
    """Return the part of each array that a grid step (row, group of heads, chunk of queries) reads; None for None."""
    number, lanes = inputs.queries.shape[1:]
    chunk, length, once = chunk_of(number), inputs.k.shape[1], pl.Buffered(1)  # one buffer for what seldom changes

    def at(shape, index, **mode):
        return pl.BlockSpec(shape, lambda row, group, part, _: index(row, group, part), **mode)

    def of_group(n, **mode):
        return at((None, n, LANES), lambda row, group, part: (row, 0, group), **mode)

    def of_row(n):
        return at((None, n, LANES), lambda row, group, part: (row, 0, 0), pipeline_mode=once)

    near, chosen = inputs.near, inputs.chosen
    specs = Operands(
        q=at((None, chunk * setting.block, LANES), lambda row, group, part: (row, part, group)),
        k=of_group(length, pipeline_mode=once),
        v=of_group(length, pipeline_mode=once),
        places=None,
        drawn=None,
        near=near if near is None else at((None, *near.shape[1:]), lambda row, group, part: (group % len(near), 0, 0)),
        queries=at((None, chunk, lanes), lambda row, group, part: (row, part, 0)),
        keys=of_row(length),
        begin=_of_lanes(inputs),
        second=at((None, None, 1, lanes), lambda row, group, part: (row, group, 0, 0)),
        chosen=None,
    )
    if chosen is not None:
        n = chosen.k.shape[1]
        specs = specs._replace(chosen=Chosen(of_group(n), of_group(n), of_row(n), of_row(n)))
    return specs if inputs.begin is not None else specs._replace(begin=None, second=None)


class _Piece(NamedTuple):
    """Consecutive keys.

    starts: their first key, one for each head of the group or one for all; empty for `Operands.chosen`.
    query_segments: i32[1, lanes], of the queries that see them.   first: i32[1, lanes], the position of the first key.
    near: index of the block in `Operands.near` that is added to the scores, or None.
    """

    starts: tuple
    size: int
    query_segments: Array
    first: Array | None = None
    near: int | None = None


class _Unit(NamedTuple):
    """A block of queries.   refs: Operands of the grid step.   group: of heads.   number: of the block in the row.
    index: of the block in the chunk."""

    refs: Operands
    group: Array
    number: Array
    index: Array
    setting: Setting

    @property
    def lines(self):
        """The positions of the unit's queries in the chunk."""
        return pl.ds(pl.multiple_of(self.index * self.setting.block, self.setting.block), self.setting.block)

    @property
    def line(self):
        return pl.ds(self.index, 1)


def _forward_kernel(entries, *refs, structure, table: _Table, setting: Setting):
    count = structure.num_leaves
    inputs, (out, spread) = jax.tree.unflatten(structure, refs[:count]), refs[count:]

    def write(unit: _Unit, mixed: Array, most: Array, total: Array):
        mixed = mixed / (total * (1.0 - setting.rate))
        out[unit.lines, :] = _folded(mixed.T, setting).astype(out.dtype)
        spread[unit.line, :] = most + jnp.log(total)

    def ordinary(unit: _Unit):
        write(unit, *_mixed(unit, _pieces(unit, entries, table)))

    def of_all(unit: _Unit):
        def joined(carried, pieces: list[_Piece]):
            mixed, most, total = _mixed(unit, pieces)
            both = jnp.maximum(most, carried[1])
            old, new = jnp.exp(carried[1] - both), jnp.exp(most - both)
            return carried[0] * old + mixed * new, both, carried[2] * old + total * new

        lanes = setting.heads * setting.block
        empty = jnp.zeros((LANES, lanes)), jnp.full((1, lanes), HIDDEN), jnp.zeros((1, lanes))
        step = lambda tile, carried: joined(carried, [_tile(unit, tile)])
        carried = jax.lax.fori_loop(0, inputs.k.shape[0] // _tile_size(unit), step, empty)
        write(unit, *(carried if inputs.chosen is None else joined(carried, _of_chosen(unit))))

    _every_unit(inputs, ordinary, of_all, setting)


def _backward_kernel(entries, *refs, structure, table: _Table, setting: Setting):
    count = structure.num_leaves
    inputs, (out, g, spread, dq, dk, dv, *sums) = jax.tree.unflatten(structure, refs[:count]), refs[count:]
    *of_chosen, dk_sum, dv_sum = sums

    @pl.when(pl.program_id(2) == 0)
    def _():
        for total in sums:
            _fill(total)

    def gradients(unit: _Unit, pieces: list[_Piece]) -> Array:
        """Return the gradient of the queries, f32[block, lanes]; add those of keys and values to their sums."""
        q, d_out = _spread(_scaled(unit), setting), _spread(g[unit.lines, :], setting)
        weighted = d_out.astype(jnp.float32) * jnp.tile(out[unit.lines, :], (setting.heads, 1)).astype(jnp.float32)
        delta = weighted.T.sum(0, keepdims=True)
        k, v = _keys_and_values(unit, pieces)
        p = jnp.exp(_scores(unit, pieces, across(k, q)) - spread[unit.line, :])
        dp, dropped = across(v, d_out), p
        if setting.rate:
            factor = jnp.where(_keep(unit, pieces), 1.0 / (1.0 - setting.rate), 0.0)
            dp, dropped = dp * factor, p * factor
        ds = (p * (dp - delta)).astype(g.dtype)
        _add([dk_sum, *of_chosen[:1]], along(ds, q), pieces, setting)
        _add([dv_sum, *of_chosen[1:]], along(dropped.astype(g.dtype), d_out), pieces, setting)
        return _folded(along(ds.T, k), setting) * setting.head_dim**-0.5

    def ordinary(unit: _Unit):
        dq[unit.lines, :] = gradients(unit, _pieces(unit, entries, table)).astype(dq.dtype)

    def of_all(unit: _Unit):
        step = lambda tile, total: total + gradients(unit, [_tile(unit, tile)])
        total = jnp.zeros((setting.block, LANES)) if inputs.chosen is None else gradients(unit, _of_chosen(unit))
        total = jax.lax.fori_loop(0, inputs.k.shape[0] // _tile_size(unit), step, total)
        dq[unit.lines, :] = total.astype(dq.dtype)

    _every_unit(inputs, ordinary, of_all, setting, together=2)

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        _fill(dk, dk_sum)
        _fill(dv, dv_sum)


def _fill(ref, source=None) -> None:
    """Fill ref [n, lanes] with source or zeros, part by part: all at once would be separate code for each register."""
    size = next(size for size in _TILES if ref.shape[0] % size == 0)

    def part(index, _):
        rows = pl.ds(pl.multiple_of(index * size, size), size)
        empty = jnp.zeros((size, ref.shape[1]), ref.dtype)
        ref[rows, :] = empty if source is None else source[rows, :].astype(ref.dtype)

    jax.lax.fori_loop(0, ref.shape[0] // size, part, None)


def _every_unit(inputs: Operands, ordinary, of_all, setting: Setting, together: int = 1) -> None:
    """Process a chunk's units: first all by the table, which names nothing for those that see all keys; then these.
    together: units in one iteration of the loop, so that one computes while another waits."""
    chunk = inputs.queries.shape[0]
    group, first = pl.program_id(1), pl.program_id(2) * chunk

    def at(index) -> _Unit:
        return _Unit(inputs, group, first + index, index, setting)

    def row(index, _):
        block = sum(jnp.where(index == number, row, 0) for number, row in enumerate(setting.rows))
        pl.when((block >= first) & (block < first + chunk))(lambda: of_all(at(block - first)))

    jax.lax.fori_loop(0, chunk, lambda index, _: ordinary(at(index)), None, unroll=math.gcd(chunk, together))
    if setting.rows:
        jax.lax.fori_loop(0, len(setting.rows), row, None)


def _pieces(unit: _Unit, entries, table: _Table) -> list[_Piece]:
    """Return the keys that a unit sees by the table."""
    setting, pieces, queries = unit.setting, [], unit.refs.queries[unit.line, :]
    near = 0 if unit.refs.near is None else unit.refs.near.shape[0] // setting.block
    for index in range(table.shared + table.drawn):
        heads = setting.heads if index >= table.shared and table.by_head else 1
        places = [table.at(entries, unit.number, unit.group * heads + head, index) for head in range(heads)]
        placed = _by_head([jnp.full((1, queries.shape[1]), place) for place in places], setting.block)
        segments = jnp.where(placed >= 0, queries, _SEES_NOTHING)
        starts = tuple(jnp.maximum(place, 0) * setting.block for place in places)
        pieces.append(_Piece(starts, setting.block, segments, placed * setting.block, index if index < near else None))
    sees_all = functools.reduce(jnp.logical_or, [unit.number == row for row in setting.rows], False)
    return pieces + _of_chosen(unit, jnp.where(sees_all, _SEES_NOTHING, queries))


def _of_chosen(unit: _Unit, segments: Array | None = None) -> list[_Piece]:
    chosen, segments = unit.refs.chosen, unit.refs.queries[unit.line, :] if segments is None else segments
    return [] if chosen is None else [_Piece((), chosen.k.shape[0], segments)]


def _tile_size(unit: _Unit) -> int:
    return next(size for size in (*_TILES, unit.setting.block) if unit.refs.k.shape[0] % size == 0)


def _tile(unit: _Unit, tile) -> _Piece:
    """Return one tile of all keys of the row."""
    queries, size = unit.refs.queries[unit.line, :], _tile_size(unit)
    return _Piece((tile * size,), size, queries, jnp.full_like(queries, tile * size))


def _mixed(unit: _Unit, pieces: list[_Piece]) -> tuple[Array, Array, Array]:
    """Return the values weighted by exp(score - largest score), f32[lanes, lanes of queries], the largest scores and
    the sums of the weights, f32[1, lanes of queries] each."""
    setting = unit.setting
    k, v = _keys_and_values(unit, pieces)
    q = _spread(_scaled(unit), setting)
    # Parts of a product run on different matrix units. The backward kernel has other products to run beside it.
    parts = [across(k[first : first + LANES], q) for first in range(0, len(k), LANES)]
    scores = _scores(unit, pieces, jnp.concatenate(parts))
    most = scores.max(0, keepdims=True)
    p = jnp.exp(scores - most)
    total = p.sum(0, keepdims=True)
    p = jnp.where(_keep(unit, pieces), p, 0.0) if setting.rate else p
    return along(v.T, p.astype(v.dtype)), most, total


def _scores(unit: _Unit, pieces: list[_Piece], scores: Array) -> Array:
    """Add `near` to the scores f32[keys, lanes of queries], and hide the keys that a query does not see."""
    parts, first, setting = [], 0, unit.setting
    for piece in pieces:
        part, first = scores[first : first + piece.size], first + piece.size
        if piece.near is not None:
            part += unit.refs.near[piece.near * piece.size : (piece.near + 1) * piece.size, :]
        if piece.starts:
            segments = _read(unit.refs.keys, piece, setting.block, setting.heads * setting.block // LANES)
        else:
            segments = _wide(unit.refs.chosen.segments[...], unit)
        seen = segments == piece.query_segments
        if setting.causal:
            position = unit.number * setting.block + iota(part.shape, 1) % setting.block
            at = piece.first + iota(part.shape, 0) if piece.starts else _wide(unit.refs.chosen.positions[...], unit)
            seen &= at <= position
        parts.append(jnp.where(seen, part, HIDDEN))
    return jnp.concatenate(parts)


def _keep(unit: _Unit, pieces: list[_Piece]) -> Array:
    """Return bool[keys, lanes of queries]: what `noise.dropout` keeps."""
    begin, second, kept_here = unit.refs.begin[unit.line, :], unit.refs.second[...], []
    for piece in pieces:
        if piece.starts:
            line = begin + counted.spread(piece.first.astype(jnp.uint32))
            of_key = counted.spread(iota((piece.size, line.shape[1]), 0).astype(jnp.uint32))
        else:
            line, of_key = begin, counted.spread(_wide(unit.refs.chosen.positions[...], unit).astype(jnp.uint32))
        kept_here.append(counted.stays(counted.hashed(of_key + line, second), unit.setting.rate))
    return jnp.concatenate(kept_here)


def _scaled(unit: _Unit) -> Array:
    q = unit.refs.q[unit.lines, :]
    return (q.astype(jnp.float32) * unit.setting.head_dim**-0.5).astype(q.dtype)


def _keys_and_values(unit: _Unit, pieces: list[_Piece]) -> tuple[Array, Array]:
    """Return keys and values of the pieces, [keys, lanes] each."""
    refs, lanes = unit.refs, unit.setting.head_dim
    both = (refs.k, refs.chosen and refs.chosen.k), (refs.v, refs.chosen and refs.chosen.v)

    def read(row, chosen, piece):
        return _read(row, piece, lanes) if piece.starts else chosen[...]

    return tuple(jnp.concatenate([read(row, chosen, piece) for piece in pieces]) for row, chosen in both)


def _read(ref, piece: _Piece, lanes: int, times: int = 1) -> Array:
    """Read a piece of ref -> [keys, times * LANES].   lanes: of each head."""
    parts = [ref[pl.ds(pl.multiple_of(start, piece.size), piece.size), :] for start in piece.starts]
    return _by_head([jnp.tile(part, (1, times)) for part in parts], lanes)


def _wide(x: Array, unit: _Unit) -> Array:
    """Repeat x [n, LANES], whose lanes are equal, for all lanes of a unit's queries."""
    return jnp.tile(x, (1, unit.setting.heads * unit.setting.block // LANES))


def _add(totals: list, parts: Array, pieces: list[_Piece], setting: Setting) -> None:
    """Add gradients to the sums: the transpose of `_keys_and_values`.   totals: of the row and of `Operands.chosen`."""
    first = 0
    for piece in pieces:
        part, first = parts[first : first + piece.size], first + piece.size
        if not piece.starts:
            totals[1][...] += part
        for head, start in enumerate(piece.starts):
            of_head = part if len(piece.starts) == 1 else only(part, head, setting.head_dim)
            totals[0][pl.ds(pl.multiple_of(start, piece.size), piece.size), :] += of_head


def _by_head(parts: list[Array], lanes: int) -> Array:
    """Take each head's lanes from its own part -> [n, heads * lanes]; a single part serves all heads."""
    x = parts[0]
    for head, part in enumerate(parts[1:], 1):
        x = jnp.where(iota(x.shape, 1) >= head * lanes, part, x)
    return x


def _spread(x: Array, setting: Setting) -> Array:
    """Copy x for each head, with the lanes of other heads 0: [block, lanes] -> [heads * block, lanes]."""
    return jnp.concatenate([only(x, head, setting.head_dim) for head in range(setting.heads)])


def _folded(x: Array, setting: Setting) -> Array:
    """Undo `_spread`, from each head's copy its own lanes: [heads * block, lanes] -> [block, lanes]."""
    return _by_head([x[first : first + setting.block] for first in range(0, len(x), setting.block)], setting.head_dim)
