"""One device's training on meshes: losses, gradients, carries, and what each device holds."""

import dataclasses
import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from finetune.predict import Predictor
from finetune.rows import Row, joined
from models.attention import plain
from models.attention.kernels import pattern_kernel, relative_kernel
from models.attention.kernels.kernel import Attention
from models.attention.kernels.row_attention import by_rows, fits
from models.attention.kernels.splash import splash
from models.attention.kernels.table import KERNELS
from models.attention.layouts import interleaved
from models.attention.mask import Mask
from models.attention.multi_head import attention_of
from models.attention.operands import Biases, Context
from models.attention.patterns.pattern import Pattern, blocks_of
from models.attention.relative import attention_spec, relative_attention
from models.blocks.layer import LayerSizes
from models.core.noise import row_keys
from models.core.parameters import Parameter
from models.core.program import Program
from models.core.sharding import placed_by
from models.families import gpt2
from models.families.xlnet import both_masks
from pretrain.generation.decoding import generate
from pretrain.generation.settings import Decoding
from pretrain.objectives.objective import Moment
from pretrain.optimizers import Optimizer, transformation
from pretrain.recipe import Phase
from pretrain.training import placement
from pretrain.training.assembly import assemble, initial_params, parameter_shapes
from pretrain.training.step import initial_state
from tests.contract import cases
from tests.models.programs import interpreted
from tests.pretrain import tiny
from tests.pretrain.fields import replaced
from tests.tpu import simulated
from tpu.batches import host_rows, place_rows
from tpu.rules import activation_rules, parameter_shardings
from tpu.xla import compiler_options

pytestmark = pytest.mark.own_process(devices=8, TF_CPP_MIN_LOG_LEVEL="0")
MESHES = ("data=8", "fsdp=8", "data=2,fsdp=2,tensor=2", "data=4,sequence=2", "tensor=8")
CUT = ("sequence=8", "slice=2,sequence=4", "fsdp=2,sequence=2,tensor=2", "sequence=4,tensor=2")


@functools.cache
def gradients(recipe, text, program):
    """(loss, {path: gradient or carry}) of a batch with dropout."""
    mesh, assembly, drawn = simulated.mesh_of(text), assemble(recipe, program), drawn_parameters(recipe)
    (stage,) = placement.stages(assembly, mesh)
    size = recipe.phases[0].batch_size
    noise = np.arange(2 * size, dtype=np.uint32).reshape(size, 2)

    def loss(params, batch, carry):
        terms, carry, _ = recipe.objective.loss(assembly.model, params, batch, carry, Moment(noise, True))
        weights = recipe.objective.weights(batch)
        return sum(c * terms[term].sum / weights[term] for term, c in recipe.objective.coefficients(0).items()), carry

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
    return jax.tree_util.tree_map_with_path(draw, parameter_shapes(recipe))


def check_near(found, expected):
    for path, leaf in expected.items():
        if "['key']['bias']" not in path:  # whose gradient is 0 but for rounding
            np.testing.assert_allclose(found[path], leaf, atol=5e-6 * np.abs(leaf).max(), err_msg=path)


ALL = ("albert", "bert", "electra", "etc", "gpt2", "t5", "transformer-xl", "adaptive", "xlnet")
SLOW = [*itertools.product(ALL, MESHES), *itertools.product(simulated.PATTERNS, MESHES + CUT)]


@pytest.mark.parametrize(
    "name, mesh, depth, remat",
    [
        ("electra", "data=2,fsdp=2,sequence=2", "unroll", "none"),
        ("xlnet", "data=2,fsdp=2,tensor=2", "unroll", "none"),
        ("bigbird", "data=2,sequence=2,tensor=2", "unroll", "full"),
        ("etc", "fsdp=2,sequence=2,tensor=2", "unroll", "none"),
        ("gpt2", "slice=2,fsdp=2,sequence=2", "unroll", "dots"),
        ("t5", "fsdp=2,sequence=2,tensor=2", "unroll", "none"),
        *(pytest.param(*case, "scan", "none", marks=pytest.mark.slow) for case in SLOW),
    ],
)
def test_a_family_on_a_mesh_is_that_of_one_device(name, mesh, depth, remat, capfd):
    """A layer that is not looped over is traced and compiled soonest."""
    patterned, recipe = name in simulated.PATTERNS, simulated.recipe(name)
    if depth == "unroll":
        for tower in ("discriminator.", "generator.") if name == "electra" else ("",):
            recipe = replaced(recipe, f"model.{tower}depth", 1)
    loss, found = gradients(recipe, mesh, Program("float32", depth, remat, "blocked" if patterned else "xla"))
    said = capfd.readouterr().err
    expected, slopes = gradients(recipe, "one", Program("float32", depth, "none", "dense" if patterned else "xla"))
    assert loss == pytest.approx(expected, rel=2e-6)
    check_near(found, slopes)
    assert "nvoluntary full rematerialization" not in said  # that the compiler saw no other way than to gather an array


def test_a_finetuned_model_says_on_a_mesh_what_it_says_on_one_device():
    """Rows are few enough that some of a batch only fill it up."""
    recipe, rng = replaced(simulated.recipe("classify"), "model.depth", 1), np.random.default_rng(0)
    tokens, found = [rng.integers(5, 100, length) for length in (3, 9, 16, 16, 7)], []
    rows = joined([Row(one) for one in tokens], {"place": np.zeros(5, int), "labels": np.array([0, 1, 2, 1, 0])})
    for text in ("fsdp=4,tensor=2", "one"):
        assembly, mesh = assemble(recipe, Program("float32", "unroll")), simulated.mesh_of(text)
        (stage,) = placement.stages(assembly, mesh)
        params = placement.place_parameters(drawn_parameters(recipe), stage)
        found.append(Predictor(recipe.objective, assembly, mesh, 16)(params, {}, rows, lambda done: None))
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6), *found)


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
        state, metrics = stage.train.run(state, frozen, batch, placement.place_given(stage))
        losses.append(float(metrics.loss))
        if number == 0:
            first = jax.device_get((state.opt_state, state.carry))
    arrays = jax.tree.leaves((state.params, state.opt_state))
    held = sum(array.addressable_shards[0].data.nbytes for array in arrays)
    first = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(first)}
    return losses, first, held, sum(array.nbytes for array in arrays)


TRAINED = [
    ("student", "slice=2,fsdp=2,tensor=2/2", "one"),  # of stored soft targets, in two microbatches
    ("toy", "slice=2,data=4/2", "one/2"),  # its carry is one of each microbatch
    ("two lengths", "slice=2,data=4", "one"),
    ("grams", "data=2,fsdp=2,tensor=2/2", "one"),
    ("factored", "data=2,fsdp=2,tensor=2/2", "one"),  # its moments are means of rows and columns
]
OTHERS = ("data=2,fsdp=2,tensor=2", "slice=2,data=2,fsdp=2", "fsdp=8", "tensor=8", "data=4,sequence=2/4")
TRAINED += [pytest.param("bert", mesh, "one", marks=pytest.mark.slow) for mesh in OTHERS]
TRAINED += [pytest.param("t5", "data=2,fsdp=2,tensor=2/2", "one", marks=pytest.mark.slow)]


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


def test_muon_on_a_mesh_sends_each_matrix_there_and_back_once_and_moves_it_like_one_device():
    axes, rng = {"up": ("layers", "width", "feed_forward"), "down": ("layers", "feed_forward", "width")}, np.random
    table = [Parameter(path, axes[path], {}) for path in axes]
    params = {path: rng.default_rng(0).normal(size=size) for path, size in (("up", (3, 16, 32)), ("down", (3, 32, 16)))}
    params, chain = jax.tree.map(np.float32, params), transformation(Optimizer("muon"), table, 1)
    where = parameter_shardings(table, params, simulated.mesh_of("fsdp=2"))

    def moved(params):
        updates, _ = chain.update(params, chain.init(params), params)
        return jax.tree.map(jnp.subtract, params, updates)

    def on_mesh(params):
        with placed_by(activation_rules(where["up"].mesh)):
            return moved(params)

    compiled = jax.jit(on_mesh, in_shardings=(where,), out_shardings=where).lower(params).compile()
    found, alone = compiled(jax.device_put(params, where)), jax.jit(moved)(params)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-5), found, alone)
    exchanges = re.findall(r" ((?:all|collective|reduce)-[a-z-]+)\(", compiled.as_text())
    assert exchanges == ["all-to-all"] * 2 * len(table)


@pytest.mark.parametrize("mesh", ["data=8", "fsdp=8"])
def test_of_a_sparse_table_a_mesh_exchanges_the_rows_of_a_batch_alone(mesh):
    recipe = simulated.recipe("grams")
    train = placement.stages(assemble(recipe, Program()), simulated.mesh_of(mesh))[0].train
    compiled = train.run.lower(*train.arguments).compile()
    sizes = [math.prod(map(int, shape.split(","))) for shape in re.findall(r"[fs]32\[([\d,]+)\]", compiled.as_text())]
    of_tables = (simulated.BUCKETS // (8 if mesh == "fsdp=8" else 1)) * recipe.model.width
    assert max(sizes) == of_tables and compiled.memory_analysis().temp_size_in_bytes < of_tables * 4


# The program that accelerators run: bfloat16, scan, remat 'dots' and the TPU's kernels.


ACCELERATOR = {"width": 256, "heads": 4, "feed_forward": 256, "attention_dropout": 0.0, "positions": 128, "memory": 128}
ACCELERATOR["depth"] = 2


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
    monkeypatch.setitem(KERNELS, kernel, interpreted(KERNELS[kernel]))
    fast = Program(dtype="bfloat16", depth="scan", remat="dots", attention=kernel)
    loss, ours = gradients(accelerated(name), "one", fast)
    rounding = 2**-8  # bfloat16's, which differs by CPU; a mistake shows in the gradients' directions
    meshes = ("data=2,fsdp=2,tensor=2", fast, rounding, 0.999), ("one", Program(), 1e-2, 0.99)
    for text, program, near, cosine in meshes:
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
    drawn, beams = dataclasses.replace(greedy, sample=True, temperature=0.8), dataclasses.replace(greedy, beams=2)
    for depth, decoding, prompts in ("scan", drawn, given), ("unroll", beams, given[:1]):
        model = gpt2.FAMILY.module(config, Program(depth=depth))
        assert generate(model, placed, prompts, decoding, mesh=mesh) == generate(model, params, prompts, decoding)


# Kernels across a cut sequence and cut heads


TENSOR_CUTS = "--mesh tensor=4 cuts model.heads=4 in model.width=256: its parts do not fill blocks of 128"
SEQUENCE_CUTS = "--mesh sequence=2 cuts rows: leave sequence out"
UNFIT = ("data=2,tensor=4", [TENSOR_CUTS]), ("data=2,sequence=2,tensor=2", [SEQUENCE_CUTS])


def rules_of(mesh):
    return activation_rules(simulated.mesh_of(mesh))


def slopes(rules, loss, *arguments):
    """Its gradients by these arguments where these rules are in force."""

    def placed(*arguments):
        with placed_by(rules):
            return loss(*arguments)

    return jax.jit(jax.grad(placed, tuple(range(len(arguments)))))(*arguments)


def normal(*shape):
    return jnp.asarray(np.random.default_rng(math.prod(shape)).normal(size=shape), jnp.float32)


def test_splash_attends_across_a_cut_sequence_and_cut_heads():
    q, k, v, w = normal(4, 2, 256, 2, 64)
    mask = Mask(jnp.asarray(np.random.default_rng(0).integers(1, 3, (2, 256))))
    rules, swap = rules_of("data=2,sequence=2,tensor=2"), lambda x: jnp.swapaxes(x, 1, 2)  # heads first
    ours = lambda q, k, v: (swap(splash(swap(q), swap(k), swap(v), mask, interpret=True)) * w).sum()
    theirs = lambda q, k, v: (plain.attention(q, k, v, mask, dropout_rate=0.0, noise=None) * w).sum()
    simulated.check_close(slopes(rules, ours, q, k, v), slopes(None, theirs, q, k, v), 5e-6)
    with placed_by(rules):
        cut, parts = Attention(256, 256, 4, 0.0), Attention(384, 256, 4, 0.0)
        assert KERNELS["splash"].obstacles(cut) == []
        assert KERNELS["splash"].obstacles(parts) == [
            "--mesh sequence=2 cuts length=384 into parts that are no multiple of 128"
        ]
        assert not fits(cut) and KERNELS["cudnn"].obstacles(cut) == [SEQUENCE_CUTS]


def test_attention_of_whole_rows_has_its_heads_cut():
    x, w = normal(2, 256, 3 * 256), normal(2, 256, 256)
    segments = jnp.asarray(np.random.default_rng(0).integers(1, 3, (2, 256)))

    def loss(x):
        flat, noise = interleaved(*jnp.split(x, 3, -1)), row_keys(0, 0, jnp.arange(2))
        how = {"head_dim": 64, "dropout_rate": 0.2, "noise": noise, "interpret": True}
        out, _ = by_rows((flat,), (jnp.zeros(3 * 256),), Mask(segments), **how)
        return (out.reshape(w.shape) * w).sum()

    rules = rules_of("data=2,tensor=2")
    simulated.check_close(slopes(rules, loss, x), slopes(None, loss, x), 5e-6)
    with placed_by(rules):
        assert fits(Attention(256, 256, 4, 0.0))
        assert not fits(Attention(256, 128, 2, 0.0))  # 64 lanes on each device


def test_attention_to_another_sequence_with_a_bias_has_its_rows_and_heads_cut():
    """Devices add up the gradient of a bias that all rows share."""
    q, kv, w, noise = normal(2, 114, 256), normal(2, 128, 2 * 256), normal(2, 114, 256), row_keys(0, 0, jnp.arange(2))
    queries, keys = (jnp.asarray(np.random.default_rng(n).integers(1, 3, (2, n))) for n in (114, 128))

    def loss(q, kv, distances):
        mask = Mask(keys, queries=queries, distances=distances, whole=True)
        how = {"head_dim": 64, "dropout_rate": 0.2, "noise": noise, "interpret": True}
        return (by_rows((q, kv), (jnp.zeros(256), jnp.zeros(2 * 256)), mask, **how)[0] * w).sum()

    rules, given = rules_of("data=2,tensor=2"), (q, kv, normal(4, 114 + 128 - 1))
    simulated.check_close(slopes(rules, loss, *given), slopes(None, loss, *given), 5e-6)


@pytest.mark.parametrize("stream, n, table", [(0, 128, 1), (1, 3, 2)])
def test_relative_attention_has_its_heads_cut(stream, n, table):
    rng = np.random.default_rng(0)
    ranks = jnp.asarray(np.argsort(rng.random((2, 128)), axis=1).astype(np.int32))
    ones, positions = jnp.ones_like(ranks), jnp.asarray([[3, 8, 70], [0, 5, 127]])
    mask, types = both_masks(ones, ones, ranks, ranks, positions, jnp.ones((2, 128), jnp.int32))[stream]
    keys, context = (
        row_keys(0, 0, jnp.arange(2)),
        Context(normal(2, 256, 256), normal(2, 256, 256) / 2, normal(table, 384, 256)),
    )
    x = normal(2, n, 256), context, Biases(normal(256), normal(256) / 2, normal(256) / 3, normal(2, 256))
    settings = {"dropout_rate": 0.2, "noise": keys}
    ours = lambda *x: (relative_kernel.by_kernel(*x, mask, types, 4, interpret=True, **settings) ** 2).sum()
    theirs = lambda *x: (relative_attention(*x, mask, types, 4, **settings) ** 2).sum()
    expected = slopes(None, theirs, *x)
    near = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())
    jax.tree.map(near, slopes(rules_of("data=2,tensor=2"), ours, *x), expected)
    for mesh, said in UNFIT:
        with placed_by(rules_of(mesh)):
            obstacles = KERNELS["relative"].obstacles(attention_spec(x[0], context, mask, 4, 0.2))
            assert obstacles == (said if "sequence" not in mesh or n > 3 else [])


def test_the_kernel_of_patterns_has_its_heads_cut():
    q, k, v, w = normal(4, 2, 512, 256)
    tables = blocks_of(Pattern("bigbird", random=1), 1, 4, 512)
    segments, chosen = jnp.asarray(np.random.default_rng(0).integers(1, 3, (2, 512))), jnp.array([[9], [400]])
    mask = Mask(segments, blocks=jax.tree.map(lambda x: x[0], tables), globals=chosen)
    settings = {"dropout_rate": 0.2, "noise": row_keys(0, 0, jnp.arange(2)), "interpret": True}
    loss = lambda *qkv: (pattern_kernel.by_kernel(*qkv, mask, heads=4, **settings) * w).sum()
    simulated.check_close(slopes(rules_of("data=2,tensor=2"), loss, q, k, v), slopes(None, loss, q, k, v), 5e-6)
    sizes = LayerSizes(256, 4, 16, "gelu", 0.0, 0.1, 1e-12, 0.02)
    for mesh, said in UNFIT:
        with placed_by(rules_of(mesh)):
            assert KERNELS["pattern"].obstacles(attention_of(sizes, 512, blocks=tables)) == said
