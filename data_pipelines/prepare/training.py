"""The tokenizer that `prepare` trains: of words, counted where the text is, whose counts are added in any order."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from data_pipelines.formats.source import Source
from data_pipelines.prepare import sample
from data_pipelines.prepare.options import Prepare
from data_pipelines.prepare.plan import Plan
from data_pipelines.prepare.sample import Stretch
from data_pipelines.tokenizers.table import KINDS
from data_pipelines.tokenizers.training import Training

SAMPLE = 32_000_000  # characters that a tokenizer is trained on, taken from the whole corpus
COUNTED = 1_000_000_000  # where a vocabulary is of whole words; their counts take about 1 GB


def chosen(options: Prepare, plan: Plan, sources: Sequence[Source]) -> list[Stretch]:
    """The text that the tokenizer is trained on."""
    return sample.stretches(plan, len(sources), COUNTED if KINDS[options.tokenizer].whole else SAMPLE)


class Counting(NamedTuple):
    """How words are counted; it travels to where the text is."""

    sources: tuple[Source, ...]
    steps: tuple[str, ...]
    kind: str
    asked: Training


def counting(options: Prepare, sources: tuple[Source, ...]) -> Counting:
    asked = Training(options.vocab_size, options.cased, options.keep_accents, options.specials, options.sentinels)
    return Counting(sources, options.steps, options.tokenizer, asked)


def count(how: Counting, stretch: Stretch) -> Counter:
    return KINDS[how.kind].count(sample.read(stretch, how.sources, how.steps), how.asked)


def merged(words: Counter, more: Mapping[str, int]) -> Counter:
    words.update(more)
    return words
