"""All programs of a run before its first step: what does not trace, compile or fit must not wait for its phase."""

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from data_pipelines.errors import UserError
from pretrain.storage.checkpoints import checkpoint_bytes
from pretrain.training.assembly import Assembly
from pretrain.training.evaluate import EVALUATION_SEED
from pretrain.training.placement import (
    abstract_batch,
    abstract_carry,
    abstract_state,
    jit_evaluation_step,
    jit_train_step,
)
from tpu.chips import GIB
from tpu.rules import shard_bytes

TRAIN, EVALUATE = "train step", "evaluation"
CURES = {
    TRAIN: "raise --microbatches, or try --remat full, a --mesh with more fsdp, a smaller phases.{}.batch_size",
    EVALUATE: "try a --mesh with more fsdp, or a smaller phases.{}.batch_size",
}


class Program(NamedTuple):
    """run: jitted or compiled.   arguments: its arguments as shapes.   beside: bytes that a device holds meanwhile."""

    run: Callable
    arguments: tuple
    beside: int = 0


def trace(assembly: Assembly, mesh: Mesh, microbatches: int) -> list[dict[str, Program]]:
    """The programs of each phase by name, traced, not compiled.

    UserError where a mesh does not divide the parameters or a phase's activations evenly.
    """
    try:
        return [_traced(assembly, phase, mesh, microbatches) for phase in range(len(assembly.recipe.phases))]
    except ValueError as error:
        if mesh.size == 1:
            raise
        raise UserError(str(error)) from None


def _traced(assembly: Assembly, phase: int, mesh: Mesh, microbatches: int) -> dict[str, Program]:
    state, frozen = abstract_state(assembly, phase, mesh)
    batch, carry = abstract_batch(assembly, phase, mesh), abstract_carry(assembly, phase, mesh, train=False)
    index = jax.ShapeDtypeStruct((), np.int32)
    unused = state._replace(params=())  # by an evaluation
    train = jit_train_step(assembly, phase, mesh, microbatches)
    evaluate = jit_evaluation_step(assembly, phase, EVALUATION_SEED, mesh)
    programs = {
        TRAIN: Program(train, (state, frozen, batch)),
        EVALUATE: Program(evaluate, (state.params, frozen, batch, index, carry), shard_bytes(unused)),
    }
    for program in programs.values():
        program.run.trace(*program.arguments)
    return programs


def compiles_ahead(mesh: Mesh) -> bool:
    """On accelerators, where a program may not fit and, once compiled, is kept for the next start. A CPU has memory
    enough, and compiles within seconds when a phase begins."""
    return mesh.devices.flat[0].platform != "cpu"


def compile_phases(
    programs: list[dict[str, Program]], names: Mapping[int, list[str]], mesh: Mesh, say: Callable[[str], None]
) -> list[dict[str, Program]]:
    """The same programs, of which those with these names (phase -> names) are compiled.

    say: is told what takes so long, and how long it took.   UserError for what does not fit a device.
    """
    programs = [dict(of_phase) for of_phase in programs]
    capacity = (mesh.local_devices[0].memory_stats() or {}).get("bytes_limit")
    for phase, wanted in names.items():
        say(f"compiling phase {phase + 1} of {len(programs)}: {', '.join(wanted)}")
        start, needed = time.perf_counter(), {}
        for name in wanted:
            program = programs[phase][name]
            compiled = _compiled(program, phase, name)
            programs[phase][name] = program._replace(run=compiled)
            needed[name] = _bytes(compiled) + program.beside
        arguments = programs[phase][TRAIN].arguments
        needed["checkpoint"] = shard_bytes(arguments) + checkpoint_bytes(arguments[0])
        _check_memory(needed, phase, capacity)
        sizes = ", ".join(f"{name} {size / GIB:.2f}" for name, size in needed.items())
        say(f"compiled in {time.perf_counter() - start:.0f} s; GiB of each device: {sizes}")
    return programs


def _check_memory(needed: Mapping[str, int], phase: int, capacity: int | None) -> None:
    for name, size in needed.items():
        if capacity and size > capacity:
            has = f"takes {size / GIB:.2f} GiB of a device that has {capacity / GIB:.2f}"
            raise UserError(_too_large(phase, name, has))


def _compiled(program: Program, phase: int, name: str) -> jax.stages.Compiled:
    try:
        return program.run.lower(*program.arguments).compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise UserError(_too_large(phase, name, "does not fit a device's memory")) from error


def _bytes(compiled: jax.stages.Compiled) -> int:
    """What a program takes of a device's memory; outputs that reuse an argument's cost nothing."""
    memory = compiled.memory_analysis()
    return (
        memory.argument_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.generated_code_size_in_bytes
    )


def _too_large(phase: int, name: str, how: str) -> str:
    cure = CURES.get(name, CURES[EVALUATE]).format(phase)  # of a checkpoint as of an evaluation
    return f"phase {phase + 1}: its {name} {how}; {cure} in another --workdir"
