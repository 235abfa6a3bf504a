"""Mix several corpora in every batch, or let tasks take turns by steps, each at its own rate.

The rows of a lane are numbered without end and cut into blocks. Each corpus has an exact number of rows in every block,
in shuffled places. That number is a difference of rounded sums over all rows so far. So a corpus stays within a few
rows of its rate, however long the run and however small the rate, and the number of its rows before a step is computed
directly. Each corpus has its own epochs and order.

Rows that continue each other (streams) cannot change their corpus from step to step: each row of the batch has one
corpus for the whole run, and the rates are as exact as that allows.
"""

import functools
from collections.abc import Mapping, Sequence
from math import inf

import numpy as np

from data_pipelines import noise
from data_pipelines.batches import Batches, Examples, RowExamples, StreamExamples, make_examples, put_together
from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.examples.layout import Chosen, Layout
from data_pipelines.order import ONE_LANE, Order, distinct, permute, permute_each

BLOCK = 2048  # rows of a lane among which each corpus has an exact number
PARTS = 1 << 40  # resolution of rates: each becomes a whole number of 1 / PARTS
FORMS = "use proportional[:LIMIT], temperature:T[,LIMIT], smoothed:S, equal or given:R,R,..., like smoothed:0.7"


def parse_rates(text: str, sizes: Mapping[str, int], setting: str = "mixture") -> dict[str, float]:
    """Return the rates, with the sum 1, that a setting gives corpora by their tokens, or tasks by their examples.
    given: the rates as written. proportional: to the size, or to a limit if that is less. temperature: to size ** (1 /
    T), also with a limit. equal. (Raffel et al. 2020, section 3.5.2.) smoothed: to size ** S. Raises UserError."""
    form, _, value = text.partition(":")
    try:
        numbers = [float(number) for number in value.split(",")] if value else []
    except ValueError:
        raise UserError(f"{setting}={text}: {value!r} is not a number; {FORMS}") from None
    if not all(0 < number < inf for number in numbers):
        raise UserError(f"{setting}={text}: numbers must be above 0 and finite; leave out what has a rate of 0")
    if empty := [name for name, size in sizes.items() if not size]:
        raise UserError(f"{setting}={text}: {empty[0]} has no text to train on; leave it out, or prepare more")
    if form == "given" and len(numbers) != len(sizes):
        raise UserError(f"{setting}={text}: {len(numbers)} rates for {', '.join(sizes)}; give one for each")

    def limited(limit=inf):
        return [min(size, limit) for size in sizes.values()]

    def raised(power, limit=inf):
        return [(size / max(limited(limit))) ** power for size in limited(limit)]

    forms = {  # form -> fewest and most numbers, and the shares that they give
        "given": (1, inf, lambda *rates: rates),
        "proportional": (0, 1, limited),
        "temperature": (1, 2, lambda temperature, *limit: raised(1 / temperature, *limit)),
        "equal": (0, 0, lambda: [1] * len(sizes)),
        "smoothed": (1, 1, raised),
    }
    if form not in forms:
        raise UserError(f"{setting}={text}: {form!r} is not a form of rates; {FORMS}")
    fewest, most, made = forms[form]
    if not fewest <= len(numbers) <= most:
        much = "few" if len(numbers) < fewest else "many"
        raise UserError(f"{setting}={text}: too {much} numbers for {form}; {FORMS}")
    shares = list(made(*numbers))
    return {name: share / sum(shares) for name, share in zip(sizes, shares, strict=True)}


def make_mixture(
    layouts: Mapping[str, Layout],
    corpora: Mapping[str, Corpus],
    rates: Sequence[float],
    batch_size: int,
    seed: int,
    order: Order = ONE_LANE,
    sizes: Mapping[str, Sequence[int]] | None = None,
) -> "RowMixture | StreamMixture":
    """Return the training batches of several corpora, each with its layout, by name. sizes: examples of parts, if
    known. Raises UserError if the layouts have different specs, or if a stream gets no row."""
    if any(layout.spec != next(iter(layouts.values())).spec for layout in layouts.values()):
        raise UserError("the layouts of a mixture make different arrays; give all corpora layouts of one spec")
    weights, sources = weights_of(rates), {}
    for index, (name, layout) in enumerate(layouts.items()):
        known = None if sizes is None else sizes[name]
        of_source = noise.key(seed, "source", index)  # no two sources have the same noise
        sources[name] = make_examples(layout, corpora[name], "train", batch_size, of_source, order, known)
    return (RowMixture if isinstance(sources[name], RowExamples) else StreamMixture)(sources, weights, seed)


def weights_of(rates: Sequence[float]) -> tuple[int, ...]:
    """Return whole numbers in proportion to rates, whose sum is 1."""
    return tuple(max(round(rate * PARTS), 1) for rate in rates)


@functools.lru_cache(1 << 16)
def counts(weights: tuple[int, ...], rows: int) -> tuple[int, ...]:
    """Return how many of the first `rows` rows each source has. They add up to `rows`, never fall with more rows, and
    differ from the exact share by at most half of 1 + 1 / 2 + 1 / 3 + ..., with a term for each source. The heaviest
    source has its share rounded, the next its share of the rest, and so on."""
    found, left, rest = [0] * len(weights), rows, sum(weights)
    for index in sorted(range(len(weights)), key=lambda index: -weights[index]):
        found[index] = (2 * weights[index] * left + rest) // (2 * rest)
        left, rest = left - found[index], rest - weights[index]
    return tuple(found)


class Mixture(Batches):
    """Batches of several sources of the same batch size and order, with a seed.

    sources: name -> examples. weights: whole numbers, in proportion to the sources' rates.
    """

    def __init__(self, sources: Mapping[str, RowExamples | StreamExamples], weights: tuple[int, ...], seed: int):
        self.sources, self.weights, self.seed = dict(sources), weights, seed
        first = next(iter(sources.values()))
        self.batch_size, self.order, self.rows = first.batch_size, first.order, first.rows
        self.spec, self.tokens = first.spec, first.tokens
        self.corpora = tuple(source.corpus for source in sources.values())
        self.cells = sum(source.cells for source in sources.values())

    def check_size(self):
        for source in self.sources.values():
            source.check_size()

    def rows_before(self, step: int) -> dict[str, int]:
        """Return how many rows of each source come before a step."""
        raise NotImplementedError


class RowMixture(Mixture):
    """A mixture of rows that stand alone."""

    sources: dict[str, RowExamples]

    def at(self, lane, step, row):
        block, place = np.divmod(step * self.rows + row, BLOCK)
        cells, which = distinct(block * self.order.lanes + lane)
        cells = [divmod(cell, self.order.lanes) for cell in cells]
        slot = permute_each([self._network(of_lane, of_block) for of_block, of_lane in cells], which, place)
        blocks = [of_block for of_block, _ in cells]
        before, after = (np.array([counts(self.weights, (start + at) * BLOCK) for start in blocks]) for at in (0, 1))
        ends = np.cumsum(after - before, axis=1)  # a block's slots belong to its sources, one after the other
        source = (slot[:, None] >= ends[which]).sum(axis=1)
        number = before[which, source] + slot - (ends - after + before)[which, source]
        built, sources = [], list(self.sources.values())
        for layout in dict.fromkeys(each.layout for each in sources):  # rows of one layout are built together
            rows = np.flatnonzero(np.array([each.layout == layout for each in sources])[source])
            plans, which = [], np.empty(len(rows), np.int64)
            example, keys = np.empty(len(rows), np.int64), np.empty(len(rows), np.uint64)
            for index in distinct(source[rows])[0]:
                here = source[rows] == index
                chosen, keys[here] = sources[index].choose(lane[rows[here]], number[rows[here]])
                which[here], example[here] = chosen.which + len(plans), chosen.example
                plans += chosen.plans
            if len(rows):
                built.append((rows, layout.build(Chosen(plans, which, example), keys)))
        return put_together(built, len(source))

    def rows_before(self, step):
        block, place = divmod(step * self.rows, BLOCK)
        before, after = (np.array(counts(self.weights, number * BLOCK)) for number in (block, block + 1))
        rows = self.order.lanes * before
        for lane in range(self.order.lanes if place else 0):
            slot = permute(*self._network(lane, block), np.arange(place))
            rows += np.bincount(np.searchsorted(np.cumsum(after - before), slot, "right"), minlength=len(rows))
        return dict(zip(self.sources, rows.tolist(), strict=True))

    def _network(self, lane, block):
        return noise.key(self.seed, "mixture", lane), block, BLOCK


class StreamMixture(Mixture):
    """A mixture of rows that continue each other: in each lane the first rows are the first source's, and so on."""

    sources: dict[str, StreamExamples]

    def __init__(self, sources, weights, seed):
        super().__init__(sources, weights, seed)
        multiple = max(source.layout.multiple for source in sources.values())
        shares = [multiple * share for share in counts(weights, self.rows // multiple)]
        for (name, source), share, weight in zip(self.sources.items(), shares, weights, strict=True):
            if not share:
                raise UserError(
                    f"mixture: {name} has a rate of {weight / sum(weights):.2g}, too small for one of the {self.rows} "
                    "rows of a lane, and a row keeps its corpus: raise its rate or the batch size, or leave it out"
                )
            source.rows = share
        self._begins = np.cumsum([0, *shares])

    def at(self, lane, step, row):
        built, of_row = [], np.searchsorted(self._begins, row, "right") - 1
        for index, source in enumerate(self.sources.values()):
            rows = np.flatnonzero(of_row == index)
            if len(rows):
                pieces = source.pieces(lane[rows], step[rows], row[rows] - self._begins[index])
                built += [(rows[here], arrays) for here, arrays in pieces]
        return put_together(built, len(row))

    def rows_before(self, step):
        return {name: step * source.rows * self.order.lanes for name, source in self.sources.items()}


class Tasks:
    """Batches of one task, or of several that take turns. The task of a step, and how many steps it had before, follow
    from the step alone. A task stays within a few steps of its rate (see `mixture.counts`).

    batches: name -> batches of a task.   rates: name -> relative frequency.   together: see `Loader`; 1 for several
    tasks, whose batches have different arrays.
    """

    def __init__(self, batches: Mapping[str, Examples | Mixture], rates: Mapping[str, float]):
        total = sum(rates.values())
        self.batches, self._weights = dict(batches), weights_of([rates[name] / total for name in batches])
        first = next(iter(batches.values()))
        self.batch_size, self.together = first.batch_size, first.together if len(batches) == 1 else 1
        self.corpora = tuple(corpus for task in batches.values() for corpus in task.corpora)  # to read

    def at(self, step: int) -> tuple[str, int]:
        """Return (the task of a step, how many steps it had before)."""
        before, after = counts(self._weights, step), counts(self._weights, step + 1)
        index = next(index for index, (old, new) in enumerate(zip(before, after, strict=True)) if new > old)
        return [*self.batches][index], before[index]

    def before(self, step: int) -> dict[str, int]:
        """Return how many steps of each task come before a step."""
        return dict(zip(self.batches, counts(self._weights, step), strict=True))

    def batch(self, step: int, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Return rows of a step's global batch: name -> array [n, ...].   rows: int64 [n]; if there is one task, rows
        from batch_size on are those of later steps."""
        name, number = self.at(step)
        return self.batches[name].batch(number, rows)
