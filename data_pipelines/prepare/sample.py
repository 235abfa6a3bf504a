"""The text that a tokenizer is trained on: of each source a smoothed share, from places all over it."""

from collections.abc import Sequence
from decimal import Decimal
from typing import NamedTuple

from data_pipelines.formats import table
from data_pipelines.formats.problems import Problems
from data_pipelines.formats.source import SHARD, Range, Source
from data_pipelines.prepare.plan import Plan, size
from data_pipelines.text.steps import run

EXPONENT = Decimal("0.7")  # as mBERT and XLM-R: small languages get more than their share of the text
PLACES = 64  # in each source, at least, if it has as many


class Stretch(NamedTuple):
    """Neighbouring ranges of one source, of which the first characters are taken; None: all of them."""

    ranges: tuple[Range, ...]
    characters: int | None


def shares(sizes: Sequence[int], total: int) -> list[int]:
    """How much of `total` goes to each: by size to the power of EXPONENT, at most all of it; what is left over goes to
    the others. Decimals, so that every machine has the same."""
    given = [0] * len(sizes)
    waiting = [index for index, size in enumerate(sizes) if size]
    while waiting:
        weights = {index: Decimal(sizes[index]) ** EXPONENT for index in waiting}
        part = total / sum(weights.values())
        whole = [index for index in waiting if sizes[index] <= part * weights[index]]
        for index in whole or waiting:
            given[index] = sizes[index] if whole else int(part * weights[index])
        if not whole:
            break
        total -= sum(sizes[index] for index in whole)
        waiting = [index for index in waiting if index not in whole]
    return given


def stretches(plan: Plan, number: int, total: int) -> list[Stretch]:
    """What to read of `number` sources to get about `total` characters."""
    by_source: list[list[tuple[Range, ...]]] = [[] for _ in range(number)]
    for part in plan.parts:
        for unit in part:
            for source in sorted({piece.source for piece in unit}):
                by_source[source].append(tuple(piece for piece in unit if piece.source == source))
    sizes = [sum(map(size, units)) for units in by_source]
    chosen = []
    for units, has, wanted in zip(by_source, sizes, shares(sizes, total), strict=True):
        if wanted >= has:
            chosen += [Stretch(unit, None) for unit in units]
            continue
        places = min(len(units), max(PLACES, -(-2 * wanted // SHARD)))
        chosen += [Stretch(units[index * len(units) // places], -(-wanted // places)) for index in range(places)]
    return chosen


def read(stretch: Stretch, sources: Sequence[Source], steps: Sequence[str] = ()) -> list[str]:
    """Its texts; the last is cut where it has enough."""
    texts, left = [], stretch.characters
    for piece in stretch.ranges:
        for document in run(steps, table.read(sources[piece.source], piece, Problems())):
            for segment in document.segments:
                texts.append(segment.text[:left])
                if left is not None:
                    left -= len(texts[-1])
                    if not left:
                        return texts
    return texts
