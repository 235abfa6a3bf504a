"""Batches: a layout's rows of one split of a corpus, in an order. What the loader and the evaluation read."""

import functools
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from data_pipelines import noise
from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.examples.evaluation import spread
from data_pipelines.examples.layout import Chosen, Feature, Layout, Piece, RowLayout, StreamLayout
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
    if isinstance(layout, StreamLayout):
        return StreamExamples(layout, corpus, split, batch_size, seed, order)
    return RowExamples(layout, corpus, split, batch_size, seed, order, sizes)


def together(cells: int, tokens: int) -> int:
    """How many rows of so many tokens are best built together where they are of so many parts, or sources and parts."""
    few = max(ROWS, TOKENS // tokens)
    return max(few, min(few * cells, MOST // tokens))


Built = tuple[np.ndarray, dict[str, np.ndarray]]  # some rows (int64 [m]) of a batch: name -> array [m, ...]


def put_together(built: Sequence[Built], number: int) -> dict[str, np.ndarray]:
    """A batch of so many rows, ascending in each piece, from pieces that have all of them: name -> array [n, ...]."""
    if len(built) == 1:
        return built[0][1]
    batch = {name: np.empty((number, *array.shape[1:]), array.dtype) for name, array in built[0][1].items()}
    for rows, arrays in built:
        for name, array in arrays.items():
            batch[name][rows] = array
    return batch


class Examples:
    """Batches of one layout, corpus, split, seed and order; a batch depends on these and the step alone.

    Held-out examples are of at most `HELD_OUT` parts, in one lane and one window.
    """

    def __init__(self, layout: Layout, corpus: Corpus, split: str, batch_size: int, seed: int, order: Order):
        layout.check(corpus)
        order.check("batch size", batch_size)
        self.layout, self.corpus, self.split = layout, corpus, split
        self.batch_size, self.seed, self.order = batch_size, seed, order
        self.rows = batch_size // order.lanes  # of each lane
        self.parts = corpus.parts
        if split != "train":
            self.parts = _spread_out(self.parts, split)
            self.order = Order(lanes=1, window=max(len(self.parts), 1))
            self.rows = batch_size
        self._plans, self._deals = _Kept(), {}
        self._lock = threading.Lock()
        self._batches, self._read = 0, {}  # windows that batches are of: the last of these, counted

    @property
    def spec(self) -> dict[str, Feature]:
        """A batch's arrays, by name."""
        return self.layout.spec

    @property
    def corpora(self) -> tuple[Corpus, ...]:
        """What is read."""
        return (self.corpus,)

    @property
    def cells(self) -> int:
        """The most parts, each with rows of its own, that a batch is of."""
        return min(self.order.lanes * self.order.window, len(self.parts) + self.order.lanes - 1)

    @property
    def together(self) -> int:
        """How many rows, of several steps, are best built together."""
        return together(self.cells, self.layout.tokens)

    def batch(self, step: int, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Some rows (int64 [n], from batch_size on those of later steps) of a step's global batch: name -> array
        [n, ...]. Raises UserError as `check_size` does."""
        later, row = np.divmod(rows, self.batch_size)
        lane, row = np.divmod(row, self.rows)
        return self.at(lane, step + later, row)

    def at(self, lane: np.ndarray, step: np.ndarray, row: np.ndarray) -> dict[str, np.ndarray]:
        """Rows of lanes, as they are at steps, all int64 [n]: name -> array [n, ...]."""
        raise NotImplementedError

    def _windows(self, lane: int, epoch: int) -> list[Window]:
        """What a lane reads in an epoch; of two epochs in a row they are remembered."""
        if (lane, epoch) not in self._deals:
            near = {key: windows for key, windows in self._deals.items() if abs(key[1] - epoch) <= 1}
            windows = deal(self.seed, epoch, np.array(self.sizes), self.order, lane)
            self._deals = {**near, (lane, epoch): windows}  # replaced whole: other threads may be reading it
            return windows
        return self._deals[lane, epoch]

    def _enter(self, read: Sequence[tuple[int, int, int]]) -> None:
        """A batch is of these windows (lane, epoch, index): what a new one and the next one need is wanted, and what
        windows have that their lanes are through with is let go, a few batches later."""
        with self._lock:
            self._batches += 1
            new = [key for key in read if key not in self._read]
            self._read.update(dict.fromkeys(read, self._batches))
            newest = {lane: (epoch, index) for lane, epoch, index in sorted(self._read)}

            def past(lane, *window):
                return window < newest[lane]  # not by age alone: a rare source's lane has no row in most batches

            old = [key for key, last in self._read.items() if last < self._batches - KEPT and past(*key)]

            def parts_of(keys):
                return {part for lane, epoch, index in keys for part in self._parts_of(lane, epoch, index)}

            done = parts_of(old)
            for key in old:
                del self._read[key]
            done -= parts_of(self._read) if done else set()
        self._plans.drop([*old, *done])
        self._release(done)
        for lane, epoch, index in new if len(self.parts) > 1 else ():
            following = (epoch, index + 1) if index + 1 < len(self._windows(lane, epoch)) else (epoch + 1, 0)
            wanted = dict.fromkeys((*self._parts_of(lane, epoch, index), *self._parts_of(lane, *following)))
            self.corpus.want(self.split, [self.parts[part].index for part in wanted])

    def _parts_of(self, lane: int, epoch: int, index: int) -> list[int]:
        return self._windows(lane, epoch)[index].parts.tolist()

    def _release(self, parts: Iterable[int]) -> None:
        if parts := [self.parts[part].index for part in parts]:
            self.corpus.release(self.split, parts)

    def __getstate__(self):  # a worker process plans for itself
        return {**self.__dict__, "_plans": None, "_deals": {}, "_read": {}, "_lock": None}

    def __setstate__(self, state):
        self.__dict__.update(state)
        self._plans, self._lock = _Kept(), threading.Lock()


class Choice(NamedTuple):
    """Examples to be built. which: int64 [n], the plan of each; example: int64 [n], within it; keys: uint64 [n]."""

    plans: list[Any]
    which: np.ndarray
    example: np.ndarray
    keys: np.ndarray


class RowExamples(Examples):
    """Rows that stand alone: in an epoch every example comes once.

    Examples are counted endlessly, in each lane: count = step * rows + row; the epoch is count // size, and within it
    the lane walks through its stretch. An example's noise is keyed by (seed, epoch, its number in the split); of a
    layout with copies epochs that are so many apart have the same noise, in another order.
    """

    def __init__(self, layout: RowLayout, corpus, split, batch_size, seed, order=ONE_LANE, sizes=None):
        super().__init__(layout, corpus, split, batch_size, seed, order)
        self._sizes = None if sizes is None else tuple(sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Examples of each part. Counting them plans every part once, one at a time."""
        if self._sizes is None:
            one = len(self.parts) == 1  # its plan is kept
            self._sizes = (self._plan(0).number,) if one else tuple(map(self.count, range(len(self.parts))))
        return self._sizes

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
    def _bounds(self) -> np.ndarray:
        """int64 [lanes, 2]: where each lane's share of an epoch begins and ends."""
        return np.array([stretch(self.number, lane, self.order.lanes) for lane in range(self.order.lanes)])

    @property
    def number(self) -> int:
        """Examples per epoch."""
        return int(self._firsts[-1])

    def epochs(self, rows: int) -> float:
        """How often all examples come in so many rows."""
        return rows / self.number

    def check_size(self) -> None:
        """Raises UserError where a lane has no example."""
        if self.number < self.order.lanes:
            lanes = f" for {self.order.lanes} lanes; lower order.lanes or" if self.number else ";"
            empty = f"has {self.number} examples" if self.number else "is empty"
            raise UserError(f"split '{self.split}' of corpus {self.corpus.path} {empty}{lanes} prepare more text")

    def at(self, lane, step, row):
        return self._built(self.choose(lane, step * self.rows + row))

    def choose(self, lane: np.ndarray, count: np.ndarray) -> "Choice":
        """The examples of lanes at their counts, both int64 [n]."""
        self.check_size()
        if self.order.lanes == len(self.parts) == 1:
            epochs, which = distinct(count // self.number)
            inside = permute_each([(self.seed, epoch, self.number) for epoch in epochs], which, count % self.number)
            return self._choice(np.array(epochs)[which], np.zeros_like(count), inside)
        epoch, place = np.divmod(count, (self._bounds[:, 1] - self._bounds[:, 0])[lane])
        windows, which = self._windows_at(lane, epoch, place)
        of = lambda value: np.array([value(window) for _, window in windows])
        networks = [(window.key, epoch, window.size) for epoch, window in windows]
        inside = permute_each(networks, which, place - of(lambda window: window.start)[which])
        # Which piece of its window each is of: windows laid end to end, so that one search finds all
        pieces = np.concatenate([window.ends - window.begins for _, window in windows])
        ends = np.cumsum(pieces)
        inside += np.append(0, np.cumsum(of(lambda window: window.size)))[which]
        piece = np.searchsorted(ends, inside, "right")
        parts = np.concatenate([window.parts for _, window in windows])[piece]
        begins = np.concatenate([window.begins for _, window in windows])
        example = inside - (ends - pieces)[piece] + begins[piece]
        return self._choice(epoch, parts, example)

    def build(self, epoch: int | np.ndarray, example: np.ndarray) -> dict[str, np.ndarray]:
        """The examples (int64 [n], below `number`) as they look in an epoch (or one each): name -> array [n, ...]."""
        part = np.searchsorted(self._firsts, example, "right") - 1
        return self._built(self._choice(epoch, part, example - self._firsts[part]))

    def fixed(self, limit: int) -> Iterator[np.ndarray]:
        """The examples of each batch of a fixed set, at most `limit` in all, spread over the split: int64 [n]."""
        return spread(self.number, limit, self.batch_size)

    def _windows_at(self, lane, epoch, place):
        """The windows of rows, each with its epoch, and which each row's is: int64 [n]."""
        found, read, which = [], [], np.empty(len(place), np.int64)
        walks, walk = distinct(epoch * self.order.lanes + lane)
        for index, (of_epoch, of_lane) in enumerate(divmod(one, self.order.lanes) for one in walks):
            windows = self._windows(of_lane, of_epoch)
            here = np.flatnonzero(walk == index)
            number = np.searchsorted([window.start for window in windows], place[here], "right") - 1
            for one in distinct(number)[0]:
                which[here[number == one]] = len(found)
                found.append((of_epoch, windows[one]))
                read.append((of_lane, of_epoch, one))
        self._enter(read)
        return found, which

    def _choice(self, epoch, part, example):
        epoch = epoch % self.layout.copies if self.layout.copies else epoch
        if len(self.parts) == 1:
            return Choice([self._plan(0)], part, example, noise.key(self.seed, epoch, example))
        keys = noise.key(self.seed, epoch, self._firsts[part] + example)
        chosen, which = distinct(part)
        plans = [self._plan(index) for index in chosen] or [self._plan(0)]
        return Choice(plans, which, example, keys)

    def _built(self, choice):
        return self.layout.build(Chosen(choice.plans, choice.which, choice.example), choice.keys)

    def _plan(self, index):
        return self._plans.get(index, lambda: self._planned(index))

    def _planned(self, index):
        plan = self.layout.plan(self.parts[index], self.split, self.seed)
        if self._sizes is not None and plan.number != self._sizes[index]:
            raise UserError(
                f"part {index} of corpus {self.corpus.path} has {plan.number} examples, not {self._sizes[index]}: they "
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

    def __init__(self, layout: StreamLayout, corpus, split, batch_size, seed, order=ONE_LANE):
        super().__init__(layout, corpus, split, batch_size, seed, order)
        layout.check_rows(self.rows)
        self._first_steps = None
        self._epoch_steps: dict[int, list[int]] = {}  # of a lane, the steps before each epoch

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Tokens of each part as a stream, in which a document has one more, that ends it."""
        sizes = (part.sizes[self.split] for part in self.parts)
        return tuple(of["tokens"] + of["documents"] for of in sizes)

    @functools.cached_property
    def _documents(self) -> int:
        return sum(part.sizes[self.split]["documents"] for part in self.parts)

    @property
    def number(self) -> int:
        """Examples in the first epoch's streams; the last of each may be shorter."""
        lanes = range(self.order.lanes)
        return sum(self.layout.number(window.size) for lane in lanes for window in self._windows(lane, 0))

    @property
    def steps(self) -> int:
        """Steps of the first epoch; lanes may have a few more or fewer, in other epochs too."""
        if self._first_steps is None:
            self._first_steps = int(min(self._steps(self._windows(lane, 0))[-1] for lane in range(self.order.lanes)))
        return self._first_steps

    def epochs(self, rows: int) -> float:
        """How often the first epoch's steps come in so many rows."""
        return rows / (self.steps * self.rows * self.order.lanes)

    def check_size(self) -> None:
        """Raises UserError where the split is too small for a step."""
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
        built, read = [], []
        for of_lane in distinct(lane)[0]:
            in_lane = np.flatnonzero(lane == of_lane)
            epoch, place = self._epochs(of_lane, step[in_lane])
            for of_epoch in distinct(epoch)[0]:
                windows = self._windows(of_lane, of_epoch)
                begins = self._steps(windows)
                number = np.searchsorted(begins, place, "right") - 1
                for index in distinct(number[epoch == of_epoch])[0]:
                    read.append((of_lane, of_epoch, index))
                    here = np.flatnonzero((epoch == of_epoch) & (number == index))
                    rows = in_lane[here]
                    arrays = self._built(of_lane, of_epoch, index, place[here] - begins[index], row[rows])
                    built.append((rows, arrays))
        self._enter(read)
        return built

    def build(self, epoch: int, example: np.ndarray) -> dict[str, np.ndarray]:
        """Examples (int64 [n]) of the first lane's first window as they look in an epoch: name -> array [n, ...]."""
        return self._build(0, epoch, 0, example)

    def fixed(self, limit: int) -> Iterator[np.ndarray]:
        """The examples of each batch of a fixed set, at most `limit` in all, rows continuing each other: int64 [n]."""
        return self.layout.fixed(sum(self.sizes), limit, self.batch_size)

    def _steps(self, windows):
        """The steps before each window, and of all: int64 [windows + 1]."""
        return np.cumsum([0, *(self.layout.steps(window.size, self.rows) for window in windows)])

    def _epochs(self, lane, step):
        """The epochs that steps (int64 [n]) of a lane are in, and their places there: int64 [n] each."""
        if self.order.lanes == 1 and len(self.parts) <= self.order.window:  # all epochs are alike
            return np.divmod(step, self.steps)
        begun = self._epoch_steps.get(lane, [0])
        while begun[-1] <= step.max():
            begun = [*begun, begun[-1] + int(self._steps(self._windows(lane, len(begun) - 1))[-1])]
        self._epoch_steps[lane] = begun  # replaced whole: other threads may be reading it
        epoch = np.searchsorted(begun, step, "right") - 1
        return epoch, step - np.array(begun)[epoch]

    def _built(self, lane, epoch, index, step, row):
        size = self._windows(lane, epoch)[index].size
        return self._build(lane, epoch, index, self.layout.example(size, self.rows, row, step))

    def _build(self, lane, epoch, index, example):
        window = self._windows(lane, epoch)[index]
        keys = noise.key(window.key, epoch, example)
        return self.layout.build(self._plan(lane, epoch, index), example, keys)

    def _plan(self, lane, epoch, index):
        """A window's stream."""
        window = self._windows(lane, epoch)[index]
        pieces = zip(window.parts.tolist(), window.begins.tolist(), window.ends.tolist(), strict=True)
        # Documents of windows that follow each other have other numbers; one that a lane begins inside of counts twice
        documents = self._documents + self.order.lanes - 1
        before = (epoch * -(-len(self.parts) // self.order.window) + index) * documents

        def make():
            found = [Piece(self.parts[part], begin, end) for part, begin, end in pieces]
            return self.layout.plan(found, self.split, window.key, epoch, before)

        return self._plans.get((lane, epoch, index), make)


class _Kept:
    """Plans, each made once, safe from several threads."""

    def __init__(self):
        self._lock, self._plans = threading.Lock(), {}

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The plan of a key; what has to be made holds up nobody who asks for another."""
        with self._lock:
            plan = self._plans.setdefault(key, _Plan())
        with plan.lock:
            if plan.made is None:
                plan.made = make()
            return plan.made

    def drop(self, keys: Iterable[Hashable]) -> None:
        """Forget plans."""
        with self._lock:
            for key in keys:
                self._plans.pop(key, None)


class _Plan:
    """A place for a plan."""

    def __init__(self):
        self.lock, self.made = threading.Lock(), None


def _spread_out(parts, split):
    """At most `HELD_OUT` of the parts that have something of a split, evenly spaced."""
    full = [part for part in parts if part.sizes[split]["tokens"]] or list(parts[:1])
    count = min(HELD_OUT, len(full))
    return tuple(full[index * len(full) // count] for index in range(count))
