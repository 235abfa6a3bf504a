"""The tokenizer that `prepare` trains: of words, counted where the text is, whose counts are added in any order."""

import functools
from collections import Counter
from collections.abc import Mapping, Sequence

from data_pipelines.formats.problems import Problems
from data_pipelines.formats.source import Source
from data_pipelines.formats.table import read
from data_pipelines.over_parts import over_parts
from data_pipelines.prepare import partial, sample
from data_pipelines.prepare.options import Prepare
from data_pipelines.prepare.plan import Plan
from data_pipelines.prepare.pool import cores
from data_pipelines.prepare.sample import Stretch
from data_pipelines.prepare.unknown import enough
from data_pipelines.prepare.versions import versions
from data_pipelines.tokenizers.made import Made
from data_pipelines.tokenizers.prefixes import check_values
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
    count = functools.partial(_words, sources, options.steps, options.tokenizer, asked)
    words = _counted(count, stretches, options, runner_options)
    return learn(options.tokenizer, words, asked), enough(options.tokenizer, words)


def values(options: Prepare, plan: Plan, sources: tuple[Source, ...], runner_options: Sequence[str]) -> list[str]:
    """The values of documents whose tokens stand before them, sorted, from all text. UserError for too many."""
    every = [Stretch(unit, None) for part in plan.parts for unit in part]
    count = functools.partial(_values, sources, options.prefix)
    return sorted(check_values(options.prefix, _counted(count, every, options, runner_options)))


def _counted(
    count: functools.partial, stretches: Sequence[Stretch], options: Prepare, runner_options: Sequence[str]
) -> Counter:
    """What is counted in all stretches, on all cores or by the runner of parts."""
    pipeline = None
    if options.runner:
        from data_pipelines.prepare import beam  # not everybody has it

        how = count.func.__name__, count.args, stretches, versions(options.steps)
        place = options.out / partial.FOLDER / f"words-{partial.digest(repr(how))[:16]}.json"
        pipeline = beam.summing(place, options.runner, runner_options)
    return over_parts(count, merged, Counter, stretches, options.processes or cores(), pipeline)


def _words(
    sources: tuple[Source, ...], steps: tuple[str, ...], kind: str, asked: Training, stretch: Stretch
) -> Counter:
    return KINDS[kind].count(sample.read(stretch, sources, steps), asked)


def _values(sources: tuple[Source, ...], name: str, stretch: Stretch) -> Counter:
    pieces = (document for one in stretch.ranges for document in read(sources[one.source], one, Problems()))
    return Counter(check_values(name, Counter(piece.values[name] for piece in pieces)))


def merged(words: Counter, more: Mapping[str, int]) -> Counter:
    words.update(more)
    return words
