"""Batches: the rows of a layout, from one split of a corpus, in an order. The loader and the evaluation read them."""

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

HELD_OUT = 8  # parts that an evaluation reads, evenly spaced in the corpus
KEPT = 8  # batches for which a window is kept once its lane is in the next: threads are not in step
ROWS, TOKENS = 256, 1 << 16  # least to build at once: below, NumPy's calls cost more than the data
MOST = 1 << 21  # most tokens to build at once, if a batch has many lanes and parts, which each want so many rows


def make_examples(
    layout: Layout,
    corpus: Corpus,
    split: str,
    batch_size: int,
    seed: int,
    order: Order = ONE_LANE,
    sizes: Sequence[int] | None = None,
) -> "Examples":
    """Return the batches of a layout. sizes: the examples of each part, if known (see `RowExamples.sizes`). Raises
    UserError if the corpus lacks the layout's special tokens, or if the lanes do not divide the batch."""
    kind = StreamExamples if isinstance(layout, StreamLayout) else RowExamples
    return kind(layout, corpus, split, batch_size, seed, order, sizes)


def evaluation_batches(examples, limit: int) -> Iterator[dict[str, np.ndarray]]:
    """Yield batches of at most `limit` examples, those of `fixed`, always alike, with the noise of epoch 0. Blank rows
    of the layout, which count nowhere, fill up a last one."""
    spec = examples.spec
    for chosen in examples.fixed(limit):
        missing = examples.batch_size - len(chosen)
        batch = examples.build(0, chosen)
        yield {name: np.concatenate([array, spec[name].blank(missing)]) for name, array in batch.items()}


Built = tuple[np.ndarray, dict[str, np.ndarray]]  # rows (int64 [m]) of a batch, and name -> array [m, ...]
WindowOf = tuple[int, int, int]  # lane, epoch, and the window's number in that epoch


def put_together(built: Sequence[Built], number: int) -> dict[str, np.ndarray]:
    """Assemble a batch of `number` rows from pieces that cover them, ascending in each: name -> array [n, ...]."""
    if len(built) == 1:
        return built[0][1]
    batch = {name: np.empty((number, *array.shape[1:]), array.dtype) for name, array in built[0][1].items()}
    for rows, arrays in built:
        for name, array in arrays.items():
            batch[name][rows] = array
    return batch


class Batches:
    """Batches of rows. A batch depends only on what the batches are made of and on its step."""

    spec: dict[str, Feature]  # the arrays of a batch, by name
    corpora: tuple[Corpus, ...]  # to read
    batch_size: int
    order: Order  # each of its lanes has `rows` rows of a batch
    rows: int
    tokens: int  # of a row
    cells: int  # the most (source, lane, part) groups that the rows of a batch form

    @property
    def together(self) -> int:
        """How many rows, of several steps, are best built at once."""
        least = max(ROWS, TOKENS // self.tokens)
        return max(least, min(least * self.cells, MOST // self.tokens))

    def batch(self, step: int, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Return rows (int64 [n]) of a step's global batch; from batch_size on they are those of later steps: name ->
        array [n, ...]. Raises UserError as `check_size` does."""
        later, row = np.divmod(rows, self.batch_size)
        lane, row = np.divmod(row, self.rows)
        return self.at(lane, step + later, row)

    def at(self, lane: np.ndarray, step: np.ndarray, row: np.ndarray) -> dict[str, np.ndarray]:
        """Return rows of lanes at steps, all int64 [n]: name -> array [n, ...]."""
        raise NotImplementedError

    def check_size(self) -> None:
        """Raise UserError if there is too little text for a step."""
        raise NotImplementedError


class Examples(Batches):
    """Batches of one layout, corpus, split and seed. Held-out examples come from at most `HELD_OUT` nonempty parts,
    evenly spaced, in one lane and one window."""

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
        """Return the windows of a lane in an epoch. Those of two consecutive epochs are remembered."""
        if (lane, epoch) not in self._deals:
            near = {key: windows for key, windows in self._deals.items() if abs(key[1] - epoch) <= 1}
            windows = deal(self.seed, epoch, np.array(self.sizes), self.order, lane)
            self._deals = {**near, (lane, epoch): windows}  # replaced whole: other threads may be reading it
            return windows
        return self._deals[lane, epoch]

    def _read(self, lane: np.ndarray, epoch: np.ndarray, place: np.ndarray) -> list[tuple[WindowOf, np.ndarray]]:
        """Return the windows of rows at places of epochs of lanes, all int64 [n], and each window's rows, int64 [m]."""
        found, lanes = [], self.order.lanes
        walks, walk = distinct(epoch * lanes + lane)
        for number, (of_epoch, of_lane) in enumerate(divmod(each, lanes) for each in walks):
            here = np.flatnonzero(walk == number)
            index = np.searchsorted(self._begins(of_lane, of_epoch), place[here], "right") - 1
            found += [((of_lane, of_epoch, each), here[index == each]) for each in distinct(index)[0]]
        self._enter([window for window, _ in found])
        return found

    def _enter(self, windows: Sequence[WindowOf]) -> None:
        """Register a batch of these windows: request the parts of new windows and of those after them, and release, a
        few batches later, the parts of windows that their lanes have left."""
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
        """Return the parts of windows, each once, in order."""
        found = (self._windows(lane, epoch)[index].parts.tolist() for lane, epoch, index in windows)
        return dict.fromkeys(itertools.chain.from_iterable(found))

    def _release(self, parts: Iterable[int]) -> None:
        if parts := [self.parts[part].index for part in parts]:
            self.corpus.release(self.split, parts)


class RowExamples(Examples):
    """Rows that stand alone: every example comes once per epoch.

    Each lane counts its examples without end: count = step * rows + row. The epoch is count // size, and within it the
    lane walks through its stretch. An example's noise is keyed by (seed, epoch, its number in the split). If the layout
    has copies, the noise repeats after as many epochs, in another order of examples.
    """

    layout: RowLayout

    @functools.cached_property
    def sizes(self) -> Sequence[int]:
        """Examples of each part. Counting them plans every part once, one at a time."""
        if self._known is not None:
            return self._known
        single = len(self.parts) == 1  # then its plan is kept
        return (self._plan(0).number,) if single else tuple(map(self.count, range(len(self.parts))))

    def count(self, index: int) -> int:
        """Return the number of examples in a part."""
        number = self._planned(index).number
        self._release([index])
        return number

    @functools.cached_property
    def _firsts(self) -> np.ndarray:
        """int64 [parts + 1]: the number in the split of each part's first example, then the number of all examples."""
        return np.cumsum((0, *self.sizes))

    @functools.cached_property
    def _shares(self) -> np.ndarray:
        """int64 [lanes]: the examples of each lane in an epoch."""
        lanes = self.order.lanes
        return np.diff([stretch(self.number, lane, lanes) for lane in range(lanes)]).ravel()

    @property
    def number(self) -> int:
        """Examples per epoch."""
        return int(self._firsts[-1])

    def epochs(self, rows: int) -> float:
        """Return how many epochs so many rows make."""
        return rows / self.number

    def check_size(self):
        if self.number < self.order.lanes:
            lanes = f" for {self.order.lanes} lanes; lower order.lanes or" if self.number else ";"
            empty = f"has {self.number} examples" if self.number else "is empty"
            raise UserError(f"split '{self.split}' of corpus {self.corpus.path} {empty}{lanes} prepare more text")

    def at(self, lane, step, row):
        return self.layout.build(*self.choose(lane, step * self.rows + row))

    def choose(self, lane: np.ndarray, count: np.ndarray) -> tuple[Chosen, np.ndarray]:
        """Return the examples of lanes at their counts, both int64 [n], and their keys, uint64 [n]."""
        self.check_size()
        if self.order.lanes == len(self.parts) == 1:  # a shortcut for a single window
            epochs, which = distinct(count // self.number)
            inside = permute_each([(self.seed, epoch, self.number) for epoch in epochs], which, count % self.number)
            return self._chosen(np.array(epochs)[which], np.zeros_like(count), inside)
        epoch, place = np.divmod(count, self._shares[lane])
        which, windows, networks = np.empty(len(place), np.int64), [], []
        for number, ((of_lane, of_epoch, index), rows) in enumerate(self._read(lane, epoch, place)):
            window, which[rows] = self._windows(of_lane, of_epoch)[index], number
            windows.append(window)
            networks.append((window.key, of_epoch, window.size))
        # Lay the windows end to end, so that one search finds the piece that each row is of
        starts, sizes = np.array([(window.start, window.size) for window in windows]).T
        parts, begins, ends = (np.concatenate(arrays) for arrays in [*zip(*windows, strict=True)][:3])
        after = np.cumsum(ends - begins)
        inside = permute_each(networks, which, place - starts[which]) + (np.cumsum(sizes) - sizes)[which]
        piece = np.searchsorted(after, inside, "right")
        return self._chosen(epoch, parts[piece], inside - after[piece] + ends[piece])

    def build(self, epoch: int | np.ndarray, example: np.ndarray) -> dict[str, np.ndarray]:
        """Return examples (int64 [n], below `number`) as they look in an epoch, or in one each: name -> array."""
        return self.layout.build(*self.located(epoch, example))

    def located(self, epoch: int | np.ndarray, example: np.ndarray) -> tuple[Chosen, np.ndarray]:
        """Return where examples lie, and their keys, uint64 [n]."""
        part = np.searchsorted(self._firsts, example, "right") - 1
        return self._chosen(epoch, part, example - self._firsts[part])

    def fixed(self, limit: int) -> Iterator[np.ndarray]:
        """Yield the examples of each batch of a fixed set, at most `limit` in all, spread over the split: int64 [n]."""
        return spread(self.number, limit, self.batch_size)

    def _begins(self, lane, epoch):
        """Return the places in a lane's epoch at which its windows begin: int64 [windows]."""
        return np.array([window.start for window in self._windows(lane, epoch)])

    def _chosen(self, epoch, part, example):
        epoch = epoch % self.layout.copies if self.layout.copies else epoch
        number = self._firsts[part] + example
        parts, which = distinct(part)
        chosen = Chosen([self._plan(index) for index in parts or [0]], which, example, number, epoch)
        return chosen, noise.key(self.seed, epoch, number)

    def _plan(self, index):
        return self._kept.plan(index, lambda: self._planned(index))

    def _planned(self, index):
        plan = self.layout.plan(self.parts[index], self.split, self.seed)
        if self._known is not None and plan.number != self._known[index]:
            raise UserError(
                f"part {index} of corpus {self.corpus.path} has {plan.number} examples, but examples.json says "
                f"{self._known[index]}; remove examples.json from the work directory to count them again"
            )
        return plan


class StreamExamples(Examples):
    """Rows that continue the same row of the step before.

    The documents of a window, in an order of the epoch, form one stream, of which each row of the lane has an equal
    run. At the end of a window or an epoch the rows begin anew, so what a model remembers there is of other text. The
    rest of a window, too short for a step of all rows, is not read in this epoch.
    """

    layout: StreamLayout

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._epoch_steps: dict[int, list[int]] = {}  # lane -> steps before each epoch

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Tokens of each part as a stream, in which an end token follows each document."""
        sizes = (part.sizes[self.split] for part in self.parts)
        return tuple(size["tokens"] + size["documents"] for size in sizes)

    @property
    def number(self) -> int:
        """Examples in the streams of the first epoch; the last one of each stream may be shorter."""
        lanes = range(self.order.lanes)
        return sum(self.layout.number(window.size) for lane in lanes for window in self._windows(lane, 0))

    @functools.cached_property
    def steps(self) -> int:
        """Steps of the first epoch; other lanes and epochs may have a few more or fewer."""
        return int(min(self._begins(lane, 0)[-1] for lane in range(self.order.lanes)))

    def epochs(self, rows: int) -> float:
        """Return how many times so many rows go through the first epoch's steps."""
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
        """Return the same as `at` in pieces, one for each window."""
        self.check_size()
        epoch, place = np.empty_like(step), np.empty_like(step)
        for this_lane in distinct(lane)[0]:
            here = lane == this_lane
            epoch[here], place[here] = self._epochs(this_lane, step[here])
        built = []
        for (of_lane, of_epoch, index), rows in self._read(lane, epoch, place):
            within = place[rows] - self._begins(of_lane, of_epoch)[index]
            size = self._windows(of_lane, of_epoch)[index].size
            example = self.layout.example(size, self.rows, row[rows], within)
            built.append((rows, self._build(of_lane, of_epoch, index, example)))
        return built

    def build(self, epoch: int, example: np.ndarray) -> dict[str, np.ndarray]:
        """Return examples (int64 [n]) of the first lane's first window as they look in an epoch: name -> array."""
        return self._build(0, epoch, 0, example)

    def fixed(self, limit: int) -> Iterator[np.ndarray]:
        """Yield the examples of each batch of a fixed set, at most `limit`. Rows continue each other. int64 [n]."""
        return self.layout.fixed(sum(self.sizes), limit, self.batch_size)

    def _begins(self, lane, epoch):
        """As for rows, in steps; the last entry is the end of the epoch."""
        return np.cumsum([0, *(self.layout.steps(window.size, self.rows) for window in self._windows(lane, epoch))])

    def _epochs(self, lane, step):
        """Return the epochs of steps (int64 [n]) of a lane, and the steps' places in them: int64 [n] each."""
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
            # Documents of consecutive windows have different numbers; a document in which a lane begins counts twice
            documents = sum(part.sizes[self.split]["documents"] for part in self.parts) + self.order.lanes - 1
            before = (epoch * -(-len(self.parts) // self.order.window) + index) * documents
            return self.layout.plan(found, self.split, window.key, epoch, before)

        keys = noise.key(window.key, epoch, example)
        return self.layout.build(self._kept.plan((lane, epoch, index), plan), example, keys)


class _Kept:
    """Plans, each made once, and the windows that batches read; safe from several threads. A pickled copy is empty."""

    def __init__(self):
        self._lock, self._plans = threading.Lock(), {}  # key -> (its lock, [the plan])
        self._batches, self._last = 0, {}  # batches so far; window -> the last of its batches

    def __reduce__(self):
        return _Kept, ()

    def plan(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the plan of a key. While it is made, callers that need another plan do not wait."""
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
        """Register a batch of these windows. Returns the new windows, those that are let go, and the others."""
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
