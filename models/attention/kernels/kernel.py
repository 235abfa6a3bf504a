"""The description of a fused attention kernel, and the conditions that several kernels share."""

from collections.abc import Callable
from typing import NamedTuple

from models.attention.layouts import Mixing
from models.attention.operands import LANES
from models.attention.patterns.blocks import Blocks
from models.core.sharding import parts_of


class Attention(NamedTuple):
    """An attention that a kernel may compute, as a whole; the sharding rules in force say how a mesh cuts it.

    length: tokens of a row.   width: of all heads together.   dropout: of the probabilities.   memory: keys before
    the row's own.   chosen: whether only chosen positions of the row are queries.
    causal, ranked, biased: whether its mask is statically causal, has ranks, has a bias.
    by_distance: whether the bias depends on the distance only.   whole: whether the queries are a decoder's, which no
    mesh cuts.   blocks: of a sparse pattern, with shapes in place of one layer's arrays; None for full attention.
    part: name of this part of the model in its settings, '' if the model has one part.
    context: number of keys of a second sequence, which the row then sees instead of itself; 0 for self-attention.
    """

    length: int
    width: int
    heads: int
    dropout: float
    memory: int = 0
    chosen: bool = False
    causal: bool = False
    ranked: bool = False
    biased: bool = False
    blocks: Blocks | None = None
    part: str = ""
    context: int = 0
    by_distance: bool = False
    whole: bool = False


class Kernel(NamedTuple):
    """The description of a kernel, without its cost (`tpu/kernel_costs.py`): the code that chooses, refuses or traces a
    kernel reads this.

    name: the value of --attention.   form: of attention that it computes, 'self' or 'relative'.
    platforms: where it runs.   obstacles: attention -> the reasons why the kernel cannot compute it, [] if it can;
    ValueError if the mesh does not divide it.
    mixing: attention that it can compute -> how; for the form 'relative', `mix` is called like
    `relative.relative_attention`.
    sparse: whether it computes sparse patterns, or full attention under a mask; `obstacles` is asked about its own kind
    only.
    unrolled: up to this many layers are unrolled by default, if each has its own parameters and the mesh does not cut
    the layers' work (`tensor`): a loop would copy the kernel's inputs and outputs into and out of its stacks.
    """

    name: str
    form: str
    platforms: tuple[str, ...]
    obstacles: Callable[[Attention], list[str]]
    mixing: Callable[[Attention], Mixing]
    sparse: bool = False
    unrolled: int = 0


def of_dropout(attention: Attention) -> list[str]:
    """Return the obstacle of a kernel without dropout."""
    return [f"set model.attention_dropout={attention.dropout} to 0"] if attention.dropout > 0 else []


def of_bias(attention: Attention) -> list[str]:
    """Return the obstacle of a kernel that cannot add a bias to the scores."""
    return ["scores have a bias, which it does not add"] if attention.biased else []


def of_ranks(attention: Attention) -> list[str]:
    """Return the obstacle of a kernel that reads nothing but segments from a mask."""
    return ["the mask has ranks, a prefix or an order, which it does not read"] if attention.ranked else []


def lengths(attention: Attention) -> dict[str, int]:
    """Return the lengths of a row and of a second sequence, by the names of their settings."""
    return {"target-length" if attention.whole else "length": attention.length, "context": attention.context}


def of_length(attention: Attention) -> list[str]:
    """Return the obstacles of a kernel that needs a row, and a second sequence, of whole blocks."""
    return [f"{name}={n}: choose a multiple of {LANES}" for name, n in lengths(attention).items() if n % LANES]


def of_cut(attention: Attention) -> list[str]:
    """Return the obstacle of a kernel that needs whole rows."""
    cut, _ = cuts(attention)
    return [f"--mesh sequence={cut} cuts rows: leave sequence out"] if cut > 1 else []


def of_heads(attention: Attention) -> str:
    """Return the settings that determine the size of heads, for messages."""
    part = f"model.{attention.part}." if attention.part else "model."
    return f"{part}heads={attention.heads} in {part}width={attention.width}"


def cuts(attention: Attention) -> tuple[int, int]:
    """Return into how many parts the mesh cuts a row's queries and the heads; it never cuts chosen queries."""
    rows = None if attention.chosen or attention.whole else "length"
    cut, shared = parts_of((rows, "heads"), (attention.length, attention.heads))
    return cut, shared
