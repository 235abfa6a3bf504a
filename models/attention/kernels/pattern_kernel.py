"""Attention of a sparse pattern by the TPU kernel of `block_attention.py`: its operands, from a mask's blocks, and the
conditions for it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from models.attention.kernels import block_attention as by_block
from models.attention.kernels.block_attention import Chosen, Operands, Setting, block_attention
from models.attention.kernels.kernel import Attention, Kernel, cuts, of_bias, of_cut, of_heads, of_ranks
from models.attention.kernels.lanes import HIDDEN
from models.attention.layouts import HEADS_BESIDE, Mixing
from models.attention.mask import Mask, chosen, is_global, visible
from models.attention.operands import LANES
from models.attention.patterns.blocks import Blocks
from models.blocks.positions import gather_positions, put_positions
from models.core import noise as counted
from models.core.parameters import Noise
from models.core.sharding import current_rules

_BEYOND, _ABSENT = -1, -2  # segments of a row's padding to whole chunks, and of keys not seen at their own place
_PACKED = 16  # bfloat16 numbers in a register's column
# MiB of vector memory of a core, by the beginning of the chip's name: v5e, v5p, v6e, v7x; the default is v4's 16.
_MEMORY = {"TPU v5 lite": 128, "TPU v5": 64, "TPU v6": 128, "TPU7x": 64, "": 16}


def by_kernel(
    q: Array, k: Array, v: Array, mask: Mask, *, heads: int, dropout_rate: float, noise: Noise, interpret: bool = False
) -> Array:
    """Compute `plain.attention` of a pattern: q, k, v [batch, length, width], heads side by side -> like q."""
    blocks, rate = mask.blocks, 0.0 if noise is None else dropout_rate
    length, head_dim = q.shape[1], q.shape[2] // heads
    setting = Setting(head_dim, blocks.block, blocks.rows, rate, mask.causal, interpret)
    number = by_block.filled_up(blocks.number)
    padding = number * blocks.block - length
    long = lambda x: jnp.pad(x, ((0, 0), (0, padding), (0, 0)))
    segments = jnp.pad(mask.segments, ((0, 0), (0, padding)), constant_values=_BEYOND)
    begin, second = _noise(noise, heads, length, number, setting) if rate else (None, None)
    inputs = Operands(
        *(long(x) for x in (q, k, v)),
        places=jnp.asarray(_places(blocks, number)),
        drawn=_drawn(blocks, number),
        near=_near(blocks, setting),
        queries=jnp.tile(segments.reshape(-1, number, blocks.block), (1, 1, setting.heads)),
        keys=_of_keys(_without_globals(segments, mask.globals)),
        begin=begin,
        second=second,
        chosen=None if mask.globals is None else _chosen(k, v, mask),
    )
    mixed = _on_mesh(inputs, setting)[:, :length]
    if mask.globals is None or mask.globals_apart:
        return mixed
    return put_positions(mixed, _of_globals(q, k, v, mask, heads, rate, noise), mask.globals)


def _of_globals(q: Array, k: Array, v: Array, mask: Mask, heads: int, rate: float, noise: Noise) -> Array:
    """Compute the attention of the global tokens, which are too few for a kernel's blocks -> [batch, n, width]."""
    by_head = lambda x: x.reshape(*x.shape[:2], heads, -1)
    length, at = q.shape[1], mask.globals
    query_mask = chosen(dataclasses.replace(mask, blocks=None, globals=None), jnp.maximum(at, 0))
    queries = by_head(gather_positions(q, at))
    scaled = queries * queries.shape[-1] ** -0.5
    scores = jnp.einsum("bnhd,blhd->bhnl", scaled, by_head(k), preferred_element_type=jnp.float32)
    shares = jax.nn.softmax(jnp.where(visible(query_mask), scores, jnp.finfo(jnp.float32).min), axis=-1)
    if rate:
        elements = jnp.arange(heads)[None, :, None, None], at[:, None, :, None], jnp.arange(length)[None, None, None]
        stays = counted.stays(counted.bits_at(noise, (heads, length, length), elements), rate)
        shares = jnp.where(stays, shares / (1.0 - rate), 0.0)
    return jnp.einsum("bhnl,blhd->bnhd", shares.astype(v.dtype), by_head(v)).reshape(queries.shape[0], -1, q.shape[2])


def _of_keys(x: Array) -> Array:
    """Repeat x [batch, keys] in all lanes -> [batch, keys, LANES]."""
    return jnp.broadcast_to(x[:, :, None], (*x.shape, LANES))


def _without_globals(segments: Array, positions: Array | None) -> Array:
    """Return the segments i32[batch, length] of keys without global tokens, which queries see as `Operands.chosen`."""
    return segments if positions is None else jnp.where(is_global(positions, segments.shape[1]), _ABSENT, segments)


def _chosen(k: Array, v: Array, mask: Mask) -> Chosen:
    """Return the global tokens, padded to whole registers."""
    at = jnp.pad(mask.globals, ((0, 0), (0, -mask.globals.shape[1] % _PACKED)), constant_values=-1)
    segments = jnp.where(at < 0, _ABSENT, gather_positions(mask.segments, at))
    return Chosen(*(gather_positions(x, at) for x in (k, v)), segments=_of_keys(segments), positions=_of_keys(at))


def _on_mesh(inputs: Operands, setting: Setting) -> Array:
    """Run the kernel on each device with its rows and heads."""
    rules = current_rules()
    if rules is None:
        return block_attention(inputs, setting)
    of_row, of_lanes = ("batch", None, "heads"), ("batch", "heads", None, None)
    axes = Operands(
        *[of_row] * 3,
        places=(None, None),
        drawn=("heads", None, None),
        near=("heads", None, None),
        queries=("batch", None, None),
        keys=("batch", None, None),
        begin=of_lanes,
        second=of_lanes,
        chosen=None if inputs.chosen is None else Chosen(of_row, of_row, *[("batch", None, None)] * 2),
    )

    def spec(x: Array | None, names: tuple):
        if x is None:
            return None
        shared = x.shape[0] == 1 and names[0] == "heads"  # one entry serves all heads
        return rules.spec((None, *names[1:]) if shared else names, x.shape)

    specs = jax.tree.map(spec, inputs, axes, is_leaf=lambda x: x is None)
    attend = lambda part: block_attention(part, setting)
    return jax.shard_map(attend, mesh=rules.mesh, in_specs=(specs,), out_specs=specs.q, check_vma=False)(inputs)


def _places(blocks: Blocks, number: int) -> np.ndarray:
    """Return i32[number, n]: the window's blocks, then the columns, each once; all -1 for blocks that see all keys."""
    query_blocks, offsets = np.arange(number)[:, None], np.array(blocks.offsets, np.int32)
    near = query_blocks + offsets
    hidden = (near < 0) | (near >= blocks.number) | np.isin(near, blocks.columns)
    columns = np.broadcast_to(np.array(blocks.columns, np.int32), (number, len(blocks.columns)))
    places = np.concatenate([np.where(hidden, -1, near), columns], axis=1)
    return np.where((query_blocks >= blocks.number) | np.isin(query_blocks, blocks.rows), -1, places).astype(np.int32)


def _drawn(blocks: Blocks, number: int) -> Array | None:
    if not blocks.drawn.shape[-1]:
        return None
    drawn = jnp.pad(blocks.drawn, ((0, 0), (0, number - blocks.number), (0, 0)), constant_values=-1)
    return jnp.where(np.isin(np.arange(number), blocks.rows)[:, None], -1, drawn)


def _near(blocks: Blocks, setting: Setting) -> Array | None:
    """Return f32[groups or 1, window's keys, lanes]: 0 where reach and dilation let a query see a key, else HIDDEN."""
    if blocks.reach is None:
        return None
    keys = (np.array(blocks.offsets)[:, None] * blocks.block + np.arange(blocks.block)).reshape(-1)
    distance = np.abs(keys[:, None] - np.arange(blocks.block))
    reach, dilation = (x[:, None, None] for x in (blocks.reach, blocks.dilation))
    near = jnp.where((distance <= reach) & (distance % dilation == 0), 0.0, HIDDEN)  # [heads or 1, keys, queries]
    if near.shape[0] == 1:
        return jnp.tile(near, (1, 1, setting.heads))
    by_group = near.reshape(-1, setting.heads, *near.shape[1:])
    return jnp.swapaxes(by_group, 1, 2).reshape(by_group.shape[0], keys.size, -1)


def _noise(noise: Array, heads: int, length: int, number: int, setting: Setting) -> tuple[Array, Array]:
    """Return `Operands.begin` and `second`, which give elements [heads, length, length] the bits of `noise.bits`."""
    batch, groups = noise.shape[0], heads // setting.heads
    if heads * length**2 <= counted.COUNTED:
        first = counted.spread(jnp.arange(heads, dtype=jnp.uint32) * jnp.uint32(length**2 % 2**32))
        words = noise[:, :1] + first, jnp.broadcast_to(noise[:, 1:], (batch, heads))
    else:  # each head has its own key
        keys = jax.vmap(counted.fold, (None, 0), 1)(noise, jnp.arange(heads))
        words = keys[..., 0], keys[..., 1]
    of_query = counted.spread(jnp.arange(number * setting.block, dtype=jnp.uint32) * jnp.uint32(length))
    begin = words[0][..., None] + of_query  # [batch, heads, queries]
    begin = begin.reshape(batch, groups, setting.heads, number, setting.block)
    second = jnp.broadcast_to(words[1][..., None], (batch, heads, setting.block))
    return jnp.swapaxes(begin, 2, 3).reshape(batch, groups, number, -1), second.reshape(batch, groups, 1, -1)


def _obstacles(attention: Attention) -> list[str]:
    blocks, width, heads = attention.blocks, attention.width, attention.heads
    if attention.biased:
        return of_bias(attention)
    (_, shared), obstacles, fill = cuts(attention), [], f"do not fill blocks of {LANES}"
    if width % LANES or LANES % (width // heads):
        return [f"{of_heads(attention)} {fill}"]
    if width // shared % LANES:
        obstacles.append(f"--mesh tensor={shared} cuts {of_heads(attention)}: its parts {fill}")
    whole = max(width // heads, _PACKED)  # so that a group's queries fill whole lanes
    if blocks.block % whole:
        obstacles.append(f"model.pattern.block={blocks.block}: choose a multiple of {whole}")
    obstacles += of_ranks(attention) + of_cut(attention)
    keys = (len(blocks.offsets) + len(blocks.columns) + blocks.drawn[-1]) * blocks.block
    length = by_block.filled_up(-(-attention.length // blocks.block)) * blocks.block
    if by_block.memory(length, keys, blocks.block, width // heads) > _vector_memory():
        obstacles.append(f"length={attention.length} with {keys} keys for a query does not fit into vector memory")
    return obstacles


def _vector_memory() -> int:
    """Return the bytes of vector memory that a core of the current chips has."""
    rules = current_rules()
    kind = (jax.devices() if rules is None else rules.mesh.devices.flat)[0].device_kind
    return 2**20 * next(size for name, size in _MEMORY.items() if kind.startswith(name))


# Unrolling 12 layers takes 0.85 of the scanned step's time and 1.8 times its compilation
# (benchmarks/results/long_plans.md).
KERNEL = Kernel(
    "pattern",
    "self",
    ("tpu",),
    _obstacles,
    lambda attention: Mixing(HEADS_BESIDE, functools.partial(by_kernel, heads=attention.heads)),
    sparse=True,
    unrolled=12,
)
