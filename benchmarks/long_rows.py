"""What long rows cost on this CPU: BigBird's blocks beside dense attention, by the length of rows.

    python -m benchmarks.long_rows [--lengths 512 4096] [--width 256]

Whole steps on 16,384 random tokens in rows of each length, by BERT with dense attention and by BigBird with its blocks,
otherwise as in `benchmarks.train_speed`, whose long rows stand beside Hugging Face's. Times are also given in those of
rows of 512 with dense attention, taken in the same turns, so that what else the machine does falls out. Memory is what
the step needs by the compiler's count, temporaries and arguments; steps above --memory GB are not run.
"""

import dataclasses
import functools
import os

import numpy as np

from benchmarks.sides import Case, Ours, compiled_step, needed
from benchmarks.turns import milliseconds, take_turns
from data_pipelines.command_line import end_with, parse

TOKENS, SHORT = 16_384, 512  # of a batch, and of the rows to compare with
HEAD = (
    "| tokens a row | dense, ms (CPU) | blocks, ms (CPU) | dense, of 512's | blocks, of 512's | dense, GB | blocks, GB "
    "|\n" + "|---" * 7 + "|"
)


@dataclasses.dataclass(frozen=True)
class Options:
    """lengths: of rows.   width: of the models, of 64 a head.   layers: their number.   vocab: size of the vocabulary.
    rounds: timed steps.   memory: GB that a step may need to be run.
    """

    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16_384)
    width: int = 256
    layers: int = 2
    vocab: int = 8192
    rounds: int = 3
    memory: float = 5.0


def main(arguments: list[str]) -> int:
    """Measure and print the table row by row -> exit status."""
    options = parse(Options, arguments, "python -m benchmarks.long_rows")
    print(HEAD)
    for length in options.lengths:
        print(row(length, options), flush=True)
    return 0


def row(length: int, options: Options) -> str:
    """Of the table."""
    changes = {"width": options.width, "heads": options.width // 64, "feed_forward": 4 * options.width}
    changes |= {"depth": options.layers, "vocab_size": options.vocab, "dropout": 0.1, "attention_dropout": 0.1}
    case = lambda recipe, length, **how: Case(recipe, TOKENS // length, length, changes, **how)
    sides = {"dense": case("bert-base", length)}
    if length > SHORT:  # shorter rows have no blocks to draw
        sides["blocks"] = case("bigbird-base", length, attention="blocked")
    size = {side: needed(compiled_step(one)[-1]) / 1e9 for side, one in sides.items()}
    run = {side: one for side, one in sides.items() if size[side] < options.memory}
    makers = {side: functools.partial(Ours, one) for side, one in ({"512": case("bert-base", SHORT)} | run).items()}
    times = take_turns(makers, sorted(os.sched_getaffinity(0)), options.rounds, warm_up=1)
    both = ("dense", "blocks")
    cells = [milliseconds(times[side]) if side in run else "-" for side in both]
    of_short = {side: np.median(times[side] / times["512"], axis=0) for side in run}
    cells += ["{:.2f} ({:.2f})".format(*of_short[side]) if side in run else "-" for side in both]
    cells += [f"{size[side]:.2f}" if side in size else "-" for side in both]
    return f"| {length:,} | {' | '.join(cells)} |"


if __name__ == "__main__":
    end_with(main)
