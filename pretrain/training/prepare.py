"""A recipe on its way to devices: prepared, then placed. A run, a plan and all that reads a run's model begin so."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from data_pipelines.errors import UserError
from models.core.parameters import Params
from models.core.program import Program
from pretrain.options import How
from pretrain.recipe import Recipe, check_rowwise
from pretrain.training.assembly import Assembly, assemble, parameter_shapes
from pretrain.training.attention_choice import chosen_program
from pretrain.training.placement import Stage, load_of, stages
from tpu.mesh import Load, MeshShape, choose_mesh, divided_by, mesh_shape


class Prepared(NamedTuple):
    """shapes: of all parameters, the model's and its teachers'."""

    recipe: Recipe
    shapes: Params


class Placed(NamedTuple):
    """A recipe on a mesh; nothing is allocated or compiled yet.   load: by which a mesh is chosen."""

    assembly: Assembly
    mesh: Mesh
    load: Load
    shapes: Params
    stages: list[Stage]


def prepare(recipe: Recipe) -> Prepared:
    """A checked recipe with what its parameters are. UserError where `frozen` does not fit."""
    return Prepared(recipe, parameter_shapes(assemble(recipe, Program())))


def place(
    prepared: Prepared, how: How, devices: Sequence[jax.Device], memory: float | None, platform: str | None = None
) -> Placed:
    """On these devices, which have so many bytes each, with the mesh and the program that are chosen or suit best.

    platform: of the devices, by default this machine's. UserError where that does not go together.
    """
    recipe, shapes = prepared
    load = load_of(recipe, shapes, devices, memory)
    mesh = choose_mesh(how.mesh, devices, load)
    check_batches(recipe, how.microbatches, mesh_shape(mesh))
    return place_on(prepared, mesh, chosen_program(recipe, how, mesh, platform), load, how.microbatches)


def place_on(prepared: Prepared, mesh: Mesh, program: Program, load: Load, microbatches: int = 1) -> Placed:
    """On a mesh, with a program."""
    assembly = assemble(prepared.recipe, program)
    with divided_by(mesh):
        made = stages(assembly, mesh, microbatches, prepared.shapes)
    return Placed(assembly, mesh, load, prepared.shapes, made)


def check_batches(recipe: Recipe, microbatches: int, shape: MeshShape) -> None:
    """UserError unless a mesh of this shape cuts the microbatches of every phase evenly."""
    check_rowwise(recipe, microbatches)
    parts = microbatches * shape.batch_parts
    for index, phase in enumerate(recipe.phases):
        if phase.batch_size % parts:
            raise UserError(
                f"phases.{index}.batch_size={phase.batch_size} is not a multiple of --microbatches {microbatches} x "
                f"the {shape.batch_parts} parts of the mesh {shape}: choose a multiple of {parts}, or another --mesh"
            )
