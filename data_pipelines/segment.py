"""python -m data_pipelines segment: divide text into words, and score a segmenter against text divided by hand."""

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from data_pipelines.durable import ours, put
from data_pipelines.errors import UserError
from data_pipelines.text.words import HAN, RUN, SPACES, Cut, segmenter

# Chinese characters, which a segmenter divides; letters and digits of other scripts; or any other character
PART = re.compile(rf"({RUN.pattern})|[^\W{HAN}]+|\S")


@dataclass(frozen=True)
class Segment:
    """Divide text into words, one sentence a line, and score the words against those of --gold."""

    words: str
    """The segmenter: forward:FILE, backward:FILE (maximum matching with a list of words), jieba; or spaces, if words
    are divided by white space in --text."""
    text: Path | None = None
    """The text. Default: that of --gold without its white space."""
    gold: Path | None = None
    """The same text with white space between words, to score against."""
    out: Path | None = None
    """Where to write the text with a space between words."""


def segment(options: Segment, console: Console) -> None:
    """Run the command. Raises UserError for texts that differ, with the line."""
    if options.text is None and (options.gold is None or options.words == SPACES):
        raise UserError(f"--words {options.words}: needs --text, the text to divide; give it")
    if options.gold is None and options.out is None:
        raise UserError("--gold and --out are both missing; give at least one")
    try:
        cut = segmenter(options.words)
    except UserError as error:
        raise UserError(f"--words {error}") from error
    gold = None if options.gold is None else [line.split() for line in _lines("--gold", options.gold)]
    lines = ["".join(words) for words in gold] if options.text is None else _lines("--text", options.text)
    found = [line.split() if options.words == SPACES else words_of(line, cut) for line in lines]
    if options.out is not None:
        _write(options.out, "".join(f"{' '.join(words)}\n" for words in found))
    if gold is not None:
        right, own, theirs = agreement(found, gold)
        precision, recall = right / max(own, 1), right / max(theirs, 1)
        f1 = 2 * right / max(own + theirs, 1)
        console.print(f"{len(gold):,} lines: {theirs:,} words, {own:,} found, {right:,} of them right")
        console.print(f"precision {precision:.4f}   recall {recall:.4f}   F1 {f1:.4f}")


def words_of(line: str, cut: Cut) -> list[str]:
    """Return the words of a line: the segmenter's of Chinese characters; letters and digits; or another character."""
    words = []
    for part in PART.finditer(line):
        starts = cut(part[0]) if part[1] else [0]
        words += [part[0][start:end] for start, end in itertools.pairwise([*starts, len(part[0])])]
    return words


def agreement(found: list[list[str]], gold: list[list[str]]) -> tuple[int, int, int]:
    """Return how many words agree in where they begin and end, how many are found, and how many there are. Raises
    UserError for a line that has other characters."""
    right = 0
    for number, (own, theirs) in enumerate(itertools.zip_longest(found, gold, fillvalue=()), 1):
        if "".join(own) != "".join(theirs):
            raise UserError(f"--gold: line {number} has other characters than that of --text; give the same text")
        right += len({*_spans(own)} & {*_spans(theirs)})
    return right, sum(map(len, found)), sum(map(len, gold))


def _spans(words: Iterable[str]) -> Iterable[tuple[int, int]]:
    return itertools.pairwise([0, *itertools.accumulate(map(len, words))])


def _write(out: Path, text: str) -> None:
    temporary = out.with_name(f".{out.name}.{ours()}")
    try:
        temporary.write_text(text, "utf-8")
        put(temporary, out)
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written ({error.strerror}); give another file") from error


def _lines(option: str, file: Path) -> list[str]:
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise UserError(f"{option} {file}: cannot be read ({reason}); give a text file") from error
    lines = text.replace("\r\n", "\n").split("\n")
    return lines[:-1] if lines[-1] == "" else lines
