"""One file's facts of each generation agree with each other, and with all that needs them by a generation's name."""

import math

import jax
import jax.numpy as jnp
import pytest

from tpu.generations import GENERATIONS, GIB, generation_of
from tpu.kernel_costs import COSTS, Call
from tpu.topologies import parse_accelerator, parse_topology

ALL = pytest.mark.parametrize("name, facts", GENERATIONS.items(), ids=GENERATIONS)


@ALL
def test_every_slice_has_one_shape_and_the_chips_devices_and_hosts_that_its_name_says(name, facts):
    for chips, shape in facts.shapes.items():
        cloud = f"{facts.prefix}-{chips * facts.count}"
        accelerator, topology = parse_accelerator(cloud), parse_topology(cloud)
        assert topology == parse_topology(f"{name}:{shape}") == parse_topology(f"{facts.xla}:{shape}")
        assert (topology.chips, topology.cloud, topology.generation) == (chips, cloud, accelerator.generation)
        assert accelerator.devices == chips * facts.device.per_chip
        assert accelerator.hosts == max(chips // 4, 1) or chips in facts.one_host
        assert len(topology.sides) == facts.device.axes and math.prod(topology.host_bounds) * accelerator.hosts == chips


@ALL
def test_the_peak_is_what_its_matrix_units_do_at_its_clock(name, facts):
    """Units of 128 x 128 or 256 x 256, two FLOPs for each of their cells in a cycle: a power of two."""
    in_a_cycle = facts.device.peak_flops / facts.device.clock
    assert in_a_cycle == pytest.approx(2 ** round(math.log2(in_a_cycle)), rel=0.02)


def test_a_device_is_of_one_generation_by_what_it_calls_itself():
    kinds = {kind: name for name, facts in GENERATIONS.items() for kind in facts.kinds}
    assert {kind: generation_of(kind) for kind in kinds} == {k: GENERATIONS[name] for k, name in kinds.items()}
    assert generation_of("TPU v6 lite") == GENERATIONS["v6e"]
    assert generation_of("cpu") is generation_of("NVIDIA H200") is None


@ALL
def test_cycles_of_every_kernel_are_known_where_kernels_compile(name, facts):
    assert facts.kernels == (name not in ("v2", "v3"))
    table, heads = jax.ShapeDtypeStruct((1, 2, 2), jnp.int8), jax.ShapeDtypeStruct((2, 2, 64, 1024), jnp.bfloat16)
    call = Call((table, heads, heads), (), turns=8, flops=1e9, scores=1e6)
    for cost in COSTS.values():
        if facts.kernels:
            assert cost.cycles(name, call) > 0


def test_the_compiler_leaves_a_program_a_little_less_than_the_chip_has():
    sheets = {"v2": 16, "v3": 32, "v4": 32, "v5e": 16, "v5p": 96, "v6e": 32, "v7x": 192}  # GiB of a chip
    for name, gib in sheets.items():
        device = GENERATIONS[name].device
        assert 0 < gib - device.per_chip * device.hbm / GIB <= 2.5, name
