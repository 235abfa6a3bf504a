"""What every family keeps to, one small program each: `cases.py` has a line per family.

Golden parameter tables are in `tests/models/test_parameters.py`, which also walks the registry.
"""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from models.attention.patterns.pattern import Pattern
from models.core.parameters import leaves
from models.core.program import Program
from models.core.sharding import placed_by
from models.families.registry import FAMILIES
from pretrain.objectives.objective import Moment, shapes_of
from pretrain.training.assembly import made_heads, model_of
from tests.contract import cases
from tests.contract.cases import CASES
from tests.models.programs import equations
from tests.models.shapes import parameter_shapes
from tpu.flops import flops
from tpu.mesh import parse_mesh
from tpu.rules import activation_rules, parameter_shardings

FROZEN = Path(__file__).parent / "frozen"  # as `torch_reference.py` writes them
MESHES = {"data=8": False, "data=4,sequence=2": False, "fsdp=8": True}  # mesh -> whether parameters are cut
MESHES |= dict.fromkeys(("data=2,fsdp=2,tensor=2", "slice=2,sequence=2,tensor=2"), True)


def loss_of(case, program, train):
    """(params, batch, carry) -> loss as the train step forms it."""
    model = model_of(case.model, case.objective.asks, program)

    def loss(params, batch, carry):
        keys = cases.noise(len(batch["tokens"]))
        terms, _, _ = case.objective.loss(model, params, batch, carry, Moment(keys, train))
        weights = case.objective.weights(batch)
        return sum(c * terms[term].sum / weights[term] for term, c in case.objective.coefficients(0).items())

    return loss


def arguments(case):
    memory = cases.memory(case)
    return cases.params(case), cases.batch(case), {} if memory is None else memory._asdict()


def check(case, expected, theirs=None, bounds=(1e-5, 2e-5)):
    """Our loss is the expected one; so are the gradients, where given, to a relative norm."""
    loss = loss_of(case, Program(), True)
    found = jax.jit(loss if theirs is None else jax.value_and_grad(loss))(*arguments(case))
    value, gradients = (found, {}) if theirs is None else found
    assert abs(float(value) - expected) <= bounds[0] * max(1, abs(expected))
    if theirs is not None:
        ours = dict(leaves(gradients))
        assert set(ours) == set(theirs)
        # A shift of all scores changes no softmax: the gradients of such biases are rounding.
        whole = np.sqrt(sum(np.square(array).sum() for array in theirs.values()))
        for path, gradient in theirs.items():
            assert np.linalg.norm(ours[path] - gradient) <= bounds[1] * np.linalg.norm(gradient) + 1e-7 * whole, path


def test_every_family_has_a_case_and_a_frozen_reference():
    assert set(CASES) == set(FAMILIES) == {file.stem for file in FROZEN.glob("*.npz")}
    assert set(FAMILIES) > ALIKE


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_every_gradient_are_the_independent_implementations(name):
    with np.load(FROZEN / f"{name}.npz") as file:
        theirs = dict(file)
    check(CASES[name], float(theirs.pop("loss")), theirs)


@pytest.mark.parametrize("name", ["bert", "electra"])  # all others have the encoder of the one
def test_every_encoder_takes_a_pattern_and_has_fewer_flops_in_blocks_than_dense(name):
    """BigBird's and Longformer's parity is that of the blocks; `tests/models/test_sparse.py` has their dense form."""

    def products(pattern, form):
        case = CASES[name]._replace(model=dataclasses.replace(CASES[name].model, pattern=pattern))
        traced = jax.make_jaxpr(loss_of(case, Program(attention=form), True))(*arguments(case))
        return flops(traced, {}).products

    sparse = Pattern("bigbird", block=2, random=1)
    assert products(sparse, "blocked") < products(sparse, "dense")
    assert products(sparse, "dense") != products(Pattern(), "xla")


# Made of the blocks of others, with other switches: these run with `-m slow`
ALIKE = {"bart-translation", "ctrl", "deberta-v3", "distilbert", "electra-encoder", "ernie", "gpt", "mt5", "roberta"}
ALIKE |= {"modernbert-decoder", "transformer", "unilm"}
DELICATE = ("exp", "exp2", "expm1", "log", "log1p", "logistic", "erf", "rsqrt", "cumsum", "reduce_sum")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in ALIKE else ()) for name in FAMILIES]
)
def test_the_published_size_can_be_placed_and_what_rounds_badly_is_float32(name):
    family = FAMILIES[name]
    model = family.sizes["large" if "large" in family.sizes else "base"]
    case = CASES[name]._replace(model=dataclasses.replace(model, dropout=0.1, attention_dropout=0.1))
    heads, rows = made_heads(model, case.objective.asks), 16
    shapes = parameter_shapes(model, heads)
    length = min(getattr(model, "positions", 128), 1024)  # which serves any pattern
    spec = case.objective.spec(case.of(length, rows))
    batch = shapes_of(spec, rows)
    loss = loss_of(case, Program(dtype="bfloat16", remat="dots"), True)
    own = model_of(case.model, case.objective.asks, Program(dtype="bfloat16"))
    carry = jax.eval_shape(lambda: case.objective.carry(own, case.of(length, rows), True)[0])

    def traced(function, mesh):
        with placed_by(activation_rules(mesh)):
            return list(equations(jax.make_jaxpr(function)(shapes, batch, carry).jaxpr))

    meshes = {}
    for mesh, is_cut in MESHES.items():
        sizes = dataclasses.asdict(parse_mesh(mesh, 8))
        meshes[mesh] = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
        cut = parameter_shardings(family.parameters(model, heads), shapes, meshes[mesh])
        assert any(any(sharding.spec) for _, sharding in leaves(cut)) == is_cut, mesh
    found = traced(jax.grad(loss), meshes["slice=2,sequence=2,tensor=2"])  # which cuts activations wherever one does
    assert any(e.primitive.name == "dot_general" and e.invars[0].aval.dtype == "bfloat16" for e in found)
    for equation in found:
        if equation.primitive.name in DELICATE:
            (result,), summed = equation.outvars, equation.invars[0].aval.size
            of_one = equation.primitive.name == "reduce_sum" and summed == result.aval.size  # each sum is of one number
            assert of_one or result.aval.dtype != "bfloat16", equation
