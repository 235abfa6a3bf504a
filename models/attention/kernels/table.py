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

from models.attention.kernels import relative_kernel, row_attention
from models.core.sharding import current_rules

LANES = row_attention.LANES  # splash attention cuts sequences into blocks of multiples of it


class Attention(NamedTuple):
    """An attention that a kernel is asked to compute, whole; how a mesh cuts it say the rules in force.

    length: tokens of a row.   width, heads: of its layer.   dropout: of the probabilities.   memory: keys before the
    row's own.   chosen: whether the queries are chosen positions of the row, else all.
    causal, ranked: whether its mask is static causal, and whether it has ranks.
    part: of a model of several, as its settings name it.
    """

    length: int
    width: int
    heads: int
    dropout: float
    memory: int = 0
    chosen: bool = False
    causal: bool = False
    ranked: bool = False
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
    if cut > 1 and attention.causal:
        obstacles.append(f"--mesh sequence={cut} cuts rows of a causal mask: leave sequence out")
    if attention.ranked:
        obstacles.append("the mask has ranks, a prefix or an order, which it does not read")
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
    if attention.causal or not attention.ranked:
        obstacles.append("the mask has no ranks, which alone it reads")
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
    """Whether `attend_rows` takes an attention within segments, as a mesh cuts it."""
    length, width, heads = attention[:3]
    cut, shared = _cuts(attention)
    return cut == 1 and not attention.causal and row_attention.fits(length, width // shared, width // heads)


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
