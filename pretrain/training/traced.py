"""A loss that is traced and not computed: what it reads, and what it costs."""

import functools
from collections.abc import Mapping
from types import MappingProxyType

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr
from jax.interpreters import partial_eval

from models.attention.mask import PAIRS
from models.core.noise import row_keys
from models.core.parameters import Params, leaves
from models.core.program import Program
from models.families.registry import family_of
from pretrain.objectives.inputs import shapes_of
from pretrain.objectives.objective import Batch, Moment, Objective
from pretrain.objectives.phase import Phase, Task
from pretrain.objectives.teacher import scope
from pretrain.recipe import Recipe, every_task, tasks_of
from pretrain.training.assembly import assemble, parameter_shapes
from pretrain.training.step import batch_rows, bound
from pretrain.training.trained import merge, split_frozen
from tpu.flops import flops


def traced_loss(
    objective: Objective,
    model: nn.Module,
    params: Params,
    frozen: Params,
    batch: Batch,
    carry,
    teachers: Mapping[str, nn.Module] = MappingProxyType({}),
) -> ClosedJaxpr:
    """The program of the loss in training: (params, frozen, batch, carry) -> the sum of its terms.

    The arguments are shapes and dtypes; nothing is computed.
    """

    def loss(params, frozen, batch, carry):
        keys = row_keys(0, 0, jnp.arange(batch_rows(batch)))
        merged, taught = bound(merge(params, frozen), objective, teachers)
        terms = objective.loss(model, merged, batch, carry, Moment(keys, True, 0, taught))[0]
        return sum(terms[term].sum for term in objective.coefficients(0))

    return jax.make_jaxpr(loss)(params, frozen, batch, carry)


def unread(
    objective: Objective,
    model: nn.Module,
    params: Params,
    frozen: Params,
    batch: Batch,
    carry,
    teachers: Mapping[str, nn.Module] = MappingProxyType({}),
) -> tuple[str, ...]:
    """Paths of the parameters that the loss does not depend on: no gradient ever reaches them. As `traced_loss`."""
    traced = traced_loss(objective, model, params, frozen, batch, carry, teachers).jaxpr
    read = partial_eval.dce_jaxpr(traced, [True])[1]
    return tuple(path for (path, _), is_read in zip(leaves(params), read, strict=False) if not is_read)


@functools.lru_cache
def model_flops(recipe: Recipe, phase: Phase, task: Task | None = None) -> float:
    """FLOPs of a task's train step that the model needs, counted in its traced loss: of attention those of the pairs
    that `Family.seen` says, of relative attention all. The backward pass costs two forward passes, since a product's
    gradient is two products of its size; a teacher has none.

    task: the phase's only one unless given."""
    objective = (task or tasks_of(recipe, phase)[0]).objective
    assembly = assemble(recipe, Program(attention="dense"))
    trained, frozen = split_frozen(parameter_shapes(assembly), recipe)
    carry = jax.eval_shape(lambda: objective.carry(assembly.model, phase, train=True)[0])
    batch = shapes_of(objective.spec(phase), phase.batch_size)
    traced = traced_loss(objective, assembly.model, trained, frozen, batch, carry, assembly.teachers)
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
