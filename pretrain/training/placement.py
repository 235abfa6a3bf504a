"""A run's state and its two programs on a mesh: what lies where, and the jitted steps."""

from collections.abc import Callable

import jax
import optax
from jax.sharding import Mesh, NamedSharding

from models.core.parameters import Params
from models.core.sharding import placed_by
from pretrain.state import TrainState
from pretrain.training.assembly import Assembly, carry_axes, initial_carry, split_frozen, state_shapes
from pretrain.training.attention_choice import for_evaluation
from pretrain.training.step import evaluation_step, merge, train_step
from tpu.rules import activation_rules, carry_shardings, parameter_shardings, replicated, rows
from tpu.xla import compiler_options, matmul_precision


def state_shardings(assembly: Assembly, phase: int, mesh: Mesh) -> tuple[TrainState, Params]:
    """(of the state in a phase, of the frozen parameters): a sharding for each array; UserError if the mesh misfits."""
    state, frozen = state_shapes(assembly, phase)
    table = assembly.family.parameters(assembly.recipe.model)
    everything = parameter_shardings(table, merge(state.params, frozen), mesh)
    trained, held = split_frozen(everything, assembly.recipe.frozen)
    everywhere = replicated(mesh)
    moments = optax.tree_utils.tree_map_params(
        assembly.optimizer, lambda _, sharding: sharding, state.opt_state, trained,
        transform_non_params=lambda _: everywhere,
    )  # fmt: skip
    carry = carry_shardings(carry_axes(assembly, phase), mesh)
    return TrainState(everywhere, trained, moments, carry, everywhere), held


def abstract_state(assembly: Assembly, phase: int, mesh: Mesh) -> tuple[TrainState, Params]:
    """(state, frozen parameters) as shapes, dtypes and shardings."""
    return jax.tree.map(_placed, state_shapes(assembly, phase), state_shardings(assembly, phase, mesh))


def _placed(shape: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def place_parameters(params: Params, assembly: Assembly, mesh: Mesh) -> Params:
    """Parameters that every host has whole, trained and frozen, on a mesh: a device is given only its part."""
    state, held = state_shardings(assembly, 0, mesh)
    place = lambda array, sharding: jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
    return jax.tree.map(place, params, merge(state.params, held))


def jit_first_carry(assembly: Assembly, phase: int, mesh: Mesh, train: bool = True) -> Callable:
    """() -> the objective's carry before a phase's first batch, jitted."""
    make = lambda: initial_carry(assembly, phase, train)[0]
    return jax.jit(make, out_shardings=carry_shardings(carry_axes(assembly, phase, train), mesh))


def abstract_carry(assembly: Assembly, phase: int, mesh: Mesh, train: bool = True):
    """What `jit_first_carry` gives as shapes, dtypes and shardings."""
    shapes = jax.eval_shape(lambda: initial_carry(assembly, phase, train)[0])
    return jax.tree.map(_placed, shapes, carry_shardings(carry_axes(assembly, phase, train), mesh))


def abstract_batch(assembly: Assembly, phase: int, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """A global batch of a phase as shapes, dtypes and shardings."""
    shape = assembly.recipe.phases[phase]
    return {
        name: jax.ShapeDtypeStruct((shape.batch_size, *of_row), dtype, sharding=rows(mesh))
        for name, (of_row, dtype) in assembly.recipe.objective.spec(shape).items()
    }


def jit_train_step(assembly: Assembly, phase: int, mesh: Mesh, microbatches: int) -> Callable:
    """The train step of a phase, jitted: (state, frozen, batch) -> (state, metrics); the old state is given up."""
    axes = carry_axes(assembly, phase)
    step = train_step(assembly.recipe, assembly.model, assembly.optimizer, axes, microbatches)

    def placed(state, frozen, batch):
        with placed_by(activation_rules(mesh)), matmul_precision(assembly.model.program.dtype):
            return step(state, frozen, batch)

    shardings, _ = state_shardings(assembly, phase, mesh)
    outputs = (shardings, replicated(mesh))
    return jax.jit(placed, donate_argnums=0, out_shardings=outputs, compiler_options=compiler_options(mesh))


def jit_evaluation_step(assembly: Assembly, phase: int, seed: int, mesh: Mesh) -> Callable:
    """`step.evaluation_step` of a phase, jitted; the carry comes back as it lies in `jit_first_carry`."""
    assembly = for_evaluation(assembly, phase, mesh)
    step = evaluation_step(assembly.recipe.objective, assembly.model, seed)

    def placed(*arguments):
        with placed_by(activation_rules(mesh)), matmul_precision(assembly.model.program.dtype):
            return step(*arguments)

    carry = carry_shardings(carry_axes(assembly, phase, train=False), mesh)
    return jax.jit(placed, out_shardings=(replicated(mesh), carry), compiler_options=compiler_options(mesh))
