"""All programs of a run before its first step: what does not trace, compile or fit must not wait for its phase."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping

import jax
from jax.sharding import Mesh

from data_pipelines.errors import UserError
from pretrain.storage.checkpoints import checkpoint_bytes
from pretrain.training.placement import Jitted, Stage
from tpu.generations import GIB
from tpu.mesh import divided_by
from tpu.rules import shard_bytes

TRAIN, EVALUATE = "train step", "evaluation"
FIELDS = {TRAIN: "train", EVALUATE: "evaluate"}  # of a Stage
CURES = {
    TRAIN: "raise --microbatches, or try --remat full, a --mesh with more fsdp, a smaller phases.{}.batch_size",
    EVALUATE: "try a --mesh with more fsdp, or a smaller phases.{}.batch_size",
}


def trace(made: list[Stage]) -> None:
    """Trace their programs, which are not compiled. UserError where a mesh does not divide activations evenly."""
    for stage in made:
        with divided_by(stage.mesh):
            for program in (stage.train, stage.evaluate):
                program.run.trace(*program.arguments)


def compiles_ahead(mesh: Mesh) -> bool:
    """On accelerators, where a program that is compiled is kept for the next start. A CPU compiles within seconds when
    a phase begins, and says then what does not fit."""
    return mesh.devices.flat[0].platform != "cpu"


def compile_phases(made: list[Stage], names: Mapping[int, list[str]], say: Callable[[str], None]) -> list[Stage]:
    """The same stages, whose programs with these names (phase -> names) are compiled.

    say: is told what takes so long, and how long it took.   UserError for what does not fit a device.
    """
    made = list(made)
    for number, stage in enumerate(made):
        if stage.index in names:
            say(f"compiling {stage.title}: {', '.join(names[stage.index])}")
            start = time.perf_counter()
            made[number], needed = _compiled_stage(stage, names[stage.index])
            sizes = ", ".join(f"{name} {size / GIB:.2f}" for name, size in needed.items())
            say(f"compiled in {time.perf_counter() - start:.0f} s; GiB of each device: {sizes}")
    return made


def _compiled_stage(stage: Stage, wanted: list[str]) -> tuple[Stage, dict[str, int]]:
    """(the stage with compiled programs; name -> bytes of a device)."""
    needed = {}
    beside = {EVALUATE: shard_bytes(stage.state._replace(params=()))}  # which lies there, but is not read
    for name in wanted:
        program = getattr(stage, FIELDS[name])
        compiled = _compiled(program, stage.index, name)
        stage = stage._replace(**{FIELDS[name]: program._replace(run=compiled)})
        needed[name] = _bytes(compiled) + beside.get(name, 0)
    needed["checkpoint"] = shard_bytes(stage.train.arguments) + checkpoint_bytes(stage.state)
    capacity = (stage.mesh.local_devices[0].memory_stats() or {}).get("bytes_limit")
    _check_memory(needed, stage.index, capacity)
    return stage, needed


def _check_memory(needed: Mapping[str, int], phase: int, capacity: int | None) -> None:
    for name, size in needed.items():
        if capacity and size > capacity:
            has = f"takes {size / GIB:.2f} GiB of a device that has {capacity / GIB:.2f}"
            raise UserError(_too_large(phase, name, has))


def _compiled(program: Jitted, phase: int, name: str) -> jax.stages.Compiled:
    with no_memory(phase, name):
        return program.run.lower(*program.arguments).compile()


@contextlib.contextmanager
def no_memory(phase: int, name: str) -> Iterator[None]:
    """Where a program finds no memory: UserError says what makes it smaller."""
    try:
        yield
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
