"""What a fused attention kernel says of itself, and what kernels ask alike of an attention."""

from collections.abc import Callable
from typing import NamedTuple

from models.attention.layouts import LANES, Mixing
from models.attention.patterns.blocks import Blocks
from models.core.sharding import parts_of


class Attention(NamedTuple):
    """An attention that a kernel is asked to compute, whole; how a mesh cuts it say the rules in force.

    length: tokens of a row.   width: of all its heads together.   dropout: of the probabilities.   memory: keys before
    the row's own.   chosen: whether the queries are chosen positions of the row, else all.
    causal, ranked, biased: whether its mask is static causal, and whether it has ranks and a bias.
    by_distance: whether that is one by distance alone.   whole: whether queries are a decoder's, which no mesh cuts.
    blocks: of a sparse pattern, with the shapes of one layer's arrays in their places; None where all see all.
    part: of a model of several, as its settings name it.
    context: keys of a second sequence, which are then all that the row sees; 0 where it sees itself.
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
    """All that is known of a kernel but its cost (`tpu/kernel_costs.py`): who chooses, refuses or traces it reads this.

    name: as --attention takes it.   form: of the attention that it computes, 'self' or 'relative'.
    platforms: where it runs.   obstacles: of an attention -> why it cannot compute that, nothing where it can;
    ValueError where a mesh does not divide it.
    mixing: of an attention that it can compute -> how; of the form 'relative' `mix` is called as
    `relative.relative_attention`.
    sparse: whether it computes sparse patterns, else queries that see all keys but for what the mask hides; `obstacles`
    is asked of nothing else.
    unrolled: up to so many layers are compiled one by one by default, where each has parameters of its own and the
    mesh cuts no layer's work (`tensor`): a loop copies what a kernel reads and writes into and out of its stacks.
    """

    name: str
    form: str
    platforms: tuple[str, ...]
    obstacles: Callable[[Attention], list[str]]
    mixing: Callable[[Attention], Mixing]
    sparse: bool = False
    unrolled: int = 0


def of_dropout(attention: Attention) -> list[str]:
    """The obstacle of a kernel without dropout."""
    return [f"set model.attention_dropout={attention.dropout} to 0"] if attention.dropout > 0 else []


def of_bias(attention: Attention) -> list[str]:
    """The obstacle of a kernel that adds nothing to the scores."""
    return ["scores have a bias, which it does not add"] if attention.biased else []


def of_ranks(attention: Attention) -> list[str]:
    """The obstacle of a kernel that reads segments alone."""
    return ["the mask has ranks, a prefix or an order, which it does not read"] if attention.ranked else []


def lengths(attention: Attention) -> dict[str, int]:
    """Of a row's queries, by the name of the setting, and of a second sequence."""
    return {"target-length" if attention.whole else "length": attention.length, "context": attention.context}


def of_length(attention: Attention) -> list[str]:
    """The obstacles of a kernel that computes whole blocks of a row, and of a second sequence."""
    return [f"{name}={n}: choose a multiple of {LANES}" for name, n in lengths(attention).items() if n % LANES]


def of_heads(attention: Attention) -> str:
    """The settings that say how large heads are."""
    part = f"model.{attention.part}." if attention.part else "model."
    return f"{part}heads={attention.heads} in {part}width={attention.width}"


def cuts(attention: Attention) -> tuple[int, int]:
    """Into how many parts the mesh cuts a row's queries and the heads; chosen queries are never cut."""
    rows = None if attention.chosen or attention.whole else "length"
    cut, shared = parts_of((rows, "heads"), (attention.length, attention.heads))
    return cut, shared
