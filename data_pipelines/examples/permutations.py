"""Rows for permutation language modelling: [reused part, A, SEP, B, SEP, CLS], with a factorisation order for each.

XLNet's data (Yang et al. 2019, sections 2.2, 2.3, 3.1 and the published `data_utils.py`), planned by index. The reused
part continues the row's stream; A continues it to the end of a sentence; B follows A or, half of the time, begins at a
sentence elsewhere. The row is always full: B gets the room that A leaves, and is cut where the row ends (XLNet drew B
first and cut the end of the longer of the two).

The factorisation order is never written out. A query at i sees the key at j if ranks[j] < thresholds[i]; in the content
stream every position sees itself too. Tokens that are not predicted come first in the order and see themselves.
"""

from dataclasses import dataclass

import numpy as np

from data_pipelines import noise
from data_pipelines.errors import UserError
from data_pipelines.examples import chunks
from data_pipelines.examples.document_stream import DocumentStream, end_token
from data_pipelines.examples.layout import Feature, StreamLayout

TOKENS, SPANS, ORDER, SEGMENTS = range(4)  # streams of a row's draws; changing a number changes the rows
SPLIT, COIN, ELSEWHERE = range(3)  # draws per row, in the stream SEGMENTS
LONGEST = 5  # most tokens of a span; n tokens have a probability proportional to 1 / n
SPECIALS = 3  # SEP, SEP, CLS
SLOT = np.uint64(20)  # bits for a permuted token's number


@dataclass(frozen=True)
class Permuting:
    """How rows are permuted and predicted. Raises UserError for a value out of range."""

    reuse_len: int = 256
    """Leading tokens of a row, after which the next step's row begins; 0: none, and streams advance by whole rows."""
    k: int = 6  # one in k positions is predicted
    spans: bool = True  # predict runs of 1 to 5 tokens, each in a context of other tokens; else single tokens
    context: int = 6  # other tokens in a span's context, for each token of the span
    perm_size: int = 256  # positions that are permuted together
    bidirectional: bool = True  # the second half of the rows runs backwards through the text

    def __post_init__(self):
        lowest = {"reuse_len": 0, "k": 1, "context": 1, "perm_size": 1}
        for name, least in lowest.items():
            value = getattr(self, name)
            if not least <= value < 2**31:
                raise UserError(f"objective.permuting.{name}={value}: must be at least {least} and below 2**31")


def predictions(length: int, permuting: Permuting) -> int:
    """Return the prediction slots per row."""
    return -(-length // permuting.k)


@dataclass(frozen=True)
class PermutedSpans(StreamLayout):
    """Rows, each of which continues the same row of the step before.

    A stream is cut into pieces of reuse_len tokens. Each row has an equal run of them, and each piece of its run begins
    one of its steps; the last pieces of the stream are dropped. With bidirectional data each half of the rows has the
    whole stream, the second half in reverse.

    A batch holds tokens; types (0 in the reused part and A SEP, 1 in B SEP, 2 at CLS); segments (1); ranks and
    thresholds (see the module); prediction_positions (ascending, 0 where unused), prediction_targets and
    prediction_weights; reversed (1 if the row runs backwards). CLS and the two SEP are never predicted; end tokens are.

    Raises UserError if the parts of a row do not fit its length.
    """

    permuting: Permuting = Permuting()  # XLNet's

    def __post_init__(self):
        if self.length < self.permuting.reuse_len + SPECIALS + 4:
            raise UserError(
                f"length {self.length} leaves no room for A and B after permuting reuse_len "
                f"{self.permuting.reuse_len} and {SPECIALS} special tokens; use at most reuse_len {self.length // 2}"
            )

    @property
    def spec(self) -> dict[str, Feature]:
        slots = predictions(self.length, self.permuting)
        whole = dict.fromkeys(("tokens", "types", "segments", "ranks", "thresholds"), Feature((self.length,)))
        predicted = dict.fromkeys(("prediction_positions", "prediction_targets"), Feature((slots,)))
        return whole | predicted | {"prediction_weights": Feature((slots,), np.float32), "reversed": Feature(())}

    @property
    def _room(self):
        return self.length - self.permuting.reuse_len - SPECIALS

    @property
    def _advance(self):
        return self.permuting.reuse_len or self._room

    @property
    def multiple(self) -> int:
        """A row for each direction."""
        return 1 + self.permuting.bidirectional

    def check(self, corpus):
        corpus.require("cls", "sep")
        end_token(corpus)

    def _pieces(self, total):
        return max((total - self.permuting.reuse_len - self._room) // self._advance + 1, 0)

    def number(self, total: int) -> int:
        """Those that run forwards, then as many that run backwards if bidirectional."""
        return self._pieces(total) * self.multiple

    def plan(self, pieces, split: str, key: int, epoch: int, first: int = 0) -> DocumentStream:
        # A sentence must end within every row's room, and a document's last one has an end token too
        return DocumentStream(pieces, split, key, epoch, longest=self._room - 2)

    def build(self, plan: DocumentStream, example: np.ndarray, keys: np.ndarray) -> dict[str, np.ndarray]:
        backwards, piece = np.divmod(example, self._pieces(plan.total))
        backwards = backwards.astype(bool)
        begin = piece * self._advance
        draws = noise.bits(keys, noise.counters(SEGMENTS, 3))
        size_a, begin_b = self._segments(plan, draws, begin, backwards)
        tokens = self._tokens(plan, begin, size_a, begin_b, backwards)
        separator = self.permuting.reuse_len + size_a.astype(np.int32)[:, None]
        types = (np.arange(self.length, dtype=np.int32) > separator).astype(np.int32)
        types[:, -1] = 2
        positions = self._targets(keys, separator)
        ranks, thresholds = self._ordered(keys, positions, separator)
        unused = predictions(self.length, self.permuting) - positions.shape[1]
        targets = np.take_along_axis(tokens, positions, axis=1)
        padded = lambda array: np.pad(array, ((0, 0), (0, unused)))
        return {
            "tokens": tokens,
            "types": types,
            "segments": np.ones_like(tokens),
            "ranks": ranks,
            "thresholds": thresholds,
            "prediction_positions": padded(positions),
            "prediction_targets": padded(targets),
            "prediction_weights": padded(np.ones(positions.shape, np.float32)),
            "reversed": backwards.astype(np.int32),
        }

    def _segments(self, stream, draws, begin, backwards):
        """Return A's size and where B begins, int64 [n] each. begin: of the reused part; backwards, from the end."""
        room = self._room
        begin_a = begin + self.permuting.reuse_len
        mirrored = lambda place: np.where(backwards, stream.total - place, place)
        # A ends where a sentence begins, at least one token after A begins and before the room ends
        lowest = np.where(backwards, stream.total - begin_a - room, begin_a) + 1
        first = np.searchsorted(stream.sentences, lowest)
        number = np.searchsorted(stream.sentences, lowest + room - 1) - first
        end_a = mirrored(stream.sentences[first + noise.below(draws[:, SPLIT], number)])
        size_b = room - end_a + begin_a
        # A B from elsewhere begins where a sentence does (or, backwards, ends) and does not reach past the stream
        before = np.searchsorted(stream.sentences, np.where(backwards, size_b, stream.total - size_b + 1))
        first = np.where(backwards, before, 0)
        number = np.where(backwards, len(stream.sentences) - before, before)
        other = stream.sentences[first + noise.below(draws[:, ELSEWHERE], number)]
        return end_a - begin_a, np.where(draws[:, COIN] < 1 << 31, end_a, mirrored(other))

    def _tokens(self, stream, begin, size_a, begin_b, backwards):
        """Return int32 [n, length]. A row that runs backwards is read forwards, mirrored, and turned."""
        size = self.permuting.reuse_len + size_a
        start = np.stack([begin, begin_b], 1)
        sizes = np.stack([size, self._room - size_a], 1)
        start[backwards] = (stream.total - start - sizes)[backwards, ::-1]
        sizes[backwards] = sizes[backwards, ::-1]
        text, _ = stream.read(start.ravel(), sizes.ravel())
        tokens = np.empty((len(begin), self.length), np.int32)
        row = np.arange(len(begin))
        is_text = np.ones(tokens.shape, bool)
        is_text[row, size] = is_text[:, -2] = is_text[:, -1] = False
        is_text[backwards] = is_text[backwards, ::-1]
        tokens[is_text] = text
        tokens[backwards] = tokens[backwards, ::-1]
        tokens[row, size] = tokens[:, -2] = stream.special["sep"]
        tokens[:, -1] = stream.special["cls"]
        return tokens

    def _targets(self, keys, separator):
        """Return the positions to predict, ascending, none of them special: int32 [n, predicted]."""
        reuse, room = self.permuting.reuse_len, self._room
        wanted = predictions(self.length, self.permuting)
        of_reused = -(-wanted * reuse // self.length)
        reused = _chosen(self.permuting, keys, 0, reuse, min(of_reused, reuse))
        rest = _chosen(self.permuting, keys, reuse, room, min(wanted - of_reused, room))
        return np.concatenate([reused, rest + (rest >= separator)], axis=1)

    def _ordered(self, keys, positions, separator):
        """Return ranks and thresholds for predicting at `positions`. SEP and CLS have a rank, but see themselves."""
        reuse, size = self.permuting.reuse_len, self.permuting.perm_size
        special = np.broadcast_to([self.length - 2, self.length - 1], (len(keys), 2))
        permuted = np.concatenate([positions, separator, special], axis=1)
        block = np.where(permuted < reuse, permuted // size, -(-reuse // size) + (permuted - reuse) // size)
        slot = np.arange(permuted.shape[1])
        drawn = noise.bits(keys, noise.counters(ORDER, len(slot))) >> 8
        order = (block.astype(np.uint64) << SLOT + 24) | (drawn.astype(np.uint64) << SLOT) | slot.astype(np.uint64)
        return visibility(order, permuted, slot < positions.shape[1], reuse, self.length)


def visibility(
    order: np.ndarray, permuted: np.ndarray, predicted: np.ndarray, reuse: int, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return ranks and thresholds, both int32 [n, length], of a factorisation order.

    permuted: int [n, m], the positions that the order permutes; the others come before them all and see each other and
    themselves. order: [n, m], the sort keys of these positions, those of the reused part before the rest. predicted:
    bool [m], positions that do not see themselves. reuse: positions below it see nothing of the rest.
    """
    rows = len(permuted)
    row = np.arange(rows)[:, None]
    number = np.empty(permuted.shape, np.int32)
    number[row, np.argsort(order, axis=1)] = np.arange(permuted.shape[1], dtype=np.int32)
    rest = permuted >= reuse
    ranks = np.zeros((rows, length), np.int32)
    ranks[:, reuse:] = permuted.shape[1] - np.count_nonzero(rest, axis=1)[:, None] + 1
    ranks[row, permuted] = number + 1 + rest
    thresholds = ranks + 1
    thresholds[row, permuted] -= predicted
    return ranks, thresholds


def _chosen(permuting, keys, begin, size, wanted):
    """Choose `wanted` of the positions begin .. begin + size - 1 to predict: int32 [n, wanted], ascending. Positions in
    spans come first, then single ones until there are enough."""
    bits = (size - 1).bit_length() if size else 0
    low = np.uint32((1 << bits) - 1)
    position = np.arange(size, dtype=np.uint32)
    order = noise.bits(keys, noise.counters(TOKENS, size) + np.uint32(begin))
    order &= ~low
    order |= position
    if permuting.spans:
        row, taken = _spans(permuting.context, keys, begin, size, wanted)
        order[row, taken] = taken  # before all others
    order.sort(axis=1)
    positions = (order[:, :wanted] & low).astype(np.int32)
    positions.sort(axis=1)
    return positions + begin


def _spans(context, keys, begin, size, wanted):
    """Return positions below `size` in spans, at most `wanted` per row: (row, position), int64 [all]."""
    most = min(wanted, size // (1 + context) + 1)
    counters = noise.counters(SPANS, 2 * most) + np.uint32(2 * begin)
    draws = noise.bits(keys, counters).reshape(len(keys), 2, most)
    chances = np.cumsum(1 / np.arange(1, LONGEST + 1))
    length = 1 + np.searchsorted(chances[:-1] / chances[-1] * 2**32, draws[:, 0].astype(np.float64), "right")
    before = np.cumsum(length, axis=1) - length
    length = np.minimum(length, np.maximum(wanted - before, 0))
    first = before * (1 + context) + noise.below(draws[:, 1], np.maximum(length * context, 1))
    row, span = np.nonzero((length > 0) & (first + length <= size))
    length, first = length[row, span], first[row, span]
    which, rank = chunks.ranks(length)
    return row[which], first[which] + rank
