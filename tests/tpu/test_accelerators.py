"""Names of TPU slices, against Google Cloud's tables of configurations."""

import pytest

from data_pipelines.errors import UserError
from tpu.accelerators import parse_accelerator


@pytest.mark.parametrize(
    "name, canonical, generation, chips, hosts, topology",
    [
        ("v2-8", "v2-8", "v2", 4, 1, "2x2"),
        ("v3-32", "v3-32", "v3", 16, 4, "4x4"),
        ("v4-8", "v4-8", "v4", 4, 1, "2x2x1"),
        ("v4-128", "v4-128", "v4", 64, 16, "4x4x4"),
        ("v4-384", "v4-384", "v4", 192, 48, ""),
        ("v5litepod-1", "v5litepod-1", "v5e", 1, 1, "1x1"),
        ("v5litepod-8", "v5litepod-8", "v5e", 8, 1, "2x4"),
        ("v5litepod-16", "v5litepod-16", "v5e", 16, 4, "4x4"),
        ("v5e-16", "v5litepod-16", "v5e", 16, 4, "4x4"),
        ("v5e-256", "v5litepod-256", "v5e", 256, 64, "16x16"),
        ("v5p-8", "v5p-8", "v5p", 4, 1, "2x2x1"),
        ("v5p-128", "v5p-128", "v5p", 64, 16, "4x4x4"),
        ("v5p-12288", "v5p-12288", "v5p", 6144, 1536, "16x16x24"),
        ("v6e-8", "v6e-8", "v6e", 8, 1, "2x4"),
        ("v6e-64", "v6e-64", "v6e", 64, 16, "8x8"),
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
    "name, runtime",
    [
        ("v3-8", "tpu-ubuntu2204-base"),
        ("v4-8", "tpu-ubuntu2204-base"),
        ("v5e-4", "v2-alpha-tpuv5-lite"),
        ("v5p-8", "v2-alpha-tpuv5"),
        ("v6e-4", "v2-alpha-tpuv6e"),
        ("tpu7x-8", "v2-alpha-tpu7-ubuntu2404"),
    ],
)
def test_each_generation_has_its_image(name, runtime):
    assert parse_accelerator(name).runtime == runtime


@pytest.mark.parametrize(
    "name, said",
    [
        ("v5lite-16", "not the name of a TPU slice; did you mean v5litepod-16?"),
        ("V5E-16", "not the name of a TPU slice; did you mean v5e-16?"),
        ("h100", "not the name of a TPU slice: use one such as v4-32"),
        ("v5e-12", "v5e has no slice of 12 (the number counts chips): use 1, 4, 8, 16"),
        ("v4-9", "v4 has no slice of 9 (the number counts TensorCores, two to a chip): use 8, 16, 32"),
        ("v4-12", "v4 has no slice of 12"),
        ("v5p-0", "v5p has no slice of 0"),
        ("v2-16", "v2 has no slice of 16"),
    ],
)
def test_what_does_not_exist_is_refused_before_gcloud_is_asked(name, said):
    with pytest.raises(UserError, match="^--type") as raised:
        parse_accelerator(name)
    assert said in str(raised.value)
