"""The tokenizer that `prepare` trains."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from data_pipelines.formats.source import Source
from data_pipelines.prepare import sample
from data_pipelines.prepare.options import Prepare
from data_pipelines.prepare.plan import Plan
from data_pipelines.prepare.pool import pool
from data_pipelines.prepare.sample import Stretch
from data_pipelines.tokenizers import table
from data_pipelines.tokenizers.made import Made
from data_pipelines.tokenizers.table import KINDS
from data_pipelines.tokenizers.training import Training

SAMPLE = 32_000_000  # characters that a tokenizer is trained on, taken from the whole corpus
COUNTED = 4_000_000_000  # characters whose words are counted where a vocabulary is of whole words
AHEAD = 2  # stretches for each process that are read before they are asked for


def chosen(options: Prepare, plan: Plan, sources: Sequence[Source]) -> list[Stretch]:
    """The text that the tokenizer is trained on."""
    return sample.stretches(plan, len(sources), COUNTED if KINDS[options.tokenizer].whole else SAMPLE)


def read_all(stretches: Iterable[Stretch], sources: tuple[Source, ...], processes: int) -> Iterator[str]:
    """The texts of the stretches in their order, read on all cores."""
    with pool(processes) as workers:
        waiting = deque()
        for stretch in stretches:
            waiting.append(workers.submit(sample.read, stretch, sources))
            if len(waiting) > AHEAD * processes:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()


def train(options: Prepare, texts: Iterable[str]) -> Made:
    asked = Training(options.vocab_size, options.cased, options.keep_accents, options.specials)
    return table.train(options.tokenizer, texts, asked)
