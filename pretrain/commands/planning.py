"""`python -m tpu plan`: compile the train steps of recipes for TPU slices that need not be at hand."""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from data_pipelines.command_line import parse
from data_pipelines.errors import UserError
from pretrain.commands.arguments import CACHE, Target, parse_target
from pretrain.options import Options
from pretrain.recipe import Phase, Recipe, check
from pretrain.recipes.registry import RECIPES, find
from pretrain.storage.checkpoints import checkpoint_bytes
from pretrain.training.attention_choice import chosen_program
from pretrain.training.placement import Stage, check_batches, place
from pretrain.training.step import model_flops
from tpu import compiler, plan_report
from tpu.kernel_costs import COSTS
from tpu.mesh import mesh_shape, parse_mesh
from tpu.plan import Plan, largest_batch, plan
from tpu.rules import shard_bytes
from tpu.topologies import Topology, parse_topology
from tpu.work import Work


@dataclasses.dataclass(frozen=True)
class Table:
    """Plan every recipe on one slice of each generation."""

    topologies: tuple[str, ...] = ("v4:2x2x4", "v5e:4x4", "v5p:2x2x4", "v6e:4x4", "tpu7x:2x2x2")
    """TPU slices, GENERATION:SHAPE each."""
    recipes: tuple[str, ...] = tuple(RECIPES)
    """Names of the recipes; by default all."""
    out: Path = Path("plans")
    """Folder to write plans.md to."""
    cache: Path = CACHE
    """Folder that keeps the compiler's results."""

    def __post_init__(self):
        for name in ("topologies", "recipes"):
            if not getattr(self, name):
                raise UserError(f"--{name}: name at least one, or leave it out to plan all")


def plan_command(arguments: Sequence[str]) -> int:
    """Print a plan (`RECIPE --topology ...`) or write a table of plans (`--all`) -> exit status."""
    if "--all" in arguments:
        _table(parse(Table, [a for a in arguments if a != "--all"], "python -m tpu plan --all"))
        return 0
    recipe, target = parse_plan(arguments)
    topology = parse_topology(target.topology)
    if target.mesh is not None:  # report mistakes before compiling
        slices = _slices(target)
        shape = parse_mesh(target.mesh, slices * topology.chips * topology.device.per_chip, slices)
        check_batches(recipe, target.microbatches, shape)
    compiler.prepare()
    for index, (work, title) in enumerate(works(recipe, target, topology)):
        planned = plan(work, topology, COSTS, target.cache)
        plan_report.show(title, planned)
        if target.largest:
            plan_report.show_largest(_largest(recipe, index, target, topology, planned), planned)
    return 0


def parse_plan(arguments: Sequence[str]) -> tuple[Recipe, Target]:
    """Parse `bert-base --topology v5e:4x4 --model.depth 3` -> (the recipe with its changes, the target)."""
    recipe, target = parse_target(arguments)
    recipe = shaped(recipe, target.batch_size, target.sequence_length)
    check(recipe)
    chosen_program(recipe, target, platform="tpu")
    return recipe, target


def shaped(recipe: Recipe, batch_size: int | None, length: int | None) -> Recipe:
    """Set the batch size and length of every phase, unless None; phases that become equal are joined."""
    sizes = {"batch_size": batch_size, "length": length}
    change = {name: value for name, value in sizes.items() if value is not None}
    shares: dict[Phase, float] = {}
    for phase in recipe.phases:
        shape = dataclasses.replace(phase, share=0.0, **change)
        shares[shape] = shares.get(shape, 0.0) + phase.share
    phases = tuple(dataclasses.replace(shape, share=share) for shape, share in shares.items())
    return dataclasses.replace(recipe, phases=phases)


def works(recipe: Recipe, target: Target, topology: Topology) -> Iterator[tuple[Work, str]]:
    """Yield (the train step, its title) for each task of each phase; UserError if the mesh cannot divide the batch."""
    slices = _slices(target)
    devices = compiler.devices(topology, slices)
    placed = place(recipe, target, devices, topology.device.hbm, "tpu")
    where = f"{slices} x {topology}" if slices > 1 else str(topology)
    counted = f"{slices * topology.chips} chips" + (f", {len(devices)} devices" if topology.device.per_chip > 1 else "")
    program = placed.assembly.model.program
    for stage in placed.stages:
        yield (
            _work(stage, target.microbatches),
            (
                f"{recipe.name} on {where} ({topology.cloud}: {counted}), mesh {mesh_shape(placed.mesh)}, "
                f"{stage.title}: {stage.phase}; "
                f"{placed.load.parameters / 1e6:.1f}M parameters, {program.dtype}, layers {program.depth}, "
                f"remat {program.remat}, attention {program.attention}"
            ),
        )


def _slices(target: Target) -> int:
    named = re.search(r"slice=(\d+)", target.mesh or "")
    return int(named[1]) if named else 1


def _work(stage: Stage, microbatches: int) -> Work:
    """Describe a stage's train step for the planner."""
    phase, shape = stage.phase, mesh_shape(stage.mesh)
    state, frozen, batch, given = stage.train.arguments
    return Work(
        step=stage.train.run,
        arguments=stage.train.arguments,
        parts={
            "parameters": (state.params, frozen),
            "optimizer": state.opt_state,
            "batch": batch,
            "other state": (state.step, state.carry, state.skipped, given),
        },
        mesh=str(shape),
        devices=stage.mesh.size,
        rows=phase.batch_size,
        rows_multiple=microbatches * shape.batch_parts,
        length=phase.length,
        model_flops=model_flops(stage.assembly.recipe, phase, stage.task),
        checkpoint=checkpoint_bytes(state),
        # Slice index (0 if there is one slice) and coordinates (none on CPUs)
        places=tuple(
            (getattr(device, "slice_index", 0), *getattr(device, "coords", ())) for device in stage.mesh.devices.flat
        ),
        ahead=Options.log_every - 1,  # the loop waits for steps only when it reports
        # Without microbatches, a train step needs at least the memory of an evaluation.
        evaluation=(stage.evaluate, shard_bytes(stage.state._replace(params=()))) if microbatches > 1 else None,
        options=stage.train.options,
    )


def _largest(recipe: Recipe, index: int, target: Target, topology: Topology, planned: Plan):
    """Find the largest batch size of a planned phase, on its mesh."""
    target = dataclasses.replace(target, mesh=planned.work.mesh)

    def total(rows: int) -> float:
        alone = dataclasses.replace(recipe.phases[index], share=1.0, batch_size=rows)
        work, _ = next(works(dataclasses.replace(recipe, phases=(alone,)), target, topology))
        return plan(work, topology, COSTS, target.cache).needed

    fixed = sum(size for name, size in planned.parts.items() if name != "batch")
    return largest_batch(total, fixed, planned.work.rows, planned.work.rows_multiple, planned.room)


def _table(options: Table) -> None:
    """Plan recipes one by one; a plan that fails becomes a row with the reason."""
    recipes = [find(name) for name in options.recipes]
    topologies = [parse_topology(name) for name in options.topologies]
    plan_report.make(options.out)  # fail early: plans take hours
    compiler.prepare()
    rows = []
    for recipe in recipes:
        for topology in topologies:
            target = Target(topology=str(topology), cache=options.cache)
            try:
                for work, _ in works(recipe, target, topology):
                    rows.append((recipe.name, plan(work, topology, COSTS, options.cache)))
            except UserError as error:
                rows.append((recipe.name, str(error)))
            plan_report.write(rows, options.out)
            print(f"{recipe.name} on {topology}: {options.out}", flush=True)
