"""Time of a train step as a table of embeddings grows, by the rows that a batch reads and by the whole table.

    python -m benchmarks.sparse_rows [--rows 10000 100000 1000000] [--width 64] [--batch 256] [--length 32]

The tests' bag of words and bigrams on this CPU; both sides take turns. Bigrams are 10,000 rows, spread evenly over
their table, so that batches read as many of a large one. Memory is what the compiled step needs beside its arguments,
the table and its moments among them.
"""

import dataclasses
import functools
import os

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.turns import contest, in_turns
from data_pipelines.command_line import end_with, parse

WORDS, BIGRAMS = 1000, 10_000  # that batches have


@dataclasses.dataclass(frozen=True)
class Options:
    """rows: of the table of bigrams, at least 10,000.   width: of one.   batch, length: of a batch.   rounds: how
    often."""

    rows: tuple[int, ...] = (10_000, 100_000, 1_000_000)
    width: int = 64
    batch: int = 256
    length: int = 32
    rounds: int = 10


def main(arguments: list[str]) -> int:
    """Measure and print the table -> exit status."""
    options = parse(Options, arguments, "python -m benchmarks.sparse_rows")
    cores, console = sorted(os.sched_getaffinity(0)), Console(width=110)
    title = f"ms of a step by wall (CPU) time, {options.batch} x {options.length} tokens, width {options.width}"
    table = Table("optimizer", "rows", "sparse", "dense", "MB beside, sparse", "dense", title=title)
    for optimizer in ("adamw", "adagrad"):
        for rows in options.rows:
            sides = {"sparse": True, "dense": False}
            makers = {side: functools.partial(BagStep, options, optimizer, rows, by) for side, by in sides.items()}
            with console.status(f"{optimizer}, {rows:,} rows"), contest(makers, cores, warm_up=2) as contestants:
                memory = [f"{side.ask('memory') / 1e6:.1f}" for side in contestants.values()]
                times = in_turns(contestants, options.rounds)
            shown = ["{:.1f} ({:.1f})".format(*np.median(side, 0) * 1e3) for side in times.values()]
            table.add_row(optimizer, f"{rows:,}", *shown, *memory)
    console.print(table)
    return 0


class BagStep:
    """The step of `pretrain run` on the CPU, of random batches that are made before."""

    def __init__(self, options: Options, optimizer: str, rows: int, sparse: bool):
        os.environ["JAX_PLATFORMS"] = "cpu"
        from pretrain.commands.platform import prepare_cpu

        prepare_cpu()
        import jax

        from models.families.registry import FAMILIES
        from pretrain.optimizers import Optimizer
        from pretrain.recipe import Phase
        from pretrain.training.assembly import assemble, initial_params
        from pretrain.training.placement import shardings, stages
        from pretrain.training.step import given_in, initial_state
        from tests.pretrain import toys
        from tpu.mesh import row_mesh

        FAMILIES["grams"] = toys.GRAMS
        recipe = toys.recipe(
            model=toys.GramsConfig(vocab_size=WORDS, buckets=rows, width=options.width, sparse=sparse),
            objective=toys.NextOfGrams(),
            optimizer=Optimizer(optimizer),
            phases=(Phase(1.0, options.length, options.batch),),
        )
        assembly = assemble(recipe)
        (stage,) = stages(assembly, row_mesh(jax.devices()[:1], [1]))
        self.run = stage.train.run.lower(*stage.train.arguments).compile()
        rng, drawn = np.random.default_rng(0), []
        for _ in range(8):
            tokens = rng.integers(0, WORDS, (options.batch, options.length), dtype=np.int32)
            bigrams = rng.integers(0, BIGRAMS, (options.batch, options.length - 1), dtype=np.int32) * (rows // BIGRAMS)
            drawn.append({"tokens": tokens, "bigrams": bigrams})
        made = *initial_state(assembly, initial_params(assembly)), drawn[0], given_in(recipe, 0)
        self.state, self.frozen, _, self.given = jax.device_put(made, shardings(stage.train.arguments))
        self.batches, self.steps = jax.device_put(drawn, shardings([stage.train.arguments[2]] * len(drawn))), 0

    def __call__(self) -> float:
        batch = self.batches[self.steps % len(self.batches)]
        self.state, metrics = self.run(self.state, self.frozen, batch, self.given)
        self.steps += 1
        return float(metrics.loss)

    def memory(self) -> int:
        """Bytes, by the compiler's count."""
        return self.run.memory_analysis().temp_size_in_bytes


if __name__ == "__main__":
    end_with(main)
