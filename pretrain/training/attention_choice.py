"""Choose the attention of a run: the platform's kernels if they can compute every phase, else XLA's.

A kernel named by --attention that cannot is an error. If evaluation has another memory length than training, which the
kernels do not support, evaluation uses XLA's attention.
"""

import contextlib
import dataclasses
from collections.abc import Iterator

import flax.linen as nn
import jax
from jax.sharding import Mesh

from data_pipelines.command_line import unknown
from data_pipelines.errors import UserError
from models.attention.kernels.kernel import Attention
from models.attention.kernels.table import KERNELS, choose
from models.attention.patterns.pattern import DENSE, Pattern, encoders, on_host
from models.attention.sparse import crossover
from models.core import program as programs
from models.core.program import PLAIN, Program
from models.core.sharding import placed_by
from models.families.registry import family_of
from pretrain.objectives.objective import Task
from pretrain.options import Options
from pretrain.recipe import Phase, Recipe, every_task
from pretrain.training.assembly import Assembly
from tpu.generations import Generation, generation_of
from tpu.rules import activation_rules


def chosen_program(recipe: Recipe, options: Options, mesh: Mesh | None = None, platform: str | None = None) -> Program:
    """Choose the program for a platform (default: this one's) and the options.   mesh: None for one device. UserError
    if --attention names a kernel that cannot run."""
    chosen = {field: getattr(options, field) for field in ("dtype", "depth", "remat", "attention")}
    try:
        program = dataclasses.replace(programs.default(platform), **{k: v for k, v in chosen.items() if v is not None})
    except ValueError as error:
        raise UserError(str(error).replace("program.", "--", 1)) from None
    kernels, named = _kernels(recipe, platform), program.attention
    use = " or ".join(["xla", *(["+".join(kernels)] if kernels else [])])
    for name in () if named in PLAIN else named.split("+"):
        if name not in KERNELS and "+" in named:
            raise UserError(f"--attention {named}: {name!r} is not a kernel, and '+' joins kernels; use {use}")
        if name not in KERNELS:
            forms = PLAIN if _is_sparse(recipe.model) else PLAIN[:1]
            raise UserError(unknown("--attention: unknown attention", name, (*forms, *kernels)))
    if named in PLAIN[1:]:
        if not _is_sparse(recipe.model):
            raise UserError(f"--attention {named}: {recipe.name} has no sparse pattern (model.pattern.name); use {use}")
        return program
    if named != "xla" and not {*named.split("+")} <= {*kernels}:
        where = f"{recipe.name} on {platform or jax.default_backend()}"
        raise UserError(f"--attention {named}: is not available for {where}; use {use}")
    if options.attention == "xla" or not kernels:
        return program
    taken = "+".join(kernels) if named == "xla" else named
    if obstacles := _obstacles(recipe, program, taken, mesh):
        if named == "xla":
            return program
        use = "xla" if taken == "+".join(kernels) else use
        raise UserError(f"--attention {named} does not work here: {'; '.join(obstacles)}; or use {use}")
    depth = options.depth or _depth(recipe, taken, program, mesh)
    return dataclasses.replace(program, attention=taken, depth=depth)


def why_plain(assembly: Assembly, options: Options, mesh: Mesh | None = None, platform: str | None = None) -> list[str]:
    """List log lines on why attention uses XLA although the platform has a kernel, unless --attention says so."""
    recipe, program = assembly.recipe, assembly.model.program
    if options.attention in PLAIN:
        return []
    if program.attention == "xla":
        if not (kernels := "+".join(_kernels(recipe, platform))):
            return []
        obstacles = "; ".join(_obstacles(recipe, program, kernels, mesh))
        return [f"attention xla: {kernels} does not work here: {obstacles}"]
    evaluated = dict.fromkeys(
        obstacle
        for index, _, task in every_task(recipe)
        for obstacle in _of_evaluation(recipe, program.attention, index, task, mesh)
    )
    return [f"evaluation uses attention xla: {'; '.join(evaluated)}"] if evaluated else []


def form_of_pattern(assembly: Assembly) -> list[str]:
    """Describe how plain operations compute a sparse pattern, by their faster form; BigBird-ETC's have only one."""
    recipe, program = assembly.recipe, assembly.model.program
    if program.attention != "xla" or not _is_sparse(recipe.model) or not family_of(recipe.model).attention:
        return []
    lines = []
    for length in dict.fromkeys(phase.length for phase in recipe.phases):
        for depth, heads in encoders(recipe.model).values():
            most = crossover(on_host(recipe.model.pattern, depth, heads, length))
            form = f"in blocks (above {most:,})" if length > most else f"densely (up to {most:,})"
            lines.append(f"attention xla: the sparse pattern in rows of {length:,} tokens is computed {form}")
    return list(dict.fromkeys(lines))


def for_evaluation(assembly: Assembly, index: int, task: Task, mesh: Mesh) -> Assembly:
    """Switch the assembly to XLA's attention if its kernels do not support a task's memory length in evaluation."""
    recipe, program = assembly.recipe, assembly.model.program
    if program.attention in PLAIN or not _of_evaluation(recipe, program.attention, index, task, mesh):
        return assembly
    return assembly._replace(model=assembly.model.clone(program=dataclasses.replace(program, attention="xla")))


def with_kernels(assembly: Assembly, mesh: Mesh) -> Assembly:
    """Give the trained model's kernels to the teachers whose attention they can compute."""
    recipe, program = assembly.recipe, assembly.model.program

    def of(name: str, teacher: nn.Module) -> nn.Module:
        config, kernels = teacher.config, program.attention
        rows = [(phase, task.objective.memory(config, train=True)) for _, phase, task in every_task(recipe)]
        try:
            if kernels in PLAIN or any(_of_rows(config, kernels, *of_task, mesh) for of_task in rows):
                return teacher
        except UserError as error:
            raise UserError(f"the teacher {name}: {error}") from None
        return teacher.clone(program=program)

    return assembly._replace(teachers={name: of(name, teacher) for name, teacher in assembly.teachers.items()})


def _is_sparse(model) -> bool:
    """Return whether a model config has a sparse pattern."""
    return getattr(model, "pattern", Pattern()).name != DENSE


def _kernels(recipe: Recipe, platform: str | None) -> list[str]:
    """List the kernels of a platform for the kinds of attention that the recipe's model has."""
    form, asked = family_of(recipe.model).attention, _attentions(recipe.model, recipe.phases[0], 0)
    kinds = {_is_sparse(recipe.model)} | {attention.blocks is not None for attention in asked}
    of_kinds = [kernel for kernel in KERNELS.values() if kernel.form == form and kernel.sparse in kinds]
    return [kernel.name for kernel in of_kinds if (platform or jax.default_backend()) in kernel.platforms]


def _depth(recipe: Recipe, kernels: str, program: Program, mesh: Mesh | None) -> str:
    """Choose between scanning and unrolling layers with these kernels, by default. Tensor-parallel layers stay scanned,
    as unrolled ones have not been planned. So do layers that share parameters: unrolled, albert-xxlarge kept the
    gradients of all layers and added them up at the end."""
    cut = mesh is not None and mesh.shape["tensor"] > 1
    if cut or getattr(recipe.model, "sharing", "none") != "none":
        return program.depth
    depths = [depth for depth, _ in encoders(recipe.model).values()] or [recipe.model.depth]
    most = min(KERNELS[kernel].unrolled for kernel in kernels.split("+"))
    return "unroll" if max(depths) <= most else program.depth


def _obstacles(recipe: Recipe, program: Program, kernels: str, mesh: Mesh | None) -> list[str]:
    """List the reasons why a recipe cannot be trained with these kernels."""
    tpu = _generation(mesh)
    if tpu and not tpu.kernels:
        return [f"no kernel compiles for TPU {tpu.prefix}"]
    obstacles = [
        obstacle
        for _, phase, task in every_task(recipe)
        for obstacle in _of_rows(recipe.model, kernels, phase, task.objective.memory(recipe.model, train=True), mesh)
    ]
    if program.dtype != "bfloat16":
        obstacles.append(f"--dtype is {program.dtype}: use bfloat16")
    return list(dict.fromkeys(obstacles))


def _of_evaluation(recipe: Recipe, kernels: str, index: int, task: Task, mesh: Mesh | None) -> list[str]:
    """List the reasons why kernels that train a task in a phase cannot evaluate it."""
    memory = task.objective.memory(recipe.model, train=False)
    return _of_rows(recipe.model, kernels, recipe.phases[index], memory, mesh)


def _of_rows(model, kernels: str, phase: Phase, memory: int, mesh: Mesh | None) -> list[str]:
    """List the reasons why kernels cannot compute the attention of a phase's rows with this memory length.
    model: the config of a recipe's model, or of a teacher."""
    attentions, tpu = _attentions(model, phase, memory, mesh), _generation(mesh)
    if not attentions:
        return ["the output of the only layer is needed at few positions"]
    form = family_of(model).attention
    with _on(mesh):
        obstacles = [reason for attention in attentions for reason in choose(kernels, form, attention)[1]]
    longest = max((attention.length for attention in attentions if attention.by_distance), default=0)
    if tpu and longest > tpu.biased:
        obstacles.append(f"TPU {tpu.prefix} has no room for a bias of {longest} tokens: use at most {tpu.biased}")
    return obstacles


def _attentions(model, phase: Phase, memory: int, mesh: Mesh | None = None) -> list[Attention]:
    """Describe the attentions of a model in a phase's rows."""
    with _on(mesh):
        return family_of(model).attentions(model, phase, memory)


def _generation(mesh: Mesh | None) -> Generation | None:
    return generation_of(mesh.devices.flat[0].device_kind) if mesh else None


@contextlib.contextmanager
def _on(mesh: Mesh | None) -> Iterator[None]:
    """Shard attentions over a mesh in this context; UserError if it does not divide them."""
    with placed_by(activation_rules(mesh) if mesh else None):
        try:
            yield
        except ValueError as error:
            raise UserError(str(error)) from None
