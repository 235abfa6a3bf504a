"""The shape of the mesh and what lies where, as arithmetic."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from data_pipelines.errors import UserError
from models.core.parameters import Parameter
from models.core.program import Program
from models.core.sharding import constrain, current_rules, placed_by
from models.families.bert import FAMILY
from models.families.registry import FAMILIES
from tpu import mesh as meshes
from tpu import xla
from tpu.generations import GENERATIONS, tpu_of
from tpu.mesh import (
    AXES,
    Load,
    MeshShape,
    automatic_mesh,
    choose_mesh,
    estimated,
    load_on,
    parse_mesh,
    reading_mesh,
    reason,
)
from tpu.rules import (
    ACTIVATION_AXES,
    PARAMETER_AXES,
    activation_rules,
    carry_shardings,
    divisor_of_fsdp,
    parameter_shardings,
    replicated,
    rows,
    spec,
)


def mesh_of(**sizes):
    shape = MeshShape(**sizes)
    return AbstractMesh(tuple(getattr(shape, axis) for axis in AXES), AXES, axis_types=(AxisType.Auto,) * len(AXES))


@pytest.mark.parametrize(
    "text, devices, slices, shape",
    [
        ("data=4,fsdp=2", 8, 1, MeshShape(data=4, fsdp=2)),
        ("fsdp=2", 8, 1, MeshShape(data=4, fsdp=2)),
        (" tensor = 2 , sequence=2", 8, 1, MeshShape(data=2, sequence=2, tensor=2)),
        ("fsdp=4", 16, 2, MeshShape(slice=2, data=2, fsdp=4)),
    ],
)
def test_a_mesh_is_read_from_text(text, devices, slices, shape):
    assert parse_mesh(text, devices, slices) == shape
    assert parse_mesh(str(shape), devices, slices) == shape


@pytest.mark.parametrize(
    "text, said",
    [
        ("dat=8", "--mesh: unknown axis dat; did you mean data?"),
        ("data=x", "--mesh data=x: give data a number of devices, like data=2"),
        ("data", "give data a number"),
        ("data=2,data=4", "data is given twice"),
        ("data=3", "it takes 3 devices, there are 8"),
    ],
)
def test_a_wrong_mesh_is_one_clear_error(text, said):
    with pytest.raises(UserError, match=said.replace("?", r"\?")):
        parse_mesh(text, 8)


GB = 2**30


@pytest.mark.parametrize(
    "devices, parameters, memory, slices, shape",
    [
        (8, 335e6, None, 1, MeshShape(data=8)),
        (8, 335e6, 16 * GB, 1, MeshShape(data=8)),  # 5.4 GB
        (8, 400e6, 16 * GB, 1, MeshShape(data=4, fsdp=2)),  # 6.4 GB
        (256, 3e9, 16 * GB, 1, MeshShape(data=32, fsdp=8)),
        (256, 300e9, 16 * GB, 1, MeshShape(data=16, fsdp=16)),  # never more, whether it fits or not
        (12, 3e9, 16 * GB, 1, MeshShape(data=3, fsdp=4)),
        (32, 3e9, 16 * GB, 4, MeshShape(slice=4, data=1, fsdp=8)),  # fsdp never leaves a slice
    ],
)
def test_the_automatic_mesh_cuts_parameters_as_far_as_they_need(devices, parameters, memory, slices, shape):
    assert automatic_mesh(devices, Load(parameters, 6 * parameters * 2**20, memory, None), slices) == shape


def test_parameters_are_cut_where_their_sums_would_take_longer_than_products_lose():
    few, many = (Load(335e6, 6 * 335e6 * tokens, 96 * GB, GENERATIONS["v5e"].device) for tokens in (2**16, 2**23))
    assert automatic_mesh(256, few).fsdp > 1 and automatic_mesh(256, many) == MeshShape(data=256)


# Scalars and FLOPs of a step; a slice; its planned step in milliseconds by fsdp, the layers of all alike scanned or
# unrolled, no sums beside products (benchmarks/results/plans.md and plans_ledger.md).
PLANS = {
    "bert-large on v5p:4x4x4": (336.3e6, 2.534e14, "v5p", 64, {1: 31.4, 4: 32.6, 8: 28.3, 16: 25.6}),
    "three layers of bert-large on v5e:4x4": (41.5e6, 2.472e13, "v5e", 16, {1: 19.3, 8: 16.2, 16: 16.9}),
    "gpt2-xl on v5e:16x16": (1.558e9, 5.139e15, "v5e", 256, {8: 404, 16: 306}),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_the_formula_orders_meshes_as_plans_of_the_compiled_step_do(plan):
    parameters, flops, generation, devices, planned = plan
    load = Load(parameters, flops, GENERATIONS[generation].device.hbm, GENERATIONS[generation].device)
    found = {n: 1000 * estimated(MeshShape(data=devices // n, fsdp=n), load).seconds for n in planned}
    assert sorted(found, key=found.get) == sorted(planned, key=planned.get)
    assert found == pytest.approx(planned, rel=0.25)
    assert automatic_mesh(devices, load).fsdp == min(planned, key=planned.get)


def test_what_rides_in_products_shortens_a_step_and_decides_the_mesh():
    """bert-large's 256 rows of 512 on v5e:4x4, planned in milliseconds by fsdp with sums and parts beside products."""
    chip, planned = GENERATIONS["v5e"].device, {1: 147, 8: 139}
    apart = Load(336.3e6, 2.534e14, chip.hbm, chip)
    beside = apart._replace(beside=True)
    for fsdp, milliseconds in planned.items():
        shape = MeshShape(data=16 // fsdp, fsdp=fsdp)
        assert 1000 * estimated(shape, beside).seconds == pytest.approx(milliseconds, rel=0.25)
        assert estimated(shape, beside).seconds < estimated(shape, apart).seconds
    assert automatic_mesh(16, beside).fsdp == min(planned, key=planned.get)


def test_there_is_a_mesh_for_every_generation():
    for name, generation in GENERATIONS.items():  # v2 and v3 have no network between slices
        load = Load(110e6, 1e14, generation.device.hbm, generation.device)
        assert automatic_mesh(16, load).size == 16 and estimated(MeshShape(data=16), load).seconds > 0, name


def test_between_slices_each_chip_sends_its_part_of_the_sums():
    """bert-large on two slices of v5e:4x4, each with as many rows as one alone."""
    chip = GENERATIONS["v5e"].device
    load = Load(336.3e6, 2.534e14, chip.hbm, chip)
    twice = load._replace(flops=2 * load.flops)
    one, two = estimated(MeshShape(data=2, fsdp=8), load), estimated(MeshShape(slice=2, data=2, fsdp=8), twice)
    seconds = 2 * 4 * 336.3e6 / 16 / 2 / 3.125e9  # half of its float32 part, there and back
    assert two.seconds - one.seconds == pytest.approx(two.collectives - one.collectives) == pytest.approx(seconds)
    one, two = estimated(MeshShape(data=16), load), estimated(MeshShape(slice=2, data=16), twice)
    assert two.collectives == pytest.approx(2 * one.collectives + seconds)  # whole sums are exchanged twice within each
    assert estimated(MeshShape(slice=2, data=16), twice._replace(beside=True)) == two  # and ride in nothing


@pytest.mark.parametrize(
    "kind, chips, divisor, libtpu, shape",
    [
        ("TPU v5p", 64, 0, "0.0.48", MeshShape(data=4, fsdp=16)),
        ("TPU v5p", 64, 2, "0.0.48", MeshShape(data=64)),
        ("TPU v5 lite", 8, 0, "0.0.48", MeshShape(data=8)),  # its sums are beside products
        ("TPU v5 lite", 8, 0, "0.1.2", MeshShape(data=2, fsdp=4)),
    ],
)
def test_a_mesh_is_chosen_by_what_divides_and_by_the_compiler(kind, chips, divisor, libtpu, shape, monkeypatch):
    """bert-large's rows of 512, 16 on each of 8 chips or 4 on each of 64."""
    monkeypatch.setattr(xla, "version", lambda package: libtpu)
    monkeypatch.setattr(meshes, "make_mesh", lambda shape, devices: shape)
    devices = [SimpleNamespace(device_kind=kind)] * chips
    flops = 2.534e14 / 256 * {8: 128, 64: 256}[chips]
    assert choose_mesh(None, devices, load_on(devices, 336.3e6, tpu_of(kind).hbm, flops, divisor)) == shape


def test_parameters_are_not_cut_where_it_hardly_helps():
    chip = GENERATIONS["v5p"].device
    many = Load(336.3e6, 2.534e14, chip.hbm, chip)  # 64 rows of 512 a chip
    uncut, cut = (estimated(shape, many).seconds for shape in (MeshShape(data=4), MeshShape(fsdp=4)))
    assert cut < uncut and automatic_mesh(4, many) == MeshShape(data=4)


def test_the_automatic_mesh_divides_what_fsdp_cuts():
    load = Load(336.3e6, 2.534e14, 96 * GB, GENERATIONS["v5p"].device)
    assert automatic_mesh(64, load).fsdp == 16 and automatic_mesh(64, load._replace(divisor=410)).fsdp <= 2
    table, shapes = FAMILY.parameters(FAMILY.sizes["tiny"], HEADS), shapes_of("tiny")
    divisor = divisor_of_fsdp(table, shapes)
    assert divisor == 128
    parameter_shardings(table, shapes, mesh_of(fsdp=divisor))
    with pytest.raises(UserError, match="does not divide"):
        parameter_shardings(table, shapes, mesh_of(fsdp=2 * divisor))


def test_what_is_read_is_cut_as_in_training_over_devices_that_divide_its_batches(monkeypatch):
    monkeypatch.setattr(meshes, "_in_order", lambda shape, devices: shape)
    small = Load(336.3e6, 2.534e14, 16 * GB, GENERATIONS["v5e"].device)
    large = small._replace(parameters=3e9)
    found = [reading_mesh([None] * 6, (32, 48), load) for load in (small, large)]
    assert found == [MeshShape(data=4), MeshShape(fsdp=4)]


def test_the_log_says_why_a_mesh_was_chosen():
    load = Load(335e6, 6 * 335e6 * 2**18, 16 * GB, GENERATIONS["v5e"].device)
    assert reason(MeshShape(data=16), load) == "mesh data=16: about 8% of the step in collectives"
    large = load._replace(parameters=3e9, flops=6 * 3e9 * 2**20)
    assert reason(automatic_mesh(16, large), large).endswith("; data=16 would need 44.7 GiB a chip")
    assert reason(MeshShape(data=8), load._replace(chip=None)) == (
        "mesh data=8: every device has room for all parameters"
    )


HEADS = ("predictions", "pooler", "pair")


def shapes_of(size):
    module = FAMILY.module(FAMILY.sizes[size], Program(), HEADS)
    ones = dict.fromkeys(FAMILY.inputs, jnp.ones((1, 8), jnp.int32))
    return jax.eval_shape(lambda: module.init(jax.random.key(0), ones)["params"])


def test_parameters_are_cut_by_the_names_of_their_axes():
    table, shapes = FAMILY.parameters(FAMILY.sizes["tiny"], HEADS), shapes_of("tiny")
    found = parameter_shardings(table, shapes, mesh_of(data=2, fsdp=2, tensor=2))
    layer = found["layers"]
    assert tuple(layer["attention"]["query"]["kernel"].spec) == (None, "fsdp", "tensor")
    assert tuple(layer["attention"]["output"]["kernel"].spec) == (None, "tensor", "fsdp")
    assert tuple(layer["feed_forward"]["up"]["bias"].spec) == (None, "tensor")
    assert tuple(layer["feed_forward"]["norm"]["scale"].spec) == (None, None)  # a vector: whole
    assert tuple(found["embeddings"]["tokens"].spec) == (("tensor", "fsdp"), None)


def test_every_parameter_of_every_family_has_rules_on_every_mesh():
    for family in FAMILIES.values():
        for config in family.sizes.values():
            for row in family.every_parameter(config):
                spec(row.axes, (1024,) * len(row.axes), PARAMETER_AXES, mesh_of(data=2, fsdp=4, sequence=2, tensor=4))


@pytest.mark.parametrize(
    "axes, shape, said",
    [
        (("layers", "depths"), (2, 4), "no rule for the axis 'depths'"),
        (("width", "width"), (4, 4), "two of them are cut over fsdp"),
        (("width", None), (6, 4), "--mesh fsdp=4 does not divide width, which is 6"),
    ],
)
def test_what_the_rules_cannot_place_is_an_error(axes, shape, said):
    with pytest.raises(UserError, match=f"x: .*{said}"):
        parameter_shardings([Parameter("x", axes, {})], {"x": np.zeros(shape)}, mesh_of(fsdp=4))


def test_activations_are_cut_by_rows_positions_and_heads():
    rules = activation_rules(mesh_of(slice=2, data=2, fsdp=2, sequence=2, tensor=2))
    batch = ("slice", "data", "fsdp")
    assert tuple(rules.spec(("batch", "length", "heads", None), (8, 8, 8, 8))) == (batch, "sequence", "tensor", None)
    with pytest.raises(ValueError, match="tensor=2 does not divide heads, which is 3"):
        rules.spec(("heads",), (3,))
    assert set(ACTIVATION_AXES) >= {"batch", "length", "heads", "feed_forward", "vocab"}


def test_constrain_follows_the_rules_in_force_and_else_does_nothing():
    x = jnp.ones((4, 2))
    assert constrain(x, "batch", None) is x and current_rules() is None
    rules = activation_rules(mesh_of(data=2))
    with placed_by(rules):
        text = str(jax.make_jaxpr(lambda x: constrain(x, "batch", None))(x))
    assert "sharding_constraint" in text and current_rules() is None


def test_carries_and_batches_are_cut_by_their_rows():
    mesh = mesh_of(data=2)
    found = carry_shardings({"a": (None, "batch"), "b": ("batch",), "c": ()}, mesh)
    in_tuples = carry_shardings(((None, "batch"), (("batch",), ())), mesh)
    assert in_tuples == (found["a"], (found["b"], found["c"]))
    batch = ("slice", "data", "fsdp")
    assert [tuple(found[name].spec) for name in "abc"] == [(None, batch), (batch,), ()]
    assert tuple(rows(mesh).spec) == (batch,) and tuple(replicated(mesh).spec) == ()
