"""Names of slices and what they stand for."""

import pytest

from data_pipelines.errors import UserError
from tpu.topologies import parse_topology


@pytest.mark.parametrize(
    "name, topology, chips, cloud",
    [
        ("v5e:4x4", "v5e:4x4", 16, "v5litepod-16"),
        ("v5litepod-256", "v5e:16x16", 256, "v5litepod-256"),
        ("v5e-8", "v5e:2x4", 8, "v5litepod-8"),
        ("v5e:8x16", "v5e:8x16", 128, "v5litepod-128"),
        ("v6e-64", "v6e:8x8", 64, "v6e-64"),
        ("v6e:1x1", "v6e:1x1", 1, "v6e-1"),
        ("v4-8", "v4:2x2x1", 4, "v4-8"),  # v4 and v5p names count cores, two to a chip
        ("v4-128", "v4:4x4x4", 64, "v4-128"),
        ("V4:2x2x4", "v4:2x2x4", 16, "v4-32"),
        ("v5p:4x4x4", "v5p:4x4x4", 64, "v5p-128"),
        ("v3-32", "v3:4x4", 16, "v3-32"),
        ("tpu7x-8", "tpu7x:2x2x1", 4, "tpu7x-8"),  # half a chip is a device
        ("tpu7x:2x2x1", "tpu7x:2x2x1", 4, "tpu7x-8"),
        ("v7x:4x4x4", "tpu7x:4x4x4", 64, "tpu7x-128"),
    ],
)
def test_names(name, topology, chips, cloud):
    found = parse_topology(name)
    assert (str(found), found.chips, found.cloud) == (topology, chips, cloud)


def test_chips_of_a_host():
    assert [parse_topology(name).host_bounds for name in ("v5e:1x1", "v5e:2x4", "v5e:4x4", "v4:2x2x1")] == [
        (1, 1, 1),
        (2, 4, 1),
        (2, 2, 1),
        (2, 2, 1),
    ]


@pytest.mark.parametrize("name", ["v5e:3x3", "v5litepod-12", "v5e", "v5e:4x4x4"])
def test_a_shape_that_is_not_offered_lists_those_that_are(name):
    with pytest.raises(UserError, match=r"no TPU topology .*: v5e has .*v5e:4x4 \(v5litepod-16\).*v5e:16x16"):
        parse_topology(name)


@pytest.mark.parametrize("name", ["v9:2x2", "", "h100-8"])
def test_an_unknown_generation_lists_the_known_ones(name):
    with pytest.raises(UserError, match="write GENERATION:SHAPE like v5e:4x4, of v2, v3, v4, v5e, v5p, v6e, v7x"):
        parse_topology(name)


def test_a_near_name_is_suggested():
    with pytest.raises(UserError, match="did you mean v5litepod-16"):
        parse_topology("v5litpod-16")
