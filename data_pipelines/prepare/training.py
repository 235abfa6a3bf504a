"""Train the tokenizer of `prepare`. Its sample has a smoothed share of each source, from places all over the source.
Words are counted where the text is read, and the counts are added in any order."""

import functools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import NamedTuple

import numpy as np

from data_pipelines.formats.problems import Problems
from data_pipelines.formats.source import SHARD, Range, Source
from data_pipelines.formats.table import read
from data_pipelines.prepare import partial
from data_pipelines.prepare.options import LARGEST_VOCABULARY, Prepare, sentinels
from data_pipelines.prepare.plan import Plan, size
from data_pipelines.processes import cores, over_parts
from data_pipelines.text.steps import run
from data_pipelines.tokenizers import words as whole_words
from data_pipelines.tokenizers.made import Made
from data_pipelines.tokenizers.prefixes import check_values
from data_pipelines.tokenizers.table import KINDS, learn
from data_pipelines.tokenizers.training import Training, by_frequency, characters_of, covering

SAMPLE = 32_000_000  # characters that a tokenizer is trained on, taken from the whole corpus
COUNTED = 1_000_000_000  # the same for a vocabulary of whole words; their counts take about 1 GB
EXPONENT = Decimal("0.7")  # as for mBERT and XLM-R: small languages get more than their share of the text
PLACES = 64  # least number of places to read in a source, if it has that many
MOST_UNKNOWN = 0.001  # share of unknown tokens above which the report warns
ALPHABETS = ("wordpiece", "character-bpe")  # kinds in which a quarter of the vocabulary may be characters


class Stretch(NamedTuple):
    """Neighbouring ranges of one source. characters: how many to read, from the first on; None: all."""

    ranges: tuple[Range, ...]
    characters: int | None


def trained(
    options: Prepare, plan: Plan, sources: tuple[Source, ...], runner_options: Sequence[str]
) -> tuple[Made, int | None]:
    """Train the tokenizer. Returns it, and the size of a vocabulary that would cover nearly all of its text."""
    chosen = stretches(plan, len(sources), COUNTED if KINDS[options.tokenizer].whole else SAMPLE)
    asked = Training(options.vocab_size, options.cased, options.keep_accents, options.specials, sentinels(options))
    count = functools.partial(_words, sources, options.steps, options.tokenizer, asked)
    words = _counted(count, chosen, options, runner_options)
    return learn(options.tokenizer, words, asked), enough(options.tokenizer, words)


def values(options: Prepare, plan: Plan, sources: tuple[Source, ...], runner_options: Sequence[str]) -> list[str]:
    """Return the values whose tokens stand before documents, sorted, from all text. Raises UserError for too many."""
    every = [Stretch(unit, None) for part in plan.parts for unit in part]
    count = functools.partial(_values, sources, options.prefix)
    return sorted(check_values(options.prefix, _counted(count, every, options, runner_options)))


def _counted(
    count: functools.partial, stretches: Sequence[Stretch], options: Prepare, runner_options: Sequence[str]
) -> Counter:
    """Return the counts over all stretches, made on all cores or by Beam's runner."""
    runner = None
    if options.runner:
        from data_pipelines.prepare import beam  # an optional package

        how = count.func.__name__, count.args, stretches, partial.versions(options.steps)
        place = options.out / partial.FOLDER / f"words-{partial.digest(repr(how))[:16]}.json"
        runner = beam.merged(place, options.runner, runner_options)
    return over_parts(count, sum_of, stretches, options.processes or cores(), runner)


def _words(
    sources: tuple[Source, ...], steps: tuple[str, ...], kind: str, asked: Training, stretch: Stretch
) -> Counter:
    return KINDS[kind].count(read_stretch(stretch, sources, steps), asked)


def _values(sources: tuple[Source, ...], name: str, stretch: Stretch) -> Counter:
    pieces = (document for part in stretch.ranges for document in read(sources[part.source], part, Problems()))
    return Counter(check_values(name, Counter(piece.values[name] for piece in pieces)))


def sum_of(counts: Iterable[Mapping[str, int]]) -> Counter:
    """Return the sum of counts."""
    sums = Counter()
    for count in counts:
        sums.update(count)
    return sums


def shares(sizes: Sequence[int], total: int) -> list[int]:
    """Divide `total` among sources by size ** EXPONENT. No source gets more than its size; the rest goes to the others.
    Decimals give the same shares on every machine."""
    found = [0] * len(sizes)
    waiting = [index for index, size in enumerate(sizes) if size]
    while waiting:
        weights = {index: Decimal(sizes[index]) ** EXPONENT for index in waiting}
        part = total / sum(weights.values())
        whole = [index for index in waiting if sizes[index] <= part * weights[index]]
        for index in whole or waiting:
            found[index] = sizes[index] if whole else int(part * weights[index])
        if not whole:
            break
        total -= sum(sizes[index] for index in whole)
        waiting = [index for index in waiting if index not in whole]
    return found


def stretches(plan: Plan, number: int, total: int) -> list[Stretch]:
    """Return what to read of `number` sources to get about `total` characters."""
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


def read_stretch(stretch: Stretch, sources: Sequence[Source], steps: Sequence[str] = ()) -> list[str]:
    """Return the texts of a stretch. The last text is cut where the stretch has its characters."""
    texts, left = [], stretch.characters
    for piece in stretch.ranges:
        for document in run(steps, read(sources[piece.source], piece, Problems())):
            for segment in document.segments:
                texts.append(segment.text[:left])
                if left is not None:
                    left -= len(texts[-1])
                    if not left:
                        return texts
    return texts


def enough(kind: str, words: Counter) -> int | None:
    """Return the size of a vocabulary of this kind that leaves at most half of MOST_UNKNOWN of these words unknown, or
    as few as possible; None if that does not depend on the size."""
    if kind == "wordlevel":
        counts = np.sort(np.fromiter(words.values(), np.int64, len(words)))[::-1]
        return min(_needed(counts) + len(whole_words.WHOLE_SPECIALS), LARGEST_VOCABULARY)
    if kind not in ALPHABETS:
        return None
    characters = characters_of([*words.items()])
    rank = {character: index for index, character in enumerate(by_frequency(characters))}
    rarest = np.zeros(len(rank), np.int64)  # for each character, the words in which it is the rarest
    for word, count in words.items():
        rarest[max(rank[character] for character in word)] += count
    return 4 * min(_needed(rarest), len(covering(characters, len(characters))))


def _needed(counts: np.ndarray) -> int:
    """Return how many of the first counts make up all but half of MOST_UNKNOWN."""
    return int(np.searchsorted(np.cumsum(counts), (1 - MOST_UNKNOWN / 2) * counts.sum())) + 1
