"""Plans by the real compiler; skipped without libtpu (`make setup-plan`). The published sizes are slow."""

import functools
import importlib.util
import itertools
import math
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from models.attention.kernels import pattern_kernel, relative_kernel
from models.attention.kernels.row_attention import by_rows
from models.attention.kernels.splash import splash
from models.attention.mask import Mask
from models.attention.operands import Biases, Context
from models.attention.patterns.pattern import Pattern, blocks_of
from models.families.xlnet import both_masks
from pretrain.commands.planning import parse_plan, works
from tpu import compiler
from tpu.generations import GENERATIONS, GIB, generation_of
from tpu.kernel_costs import COSTS
from tpu.plan import plan
from tpu.topologies import parse_topology

pytestmark = [
    pytest.mark.own_process(devices=1),  # libtpu's settings are those of a process
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="no libtpu: make setup-plan"),
]


@pytest.fixture(scope="module", autouse=True)
def prepared():
    compiler.prepare()


@functools.cache
def planned(arguments):
    """(work, its plan, recipe) of each phase."""
    recipe, target = parse_plan(arguments.split())
    topology = parse_topology(target.topology)
    with tempfile.TemporaryDirectory() as cache:
        return [(work, plan(work, topology, COSTS, Path(cache)), recipe) for work, _ in works(recipe, target, topology)]


def check_sizes(found):
    sizes = {name: size for name, size in found.parts.items() if name != "other state"}
    assert sum(sizes.values()) == pytest.approx(found.report.arguments, rel=0.02)


SMALL = "--model.depth 1 --batch-size 16 --sequence-length 32"


def test_a_plan_has_the_compilers_sizes_and_an_estimate_below_the_peak():
    """A table of 128 x 127 rows is cut into parts with a large prime factor."""
    ((work, found, _),) = planned(f"bert-tiny --topology v5e:2x2 --mesh fsdp=4 --model.vocab-size 16200 {SMALL}")
    assert found.fits and (work.devices, work.mesh) == (4, "fsdp=4")
    check_sizes(found)
    assert found.estimate.why_not == "" and 0 < found.mfu < 1 and found.costs.cycles > 10_000
    collectives = [timed.collective for timed in found.collectives]
    kinds = {collective.kind for collective in collectives}
    assert "all-gather" in kinds and kinds & {"reduce-scatter", "all-reduce"}
    assert {collective.group for collective in collectives} <= {2, 4}
    sums = [collective for collective in collectives if collective.kind in ("reduce-scatter", "all-reduce")]
    assert {array.dtype for collective in sums for array in collective.arrays} == {"f32", "s32"}


def test_the_same_program_is_not_compiled_again(tmp_path):
    topology = parse_topology("v5e:2x2")
    lowered = jax.jit(lambda x: 2 * x).lower(on(topology, shape(128, 128)))
    assert [compiler.compile_for_tpu(lowered, {}, topology, tmp_path).cached for _ in range(2)] == [False, True]


@pytest.mark.slow
def test_a_sparse_pattern_is_planned_with_its_kernel():
    sizes = "--model.width 128 --model.heads 2 --model.depth 1 --model.positions 1024 --model.vocab-size 1024"
    settings = f"--topology v5e:1x1 --model.pattern.name bigbird {sizes} --sequence-length 1024 --batch-size 4"
    ((_, found, _),) = planned(f"bert-tiny {settings}")
    kernels = [name for name in COSTS if name in found.report.hlo]
    assert kernels == ["block_attention_forward", "block_attention_backward"]
    assert found.estimate.why_not == "" and found.estimate.kernels > 0


@pytest.mark.parametrize("name, facts", GENERATIONS.items(), ids=GENERATIONS)
def test_a_generations_devices_and_memory_are_the_compilers(name, facts):
    chips, sides = next(iter(facts.shapes.items()))
    topology = parse_topology(f"{name}:{sides}")
    found = compiler.devices(topology)
    assert len(found) == chips * facts.device.per_chip and generation_of(found[0].device_kind) == facts
    too_large = on(topology, shape(2**20, 2**18, dtype=jnp.float32))
    with pytest.raises(jax.errors.JaxRuntimeError) as refused:
        jax.jit(jnp.exp).lower(too_large).compile()
    assert f"({facts.device.hbm / GIB:.2f}G)" in str(refused.value)


@pytest.mark.slow
def test_several_slices_exchange_through_their_hosts():
    ((work, found, _),) = planned(f"bert-tiny --topology v5e:2x2 --mesh slice=2 {SMALL}")
    assert (work.devices, work.mesh) == (8, "slice=2,data=4")
    sent = [timed for timed in found.collectives if timed.collective.kind == "send"]
    assert sum(timed.exposed for timed in sent) > 0 and found.estimate.why_not == "" and found.mfu > 0


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:4x4", "v5e:16x16", "v5p:4x4x4", "v4:2x2x4", "v6e:8x8", "tpu7x:2x2x2"])
@pytest.mark.parametrize("recipe", ["bert-large --depth scan", "electra-base"])
def test_published_sizes_on_every_generation(recipe, topology):
    plans = planned(f"{recipe} --topology {topology}")
    fitting = [plan for plan in plans if plan[1].report.needed is None]
    assert fitting  # one that is too large for a slice is left out, but not all
    for work, found, made in fitting:
        check_sizes(found)
        assert found.estimate.why_not == "" and 0 < found.mfu < 1
        collectives = [timed.collective for timed in found.collectives]
        assert not [c for c in collectives if carries_activations(c, work, made.model)]
        if "fsdp" in work.mesh:
            floats = sum(leaf.size for leaf in jax.tree.leaves(work.arguments[0].params))
            assert sum(c.bytes for c in collectives if c.kind == "all-gather") <= 2 * 4 * floats
            assert not [c for c in collectives if reduces_whole_matrices(c, made.model)]


def carries_activations(collective, work, model):
    """Whether a collective moves [batch, length, ...] or logits, in whole or a chip's share of it.

    One row on a chip looks like one layer of a stack, and is left out.
    """
    vocab, rows = math.ceil(model.vocab_size / 128) * 128, {work.rows, work.rows // work.rows_multiple} - {1}
    shapes = [array.dims for array in collective.arrays if len(array.dims) >= 2]
    return any((dims[0] in rows and dims[1] == work.length) or dims[1] == vocab for dims in shapes)


def reduces_whole_matrices(collective, model):
    """Whether each chip ends with the gradients of whole matrices of the layers, of which it keeps a share."""
    towers = [model] if hasattr(model, "width") else [model.discriminator, model.generator]
    sizes = {tower.width * side for tower in towers for side in (tower.width, tower.feed_forward)}
    whole = any(math.prod(array.dims) in sizes for array in collective.arrays)
    return collective.kind == "all-reduce" and collective.times > 1 and whole


def shape(*dims, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(dims, dtype)


def on(topology, shapes):
    """These shapes on one device of a slice."""
    place = SingleDeviceSharding(compiler.devices(topology)[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes)


BATCH, LENGTH, MEMORY, WIDTH = 2, 512, 384, 128
integers = functools.partial(shape, BATCH, dtype=jnp.int32)
NOISE = shape(BATCH, 2, dtype=jnp.uint32)


def of_rows(rows, length, head_dim, causal=False, queries=None, biased=False):
    """queries: of another sequence."""

    def loss(products, biases, distances, keys, own, noise):
        mask = Mask(keys, queries=None if queries is None else own, distances=distances, causal=causal)
        return by_rows(products, biases, mask, head_dim=head_dim, dropout_rate=0.1, noise=noise)[0]

    n = queries or length
    parts = [(length, 3)] if queries is None else [(n, 1), (length, 2)]
    products = tuple(shape(rows, size, times * WIDTH) for size, times in parts)
    biases = tuple(shape(times * WIDTH, dtype=jnp.float32) for _, times in parts)
    distances = shape(WIDTH // head_dim, n + length - 1, dtype=jnp.float32) if biased else None
    segments = (shape(rows, size, dtype=jnp.int32) for size in (length, n))
    return loss, products, biases, distances, *segments, shape(rows, 2, dtype=jnp.uint32)


def of_splash(causal, queries=2 * LENGTH):
    loss = lambda q, k, v, keys, own: splash(q, k, v, Mask(keys, causal=causal, queries=None if causal else own))
    q, k = (shape(BATCH, 2, n, 64) for n in (queries, 2 * LENGTH))
    return loss, q, k, k, integers(2 * LENGTH), integers(queries)


def of_pattern(name, length, chosen):
    def loss(q, k, v, segments, globals, noise, blocks):
        mask = Mask(segments, blocks=blocks, globals=globals)
        return pattern_kernel.by_kernel(q, k, v, mask, heads=2, dropout_rate=0.1, noise=noise)

    blocks = jax.tree.map(lambda x: shape(*x.shape[1:], dtype=x.dtype), blocks_of(Pattern(name), 1, 2, length))
    return loss, *[shape(BATCH, length, WIDTH)] * 3, integers(length), chosen, NOISE, blocks


def of_relative(stream, n):
    def loss(x, row, slots, memory, noise):
        mask, types = both_masks(*row, slots, memory)[stream]
        return relative_kernel.by_kernel(*x, mask, types, 2, dropout_rate=0.1, noise=noise)

    sizes = (MEMORY + LENGTH, MEMORY + LENGTH, MEMORY + 2 * LENGTH)
    context = Context(*(shape(BATCH, size, WIDTH) for size in sizes))
    x = shape(BATCH, n, WIDTH), context, Biases(*[shape(WIDTH)] * 3, shape(2, WIDTH))
    return loss, x, [integers(LENGTH)] * 4, integers(86), integers(MEMORY), NOISE


LONG = "long biased rows"  # that v4 has room for; slow to compile
KERNELS = {
    "rows": lambda: of_rows(4096, 128, 64),
    "long rows": lambda: of_rows(2, 1024, 128, causal=True),
    "splash": lambda: of_splash(False),
    "causal splash": lambda: of_splash(True),
    "splash of a second sequence": lambda: of_splash(False, LENGTH),
    "bigbird": lambda: of_pattern("bigbird", 4096, None),
    "longformer": lambda: of_pattern("longformer", 1000, integers(3)),
    "relative content": lambda: of_relative(0, LENGTH),
    "relative query": lambda: of_relative(1, 86),
    "rows of another sequence": lambda: of_rows(2, 256, 64, queries=114),
    "biased rows, no whole blocks": lambda: of_rows(2, 229, 64, causal=True, biased=True),
    LONG: lambda: of_rows(2, GENERATIONS["v4"].biased, 64, biased=True),
}
TOPOLOGIES = ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"]
# The two forms of a kernel for one generation each; the other pairs are slow.
ALWAYS = [(name, TOPOLOGIES[number % 5]) for number, name in enumerate(KERNELS) if name != LONG]
SLOW = [pair for pair in itertools.product(KERNELS, TOPOLOGIES) if pair not in ALWAYS]


@pytest.mark.parametrize("kernel, topology", [*ALWAYS, *(pytest.param(*p, marks=pytest.mark.slow) for p in SLOW)])
def test_a_kernel_and_its_gradient_compile_for_every_generation(kernel, topology):
    loss, *arguments = KERNELS[kernel]()
    summed = lambda *given: loss(*given).astype(jnp.float32).sum()
    lowered = jax.jit(jax.grad(summed)).lower(*on(parse_topology(topology), arguments))
    lowered.compile()
    assert lowered.as_text().count("tpu_custom_call") == 2
