"""Names of TPU slices, against Google Cloud's tables of configurations, of their topologies and of chips."""

import pytest

from data_pipelines.errors import UserError
from tpu.chips import peak_flops
from tpu.topologies import parse_accelerator, parse_topology


@pytest.mark.parametrize(
    "name, canonical, generation, chips, hosts, topology",
    [
        ("v3-32", "v3-32", "v3", 16, 4, "4x4"),
        ("v4-128", "v4-128", "v4", 64, 16, "4x4x4"),
        ("v5e-16", "v5litepod-16", "v5e", 16, 4, "4x4"),
        ("v5p-12288", "v5p-12288", "v5p", 6144, 1536, "16x16x24"),
        ("tpu7x-8", "tpu7x-8", "v7x", 4, 1, "2x2x1"),
        ("v7x-32", "tpu7x-32", "v7x", 16, 4, "2x2x4"),
    ],
)
def test_a_name_says_how_many_chips_and_hosts(name, canonical, generation, chips, hosts, topology):
    found = parse_accelerator(name)
    assert found[:5] == (canonical, generation, chips, hosts, topology)


def test_jax_counts_the_halves_of_some_chips():
    assert [parse_accelerator(name).devices for name in ("v3-32", "v4-32", "v5e-32", "tpu7x-32")] == [32, 16, 32, 32]


@pytest.mark.parametrize(
    "name, said",
    [
        ("v5lite-16", "not the name of a TPU slice; did you mean v5litepod-16?"),
        ("v5e:4x4", "not the name of a TPU slice; did you mean v5litepod-16?"),
        ("V5E-16", "not the name of a TPU slice; did you mean v5e-16?"),
        ("v5e-12", "v5e has no slice of 12 (the number counts chips): use 1, 4, 8, 16"),
    ],
)
def test_what_does_not_exist_is_refused_before_gcloud_is_asked(name, said):
    with pytest.raises(UserError, match="^--type") as raised:
        parse_accelerator(name)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    "name, topology, chips, cloud",
    [
        ("v4-8", "v4:2x2x1", 4, "v4-8"),  # v4 and v5p names count cores, two to a chip
        ("V4:2x2x4", "v4:2x2x4", 16, "v4-32"),
        ("tpu7x-8", "tpu7x:2x2x1", 4, "tpu7x-8"),  # half a chip is a device
        ("v7x:4x4x4", "tpu7x:4x4x4", 64, "tpu7x-128"),
    ],
)
def test_a_topology_has_a_name_of_its_own_and_clouds(name, topology, chips, cloud):
    found = parse_topology(name)
    assert (str(found), found.chips, found.cloud) == (topology, chips, cloud)


@pytest.mark.parametrize("name", ["v5e:3x3", "v5litepod-12", "v5e", "v5e:4x4x4"])
def test_a_shape_that_is_not_offered_lists_those_that_are(name):
    with pytest.raises(UserError, match=r"no TPU topology .*: v5e has .*v5e:4x4 \(v5litepod-16\).*v5e:16x16"):
        parse_topology(name)


def test_an_unknown_generation_lists_the_known_ones():
    with pytest.raises(
        UserError, match="write GENERATION:SHAPE like v5e:4x4; generations are v2, v3, v4, v5e, v5p, v6e, v7x"
    ):
        parse_topology("h100-8")


@pytest.mark.parametrize(
    "kind, teraflops",
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA L40S", 362),
        ("TPU v5 lite", 197),
        ("TPU v5", 459),
        ("TPU7x", 1153.5),
    ],
)
def test_the_peak_of_a_chip_by_the_name_that_it_gives_itself(kind, teraflops):
    assert peak_flops(kind) == teraflops * 1e12
