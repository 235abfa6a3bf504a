"""What a teacher costs: a step of distillation beside the student's own step and the teacher's forward pass, and the
step of a student that learns from stored soft targets.

    python -m benchmarks.distillation_speed [--recipe distilbert-tiny] [--rows 32] [--rounds 20] [--k 256]

On the first device, by turns, random rows, the recipe's losses and no dropout elsewhere than the recipe has it. One
without a teacher, like gpt2-tiny, is a student alone, and of soft targets.
"""

import dataclasses
import functools
import os

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.turns import milliseconds, ratio, take_turns
from data_pipelines.command_line import end_with, parse

DISTILLED, STUDENT, TEACHER, SOFT = "distilled", "student alone", "teacher forward", "soft targets"


@dataclasses.dataclass(frozen=True)
class Options:
    """recipe: with a teacher or none.   rows, length: of a batch.   rounds: how often.   k: soft targets of a place."""

    recipe: str = "distilbert-tiny"
    rows: int = 32
    length: int = 128
    rounds: int = 20
    k: int = 256


def main(arguments: list[str]) -> int:
    """Measure and print the table -> exit status."""
    options = parse(Options, arguments, "python -m benchmarks.distillation_speed")
    from pretrain.recipes.registry import find

    sides = (DISTILLED, STUDENT, TEACHER, SOFT) if find(options.recipe).teachers else (STUDENT, SOFT)
    makers = {side: functools.partial(Side, options, side) for side in sides}
    times = take_turns(makers, sorted(os.sched_getaffinity(0)), options.rounds, warm_up=2)
    ratios = {"soft targets : alone": ratio(times[SOFT], times[STUDENT])}
    if TEACHER in times:
        ratios["distilled : sum"] = ratio(times[DISTILLED], times[STUDENT] + times[TEACHER])
    title = f"{options.recipe}, {options.rows} x {options.length}, ms by wall (CPU)"
    table = Table(*times, *ratios, title=title)
    table.add_row(*map(milliseconds, times.values()), *ratios.values())
    Console(width=110).print(table)
    return 0


class Side:
    """A train step, or the teacher's part of one."""

    def __init__(self, options: Options, side: str):
        from pretrain.commands.platform import prepare

        prepare()
        import jax

        from benchmarks.sides import batch_of
        from pretrain.objectives.objective import TEACHERS, inputs_of
        from pretrain.recipe import Phase
        from pretrain.recipes.registry import find
        from pretrain.training.assembly import assemble, initial_params, parameter_shapes
        from pretrain.training.placement import shardings, stages
        from pretrain.training.step import given_in, initial_state
        from pretrain.training.teaching import of_stored
        from tpu.mesh import row_mesh

        recipe = dataclasses.replace(find(options.recipe), phases=(Phase(1.0, options.length, options.rows),))
        rng = np.random.default_rng(0)
        if side in (STUDENT, SOFT) and recipe.teachers:
            kind = type(recipe.objective).__bases__[1]  # of the student's own loss
            own = {field.name: getattr(recipe.objective, field.name) for field in dataclasses.fields(kind)}
            recipe = dataclasses.replace(recipe, objective=kind(**own), teachers=())
        if side == SOFT:
            if masking := getattr(recipe.objective, "masking", None):
                fixed = dataclasses.replace(recipe.objective, masking=dataclasses.replace(masking, copies=1))
                recipe = dataclasses.replace(recipe, objective=fixed)
            recipe = of_stored(recipe, options.k)
        batch = batch_of(recipe)
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
