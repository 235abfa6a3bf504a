"""What a teacher costs: a step of distillation beside the student's own step and the teacher's forward pass.

    python -m benchmarks.distillation_speed [--recipe distilbert-tiny] [--rows 32] [--length 128] [--rounds 20]

On the first device, by turns, random rows, the recipe's losses and no dropout elsewhere than the recipe has it.
"""

import dataclasses
import functools
import os

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.turns import milliseconds, ratio, take_turns
from data_pipelines.command_line import end_with, parse

DISTILLED, STUDENT, TEACHER = "distilled", "student alone", "teacher forward"


@dataclasses.dataclass(frozen=True)
class Options:
    """recipe: with one teacher.   rows, length: of a batch.   rounds: how often."""

    recipe: str = "distilbert-tiny"
    rows: int = 32
    length: int = 128
    rounds: int = 20


def main(arguments: list[str]) -> int:
    """Measure and print the table -> exit status."""
    options = parse(Options, arguments, "python -m benchmarks.distillation_speed")
    makers = {side: functools.partial(Side, options, side) for side in (DISTILLED, STUDENT, TEACHER)}
    times = take_turns(makers, sorted(os.sched_getaffinity(0)), options.rounds, warm_up=2)
    table = Table(
        *times, "distilled : sum", title=f"{options.recipe}, {options.rows} x {options.length}, ms by wall (CPU)"
    )
    together = times[STUDENT] + times[TEACHER]
    table.add_row(*map(milliseconds, times.values()), ratio(times[DISTILLED], together))
    Console(width=110).print(table)
    return 0


class Side:
    """A train step, or the teacher's part of one."""

    def __init__(self, options: Options, side: str):
        from pretrain.commands.platform import prepare

        prepare()
        import jax

        from benchmarks.sides import batch_of
        from pretrain.objectives.masked_language_model import MaskedLanguageModel
        from pretrain.objectives.objective import TEACHERS, inputs_of
        from pretrain.recipe import Phase
        from pretrain.recipes.registry import find
        from pretrain.training.assembly import assemble, initial_params, parameter_shapes
        from pretrain.training.placement import shardings, stages
        from pretrain.training.step import given_in, initial_state
        from tpu.mesh import row_mesh

        recipe = dataclasses.replace(find(options.recipe), phases=(Phase(1.0, options.length, options.rows),))
        rng, batch = np.random.default_rng(0), batch_of(recipe)
        if side == STUDENT:
            fields = {field.name for field in dataclasses.fields(MaskedLanguageModel)}
            own = {name: value for name, value in vars(recipe.objective).items() if name in fields}
            recipe = dataclasses.replace(recipe, objective=MaskedLanguageModel(**own), teachers=())
        assembly = assemble(recipe)
        draw = lambda leaf: rng.normal(0, 0.02, leaf.shape).astype(np.float32)
        teachers = jax.tree.map(draw, parameter_shapes(recipe).get(TEACHERS, {}))
        if side == TEACHER:
            ((name, module),) = assembly.teachers.items()
            objective = recipe.objective

            def forward(params, batch):
                apply = functools.partial(module.apply, {"params": params})
                hidden, seen = objective._read(apply, inputs_of(module, batch), None, batch)
                scores = apply("predictions", hidden, method="apply_head") if objective.soft else hidden
                return scores, seen

            self.run = functools.partial(jax.jit(forward), *jax.device_put((teachers[name], batch)))
            return
        (stage,) = stages(assembly, row_mesh(jax.devices()[:1], [1]))
        params = initial_params(assembly) | ({TEACHERS: teachers} if teachers else {})
        made = *initial_state(assembly, params), batch, given_in(recipe, 0)
        self.state, *self.given = jax.device_put(made, shardings(stage.train.arguments))
        compiled = stage.train.run.lower(*stage.train.arguments).compile()

        def step():
            self.state, metrics = compiled(self.state, *self.given)
            return metrics.loss

        self.run = step

    def __call__(self) -> float:
        import jax

        return float(np.sum(jax.tree.leaves(jax.block_until_ready(self.run()))[0]))


if __name__ == "__main__":
    end_with(main)
