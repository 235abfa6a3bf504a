"""Costs of attention kernels on TPUs, into which the compiler does not look: counted cycles, by generation."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax.numpy as jnp

from models.attention.layouts import LANES


class Call(NamedTuple):
    """One call of a kernel's program in a step's trace.

    arguments, results: each with shape and dtype.   turns: steps of its grid.   flops, scores: the FLOPs and
    exponentials (one for each score of a query and a key) that it declares (`pl.CostEstimate`), None if it declares
    none.
    """

    arguments: tuple
    results: tuple
    turns: int
    flops: float | None
    scores: float | None = None


class Cost(NamedTuple):
    """The cost of one program of a kernel.

    cycles: (TPU generation, call) -> cycles of one core for the call; a device's cores share the grid steps. v7x has
    the cycles of v6e: the programs that XLA:TPU schedules for it have 0.93 to 1.02 times as many bundles.
    flops: call -> its FLOPs, None if unknown; by default those that the program declares.
    """

    cycles: Callable[[str, Call], float]
    flops: Callable[[Call], float | None] = lambda call: call.flops


def per_score(cycles: Mapping[str, float]) -> Cost:
    """Return the cost of a program that spends its time on the arithmetic of scores rather than on products, which take
    the same time for heads of 32 to 128 numbers, the side of a matrix unit.
    cycles: TPU generation -> cycles for 1,024 scores, which fill a register."""
    return Cost(lambda generation, call: cycles[generation] * call.scores / 1024)


class Bundles(NamedTuple):
    """Instruction bundles that XLA:TPU schedules for a grid step ("turn") of `row_attention`, 128 lanes of a row's
    heads; a bundle takes a cycle.

    turn: fixed part, on v5p.   pairs, scores: for 1,024 pairs of a query and a key, and for 1,024 scores (each head has
    a score for each pair).   biased: additional, for 1,024 scores with a bias.   apart: additional, for a turn with
    keys of a second sequence.   generations: factor relative to v5p.   drawn: for dropout of 1,024 scores.
    """

    turn: float
    pairs: float
    scores: float
    biased: float
    apart: float
    generations: Mapping[str, float]
    drawn: Mapping[str, float]

    def cycles(self, products: int, generation: str, call: Call) -> float:
        """Return the cycles of a call.   products: how many query-key products the program computes."""
        arrays = (*call.arguments, *call.results)
        heads = next(array.shape[2] for array in arrays if len(array.shape) == 4)  # of the statistics
        drawn = self.drawn[generation] if any(array.dtype == jnp.uint32 for array in arrays) else 0.0
        # Biases of projections are the arguments with two axes; a bias by distance is f32 with three.
        apart = self.apart if sum(len(array.shape) == 2 for array in call.arguments) > 1 else 0.0
        biased = any(len(array.shape) == 3 and array.dtype == jnp.float32 for array in call.arguments)
        scores = self.scores + (self.biased if biased else 0.0)
        pairs = call.flops / call.turns / (2 * products * LANES) / 1024
        turn = (self.turn + apart + pairs * (self.pairs + heads * scores)) * self.generations[generation]
        return call.turns * (turn + pairs * heads * drawn)


# Fitted to the bundles of rows of 512 with heads of 64 and 128 and of rows of 128 on v5p, with and without dropout, and
# of rows of 512 on v4 and v6e (LIBTPU_INIT_ARGS="--xla_jf_dump_to=DIR --xla_jf_dump_llo_text=true"). They do not
# include waiting; a kernel's transfers take a third of HBM's time. Dropout takes 12 vector operations for a score, and
# 60 on v4, which lacks an integer product.
_FORWARD = Bundles(
    turn=377,
    pairs=2.78,
    scores=2.63,
    biased=0.0,
    apart=280,
    generations={"v4": 1.56, "v5e": 1.0, "v5p": 1.0, "v6e": 0.81, "v7x": 0.81},
    drawn={"v4": 30.6, "v5e": 2.75, "v5p": 2.75, "v6e": 2.39, "v7x": 2.39},
)
_BACKWARD = Bundles(
    turn=595,
    pairs=7.76,
    scores=3.36,
    biased=1.65,
    apart=215,
    generations={"v4": 1.36, "v5e": 1.0, "v5p": 1.0, "v6e": 0.76, "v7x": 0.76},
    drawn={"v4": 29.5, "v5e": 1.65, "v5p": 1.65, "v6e": 2.22, "v7x": 2.22},
)


def _heads(call: Call) -> tuple[float, int]:
    """Return (scores of all heads, head_dim) of a call; a causal mask counts the blocks on and below its diagonal.
    q, k: [batch, heads, head_dim, length], without batch if it is a single row."""
    blocks, (q, k) = call.arguments[0], [a for a in call.arguments if jnp.issubdtype(a.dtype, jnp.floating)][:2]
    # A mask that the kernel computes has positions as arguments, besides the segments of queries and keys.
    causal = sum(a.dtype == jnp.int32 for a in call.arguments) > 2
    share = (blocks.shape[-1] + 1) / (2 * blocks.shape[-1]) if causal else 1
    return math.prod(q.shape) // q.shape[-2] * k.shape[-1] * share, q.shape[-2]


def _of_splash(products: int, cycles: dict[str, float], wide: float) -> Cost:
    """Return the cost of a splash program.   products: how many query-key products it computes.   cycles: as in
    `per_score`, for heads of up to 64.   wide: factor for heads of 128."""

    def of_call(generation: str, call: Call) -> float:
        scores, head_dim = _heads(call)
        return cycles[generation] * scores / 1024 * (wide if head_dim > 64 else 1)

    return Cost(of_call, lambda call: 2.0 * products * math.prod(_heads(call)))


# Beginning of the name given to `pl.pallas_call` -> cost.
COSTS: dict[str, Cost] = {
    "row_attention_forward": Cost(functools.partial(_FORWARD.cycles, 2)),
    "row_attention_backward": Cost(functools.partial(_BACKWARD.cycles, 5)),
    # Cycles for 1,024 scores in blocks of 512 queries and keys, heads of 64, from the bundles that XLA:TPU scheduled: a
    # grid step on v5p, one head, is 1922 bundles forward and 3134 backward. The factors for heads of 128 were counted
    # for `row_attention`. The backward kernel computes scores again, then the gradients of values, probabilities,
    # queries and keys. In bert-large's step, 24 layers, an eighth of the time goes to copies into and out of a loop's
    # stacks (benchmarks/results/plans_ledger.md).
    "splash_mha_fwd": _of_splash(2, {"v4": 11.8, "v5e": 8.0, "v5p": 7.5, "v6e": 5.0, "v7x": 5.0}, 1.2),
    "splash_mha_dkv": _of_splash(5, {"v4": 15.2, "v5e": 11.1, "v5p": 12.2, "v6e": 7.4, "v7x": 7.4}, 1.35),
    # Cycles for 1,024 scores of XLNet's rows, heads of 64 and 896 keys, from the bundles that XLA:TPU scheduled for a
    # grid step, one per cycle. On v5e, a step with two heads of 128 queries takes 3402 forward and on average 5607
    # backward, with chosen queries 3681 and 6580; v4 is slow at lookups among lanes.
    "relative_whole_forward": per_score({"v4": 53.2, "v5e": 15.2, "v5p": 15.2, "v6e": 13.3, "v7x": 13.3}),
    "relative_whole_backward": per_score({"v4": 65.4, "v5e": 25.0, "v5p": 25.8, "v6e": 21.3, "v7x": 21.3}),
    "relative_chosen_forward": per_score({"v4": 51.5, "v5e": 16.4, "v5p": 17.2, "v6e": 12.9, "v7x": 12.9}),
    "relative_chosen_backward": per_score({"v4": 69.3, "v5e": 29.4, "v5p": 30.3, "v6e": 24.3, "v7x": 24.3}),
    # Cycles for 1,024 scores with BigBird's blocks and two heads of 64, four units of the table for each tile of blocks
    # that see all, from the bundles that XLA:TPU scheduled (benchmarks/results/long_plans.md).
    "block_attention_forward": per_score({"v4": 43.5, "v5e": 11.4, "v5p": 11.2, "v6e": 10.0, "v7x": 10.0}),
    "block_attention_backward": per_score({"v4": 47.6, "v5e": 13.9, "v5p": 13.9, "v6e": 11.6, "v7x": 11.6}),
}
