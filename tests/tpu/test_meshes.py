"""One device's training on meshes: losses, gradients, carries, and what each device holds."""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest

from models.attention.kernels import table
from models.core.program import Program
from models.families import gpt2
from pretrain.generation.decoding import generate
from pretrain.generation.settings import Decoding
from pretrain.objectives.objective import Moment
from pretrain.recipe import Phase
from pretrain.training import placement
from pretrain.training.assembly import assemble, initial_params, initial_state, parameter_shapes
from tests.contract import cases
from tests.pretrain import tiny
from tests.pretrain.test_options import replaced
from tests.tpu import simulated
from tpu.batches import host_rows, place_rows
from tpu.rules import parameter_shardings
from tpu.xla import compiler_options

pytestmark = pytest.mark.own_process(devices=8, TF_CPP_MIN_LOG_LEVEL="0")
MESHES = ("data=8", "fsdp=8", "data=2,fsdp=2,tensor=2", "data=4,sequence=2", "tensor=8")
CUT = ("sequence=8", "slice=2,sequence=4", "fsdp=2,sequence=2,tensor=2", "sequence=4,tensor=2")


@functools.cache
def gradients(recipe, text, program):
    """(loss, {path: gradient or carry}) of a batch with dropout."""
    mesh, assembly, drawn = simulated.mesh_of(text), assemble(recipe, program), drawn_parameters(recipe)
    (stage,) = placement.stages(assembly, mesh, shapes=jax.eval_shape(lambda: drawn))
    size = recipe.phases[0].batch_size
    noise = np.arange(2 * size, dtype=np.uint32).reshape(size, 2)

    def loss(params, batch, carry):
        sums, carry, _ = recipe.objective.loss(assembly.model, params, batch, carry, Moment(noise, True))
        weights = recipe.objective.weights(batch)
        return sum(c * sums[term] / weights[term] for term, c in recipe.objective.coefficients(0).items()), carry

    params = placement.place_parameters(drawn, stage)
    batch = place_rows(simulated.rows_of(recipe, 0), host_rows(mesh, size), size, mesh)
    step = placement.jit_on(mesh, assembly, jax.value_and_grad(loss, has_aux=True), compiler_options(mesh))
    (value, carry), found = step(params, batch, stage.first_carry())
    found = jax.tree_util.tree_leaves_with_path(jax.device_get((found, carry)))
    return float(value), {jax.tree_util.keystr(path): leaf for path, leaf in found}


@functools.cache
def drawn_parameters(recipe):
    rng, scale = np.random.default_rng(0), lambda path: float("scale" in jax.tree_util.keystr(path))
    draw = lambda path, like: (scale(path) + rng.normal(0, 0.1, like.shape)).astype(like.dtype)
    return jax.tree_util.tree_map_with_path(draw, parameter_shapes(assemble(recipe)))


def check_near(found, expected):
    for path, leaf in expected.items():
        if "['key']['bias']" not in path:  # whose gradient is 0 but for rounding
            np.testing.assert_allclose(found[path], leaf, atol=5e-6 * np.abs(leaf).max(), err_msg=path)


SLOW = [("albert", "bert", "electra", "etc", "gpt2", "transformer-xl", "adaptive", "xlnet"), MESHES]
SLOW = [*itertools.product(*SLOW), *itertools.product(simulated.PATTERNS, MESHES + CUT)]


@pytest.mark.parametrize(
    "name, mesh, program",
    [
        ("electra", "data=2,fsdp=2,sequence=2", Program(depth="scan")),
        ("xlnet", "data=2,fsdp=2,tensor=2", Program(depth="scan")),
        ("bigbird", "data=2,sequence=2,tensor=2", Program(depth="unroll", remat="full")),
        ("etc", "fsdp=2,sequence=2,tensor=2", Program(depth="scan")),
        ("gpt2", "slice=2,fsdp=2,sequence=2", Program(depth="unroll", remat="dots")),
        *(pytest.param(*case, Program(depth="scan"), marks=pytest.mark.slow) for case in SLOW),
    ],
)
def test_a_family_on_a_mesh_is_that_of_one_device(name, mesh, program, capfd):
    patterned, recipe = name in simulated.PATTERNS, simulated.recipe(name)
    program = dataclasses.replace(program, attention="blocked" if patterned else "xla")
    loss, found = gradients(recipe, mesh, program)
    said = capfd.readouterr().err
    expected, slopes = gradients(recipe, "one", Program(depth="scan", attention="dense" if patterned else "xla"))
    assert loss == pytest.approx(expected, rel=2e-6)
    check_near(found, slopes)
    assert "nvoluntary full rematerialization" not in said  # that the compiler saw no other way than to gather an array


@functools.cache
def trained(name, text):
    """Two steps -> (losses, {path: moments, carry} after one, bytes of the state on a device and in all)."""
    text, _, parts = text.partition("/")
    mesh = simulated.mesh_of(text)
    assembly = assemble(simulated.recipe(name), Program(depth="scan"))
    stage = placement.stages(assembly, mesh, int(parts or 1))[0]
    where = placement.shardings((stage.state, stage.frozen))
    state, frozen = jax.jit(lambda: initial_state(assembly, initial_params(assembly), 0), out_shardings=where)()
    losses, mine = [], host_rows(mesh, simulated.ROWS)
    for number in range(2):
        batch = place_rows(simulated.rows_of(assembly.recipe, number), mine, simulated.ROWS, mesh)
        state, metrics = stage.train.run(state, frozen, batch)
        losses.append(float(metrics.loss))
        if number == 0:
            first = jax.device_get((state.opt_state, state.carry))
    arrays = jax.tree.leaves((state.params, state.opt_state))
    held = sum(array.addressable_shards[0].data.nbytes for array in arrays)
    first = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(first)}
    return losses, first, held, sum(array.nbytes for array in arrays)


TRAINED = [
    ("bert", "slice=2,fsdp=2,tensor=2/2", "one"),  # in two microbatches
    ("toy", "slice=2,data=4/2", "one/2"),  # its carry is one of each microbatch
]
OTHERS = ("data=2,fsdp=2,tensor=2", "slice=2,data=2,fsdp=2", "fsdp=8", "tensor=8", "data=4,sequence=2/4")
TRAINED += [pytest.param("bert", mesh, "one", marks=pytest.mark.slow) for mesh in OTHERS]


@pytest.mark.parametrize("name, mesh, alone", TRAINED)
def test_a_mesh_trains_like_one_device(name, mesh, alone):
    """The optimiser's moments after a step are the gradients and their squares."""
    losses, found, _, _ = trained(name, mesh)
    expected, moments, _, _ = trained(name, alone)
    np.testing.assert_allclose(losses, expected, rtol=2e-6)
    check_near(found, moments)


# At least and at most, of the bytes of one device. Vectors, positions and types stay whole under fsdp; under tensor
# also what only leads from width to width.
SHARES = {"fsdp=8": (1 / 8, 1 / 4), "tensor=8": (1 / 8, 1 / 3), "fsdp=2,tensor=2": (1 / 4, 1 / 2.5)}
SHARES |= {"fsdp=2": (1 / 2, 1 / 1.7), "tensor=2": (1 / 2, 1 / 1.6), "": (1, 1)}


@pytest.mark.parametrize("name, mesh, alone", TRAINED)
def test_what_a_device_holds_falls_with_fsdp_and_tensor_alone(name, mesh, alone):
    _, _, held, whole = trained(name, mesh)
    assert whole == trained(name, alone)[3]
    cut = ",".join(axis for axis in mesh.split("/")[0].split(",") if axis.startswith(("fsdp", "tensor")))
    least, most = SHARES[cut]
    assert least * whole <= held <= most * whole


# The program that accelerators run: bfloat16, scan, remat 'dots' and the TPU's kernels.


ACCELERATOR = {"width": 256, "heads": 4, "feed_forward": 256, "attention_dropout": 0.0, "positions": 128, "memory": 128}


def accelerated(name):
    """A recipe of a size that fills the kernels' lanes also where heads are cut in two."""
    recipe = getattr(tiny, name)(phases=(Phase(1.0, 128, 4),))
    for field, value in ACCELERATOR.items():
        if hasattr(recipe.model, field):
            recipe = replaced(recipe, f"model.{field}", value)
    return recipe


def smallest_cosine(ours, theirs):
    """Of all parameters but key biases, whose gradient is 0 but for rounding."""
    flat = lambda array: np.asarray(array, np.float64).ravel()
    pairs = [(flat(ours[path]), flat(theirs[path])) for path in ours if "['key']['bias']" not in path]
    return min(one @ other / max(np.linalg.norm(one) * np.linalg.norm(other), 1e-30) for one, other in pairs)


@pytest.mark.parametrize(
    "name, kernel", [("bert", "splash"), pytest.param("xlnet", "relative", marks=pytest.mark.slow)]
)
def test_an_accelerators_program_on_a_mesh_is_that_of_one_device_and_near_float32(name, kernel, monkeypatch):
    kept = table.KERNELS[kernel]
    interpreted = kept._replace(attend=functools.partial(kept.attend, interpret=True))
    monkeypatch.setitem(table.KERNELS, kernel, interpreted)
    fast = Program(dtype="bfloat16", depth="scan", remat="dots", attention=kernel)
    loss, ours = gradients(accelerated(name), "one", fast)
    for text, program, near, cosine in (("data=2,fsdp=2,tensor=2", fast, 1e-3, 0.999), ("one", Program(), 1e-2, 0.99)):
        other, theirs = gradients(accelerated(name), text, program)
        assert other == pytest.approx(loss, rel=near) and smallest_cosine(theirs, ours) > cosine


def test_a_mesh_writes_the_tokens_of_one_device():
    """Its cache is cut like the model."""
    rng, config = np.random.default_rng(3), cases.CASES["gpt2"].model
    given = [rng.integers(5, 100, length).tolist() for length in (3, 9, 16, 1, 7)]
    louder = lambda path, leaf: leaf * (3 if "kernel" in jax.tree_util.keystr(path) else 1)  # or a token is repeated
    params = jax.tree_util.tree_map_with_path(louder, cases.params(cases.CASES["gpt2"]))
    mesh = simulated.mesh_of("data=2,tensor=2")
    placed = jax.device_put(params, parameter_shardings(gpt2.FAMILY.parameters(config), params, mesh))
    greedy = Decoding(max_tokens=6)
    drawn, beams = dataclasses.replace(greedy, temperature=0.8), dataclasses.replace(greedy, beams=2)
    for depth, decoding, prompts in ("scan", drawn, given), ("unroll", beams, given[:1]):
        model = gpt2.FAMILY.module(config, Program(depth=depth))
        assert generate(model, placed, prompts, decoding, mesh=mesh) == generate(model, params, prompts, decoding)
