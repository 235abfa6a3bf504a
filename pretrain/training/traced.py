"""A loss that is traced and not computed: what it reads, and what it costs."""

import functools

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr
from jax.interpreters import partial_eval

from models.attention.mask import PAIRS
from models.core.noise import row_keys
from models.core.parameters import Params, leaves
from models.core.program import Program
from models.families.registry import family_of
from pretrain.objectives.objective import Moment, Phase, Task, scope, shapes_of
from pretrain.recipe import Recipe, every_task, tasks_of
from pretrain.training.assembly import Assembly, assemble, parameter_shapes
from pretrain.training.step import batch_rows, bound
from pretrain.training.trained import merge, split_frozen
from tpu.flops import flops


def traced_loss(assembly: Assembly, phase: Phase, task: Task, params: Params, frozen: Params) -> ClosedJaxpr:
    """The program of a task's loss in training: (params, frozen, batch, carry) -> the sum of its terms.

    params, frozen: as shapes and dtypes; nothing is computed.
    """
    objective = task.objective

    def loss(params, frozen, batch, carry):
        keys = row_keys(0, 0, jnp.arange(batch_rows(batch)))
        merged, taught = bound(merge(params, frozen), objective, assembly.teachers)
        terms = objective.loss(assembly.model, merged, batch, carry, Moment(keys, True, 0, taught))[0]
        return sum(terms[term].sum for term in objective.coefficients(0))

    carry = jax.eval_shape(lambda: objective.carry(assembly.model, phase, train=True)[0])
    return jax.make_jaxpr(loss)(params, frozen, shapes_of(objective.spec(phase), phase.batch_size), carry)


def untrained(assembly: Assembly, index: int, params: Params, frozen: Params) -> tuple[str, ...]:
    """Paths of the parameters that no task of a phase reads: no gradient ever reaches them.   As `traced_loss`."""
    phase = assembly.recipe.phases[index]
    plain = assembly._replace(model=assembly.model.clone(program=Program()))  # the form that is traced fastest
    ever: set[str] = set()
    for task in tasks_of(assembly.recipe, phase):
        traced = traced_loss(plain, phase, task, params, frozen).jaxpr
        read = partial_eval.dce_jaxpr(traced, [True])[1]
        ever |= {path for (path, _), is_read in zip(leaves(params), read, strict=False) if is_read}
    return tuple(path for path, _ in leaves(params) if path not in ever)


@functools.lru_cache
def model_flops(recipe: Recipe, phase: Phase, task: Task | None = None) -> float:
    """FLOPs of a task's train step that the model needs, counted in its traced loss: of attention those of the pairs
    that `Family.seen` says, of relative attention all. The backward pass costs two forward passes, since a product's
    gradient is two products of its size; a teacher has none.

    task: the phase's only one unless given."""
    assembly = assemble(recipe, Program(attention="dense"))
    params = split_frozen(parameter_shapes(assembly), recipe)
    traced = traced_loss(assembly, phase, task or tasks_of(recipe, phase)[0], *params)
    taught = {scope(teacher.name): teacher.model for teacher in recipe.teachers}

    def counted_as(where: str) -> float:
        passes, model = next(((1, model) for name, model in taught.items() if name in where), (3, recipe.model))
        return passes * (family_of(model).seen(model, phase) if PAIRS in where else 1.0)

    return flops(traced, {}, counted_as).total


def mean_flops(recipe: Recipe) -> float:
    """`model_flops` of a step, the mean of a run's: all of its phases have one mesh, which is chosen by them."""
    total = 0.0
    for _, phase, task in every_task(recipe):
        rates = sum(one.rate for one in tasks_of(recipe, phase))
        total += phase.share * task.rate / rates * model_flops(recipe, phase, task)
    return total
