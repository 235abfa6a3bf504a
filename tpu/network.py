"""Estimate the time of a collective between chips, from the links of a slice's torus or the network between slices."""

import math
from collections import Counter
from typing import NamedTuple

from tpu.collectives import Collective
from tpu.topologies import Topology

# A transfer gets 45 of a link's nominal 50 GB/s on v4 and v5e, 90 of 100 on v5p and v6e, and the first byte takes 1 us
# to a neighbour ("How to scale your model", jax-ml.github.io/scaling-book, TPU networking and sharding).
LINK_SHARE = 0.9
HOP = 1e-6  # seconds
# An assumption: seconds from a chip through its host to a chip of another slice.
BETWEEN_SLICES = 1e-4
CHIPLETS = 6  # bandwidth, in links, between the two devices of a v7x chip (Google's page); assumed for v2 and v3, too
SLICES, INSIDE = -1, -2  # in place of an axis: the network between slices; between the two devices of a chip


class Network(NamedTuple):
    """sides: chips of a slice along each axis.   wrapped: whether the last chip of an axis is linked to the first.
    places: (slice, *coordinates) of each device of the program."""

    topology: Topology
    sides: tuple[int, ...]
    wrapped: tuple[bool, ...]
    places: tuple[tuple[int, ...], ...]

    @property
    def link(self) -> float:
        """Bytes/s over one link in one direction."""
        chip = self.topology.device
        return LINK_SHARE * chip.ici_bandwidth / (2 * chip.axes)


def network(topology: Topology, places: tuple[tuple[int, ...], ...]) -> Network:
    """Return the links of a slice. A 2-D slice closes a ring along a side as long as its pod's; a 3-D slice of whole
    cubes along every side (Google's TPU documentation, a page per generation)."""
    sides, ring = topology.sides, topology.device.ring
    cubes = len(sides) == 3 and not any(side % ring for side in sides)
    return Network(topology, sides, tuple(cubes or side == ring and len(sides) == 2 for side in sides), places)


class Exchange(NamedTuple):
    """The time of one run of a collective.   seconds: for which it occupies its links.   axes: of these links, or
    SLICES, or INSIDE.   delay: its latency, the least seconds from start to end, in which others may use the links."""

    seconds: float
    axes: frozenset[int]
    delay: float = 0.0


def exchange(collective: Collective, network: Network) -> Exchange:
    """Estimate one run of a collective that has its links to itself."""
    size = collective.bytes / collective.times
    meeting = network.places if collective.kind == "send" else [network.places[n] for n in collective.groups[0]]
    slices = len({place[0] for place in meeting})
    if collective.kind == "send" or slices > 1:
        sent = size * 2 * (slices - 1) / slices  # a sum between the slices' hosts: first its parts, then the results
        return Exchange(sent / network.topology.device.slice_bandwidth, frozenset({SLICES}), BETWEEN_SLICES)
    if collective.kind == "collective-permute":
        return _permuted(size, collective.groups, network)
    rings = _rings(collective.groups[0], network)
    if not rings:
        return Exchange(0.0, frozenset())
    rate, hops, axes = sum(r.rate for r in rings), sum(r.hops for r in rings), frozenset(r.axis for r in rings)
    if collective.kind == "all-to-all":  # half of the data crosses the middle of the longest side
        longest = min(rings, key=lambda ring: ring.rate / ring.devices)
        return Exchange(HOP * hops + size * longest.devices / 4 / longest.rate, axes)
    passes = 2 if collective.kind == "all-reduce" else 1
    return Exchange(passes * (HOP * hops + size * (1 - 1 / collective.group) / rate), axes)


class Ring(NamedTuple):
    """A group of devices along one axis.   rate: bytes/s that each can receive.   hops: until all data has arrived."""

    axis: int
    devices: int
    rate: float
    hops: int


def _rings(group: tuple[int, ...], network: Network) -> list[Ring]:
    """Return a ring for each axis along which a group extends. A ring that does not close is a line, on which each
    direction carries half of the data. If a group has every second chip, or one of a chip's two devices, another group
    shares its links."""
    rings = []
    sharing = network.topology.device.per_chip * len({network.places[device] for device in group}) / len(group)
    for axis, (side, wrapped) in enumerate(zip(network.sides, network.wrapped, strict=True)):
        along = sorted({network.places[device][1 + axis] for device in group})
        if len(along) == 1:
            continue
        stride = min(b - a for a, b in zip(along, along[1:], strict=False))
        closed = wrapped and len(along) * stride == side
        rate = network.link * (2 if closed else 1) / (stride * sharing)
        hops = stride * (len(along) // 2 if closed else len(along) - 1)
        rings.append(Ring(axis, len(along), rate, hops))
    within = [Ring(INSIDE, 2, CHIPLETS * network.link, 0)] if len(group) > 1 else []
    return rings or within


def _permuted(size: float, pairs: tuple[tuple[int, ...], ...], network: Network) -> Exchange:
    """Send each pair's bytes the shortest way, axis by axis; the link that most pairs share determines the time."""
    loads, farthest, inside = Counter(), 0, 0.0
    for source, target in pairs:
        links = _way(network.places[source][1:], network.places[target][1:], network)
        if source != target and not links:
            inside = size / (CHIPLETS * network.link)
        loads.update(links)
        farthest = max(farthest, len(links))
    axes = frozenset(axis for _, axis, _ in loads) | ({INSIDE} if inside else set())
    between = HOP * farthest + size * max(loads.values(), default=0) / network.link
    return Exchange(max(between, inside), axes)


def _way(source: tuple[int, ...], target: tuple[int, ...], network: Network) -> list[tuple]:
    """Return the links, (chip, axis, direction), of a shortest way."""
    links, here = [], list(source)
    for axis, (side, wrapped) in enumerate(zip(network.sides, network.wrapped, strict=True)):
        distance = target[axis] - here[axis]
        if wrapped and abs(distance) > side / 2:
            distance -= int(math.copysign(side, distance))
        step = 1 if distance > 0 else -1
        for _ in range(abs(distance)):
            links.append((tuple(here), axis, step))
            here[axis] = (here[axis] + step) % side
    return links
