"""What a fused attention kernel says of itself, and what kernels ask alike of an attention."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from models.attention.layouts import LANES, Mixing
from models.attention.patterns.blocks import Blocks
from models.core.sharding import parts_of


class Attention(NamedTuple):
    """An attention that a kernel is asked to compute, whole; how a mesh cuts it say the rules in force.

    length: tokens of a row.   width, heads: of its layer.   dropout: of the probabilities.   memory: keys before the
    row's own.   chosen: whether the queries are chosen positions of the row, else all.
    causal, ranked: whether its mask is static causal, and whether it has ranks.
    blocks: of a sparse pattern, with the shapes of one layer's arrays in their places; None where all see all.
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
    blocks: Blocks | None = None
    part: str = ""


class Call(NamedTuple):
    """One call of a kernel's program, as a step's trace has it.

    arguments, results: each with shape and dtype.   turns: of its grid.   flops, scores: FLOPs and exponentials, one
    for each score of a query and a key, that it declares itself (`pl.CostEstimate`), None where it declares none.
    """

    arguments: tuple
    results: tuple
    turns: int
    flops: float | None
    scores: float | None = None


class Cost(NamedTuple):
    """Of one program of a kernel, into which no compiler looks.

    cycles: (TPU generation, call) -> cycles of one core that the call takes; a device's cores share the turns. v7x's
    are v6e's: the programs that XLA:TPU schedules for it have 0.93 to 1.02 times as many bundles.
    flops: call -> its FLOPs, None where nobody says; by default those that the program declares.
    """

    cycles: Callable[[str, Call], float]
    flops: Callable[[Call], float | None] = lambda call: call.flops


def per_score(cycles: Mapping[str, float], scores: Callable[[Call], float] = lambda call: call.scores, **also) -> Cost:
    """Of a program that is busy with arithmetic on scores more than with products, which take as long for a head of 32
    numbers as of 128, the side of a matrix unit.

    cycles: TPU generation -> cycles for 1,024 scores, a register of them.   scores: of a call, by default those that it
    declares.   also: `flops` as in `Cost`.
    """
    return Cost(lambda generation, call: cycles[generation] * scores(call) / 1024, **also)


class Kernel(NamedTuple):
    """All that is known of a kernel: who chooses, refuses, traces, plans or counts it reads this.

    name: as --attention takes it.   form: of the attention that it computes, 'self' or 'relative'.
    platforms: where it runs.   obstacles: of an attention -> why it cannot compute that, nothing where it can;
    ValueError where a mesh does not divide it.
    mixing: of an attention that it can compute -> how; of the form 'relative' `mix` is called as
    `relative.relative_attention`.
    costs: of its programs on TPUs, by the beginnings of the names that `pl.pallas_call` is given.
    sparse: whether of a sparse pattern, else of queries that see all keys but for what the mask hides.
    unrolled: up to so many layers are compiled one by one by default, where each has parameters of its own and the
    mesh cuts no layer's work (`tensor`): a loop copies what a kernel reads and writes into and out of its stacks.
    """

    name: str
    form: str
    platforms: tuple[str, ...]
    obstacles: Callable[[Attention], list[str]]
    mixing: Callable[[Attention], Mixing]
    costs: Mapping[str, Cost] = {}
    sparse: bool = False
    unrolled: int = 0


def of_dropout(attention: Attention) -> list[str]:
    """The obstacle of a kernel without dropout."""
    return [f"set model.attention_dropout={attention.dropout} to 0"] if attention.dropout > 0 else []


def of_blocks(attention: Attention) -> list[str]:
    """The obstacle of a kernel whose queries see all keys."""
    return [] if attention.blocks is None else ["model.pattern names blocks of keys, which it does not read"]


def of_length(attention: Attention) -> list[str]:
    """The obstacle of a kernel that computes whole blocks of a row."""
    return [f"length={attention.length}: choose a multiple of {LANES}"] if attention.length % LANES else []


def of_heads(attention: Attention) -> str:
    """The settings that say how large heads are."""
    part = f"model.{attention.part}." if attention.part else "model."
    return f"{part}heads={attention.heads} in {part}width={attention.width}"


def cuts(attention: Attention) -> tuple[int, int]:
    """Into how many parts the mesh cuts a row's queries and the heads; chosen queries are never cut."""
    rows = None if attention.chosen else "length"
    cut, shared = parts_of((rows, "heads"), (attention.length, attention.heads))
    return cut, shared
