"""The tokenizer that `prepare` trains: of words, counted where the text is, whose counts are added in any order."""

import functools
from collections import Counter
from collections.abc import Mapping, Sequence

from data_pipelines.formats.source import Source
from data_pipelines.over_parts import over_parts
from data_pipelines.prepare import partial, sample
from data_pipelines.prepare.options import Prepare
from data_pipelines.prepare.plan import Plan
from data_pipelines.prepare.pool import cores
from data_pipelines.prepare.unknown import enough
from data_pipelines.prepare.versions import versions
from data_pipelines.tokenizers.made import Made
from data_pipelines.tokenizers.table import KINDS, learn
from data_pipelines.tokenizers.training import Training

SAMPLE = 32_000_000  # characters that a tokenizer is trained on, taken from the whole corpus
COUNTED = 1_000_000_000  # where a vocabulary is of whole words; their counts take about 1 GB


def trained(
    options: Prepare, plan: Plan, sources: tuple[Source, ...], runner_options: Sequence[str]
) -> tuple[Made, int | None]:
    """The tokenizer, and the size of a vocabulary that would know nearly all of what it was trained on."""
    stretches = sample.stretches(plan, len(sources), COUNTED if KINDS[options.tokenizer].whole else SAMPLE)
    asked = Training(options.vocab_size, options.cased, options.keep_accents, options.specials, options.sentinels)
    how, pipeline = (sources, options.steps, options.tokenizer, asked), None
    if options.runner:
        from data_pipelines.prepare import beam  # not everybody has it

        name = partial.digest(repr((stretches, how, versions(options.steps))))[:16]
        place = options.out / partial.FOLDER / f"words-{name}.json"
        pipeline = beam.summing(place, options.runner, runner_options)
    count, processes = functools.partial(_count, *how), options.processes or cores()
    words = over_parts(count, merged, Counter, stretches, processes, pipeline)
    return learn(options.tokenizer, words, asked), enough(options.tokenizer, words)


def _count(
    sources: tuple[Source, ...], steps: tuple[str, ...], kind: str, asked: Training, stretch: sample.Stretch
) -> Counter:
    return KINDS[kind].count(sample.read(stretch, sources, steps), asked)


def merged(words: Counter, more: Mapping[str, int]) -> Counter:
    words.update(more)
    return words
