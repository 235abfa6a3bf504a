"""Where words, phrases or entities begin in Chinese text, which is written without spaces, by a segmenter.

A segmenter sees runs of Chinese characters, within a sentence. So its words replace the single characters or the long
pieces that a tokenizer takes for words there, and text in other scripts keeps the tokenizer's words.
"""

import functools
import hashlib
import itertools
import re
from collections.abc import Callable, Sequence

import numpy as np

from data_pipelines import cloud
from data_pipelines.errors import UserError
from data_pipelines.store.fields import TAKEN, check_name
from data_pipelines.text.encoding import Encoded

# What BERT's tokenizer takes for Chinese characters
HAN = r"\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002a6df\U0002a700-\U0002ceaf\U0002f800-\U0002fa1f"
RUN = re.compile(f"[{HAN}]+(?:[·・‧•][{HAN}]+)*")  # with the dots of foreign names
FORWARD, BACKWARD, JIEBA, SPACES = "forward", "backward", "jieba", "spaces"
USE = f"use {FORWARD}:FILE, {BACKWARD}:FILE, {JIEBA} or {SPACES}"

Cut = Callable[[str], list[int]]  # a run -> the characters with which its words begin, ascending


def fields_of(units: Sequence[str]) -> dict[str, str]:
    """Return field -> segmenter of --units NAME=SEGMENTER. Raises UserError for a name that cannot be."""
    found = {}
    for unit in units:
        name, _, spec = unit.partition("=")
        field = f"{name}_starts"
        if not spec:
            raise UserError(f"--units {unit}: give NAME=SEGMENTER, as in word={FORWARD}:FILE")
        if field in found:
            raise UserError(f"--units {' '.join(units)}: {name} is given twice; give it once")
        try:
            found[check_name(field, TAKEN)] = spec
        except UserError as error:
            raise UserError(f"--units {unit}: {error}") from error
    return found


def digests(units: Sequence[str]) -> dict[str, str]:
    """Return segmenter of --units -> sha256 of its lexicon. Raises UserError if it is invalid or a package missing."""
    found = {}
    for unit, spec in zip(units, fields_of(units).values(), strict=True):
        try:
            digest = hashlib.sha256(_read(spec)).hexdigest() if ":" in spec else None
            segmenter(spec, digest)
        except UserError as error:
            raise UserError(f"--units {unit.partition('=')[0]}={error}") from error
        if digest:
            found[spec] = digest
    return found


@functools.lru_cache(maxsize=8)
def segmenter(spec: str, digest: str | None = None) -> Cut:
    """Return a segmenter. Raises UserError, whose message begins with `spec`, if there is none of that name, if its
    lexicon is invalid or has another `digest`, or without its package.

    forward, backward: maximum matching, which takes the longest word of the lexicon that begins (ends) where the word
    before (after) ends (begins), or else a character.   spaces: the text is segmented already.
    """
    if spec == SPACES:
        return lambda run: [0]
    if spec == JIEBA:
        return _jieba()
    if not spec.startswith((f"{FORWARD}:", f"{BACKWARD}:")):
        raise UserError(f"{spec}: there is no such segmenter; {USE}")
    content = _read(spec)
    if digest not in (None, hashlib.sha256(content).hexdigest()):
        raise UserError(f"{spec}: the file has changed since prepare began; restore it, or start over")
    words = _words(spec, content)
    if spec.startswith(FORWARD):
        return _matching(words)
    return _backward(_matching([word[::-1] for word in words]))


def _read(spec: str) -> bytes:
    file = spec.partition(":")[2]
    try:
        return cloud.place(file).read_bytes()
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"{spec}: the file cannot be read ({reason}); give a file with a word a line") from error


def _words(spec: str, content: bytes) -> list[str]:
    """Return the words of several Chinese characters in a lexicon. Further columns and other words are ignored."""
    try:
        lines = content.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"{spec}: the file is not UTF-8 (byte {error.start}); convert it to UTF-8") from error
    first = (line.split(maxsplit=1)[0] for line in lines if line.strip())
    words = [word for word in first if len(word) > 1 and RUN.fullmatch(word)]
    if not words:
        raise UserError(f"{spec}: the file has no word of two or more Chinese characters; give one word a line")
    return words


def _matching(lexicon: Sequence[str]) -> Cut:
    """Return forward maximum matching with these words of two or more characters."""
    words, lengths = frozenset(lexicon), {}
    for word in words:
        lengths.setdefault(word[:2], set()).add(len(word))
    longer = {begin: sorted(found - {2}, reverse=True) for begin, found in lengths.items() if max(found) > 2}

    def cut(run: str) -> list[int]:
        found, at = [], 0
        while at < len(run):
            found.append(at)
            begin = run[at : at + 2]
            for length in longer.get(begin, ()):
                if run[at : at + length] in words:
                    at += length
                    break
            else:
                at += 2 if begin in words else 1
        return found

    return cut


def _backward(mirrored: Cut) -> Cut:
    """Return the segmenter that reads from the right.   mirrored: the one of mirrored runs, with mirrored words."""
    return lambda run: [len(run) - end for end in reversed([*mirrored(run[::-1])[1:], len(run)])]


def _jieba() -> Cut:
    try:
        import jieba
    except ImportError as error:
        cure = "pip install -r requirements-jieba.txt"
        raise UserError(f"{JIEBA}: the package is not installed; {cure}") from error
    jieba.setLogLevel("ERROR")  # it reports that it reads its dictionary
    return lambda run: [0, *itertools.accumulate(map(len, jieba.cut(run)))][:-1]


def edges(text: str, sentences: np.ndarray, cut: Cut) -> np.ndarray:
    """Return the places at which a segmenter's words begin and its runs end: i64 [places, 2], the character, and 1 if a
    word begins there, else 0.   sentences: i64, where the text's sentences begin."""
    places, ends = [], []
    for first, last in itertools.pairwise([0, *sentences[1:].tolist(), len(text)]):
        for run in RUN.finditer(text, first, last):
            places += map(run.start().__add__, cut(run[0]))
            ends.append(len(places))
            places.append(run.end())
    found = np.ones((len(places), 2), np.int64)
    found[:, 0], found[ends, 1] = places, 0
    return found


def several(places: np.ndarray, begins: np.ndarray) -> int:
    """Return how many words of several characters there are between `edges`."""
    return int(np.count_nonzero(begins[:-1] & (np.diff(places) > 1)))


def mark(word_starts: np.ndarray, encoded: Encoded, begins: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return where words begin, bool [tokens]: as `word_starts` says outside a segmenter's words; in them the token
    with which a word begins does, and no other. A token of two words makes them one.

    encoded: of texts whose places are their `edges`, counts i64 [texts] of them.   begins: bool, as `edges` returns.
    """
    size = len(word_starts)
    end = np.cumsum(encoded.lengths)
    at, end = np.repeat(end - encoded.lengths, counts) + encoded.ended, np.repeat(end, counts)
    inside = np.zeros(size + 1, np.int32)
    first, last = at[:-1] + 1, (at + encoded.straddled)[1:]
    longer = begins[:-1] & (first < last)
    inside += np.bincount(first[longer], minlength=size + 1)
    inside -= np.bincount(last[longer], minlength=size + 1)
    marked = word_starts & (np.cumsum(inside)[:size] == 0)
    marked[at[~encoded.straddled & (at < end)]] = True
    return marked
