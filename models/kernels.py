"""Fused attention kernels: the same numbers as `attention`'s plain form, without its [length, length] arrays.

`KERNELS` says of each where it runs and what keeps it from an attention; who chooses a kernel and who traces it ask
there. A kernel that is named and cannot run is an error, never the plain form in silence. By rule the plain form are
the last layer of an encoder that is read at few positions, and an evaluation whose memory a kernel does not take
(`pretrain/training/attention_choice.py`).
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
from jax import Array
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash_kernel
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask

from models import relative_kernel, row_attention
from models.program import KEPT
from models.sharding import current_rules

LANES = row_attention.LANES  # splash attention cuts sequences into blocks of multiples of it
BLOCKS = (512, 256, 128)


class Attention(NamedTuple):
    """An attention that a kernel is asked to compute, whole; how a mesh cuts it say the rules in force.

    length: tokens of a row.   width, heads: of its layer.   dropout: of the probabilities.   memory: keys before the
    row's own.   chosen: whether the queries are chosen positions of the row, else all.
    part: of a model of several, as its settings name it.
    """

    length: int
    width: int
    heads: int
    dropout: float
    memory: int = 0
    chosen: bool = False
    part: str = ""


class Kernel(NamedTuple):
    """platforms: where it runs.   obstacles: of an attention -> why it cannot compute that, nothing where it can;
    ValueError where a mesh does not divide it."""

    platforms: tuple[str, ...]
    obstacles: Callable[[Attention], list[str]]


def require(kernel: str, attention: Attention) -> None:
    """ValueError with the reasons where a kernel that is named cannot compute an attention."""
    if obstacles := KERNELS[kernel].obstacles(attention):
        raise ValueError(f"attention {kernel} does not work here: {'; '.join(obstacles)}; or use xla")


def _splash_obstacles(attention: Attention) -> list[str]:
    length, (cut, _) = attention.length, _cuts(attention)
    obstacles = _of_dropout(attention) + _of_length(attention)
    if length % LANES == 0 and length // cut % LANES:
        obstacles.append(f"--mesh sequence={cut} cuts length={length} into parts that are no multiple of {LANES}")
    return obstacles


def _cudnn_obstacles(attention: Attention) -> list[str]:
    head_dim, (cut, _) = attention.width // attention.heads, _cuts(attention)
    obstacles = _of_dropout(attention) + _of_length(attention)
    if head_dim % 8 or head_dim > 128:
        obstacles.append(f"{_heads(attention)} have {head_dim} numbers each: choose a multiple of 8 up to 128")
    if cut > 1:
        obstacles.append(f"--mesh sequence={cut} cuts rows: leave sequence out")
    return obstacles


def _relative_obstacles(attention: Attention) -> list[str]:
    length, memory, width, heads = attention.length, attention.memory, attention.width, attention.heads
    (cut, shared), obstacles = _cuts(attention), _of_length(attention)
    if memory % LANES:
        obstacles.append(f"memory={memory}: choose a multiple of {LANES}")
    distances = memory + length + relative_kernel.reach(length, attention.chosen)
    if distances > relative_kernel.LONGEST:
        obstacles.append(
            f"length={length} with memory={memory} has {distances} distances, more than {relative_kernel.LONGEST}: "
            "lower them"
        )
    if width % LANES or LANES % (width // heads):
        obstacles.append(f"{_heads(attention)} do not fill blocks of {LANES}")
    elif width // shared % LANES:
        obstacles.append(f"--mesh tensor={shared} cuts {_heads(attention)}: its parts do not fill blocks of {LANES}")
    if cut > 1:
        obstacles.append(f"--mesh sequence={cut} cuts rows: leave sequence out")
    return obstacles


def _of_dropout(attention: Attention) -> list[str]:
    return [f"set model.attention_dropout={attention.dropout} to 0"] if attention.dropout > 0 else []


def _of_length(attention: Attention) -> list[str]:
    return [f"length={attention.length}: choose a multiple of {LANES}"] if attention.length % LANES else []


def _heads(attention: Attention) -> str:
    part = f"model.{attention.part}." if attention.part else "model."
    return f"{part}heads={attention.heads} in {part}width={attention.width}"


def _cuts(attention: Attention) -> tuple[int, int]:
    """Into how many parts the mesh cuts a row's queries and the heads; chosen queries are never cut."""
    if (rules := current_rules()) is None:
        return 1, 1
    rows = None if attention.chosen else "length"
    axes = rules.spec((rows, "heads"), (attention.length, attention.heads))
    cut, shared = (1 if axis is None else rules.mesh.shape[axis] for axis in axes)
    return cut, shared


KERNELS: Mapping[str, Kernel] = {
    "splash": Kernel(("tpu",), _splash_obstacles),  # where a row fits on a chip, `row_attention` in its place
    "cudnn": Kernel(("gpu",), _cudnn_obstacles),
    "relative": Kernel(("tpu",), _relative_obstacles),
}


def rows_fit(attention: Attention) -> bool:
    """Whether `attend_rows` takes an attention, as a mesh cuts it."""
    length, width, heads = attention[:3]
    cut, shared = _cuts(attention)
    return cut == 1 and row_attention.fits(length, width // shared, width // heads)


def attend_rows(products: Array, biases: Array, segments: Array, heads: int, interpret: bool = False) -> Array:
    """`row_attention` (TPU) on a mesh: each device attends with its rows and heads."""
    head_dim = products.shape[-1] // 3 // heads

    def attend(products: Array, biases: Array, segments: Array) -> Array:
        return row_attention.row_attention(products, biases, segments, head_dim, interpret)

    rules = current_rules()
    if rules is not None:
        spec = lambda x, *axes: rules.spec(axes, x.shape)
        specs = (spec(products, "batch", None, "heads"), spec(biases, "heads"), spec(segments, "batch", None))
        attend = jax.shard_map(attend, mesh=rules.mesh, in_specs=specs, out_specs=specs[0], check_vma=False)
    return attend(products, biases, segments)


def splash(q: Array, k: Array, v: Array, segments: Array, interpret: bool = False) -> Array:
    """Splash attention (TPU): q, k, v [batch, heads, length, head_dim], segments i32[batch, length] -> like q.

    length is a multiple of 128. On a mesh each device attends with its rows, heads and queries to all of their keys.
    interpret: run as plain operations, on any platform.
    """

    def attend(q: Array, k: Array, v: Array, queries: Array, keys: Array) -> Array:
        heads, length, width = q.shape[1], q.shape[2], q.shape[3]
        everything = splash_mask.MultiHeadMask([splash_mask.FullMask((length, k.shape[2]))] * heads)
        kernel = splash_kernel.make_splash_mha(
            everything,
            block_sizes=_blocks(length, k.shape[2]),
            head_shards=1,
            q_seq_shards=1,
            residual_checkpoint_name=KEPT,
            interpret=interpret,
        )
        return jax.vmap(kernel)(q * width**-0.5, k, v, splash_kernel.SegmentIds(queries, keys))

    rules = current_rules()
    if rules is not None:
        local = rules.spec(("batch", "heads", "length", None), q.shape)
        whole = rules.spec(("batch", "heads", None, None), k.shape)
        ids = (rules.spec(("batch", "length"), segments.shape), rules.spec(("batch", None), segments.shape))
        attend = jax.shard_map(
            attend, mesh=rules.mesh, in_specs=(local, whole, whole, *ids), out_specs=local, check_vma=False
        )
    return attend(q, k, v, segments, segments)


def _blocks(queries: int, keys: int) -> splash_kernel.BlockSizes:
    """The largest blocks that divide both sequences; the kernel's own default of 128 leaves the matrix units idle.

    Positions are the minor axis, because a head's 64 numbers would be padded to 128 in memory.
    """
    minor = splash_kernel.QKVLayout.SEQ_MINOR
    q, kv = (next(size for size in BLOCKS if length % size == 0) for length in (queries, keys))
    return splash_kernel.BlockSizes(
        block_q=q, block_kv=kv, block_kv_compute=kv, block_q_dkv=q, block_kv_dkv=kv, block_kv_dkv_compute=kv,
        use_fused_bwd_kernel=True, q_layout=minor, k_layout=minor, v_layout=minor,
    )  # fmt: skip


def cudnn(q: Array, k: Array, v: Array, segments: Array) -> Array:
    """cuDNN's fused attention (GPU): bfloat16 q, k, v [batch, length, heads, head_dim] -> like q."""
    visible = segments[:, None, :, None] == segments[:, None, None, :]  # [batch, 1, query, key]
    return jax.nn.dot_product_attention(q, k, v, mask=visible, implementation="cudnn")
