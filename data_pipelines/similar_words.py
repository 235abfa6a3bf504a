"""Words that may stand for a word, for masks that look like text (MacBERT: Cui et al. 2020, arXiv:2004.13922, section
3.2). They come from a list of synonyms or from word vectors, and have as many tokens as the word.

A corpus has them as three tables: hashes of its words' tokens, sizes, and the tokens of what may stand for them.
"""

import hashlib
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import BinaryIO, NamedTuple

import numpy as np

from data_pipelines import cloud, noise
from data_pipelines.errors import UserError
from data_pipelines.examples.chunks import ranks
from data_pipelines.formats.problems import printable
from data_pipelines.text.encoding import BYTES, Encoder

TABLES = WORDS, SIZES, CHOICES = "similar_words", "similar_sizes", "similar_choices"  # names of the tables
CODES = "=#@"  # ends of the codes in front of Cilin's lines
MOST = 100_000  # words of vectors, whose files begin with the most frequent ones
NEAREST = 10  # words that a vector's word gets
LONGEST = 16  # tokens of a word
WIDEST = 256  # bytes of a word of vectors, on average
HEAD = re.compile(rb"\s*[1-9]\d{0,8}\s+[1-9]\d{0,3}\s*")  # of vectors: how many, and of how many numbers
GLOVE = re.compile(rb"\S+( -?\d*\.\d+(e-?\d+)?){2,}\s*")  # a line of vectors that have no such line before them
FACTOR = 0x9E3779B97F4A7C15  # of the hash, a polynomial modulo 2**64


class SimilarWords:
    """words: uint64 [words], hashes of their tokens, ascending.   sizes: int32 [words, 3]: a word's tokens, the number
    of its similar words, and where the tokens of these begin in choices (int32, flat)."""

    def __init__(self, words: np.ndarray, sizes: np.ndarray, choices: np.ndarray):
        # With a word of no tokens at the end, so that a search ends there
        self.words, self.sizes = np.append(words, np.uint64(2**64 - 1)), np.pad(sizes, ((0, 1), (0, 0)))
        self.choices = choices
        bits = len(words).bit_length() + 1
        self.shift = np.uint64(64 - bits)
        number = np.bincount((words >> self.shift).astype(np.int64), minlength=2**bits)
        self.first = np.cumsum(number) - number  # of the hashes that begin with so many bits: where they are in words

    def of(self, tokens: np.ndarray, starts: np.ndarray, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Choose a similar word for each word.

        tokens: int32, those of all words, one word after the other.   starts: int64 [n], where each word begins. draws:
        uint32 [n].   Returns (tokens of the similar words, bool: whether a token's word has any; else its own stay).
        """
        sizes = np.diff(starts, append=len(tokens))
        hashes = hashed(tokens, starts, sizes)
        at = self.first[hashes >> self.shift]
        behind = np.flatnonzero(self.words[at] < hashes)
        while len(behind):
            at[behind] += 1
            behind = behind[self.words[at[behind]] < hashes[behind]]
        found = np.flatnonzero(self.words[at] == hashes)
        length, number, begin = self.sizes.take(at[found], axis=0).T
        begin = begin + noise.below(draws[found], number) * length
        right = length == sizes[found]
        word, rank = ranks(length[right])
        places = starts[found[right]][word] + rank
        similar, known = tokens.copy(), np.zeros(len(tokens), bool)
        similar[places], known[places] = self.choices[begin[right][word] + rank], True
        return similar, known


def hashed(tokens: np.ndarray, starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return a hash of each word's tokens, uint64 [n].   sizes: of the words; the others as in `SimilarWords.of`."""
    powers = np.cumprod(np.full(max(sizes.max(initial=0), 1), FACTOR, np.uint64))
    column = np.arange(len(tokens)) - np.repeat(starts, sizes)
    return np.add.reduceat((tokens.astype(np.uint64) + np.uint64(1)) * powers.take(column), starts)


class Alike(NamedTuple):
    """Contents of a file.   groups: numbers of words that are alike; none with vectors f32 [words, size]."""

    words: list[str]
    groups: list[list[int]]
    vectors: np.ndarray | None


@contextmanager
def _opened(path: str, option: str = "--similar-words") -> Iterator[BinaryIO]:
    try:
        with cloud.place(path).open("rb") as file:
            yield file
    except OSError as error:
        said = f"cannot be read ({error.strerror or error}); give a list of synonyms or vectors"
        raise UserError(f"{option} {printable(path)}: {said}") from error


def digest(path: str) -> str:
    """Return the sha256 of a file. Raises UserError if it cannot be read."""
    with _opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read(path: str, option: str = "--similar-words") -> Alike:
    """Read a list of synonyms (a line for each group, words divided by white space, behind Cilin's code or not) or word
    vectors in word2vec's format, text or binary. Raises UserError, which names the option, for another file."""
    with _opened(path, option) as file:
        option, head = f"{option} {printable(path)}", file.readline()
        if HEAD.fullmatch(head):
            return _vectors(option, file, *map(int, head.split()))
        if GLOVE.fullmatch(head):
            cure = "put a line before it, as word2vec has: how many vectors there are, and of how many numbers"
            raise UserError(f"{option}: its first line is a vector; {cure}")
        data = head + file.read()
    try:
        lines = data.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UserError(f"{option}: line {line} is not UTF-8; convert the file") from error
    number: dict[str, int] = defaultdict(itertools.count().__next__)
    groups = []
    for fields in map(str.split, lines):
        words = fields[1:] if fields and fields[0].endswith(tuple(CODES)) else fields
        groups.append(list(dict.fromkeys(number[word] for word in words)))
    groups = [group for group in groups if len(group) > 1]
    if not groups:
        raise UserError(f"{option}: no line has two words; give lines of words that are alike, divided by spaces")
    return Alike(list(number), groups, None)


def _vectors(option: str, file: BinaryIO, number: int, size: int) -> Alike:
    """Read the words and vectors behind the first line of a file in word2vec's format, which may have many GB."""
    number, words, vectors = min(number, MOST), [], []
    begin, line = file.tell(), file.readline()
    file.seek(begin)
    try:
        binary = not line.decode().strip().count(" ") >= size
    except UnicodeDecodeError:
        binary = True
    rows = _binary(file.read(number * (WIDEST + 4 * size)), size) if binary else _text(file, size)
    try:
        for word, vector in itertools.islice(rows, number):
            words.append(word)
            vectors.append(vector)
    except ValueError as error:
        at = len(words) + 1
        raise UserError(f"{option}: word {at} has no vector of {size} numbers; is the file whole?") from error
    if len(words) < number:
        raise UserError(f"{option}: has {len(words)} words, but its first line says {number}; is the file whole?")
    vectors = np.array(vectors, np.float32)
    if not np.isfinite(vectors).all():
        bad = int(np.flatnonzero(~np.isfinite(vectors).all(axis=1))[0])
        raise UserError(f"{option}: the vector of word {bad + 1} is not finite; leave it out")
    return Alike(words, [], vectors)


def _text(lines: Iterable[bytes], size: int) -> Iterator[tuple[str, np.ndarray]]:
    for line in lines:
        word, *numbers = line.decode(errors="replace").rstrip().rsplit(" ", size)
        if len(numbers) != size:
            raise ValueError
        yield word, np.array(numbers, np.float32)


def _binary(data: bytes, size: int) -> Iterator[tuple[str, np.ndarray]]:
    at, width = 0, 4 * size
    while at < len(data):
        space = data.index(b" ", at)
        word, at = data[at:space].decode(errors="replace").lstrip("\n"), space + 1 + width
        yield word, np.frombuffer(data[space + 1 : at], "<f4", size)


def usable(path: str, encoder: Encoder, unknown: int | None) -> tuple[list[list[int]], list, np.ndarray | None]:
    """Return groups of the words of a file that may stand for each other, by their numbers, all words' tokens, and
    their vectors. Raises UserError if no group has two words of as many tokens.   unknown: the token of no word."""
    alike = read(path)
    space = " " if encoder.runs is BYTES else ""  # the space before a word is part of its first token
    tokens = encoder.tokens([space + word for word in alike.words])
    kept = [0 < len(of) <= LONGEST and unknown not in of for of in tokens]
    first: dict[tuple, int] = {}  # words that have the same tokens are one
    number = [first.setdefault((*of.tolist(),), at) for at, of in enumerate(tokens)]
    if alike.vectors is None:
        groups = [[number[at] for at in group if kept[at]] for group in alike.groups]
    else:
        groups = [[at for at in first.values() if kept[at] and alike.vectors[at].any()]]  # zero has no direction
    if all(len({len(tokens[at]) for at in group}) == len({*group}) for group in groups):
        raise UserError(
            f"--similar-words {printable(path)}: no two of its {len(alike.words):,} words have the same number of "
            "tokens of this tokenizer; give words of the corpus's language"
        )
    return groups, tokens, alike.vectors


def made(path: str, encoder: Encoder, unknown: int | None) -> dict[str, np.ndarray]:
    """Return the tables of a file's similar words with a corpus's tokens. Raises UserError as `usable` does."""
    groups, tokens, vectors = usable(path, encoder, unknown)
    if vectors is None:
        similar = _of_groups(groups, tokens)
    else:
        similar = _nearest(groups[0], vectors, np.array([len(tokens[at]) for at in groups[0]]))
    words = list(similar)
    length, number = (np.array([len(each[at]) for at in words]) for each in (tokens, similar))
    flat = np.concatenate([tokens[at] for at in words]).astype(np.int32)
    hashes = hashed(flat, np.cumsum(length) - length, length)
    choices = np.concatenate([tokens[other] for at in words for other in similar[at]]).astype(np.int32)
    order = np.argsort(hashes, kind="stable")
    sizes = np.stack([length, number, np.cumsum(length * number) - length * number], axis=1)
    return dict(zip(TABLES, (hashes[order], sizes[order].astype(np.int32), choices), strict=True))


def _of_groups(groups: list[list[int]], tokens: list[np.ndarray]) -> dict[int, list[int]]:
    """Return word -> those of its groups with as many tokens."""
    similar: dict[int, dict[int, None]] = defaultdict(dict)
    for group in groups:
        for word, other in itertools.permutations(dict.fromkeys(group), 2):
            if len(tokens[word]) == len(tokens[other]):
                similar[word][other] = None
    return {word: [*others] for word, others in similar.items()}


def _nearest(words: list[int], vectors: np.ndarray, sizes: np.ndarray) -> dict[int, list[int]]:
    """Return word -> the nearest by cosine of those with as many tokens."""
    similar, vectors = {}, vectors[words]
    for size in np.unique(sizes):
        members = np.flatnonzero(sizes == size)
        found = nearest(vectors[members], np.arange(len(members)), min(NEAREST, len(members) - 1))
        similar |= {words[member]: [words[at] for at in members[near]] for member, near in found}
    return similar


def nearest(vectors: np.ndarray, which: np.ndarray, number: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (place in `which`, i64[number], ascending) of the vectors nearest by cosine to each of some others."""
    directions = vectors / np.maximum(np.abs(vectors).max(axis=1, keepdims=True, initial=0), 1e-30)  # none overflows
    directions /= np.maximum(np.linalg.norm(directions, axis=1, keepdims=True), 1e-12)
    for begin in range(0, len(which) if number else 0, 1024):
        part = which[begin : begin + 1024]
        cosines = directions[part] @ directions.T
        cosines[np.arange(len(part)), part] = -2.0  # not itself
        best = np.argpartition(cosines, -number, axis=1)[:, -number:]
        yield from enumerate(np.sort(best, axis=1), begin)
