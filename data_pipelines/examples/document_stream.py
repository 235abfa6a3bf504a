"""The documents of some parts as one long stream, in a new order every epoch, which is read at any place by index."""

from collections.abc import Sequence

import numpy as np

from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.examples import chunks
from data_pipelines.examples.layout import Piece
from data_pipelines.order import permute
from data_pipelines.tokenizers.made import text_end
from data_pipelines.tokenizers.prefixes import role_of


class DocumentStream:
    """The documents of some pieces of parts, each followed by the `end_token`, in the order of a (key, epoch).

    A document is cut where a piece begins or ends inside it. longest: longer sentences count as several; None if
    sentences are not needed, then a document counts as one. first: the number of the first document. prefixes: int32
    [documents], a token to put before each document; requires a single piece that is a whole part.

    Attributes: `total` (tokens of the stream, end tokens included), `sentences` (int64 [sentences + 1], where sentences
    begin in the stream, then the total), `prefixes` (as given, in the stream's order).

    Memory: 19 bytes per document; with sentences 8 more, and 8 per sentence.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        split: str,
        key: int,
        epoch: int,
        longest: int | None = None,
        first: int = 0,
        prefixes: np.ndarray | None = None,
    ):
        self.split, self.first, self._parts = split, first, [piece.part for piece in pieces]
        corpus = self._parts[0].corpus
        self.special, self.end = corpus.special, end_token(corpus)
        found = [_documents(piece, split) for piece in pieces]
        part = np.repeat(np.arange(len(found)), [len(starts) for starts, *_ in found])
        order = permute(key, epoch, len(part), np.arange(len(part)))
        starts, sizes, ended = (np.concatenate(arrays)[order] for arrays in zip(*found, strict=True))
        self._part, self._offsets, self._ended = part[order].astype(np.uint16), starts, ended
        self.prefixes = None if prefixes is None else prefixes[order]
        # Where each document begins in the stream, then the total
        self._starts = np.append(0, np.cumsum(sizes + (prefixes is not None)))
        self.total = int(self._starts[-1])
        if longest:
            self._count_sentences(longest)

    def read(self, start: np.ndarray, size: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Read stretches of the stream: one after the other, tokens int32 [sum of sizes], and each token's document's
        place in the order, int64. start, size: int64 [stretches], within the stream, at least one token each."""
        starts, end = self._starts, start + size
        first = np.searchsorted(starts, start, "right") - 1
        count = np.searchsorted(starts, end, "left") - first
        stretch, rank = chunks.ranks(count)  # of each run, a document's share of a stretch
        place = first[stretch] + rank
        begins = np.maximum(starts[place], start[stretch])
        ends = np.minimum(starts[place + 1], end[stretch])
        lengths = ends - begins
        after = np.cumsum(lengths)  # where each run ends in what is returned
        offsets = self._offsets[place] + begins - starts[place] - (self.prefixes is not None)
        tokens = self._tokens(place, offsets, lengths, after)
        if self.prefixes is not None:
            whole = begins == starts[place]
            tokens[(after - lengths)[whole]] = self.prefixes[place[whole]]
        tokens[after[(ends == starts[place + 1]) & self._ended[place]] - 1] = self.end
        return tokens, np.repeat(place, lengths)

    def rows(self, example: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Cut the stream every `length` tokens. Returns, for examples (int64 [n]), their tokens and the one after them,
        int32 [n, length + 1], and their documents' places in the order, int64; past the end 0 and -1."""
        start = example * length
        size = np.minimum(length + 1, self.total - start)
        there = np.arange(length + 1) < size[:, None]
        tokens, place = np.zeros(there.shape, np.int32), np.full(there.shape, -1)
        tokens[there], place[there] = self.read(start, size)
        return tokens, place

    def begins(self, at: np.ndarray) -> np.ndarray:
        """Return whether a document begins at places (int64 [n], below the total) of the stream: bool [n]."""
        return self._starts[np.searchsorted(self._starts, at, "right") - 1] == at

    def _tokens(self, place, offsets, lengths, after):
        """Return the tokens of runs, each from an offset in the part of its document, one after the other: int32."""
        index = np.arange(after[-1]) + np.repeat(offsets - after + lengths, lengths)
        if len(self._parts) == 1:
            return self._parts[0].read(self.split, "tokens", index, 1)[:, 0].astype(np.int32)
        tokens, part = np.empty(len(index), np.int32), np.repeat(self._part[place], lengths)
        for number, one in enumerate(self._parts):
            mine = np.flatnonzero(part == number)
            tokens[mine] = one.read(self.split, "tokens", index[mine], 1)[:, 0]
        return tokens

    def _count_sentences(self, longest):
        """Where the sentences of all documents begin, in their order, by place in the stream."""
        units = [chunks.units(part.sentences(self.split), longest, -(-longest // 2)) for part in self._parts]
        sizes = np.diff(self._starts) - self._ended  # without end tokens
        found = np.empty(len(sizes), np.int64)
        first = np.empty(len(sizes), np.int64)
        for part, of_part in enumerate(units):
            mine = self._part == part
            begin = self._offsets[mine]
            first[mine] = np.searchsorted(of_part, begin, "right")
            # A sentence begins with the document, or with what is left of it
            found[mine] = np.maximum(np.searchsorted(of_part, begin + sizes[mine]) - first[mine] + 1, 1)
        document, rank = chunks.ranks(found)
        places = np.repeat(self._starts[:-1], found)
        later = rank > 0
        for part, of_part in enumerate(units):
            mine = later & (self._part[document] == part)
            at = document[mine]
            places[mine] += of_part[first[at] + rank[mine] - 1] - self._offsets[at]
        self.sentences = np.append(places, self.total)


def whole(part, split: str) -> Piece:
    """Return the piece that is a whole part."""
    return Piece(part, 0, int(part.sentences(split)[-1]) + len(part.documents(split)) - 1)


def _documents(piece, split):
    """Return, for the documents in a piece, where each begins in the part's tokens, its size with its end token, and
    whether the piece has that token: int64, int64 and bool [documents]."""
    part = piece.part
    offsets = chunks.document_starts(part, split)
    starts = offsets + np.arange(len(offsets))  # counting end tokens
    first = np.searchsorted(starts, piece.begin, "right") - 1
    last = np.searchsorted(starts, piece.end, "left")
    begins = np.maximum(starts[first:last], piece.begin)
    ends = np.minimum(starts[first + 1 : last + 1], piece.end)
    return offsets[first:last] + begins - starts[first:last], ends - begins, ends == starts[first + 1 : last + 1]


def prefix_tokens(part, split: str) -> np.ndarray | None:
    """Return the token of the value before each document of a part: int32 [documents]; None without such a value."""
    corpus = part.corpus
    name = prefix_field(corpus)
    if name is None:
        return None
    tokens = [corpus.special[role_of(name, value)] for value in corpus.fields[name].values]
    return np.array(tokens, np.int32)[part.column(split, name)]


def prefix_field(corpus: Corpus) -> str | None:
    """Return the name of the value that stands before each document; None if the corpus has no such value."""
    return next((name for name, field in corpus.fields.items() if field.prefix), None)


def end_token(corpus: Corpus) -> int:
    """Return the token that ends a document: the special token 'eod', else 'sep'. Raises UserError without either."""
    if (end := text_end(corpus.special)) is not None:
        return end
    raise UserError(f"corpus {corpus.path} has no eod or sep token to end documents; prepare it with --end-of-text")


def counts_with_ends(corpus: Corpus, more: Sequence[int] = (), codes: bool = False) -> np.ndarray:
    """Return how often each token stands in the train split, f64 [vocab], counting tokens that the corpus does not
    store: the end token and each token of `more` once per document and, with `codes`, the control codes."""
    counts = corpus.token_counts().astype(np.float64)
    for token in (end_token(corpus), *more):
        counts[token] += corpus.size("train")["documents"]
    for part in corpus.parts if codes else ():
        found = prefix_tokens(part, "train")
        if found is not None:
            counts += np.bincount(found, minlength=len(counts))
    return counts
