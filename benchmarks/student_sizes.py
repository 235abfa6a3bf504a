"""What students save: their encoders' parameters and the time of a forward pass, beside the first model's.

    python -m benchmarks.student_sizes [--recipes bert-base distilbert-base ...] [--rows 1] [--length 128] [--rounds 20]

On the first device, by turns, of random rows without padding, in float32, without heads.
"""

import dataclasses
import functools
import os

from rich.console import Console
from rich.table import Table

from benchmarks.turns import milliseconds, ratio, take_turns
from data_pipelines.command_line import end_with, parse


@dataclasses.dataclass(frozen=True)
class Options:
    """recipes: of masked models.   rows, length: of a batch.   rounds: how often."""

    recipes: tuple[str, ...] = ("bert-base", "distilbert-base", "tinybert-4", "minilm-6-384", "mobilebert-base")
    rows: int = 1
    length: int = 128
    rounds: int = 20


def main(arguments: list[str]) -> int:
    """Measure and print the table -> exit status."""
    options = parse(Options, arguments, "python -m benchmarks.student_sizes")
    makers = {name: functools.partial(Forward, options, name) for name in options.recipes}
    times = take_turns(makers, sorted(os.sched_getaffinity(0)), options.rounds, warm_up=3)
    numbers, first = {name: parameters(name) for name in options.recipes}, options.recipes[0]
    table = Table("model", "parameters", "share", "ms by wall (CPU)", f"time : {first}")
    for name, number in numbers.items():
        cells = f"{number / 1e6:.1f}M", f"{number / numbers[first]:.1%}", milliseconds(times[name])
        table.add_row(name, *cells, ratio(times[name], times[first]))
    Console(width=110).print(table)
    return 0


def parameters(name: str) -> int:
    """Their number in the encoder of a recipe's model, with embeddings, without heads."""
    from models.core.parameters import leaves
    from models.families.registry import family_of
    from pretrain.recipes.registry import find
    from pretrain.training.assembly import parameter_shapes

    recipe = find(name)
    paths = {row.path for row in family_of(recipe.model).parameters(recipe.model, ())}
    return sum(shape.size for path, shape in leaves(parameter_shapes(recipe)) if path in paths)


class Forward:
    """A forward pass of a recipe's model."""

    def __init__(self, options: Options, name: str):
        from pretrain.commands.platform import prepare

        prepare()
        import jax
        import jax.numpy as jnp
        import numpy as np

        from models.core.program import Program
        from models.families.registry import family_of
        from pretrain.recipes.registry import find

        config, shape = find(name).model, (options.rows, options.length)
        family = family_of(config)
        module = family.module(config, Program(depth="unroll"))
        inputs = {of: np.ones(shape, given.dtype) for of, given in family.inputs.items()}
        inputs["tokens"] = np.random.default_rng(0).integers(5, config.vocab_size, shape, dtype=np.int32)
        params = jax.jit(module.init)(jax.random.key(0), inputs)
        self.run = functools.partial(jax.jit(functools.partial(module.apply, method="encode")), params, inputs, None)
        self.sum = jnp.sum

    def __call__(self) -> float:
        return float(self.sum(self.run()))


if __name__ == "__main__":
    end_with(main)
