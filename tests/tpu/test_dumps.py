"""Two programs as XLA:TPU (libtpu 0.0.42) wrote them: bert-tiny's step on four v5e, its parameters gathered beside
products, and one of width 256 on sixteen v5p, whose products pass their parts around rings.

    python -m tpu plan bert-tiny --topology v5e:2x2 --mesh fsdp=4 --model.vocab-size 1024 --batch-size 64 \
        --sequence-length 128
    python -m tpu plan bert-tiny --topology v5p:2x2x4 --mesh fsdp=16 --model.vocab-size 1024 --batch-size 128 \
        --sequence-length 128 --model.width 256 --model.heads 4 --model.feed-forward 1024
"""

import gzip
import json
from pathlib import Path
from typing import NamedTuple

import pytest

from tpu import hlo
from tpu.costs import Costs, costs
from tpu.estimate import clocks
from tpu.overlap import Timeline, timeline
from tpu.topologies import parse_topology
from tpu.work import Work


class Read(NamedTuple):
    found: Costs
    line: Timeline

    def of(self, kind, carried=False):
        """(runs, bytes, seconds, seconds awaited) of the collectives of a kind."""
        wanted = lambda collective: (collective.kind, bool(collective.channel)) == (kind, carried)
        chosen = [timed for timed in self.line.collectives if wanted(timed.collective)]
        runs, size = sum(t.collective.times for t in chosen), sum(t.collective.bytes for t in chosen)
        return runs, size, sum(t.seconds for t in chosen), sum(t.exposed for t in chosen)


def read(name):
    with gzip.open(Path(__file__).parent / "dumps" / f"{name}.json.gz") as file:
        dump = json.load(file)
    module, places = hlo.parse(dump["hlo"]), tuple(map(tuple, dump["places"]))
    assert module.devices == len(places)
    found, work = costs(module), Work(None, (), {}, "", len(places), 0, 0, 0, 0.0, 0, places)
    return Read(found, timeline(module, clocks(module, found, {}, work, parse_topology(dump["topology"]))))


@pytest.fixture(scope="module")
def gathers():
    return read("gathers_v5e")


@pytest.fixture(scope="module")
def rings():
    return read("rings_v5p")


WIDTH, FEED_FORWARD, VOCAB, LAYERS = 128, 512, 1024, 2
# Of a layer, in bfloat16: four projections and the two matrices of the feed-forward, forward and again backward.
LAYER = 2 * (4 * WIDTH**2 + 2 * WIDTH * FEED_FORWARD)


def test_parameters_are_gathered_beside_products(gathers):
    runs, size, seconds, awaited = gathers.of("all-gather", carried=True)
    # Once more the vocabulary for the logits, the pooler, the head, and the backward pass's own copies.
    assert size > 2 * LAYERS * LAYER and runs == 27
    assert 0 < awaited < 0.1 * seconds  # fusions carry them


def test_gradients_are_scattered_and_nothing_hides_it(gathers):
    runs, size, seconds, awaited = gathers.of("reduce-scatter")
    layers = LAYERS * 2 * LAYER  # in float32, where gathered parameters are bfloat16
    assert (runs, size) == (1, layers + 4 * WIDTH * (VOCAB + WIDTH))  # and the product before the logits
    assert awaited == seconds > size * 0.75 / 90e9  # two links, 45 GB/s each


def test_cycles_lookups_and_time_of_the_cores(gathers):
    assert gathers.found.cycles == 738_032 and gathers.found.unknown == () and gathers.found.kernels == {}
    tokens = 64 * 128 // 4
    assert gathers.found.lookups.fetched == tokens + 2 * 16 * 21  # of words; of masked positions and their targets
    assert gathers.found.lookups.added == tokens + 16 * 21
    assert gathers.line.work > 738_032 / 1.5e9
    assert gathers.line.waits == pytest.approx(65e-6, rel=0.01)
    assert gathers.line.waits < gathers.line.busy == pytest.approx(133e-6, rel=0.01)


def test_rings_of_permutations_are_hidden_in_part(rings):
    runs, size, seconds, awaited = rings.of("collective-permute")
    assert (runs, size) == (170, 4_177_920)
    assert seconds > 170 * 5e-6  # the last chip of 2x2x4 is five hops from the first: no ring closes
    assert 0.5 * seconds < awaited < 0.8 * seconds
