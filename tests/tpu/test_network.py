"""Time of exchanges, by hand from the links that they take; groups of devices as XLA writes them."""

import itertools

import pytest

from tpu.collectives import Collective
from tpu.groups import groups
from tpu.hlo import Array
from tpu.network import CHIPLETS, HOP, INSIDE, SLICES, exchange, network
from tpu.topologies import parse_topology

HUNDRED_MB = (Array("f32", (25_000_000,)),)
LINK = {"v5e": 45e9, "v5p": 90e9}  # bytes/s, one way


def places(topology):
    """Devices in the order of their coordinates, the last axis fastest."""
    sides = (*topology.sides, 1)[:3]
    return tuple((0, *place) for place in itertools.product(*map(range, sides)))


def taken(kind, devices, name="v5e:4x4"):
    """(seconds, axes) of 100 MB; devices: of the first group, or pairs."""
    topology = parse_topology(name)
    pairs = devices if kind == "collective-permute" else (devices,)
    found = exchange(Collective(kind, HUNDRED_MB, tuple(map(tuple, pairs)), 1, ""), network(topology, places(topology)))
    return found.seconds, found.axes


def ms(*arguments):
    return 1000 * taken(*arguments)[0]


ROW, COLUMN = range(4), range(0, 16, 4)  # along the second and the first axis of 4x4


def test_a_line_passes_each_half_one_way():
    assert ms("all-gather", ROW) == pytest.approx(1000 * (0.75 * 1e8 / LINK["v5e"] + 3 * HOP))
    assert ms("reduce-scatter", COLUMN) == ms("all-gather", ROW)
    assert ms("all-reduce", ROW) == pytest.approx(2 * ms("all-gather", ROW))


def test_a_side_of_sixteen_closes_a_ring_on_v5e_and_one_of_eight_does_not():
    ring = 1000 * (15 / 16 * 1e8 / (2 * LINK["v5e"]) + 8 * HOP)
    assert ms("all-gather", range(16), "v5e:16x16") == pytest.approx(ring)
    assert ms("all-gather", range(8), "v5e:8x8") == pytest.approx(1000 * (7 / 8 * 1e8 / LINK["v5e"] + 7 * HOP))
    part = ms("all-gather", range(8), "v5e:16x16")  # half of a ring is a line
    assert part == ms("all-gather", range(8), "v5e:8x8")


def test_a_group_over_two_axes_takes_the_links_of_both():
    seconds, axes = taken("all-gather", range(16))
    assert seconds == pytest.approx(15 / 16 * 1e8 / (2 * LINK["v5e"]) + 6 * HOP) and axes == {0, 1}
    assert taken("all-gather", ROW)[1] == {1} and taken("all-gather", COLUMN)[1] == {0}


def test_the_two_devices_of_a_chip_meet_beside_its_links_and_share_them():
    sides = [range(side) for side in (2, 2, 1)]
    topology = parse_topology("tpu7x:2x2x1")
    halves = tuple((0, *place) for place in itertools.product(*sides) for _ in range(2))

    def found(*group, kind="all-gather"):
        return exchange(Collective(kind, HUNDRED_MB, (group,), 1, ""), network(topology, halves))

    link = LINK["v5p"]
    assert found(0, 1).seconds == pytest.approx(0.5 * 1e8 / (CHIPLETS * link)) and found(0, 1).axes == {INSIDE}
    assert found(0, 4).seconds == pytest.approx(0.5 * 1e8 / (link / 2) + HOP)  # others may use the link, too
    assert found(0, 1, 4, 5).seconds == pytest.approx(0.75 * 1e8 / link + HOP)
    assert found(0, 1, kind="collective-permute").axes == {INSIDE}


def test_a_permutation_takes_as_long_as_the_link_that_most_share():
    once = 1000 * (1e8 / LINK["v5e"] + HOP)
    assert ms("collective-permute", [(0, 1), (1, 2)]) == pytest.approx(once)
    back = [(0, 1), (1, 2), (2, 3), (3, 0)]  # the way back takes the other direction of three links
    assert ms("collective-permute", back) == pytest.approx(once + 1000 * 2 * HOP)
    crossing = [(0, 2), (1, 3)]
    assert ms("collective-permute", crossing) == pytest.approx(1000 * (2e8 / LINK["v5e"] + 2 * HOP))
    assert ms("collective-permute", [(0, 15)], "v5e:16x16") == pytest.approx(once)  # by the link that closes the ring


def test_between_slices_a_chip_has_its_share_of_the_hosts_cards():
    topology = parse_topology("v5e:4x4")

    def found(slices, kind="send", group=(0,)):
        every = tuple((number, *place[1:]) for number in range(slices) for place in places(topology))
        return exchange(Collective(kind, HUNDRED_MB, (group,), 1, ""), network(topology, every))

    assert found(2).seconds == pytest.approx(1e8 / 3.125e9) and found(2).axes == {SLICES}
    assert found(4).seconds == pytest.approx(1.5 * 1e8 / 3.125e9)  # a sum, of which each slice adds up a quarter
    assert found(2, "all-reduce", (0, 16)) == found(2)  # the same place in two slices


@pytest.mark.parametrize(
    "text, expected",
    [
        ("replica_groups={{0,1,2},{3,4,5}}, use_global", ((0, 1, 2), (3, 4, 5))),
        ("replica_groups=[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=mesh['x'=2,'y'=4] {'y'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("replica_groups=mesh['x'=2,'y'=4] {'x'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=mesh['x'=2,'y'=2], device_ids=([2,2]T(1,0)) {'y'}", ((0, 2), (1, 3))),
        ("replica_groups=mesh['x'=2,'y'=4] {'x','y':(1)2}", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("replica_groups={}, to_apply=%add", (tuple(range(8)),)),
    ],
)
def test_groups(text, expected):
    assert groups(text, 8) == expected
