"""What every family keeps to, one small program each: `cases.py` has a line per family.

Golden parameter tables are in `tests/models/test_parameters.py`, which also walks the registry.
"""

import dataclasses

import jax
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import AbstractMesh, AxisType

from models.attention.patterns.pattern import Pattern
from models.core.parameters import leaves, nest
from models.core.program import Program
from models.core.sharding import placed_by
from models.families.registry import FAMILIES, family_of
from pretrain.objectives.objective import Moment
from tests.contract import cases, frozen
from tests.contract.cases import CASES
from tests.models.shapes import parameter_shapes
from tpu.flops import flops
from tpu.mesh import parse_mesh
from tpu.rules import activation_rules, parameter_shardings

QUICK = {"xla_backend_optimization_level": 0}  # to compile
CUT = ("fsdp=8", "data=2,fsdp=2,tensor=2", "slice=2,data=2,tensor=2")  # over which parameters are
MESHES = ("data=8", "fsdp=8", "data=2,fsdp=2,tensor=2", "data=4,sequence=2", "slice=2,data=2,tensor=2")


def carry_of(case, rows):
    model = family_of(case.model).module(case.model, Program(dtype="bfloat16"))
    return case.objective.carry(model, case.of(cases.LENGTH, rows), True)[0]


def loss_of(case, program, train):
    """(params, batch, carry) -> (loss as the train step forms it, its terms' sums)."""
    model = family_of(case.model).module(case.model, program)

    def loss(params, batch, carry):
        keys = cases.noise(len(batch["tokens"]))
        sums, _, _ = case.objective.loss(model, params, batch, carry, Moment(keys, train))
        weights = case.objective.weights(batch)
        return sum(c * sums[term] / weights[term] for term, c in case.objective.coefficients(0).items())

    return loss


def arguments(case):
    memory = cases.memory(case)
    return cases.params(case), cases.batch(case), {} if memory is None else memory._asdict()


def test_every_family_has_a_case_and_a_frozen_reference():
    assert set(CASES) == set(FAMILIES)
    assert {file.stem for file in frozen.FOLDER.glob("*.npz")} == set(FAMILIES)


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_every_gradient_are_the_independent_implementations(name):
    case = CASES[name]
    expected, theirs = frozen.read(name)
    step = jax.jit(jax.value_and_grad(loss_of(case, Program(), True)))
    value, gradients = step.lower(*arguments(case)).compile(compiler_options=QUICK)(*arguments(case))
    assert abs(float(value) - expected) <= 1e-5 * max(1, abs(expected))
    ours = dict(leaves(gradients))
    assert set(ours) == set(theirs)
    # A shift of all scores changes no softmax: the gradients of such biases are rounding.
    whole = np.sqrt(sum(np.square(array).sum() for array in theirs.values()))
    for path, gradient in theirs.items():
        assert np.linalg.norm(ours[path] - gradient) <= 2e-5 * np.linalg.norm(gradient) + 1e-7 * whole, path


SPARSE = Pattern("bigbird", block=4, random=1)
ENCODERS = {  # one family of those that share an encoder
    family_of(case.model).module.encode: name
    for name, case in CASES.items()
    if "pattern" in {field.name for field in dataclasses.fields(case.model)}
}


@pytest.mark.parametrize("name", ENCODERS.values())
def test_a_sparse_pattern_in_blocks_is_the_dense_form_of_it_in_every_encoder(name):
    """With dropout; the gradients are those of `tests/models/test_sparse.py`."""

    def loss(pattern, form):
        model = dataclasses.replace(CASES[name].model, pattern=pattern, dropout=0.1, attention_dropout=0.1)
        return loss_of(CASES[name]._replace(model=model), Program(depth="scan", attention=form), True)

    params, *rest = arguments(CASES[name])
    params = nest({path: leaf * (9 if "attention" in path else 1) for path, leaf in leaves(params)})  # sharp attention
    losses = [loss(SPARSE, "blocked"), loss(SPARSE, "dense"), loss(Pattern(), "xla")]
    run = jax.jit(lambda *given: [one(*given) for one in losses]).lower(params, *rest).compile(compiler_options=QUICK)
    blocked, dense, without = run(params, *rest)
    assert abs(blocked - dense) <= 1e-5 * abs(dense) and abs(without - dense) > 1e-3 * abs(dense)


@pytest.mark.parametrize("name", FAMILIES)
def test_stated_flops_are_those_of_the_program(name):
    model = dataclasses.replace(CASES[name].model, dropout=0.1)  # then each row has distances of its own
    case = CASES[name]._replace(model=model)
    params, batch, carry = arguments(case)
    sparse = getattr(model, "pattern", Pattern()) != Pattern() or family_of(model) is FAMILIES["bigbird-etc"]
    if sparse:  # all is read: a sparse pattern's last layer mixes all
        at_all = lambda array: np.resize(array, (len(array), cases.LENGTH - 1))
        batch |= {name: at_all(array) for name, array in batch.items() if name.startswith("prediction_")}
    batch.pop("globals", None)  # so few tokens are not counted
    traced = jax.jit(loss_of(case, Program(depth="unroll"), True)).trace(params, batch, carry)
    counted = flops(traced.jaxpr, {}).products
    phase = case.of(cases.LENGTH, cases.ROWS)
    chosen = "prediction_positions" in case.objective.spec(phase) and case.padded
    predictions = len(batch["prediction_positions"][0]) if chosen else cases.LENGTH
    stated = family_of(model).flops(model, phase, predictions)
    if any(asked.causal for asked in family_of(model).attentions(model, cases.LENGTH, case.memory)):
        # Plain attention also computes the pairs that a causal mask hides.
        hidden = cases.LENGTH * (cases.LENGTH - 1) / 2
        counted -= 4.0 * cases.ROWS * model.depth * model.width * hidden
    assert stated <= counted <= 1.1 * stated  # the vocabulary's padding, types as products


@pytest.mark.parametrize("name", FAMILIES)
def test_the_published_size_can_be_placed_on_every_mesh(name):
    family = FAMILIES[name]
    case = CASES[name]._replace(model=family.sizes["large" if "large" in family.sizes else "base"])
    shapes, rows = parameter_shapes(case.model), 16
    length = min(getattr(case.model, "positions", 128), 1024)  # which serves any pattern
    spec = case.objective.spec(case.of(length, rows))
    batch = {field: jax.ShapeDtypeStruct((rows, *shape), dtype) for field, (shape, dtype) in spec.items()}
    for mesh in MESHES:
        sizes = dataclasses.asdict(parse_mesh(mesh, 8))
        abstract = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
        cut = parameter_shardings(family.parameters(case.model), shapes, abstract)
        assert any(any(sharding.spec) for _, sharding in leaves(cut)) == (mesh in CUT), mesh
        loss = loss_of(case, Program(dtype="bfloat16", remat="dots"), True)
        carry = jax.eval_shape(lambda: carry_of(case, rows))
        with placed_by(activation_rules(abstract)):
            jax.make_jaxpr(loss)(shapes, batch, carry)


DELICATE = ("exp", "exp2", "expm1", "log", "log1p", "logistic", "erf", "rsqrt", "cumsum", "reduce_sum")


@pytest.mark.parametrize("name", FAMILIES)
def test_what_rounds_badly_is_float32_where_products_are_bfloat16(name):
    model = dataclasses.replace(CASES[name].model, dropout=0.1, attention_dropout=0.1)
    program = Program(dtype="bfloat16", depth="scan", remat="dots")
    case = CASES[name]._replace(model=model)
    traced = jax.make_jaxpr(jax.grad(loss_of(case, program, True)))(*arguments(case))
    found = list(equations(traced.jaxpr))
    assert any(e.primitive.name == "dot_general" and e.invars[0].aval.dtype == "bfloat16" for e in found)
    for equation in found:
        if equation.primitive.name in DELICATE and not sums_of_one(equation):
            assert equation.outvars[0].aval.dtype != "bfloat16", equation


def sums_of_one(equation):
    """Whether each of an equation's sums has one number."""
    return equation.primitive.name == "reduce_sum" and equation.invars[0].aval.size == equation.outvars[0].aval.size


def equations(jaxpr):
    """Those of a jaxpr and of all jaxprs inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                if isinstance(part, ClosedJaxpr | Jaxpr):
                    yield from equations(part.jaxpr if isinstance(part, ClosedJaxpr) else part)
