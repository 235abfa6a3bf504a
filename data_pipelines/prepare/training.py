"""The tokenizer that `prepare` trains: of words, counted where the text is, whose counts are added in any order."""

from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

from data_pipelines.formats.problems import Problems
from data_pipelines.formats.source import Source
from data_pipelines.formats.table import read
from data_pipelines.prepare import sample
from data_pipelines.prepare.options import Prepare
from data_pipelines.prepare.plan import Plan
from data_pipelines.prepare.pool import cores, pool
from data_pipelines.prepare.sample import Stretch
from data_pipelines.tokenizers import table
from data_pipelines.tokenizers.made import Made
from data_pipelines.tokenizers.prefixes import check_values
from data_pipelines.tokenizers.table import KINDS
from data_pipelines.tokenizers.training import Training

SAMPLE = 32_000_000  # characters that a tokenizer is trained on, taken from the whole corpus
COUNTED = 1_000_000_000  # where a vocabulary is of whole words; their counts take about 1 GB
AHEAD = 2  # stretches for each process that are counted at a time


def chosen(options: Prepare, plan: Plan, sources: Sequence[Source]) -> list[Stretch]:
    """The text that the tokenizer is trained on."""
    return sample.stretches(plan, len(sources), COUNTED if KINDS[options.tokenizer].whole else SAMPLE)


class Counting(NamedTuple):
    """How words are counted; it travels to where the text is.   value: of documents, that is counted in their place."""

    sources: tuple[Source, ...]
    steps: tuple[str, ...]
    kind: str
    asked: Training
    value: str = ""


def counting(options: Prepare, sources: tuple[Source, ...]) -> Counting:
    asked = Training(options.vocab_size, options.cased, options.keep_accents, options.specials, options.sentinels)
    return Counting(sources, options.steps, options.tokenizer, asked)


def count(how: Counting, stretch: Stretch) -> Counter:
    if how.value:
        pieces = (document for one in stretch.ranges for document in read(how.sources[one.source], one, Problems()))
        return Counter(check_values(how.value, Counter(piece.values[how.value] for piece in pieces)))
    return KINDS[how.kind].count(sample.read(stretch, how.sources, how.steps), how.asked)


def count_all(stretches: Sequence[Stretch], how: Counting, options: Prepare, runner_options: Sequence[str]) -> Counter:
    """The words of all stretches, counted on all cores or by the runner of parts."""
    if options.runner:
        from data_pipelines.prepare import beam  # not everybody has it

        return beam.count_all(stretches, how, options.out, options.runner, runner_options)
    processes = options.processes or cores()
    words, waiting = Counter(), deque()
    with pool(processes) as workers:
        for stretch in stretches:
            waiting.append(workers.submit(count, how, stretch))
            if len(waiting) > AHEAD * processes:
                words.update(waiting.popleft().result())
        while waiting:
            words.update(waiting.popleft().result())
    return words


def learn(options: Prepare, words: Counter) -> Made:
    return table.learn(options.tokenizer, words, counting(options, ()).asked)
