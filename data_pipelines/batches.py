"""Batches: a layout's rows of one split of a corpus, in an order. What the loader and the evaluation read."""

import functools
import itertools
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from data_pipelines import noise
from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.examples.layout import Chosen, Feature, Layout, Piece, RowLayout, StreamLayout, spread
from data_pipelines.order import ONE_LANE, Order, Window, deal, distinct, permute_each, stretch

HELD_OUT = 8  # parts that an evaluation reads, spread evenly over a corpus
KEPT = 8  # batches that a window is kept for when its lane has come to the next: threads are not in step
ROWS, TOKENS = 256, 1 << 16  # built together at least: below the cost is in NumPy's calls, not in the data
MOST = 1 << 21  # tokens built together where a batch is of many lanes and parts, each of which wants so many rows


def make_examples(
    layout: Layout,
    corpus: Corpus,
    split: str,
    batch_size: int,
    seed: int,
    order: Order = ONE_LANE,
    sizes: Sequence[int] | None = None,
) -> "Examples":
    """The batches of a layout. sizes: the examples of each part, where they are known (see `RowExamples.sizes`).

    Raises UserError for a corpus without the layout's special tokens, and where lanes do not divide the batch.
    """
    of = StreamExamples if isinstance(layout, StreamLayout) else RowExamples
    return of(layout, corpus, split, batch_size, seed, order, sizes)


def evaluation_batches(examples, limit: int) -> Iterator[dict[str, np.ndarray]]:
    """Yield batches of the same at most `limit` examples in the same order with the same noise, each exactly once.

    Which they are the examples say (`fixed`); they are corrupted as in epoch 0. Every batch has
    `examples.batch_size` rows: where there are fewer examples it is filled up with the layout's blank rows (no segment,
    no weight, no label), which count nowhere.
    """
    spec = examples.spec
    for chosen in examples.fixed(limit):
        missing = examples.batch_size - len(chosen)
        batch = examples.build(0, chosen)
        yield {name: np.concatenate([array, spec[name].blank(missing)]) for name, array in batch.items()}


Built = tuple[np.ndarray, dict[str, np.ndarray]]  # some rows (int64 [m]) of a batch: name -> array [m, ...]
WindowOf = tuple[int, int, int]  # a lane, an epoch and the window's number there


def put_together(built: Sequence[Built], number: int) -> dict[str, np.ndarray]:
    """A batch of so many rows, ascending in each piece, from pieces that have all of them: name -> array [n, ...]."""
    if len(built) == 1:
        return built[0][1]
    batch = {name: np.empty((number, *array.shape[1:]), array.dtype) for name, array in built[0][1].items()}
    for rows, arrays in built:
        for name, array in arrays.items():
            batch[name][rows] = array
    return batch


class Batches:
    """Batches of rows; one depends on what they are made of and the step alone."""

    spec: dict[str, Feature]  # a batch's arrays, by name
    corpora: tuple[Corpus, ...]  # what is read
    batch_size: int
    order: Order  # its lanes have equally many `rows` of a batch
    rows: int
    tokens: int  # of a row
    cells: int  # the most parts, or sources and parts, each with rows of its own, that a batch is of

    @property
    def together(self) -> int:
        """How many rows, of several steps, are best built together."""
        few = max(ROWS, TOKENS // self.tokens)
        return max(few, min(few * self.cells, MOST // self.tokens))

    def batch(self, step: int, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Some rows (int64 [n], from batch_size on those of later steps) of a step's global batch: name -> array
        [n, ...]. Raises UserError as `check_size` does."""
        later, row = np.divmod(rows, self.batch_size)
        lane, row = np.divmod(row, self.rows)
        return self.at(lane, step + later, row)

    def at(self, lane: np.ndarray, step: np.ndarray, row: np.ndarray) -> dict[str, np.ndarray]:
        """Rows of lanes, as they are at steps, all int64 [n]: name -> array [n, ...]."""
        raise NotImplementedError

    def check_size(self) -> None:
        """Raises UserError where there is too little text for a step."""
        raise NotImplementedError


class Examples(Batches):
    """Of one layout, corpus, split and seed.

    Held-out examples are of at most `HELD_OUT` parts that have some, evenly spaced, in one lane and one window.
    """

    def __init__(self, layout: Layout, corpus: Corpus, split: str, batch_size: int, seed: int, order: Order, sizes):
        layout.check(corpus)
        order.check("batch size", batch_size)
        parts = corpus.parts
        if split != "train":
            full = [part for part in parts if part.sizes[split]["tokens"]] or parts[:1]
            count = min(HELD_OUT, len(full))
            parts = tuple(full[index * len(full) // count] for index in range(count))
            order = Order(lanes=1, window=max(len(parts), 1))
        self.layout, self.spec, self.tokens = layout, layout.spec, layout.tokens
        self.corpus, self.corpora, self.split, self.parts = corpus, (corpus,), split, parts
        self.seed, self.batch_size, self.order, self.rows = seed, batch_size, order, batch_size // order.lanes
        self.cells = min(order.lanes * order.window, len(parts) + order.lanes - 1)
        layout.check_rows(self.rows)
        self._known, self._deals, self._kept = sizes, {}, _Kept()

    def _windows(self, lane: int, epoch: int) -> list[Window]:
        """What a lane reads in an epoch; of two epochs in a row they are remembered."""
        if (lane, epoch) not in self._deals:
            near = {key: windows for key, windows in self._deals.items() if abs(key[1] - epoch) <= 1}
            windows = deal(self.seed, epoch, np.array(self.sizes), self.order, lane)
            self._deals = {**near, (lane, epoch): windows}  # replaced whole: other threads may be reading it
            return windows
        return self._deals[lane, epoch]

    def _begins(self, lane: int, epoch: int) -> np.ndarray:
        """The places of a lane's epoch at which its windows begin: int64 [windows or one more]."""
        raise NotImplementedError

    def _read(self, lane: np.ndarray, epoch: np.ndarray, place: np.ndarray) -> list[tuple[WindowOf, np.ndarray]]:
        """The windows of rows at places of epochs of lanes, all int64 [n], and which rows (int64 [m]) are of each."""
        found, lanes = [], self.order.lanes
        walks, walk = distinct(epoch * lanes + lane)
        for number, (of_epoch, of_lane) in enumerate(divmod(one, lanes) for one in walks):
            here = np.flatnonzero(walk == number)
            index = np.searchsorted(self._begins(of_lane, of_epoch), place[here], "right") - 1
            found += [((of_lane, of_epoch, one), here[index == one]) for one in distinct(index)[0]]
        self._enter([window for window, _ in found])
        return found

    def _enter(self, windows: Sequence[WindowOf]) -> None:
        """A batch is of these: what new ones and the next ones need is wanted, and what others have that their lanes
        are through with is let go, a few batches later."""
        new, old, left = self._kept.enter(windows)
        done = {*self._parts_of(old)}.difference(self._parts_of(left) if old else ())
        self._kept.drop([*old, *done])
        self._release(done)
        for lane, epoch, index in new if len(self.parts) > 1 else ():
            is_last = index + 1 == len(self._windows(lane, epoch))
            following = (lane, epoch + 1, 0) if is_last else (lane, epoch, index + 1)
            wanted = self._parts_of([(lane, epoch, index), following])
            self.corpus.want(self.split, [self.parts[part].index for part in wanted])

    def _parts_of(self, windows: Iterable[WindowOf]) -> Iterable[int]:
        """The parts that windows are of, each once, in order."""
        found = (self._windows(lane, epoch)[index].parts.tolist() for lane, epoch, index in windows)
        return dict.fromkeys(itertools.chain.from_iterable(found))

    def _release(self, parts: Iterable[int]) -> None:
        if parts := [self.parts[part].index for part in parts]:
            self.corpus.release(self.split, parts)


class RowExamples(Examples):
    """Rows that stand alone: in an epoch every example comes once.

    Examples are counted endlessly, in each lane: count = step * rows + row; the epoch is count // size, and within it
    the lane walks through its stretch. An example's noise is keyed by (seed, epoch, its number in the split); of a
    layout with copies epochs that are so many apart have the same noise, in another order.
    """

    layout: RowLayout

    @functools.cached_property
    def sizes(self) -> Sequence[int]:
        """Examples of each part. Counting them plans every part once, one at a time."""
        if self._known is not None:
            return self._known
        one = len(self.parts) == 1  # its plan is kept
        return (self._plan(0).number,) if one else tuple(map(self.count, range(len(self.parts))))

    def count(self, index: int) -> int:
        """Examples of a part."""
        number = self._planned(index).number
        self._release([index])
        return number

    @functools.cached_property
    def _firsts(self) -> np.ndarray:
        """int64 [parts + 1]: the number in the split of each part's first example, then of all."""
        return np.cumsum((0, *self.sizes))

    @functools.cached_property
    def _shares(self) -> np.ndarray:
        """int64 [lanes]: the examples of each in an epoch."""
        lanes = self.order.lanes
        return np.diff([stretch(self.number, lane, lanes) for lane in range(lanes)]).ravel()

    @property
    def number(self) -> int:
        """Examples per epoch."""
        return int(self._firsts[-1])

    def epochs(self, rows: int) -> float:
        """How often all examples come in so many rows."""
        return rows / self.number

    def check_size(self):
        if self.number < self.order.lanes:
            lanes = f" for {self.order.lanes} lanes; lower order.lanes or" if self.number else ";"
            empty = f"has {self.number} examples" if self.number else "is empty"
            raise UserError(f"split '{self.split}' of corpus {self.corpus.path} {empty}{lanes} prepare more text")

    def at(self, lane, step, row):
        return self.layout.build(*self.choose(lane, step * self.rows + row))

    def choose(self, lane: np.ndarray, count: np.ndarray) -> tuple[Chosen, np.ndarray]:
        """The examples of lanes at their counts, both int64 [n], and their keys, uint64 [n]."""
        self.check_size()
        if self.order.lanes == len(self.parts) == 1:  # the same, of one window, sooner
            epochs, which = distinct(count // self.number)
            inside = permute_each([(self.seed, epoch, self.number) for epoch in epochs], which, count % self.number)
            return self._chosen(np.array(epochs)[which], np.zeros_like(count), inside)
        epoch, place = np.divmod(count, self._shares[lane])
        which, windows, networks = np.empty(len(place), np.int64), [], []
        for number, ((of_lane, of_epoch, index), rows) in enumerate(self._read(lane, epoch, place)):
            window, which[rows] = self._windows(of_lane, of_epoch)[index], number
            windows.append(window)
            networks.append((window.key, of_epoch, window.size))
        # Windows laid end to end, so that one search finds which piece of its window each row is of
        starts, sizes = (np.array(of) for of in zip(*((window.start, window.size) for window in windows), strict=True))
        parts, begins, ends = (np.concatenate(of) for of in [*zip(*windows, strict=True)][:3])
        after = np.cumsum(ends - begins)
        inside = permute_each(networks, which, place - starts[which]) + (np.cumsum(sizes) - sizes)[which]
        piece = np.searchsorted(after, inside, "right")
        return self._chosen(epoch, parts[piece], inside - after[piece] + ends[piece])

    def build(self, epoch: int | np.ndarray, example: np.ndarray) -> dict[str, np.ndarray]:
        """The examples (int64 [n], below `number`) as they look in an epoch (or one each): name -> array [n, ...]."""
        return self.layout.build(*self.located(epoch, example))

    def located(self, epoch: int | np.ndarray, example: np.ndarray) -> tuple[Chosen, np.ndarray]:
        """Where they lie, and their keys, uint64 [n]."""
        part = np.searchsorted(self._firsts, example, "right") - 1
        return self._chosen(epoch, part, example - self._firsts[part])

    def fixed(self, limit: int) -> Iterator[np.ndarray]:
        """The examples of each batch of a fixed set, at most `limit` in all, spread over the split: int64 [n]."""
        return spread(self.number, limit, self.batch_size)

    def _begins(self, lane, epoch):
        return np.array([window.start for window in self._windows(lane, epoch)])

    def _chosen(self, epoch, part, example):
        epoch = epoch % self.layout.copies if self.layout.copies else epoch
        keys = noise.key(self.seed, epoch, self._firsts[part] + example)
        parts, which = distinct(part)
        return Chosen([self._plan(index) for index in parts or [0]], which, example), keys

    def _plan(self, index):
        return self._kept.plan(index, lambda: self._planned(index))

    def _planned(self, index):
        plan = self.layout.plan(self.parts[index], self.split, self.seed)
        if self._known is not None and plan.number != self._known[index]:
            raise UserError(
                f"part {index} of corpus {self.corpus.path} has {plan.number} examples, not {self._known[index]}: they "
                "were counted otherwise; remove examples.json from the work directory to count them again"
            )
        return plan


class StreamExamples(Examples):
    """Rows that go on where the same row of the step before has ended.

    The documents of a window, in an order of the epoch's, are one stream, of which each of the lane's rows has an equal
    run. Where a window ends, or an epoch, the rows begin anew: what is remembered then is of other text. What is left
    at a window's end, too little for a step of all rows, is not read in this epoch.
    """

    layout: StreamLayout

    def __init__(self, *of):
        super().__init__(*of)
        self._epoch_steps: dict[int, list[int]] = {}  # of a lane, the steps before each epoch

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Tokens of each part as a stream, in which a document has one more, that ends it."""
        sizes = (part.sizes[self.split] for part in self.parts)
        return tuple(of["tokens"] + of["documents"] for of in sizes)

    @property
    def number(self) -> int:
        """Examples in the first epoch's streams; the last of each may be shorter."""
        lanes = range(self.order.lanes)
        return sum(self.layout.number(window.size) for lane in lanes for window in self._windows(lane, 0))

    @functools.cached_property
    def steps(self) -> int:
        """Steps of the first epoch; lanes may have a few more or fewer, in other epochs too."""
        return int(min(self._begins(lane, 0)[-1] for lane in range(self.order.lanes)))

    def epochs(self, rows: int) -> float:
        """How often the first epoch's steps come in so many rows."""
        return rows / (self.steps * self.rows * self.order.lanes)

    def check_size(self):
        if not self.steps:
            lanes = f" in {self.order.lanes} lanes" if self.order.lanes > 1 else ""
            raise UserError(
                f"split '{self.split}' of corpus {self.corpus.path} has {sum(self.sizes)} tokens, too few for a "
                f"batch of {self.batch_size} rows of {self.layout.length}{lanes}: lower the batch size or the length, "
                "or prepare more text"
            )

    def at(self, lane, step, row):
        return put_together(self.pieces(lane, step, row), len(row))

    def pieces(self, lane: np.ndarray, step: np.ndarray, row: np.ndarray) -> list[Built]:
        """The same, by the windows that the rows are of."""
        self.check_size()
        epoch, place = np.empty_like(step), np.empty_like(step)
        for one in distinct(lane)[0]:
            here = lane == one
            epoch[here], place[here] = self._epochs(one, step[here])
        built = []
        for (of_lane, of_epoch, index), rows in self._read(lane, epoch, place):
            within = place[rows] - self._begins(of_lane, of_epoch)[index]
            size = self._windows(of_lane, of_epoch)[index].size
            example = self.layout.example(size, self.rows, row[rows], within)
            built.append((rows, self._build(of_lane, of_epoch, index, example)))
        return built

    def build(self, epoch: int, example: np.ndarray) -> dict[str, np.ndarray]:
        """Examples (int64 [n]) of the first lane's first window as they look in an epoch: name -> array [n, ...]."""
        return self._build(0, epoch, 0, example)

    def fixed(self, limit: int) -> Iterator[np.ndarray]:
        """The examples of each batch of a fixed set, at most `limit` in all, rows continuing each other: int64 [n]."""
        return self.layout.fixed(sum(self.sizes), limit, self.batch_size)

    def _begins(self, lane, epoch):
        """In steps, and at the end of all."""
        return np.cumsum([0, *(self.layout.steps(window.size, self.rows) for window in self._windows(lane, epoch))])

    def _epochs(self, lane, step):
        """The epochs that steps (int64 [n]) of a lane are in, and their places there: int64 [n] each."""
        if self.order.lanes == 1 and len(self.parts) <= self.order.window:  # all epochs are alike
            return np.divmod(step, self.steps)
        begun = self._epoch_steps.get(lane, [0])
        while begun[-1] <= step.max():
            begun = [*begun, begun[-1] + int(self._begins(lane, len(begun) - 1)[-1])]
        self._epoch_steps[lane] = begun  # replaced whole: other threads may be reading it
        epoch = np.searchsorted(begun, step, "right") - 1
        return epoch, step - np.array(begun)[epoch]

    def _build(self, lane, epoch, index, example):
        window = self._windows(lane, epoch)[index]

        def plan():
            pieces = zip(window.parts.tolist(), window.begins.tolist(), window.ends.tolist(), strict=True)
            found = [Piece(self.parts[part], begin, end) for part, begin, end in pieces]
            # Documents of windows that follow each other have other numbers; one that a lane begins inside of counts
            # twice
            documents = sum(part.sizes[self.split]["documents"] for part in self.parts) + self.order.lanes - 1
            before = (epoch * -(-len(self.parts) // self.order.window) + index) * documents
            return self.layout.plan(found, self.split, window.key, epoch, before)

        keys = noise.key(window.key, epoch, example)
        return self.layout.build(self._kept.plan((lane, epoch, index), plan), example, keys)


class _Kept:
    """Plans, each made once, and the windows that batches are of; safe from several threads. A worker process, to which
    it is pickled, begins anew."""

    def __init__(self):
        self._lock, self._plans = threading.Lock(), {}  # each with a lock of its own
        self._batches, self._last = 0, {}  # windows that batches are of: the last of these, counted

    def __reduce__(self):
        return _Kept, ()

    def plan(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The plan of a key; what has to be made holds up nobody who asks for another."""
        lock, made = self._plans.setdefault(key, (threading.Lock(), []))
        with lock:
            if not made:
                made.append(make())
            return made[0]

    def drop(self, keys: Iterable[Hashable]) -> None:
        """Forget plans."""
        for key in keys:
            self._plans.pop(key, None)

    def enter(self, windows: Sequence[WindowOf]) -> tuple[list[WindowOf], list[WindowOf], list[WindowOf]]:
        """A batch is of these windows -> those that are new; those that are let go; and those that are left."""
        with self._lock:
            self._batches += 1
            new = [window for window in windows if window not in self._last]
            self._last.update(dict.fromkeys(windows, self._batches))
            newest = {window[0]: window for window in sorted(self._last)}
            # Not by age alone: a rare source's lane has no row in most batches
            old = [w for w, last in self._last.items() if last < self._batches - KEPT and w < newest[w[0]]]
            for window in old:
                del self._last[window]
            return new, old, [*self._last]
