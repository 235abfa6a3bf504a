"""The tokenizer that `prepare` trains."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from data_pipelines import pieces, wordlevel
from data_pipelines import tokenizers as ours
from data_pipelines.formats.source import Source
from data_pipelines.prepare import sample
from data_pipelines.prepare.options import Prepare
from data_pipelines.prepare.plan import Plan
from data_pipelines.prepare.pool import pool
from data_pipelines.prepare.sample import Stretch

SAMPLE = 32_000_000  # characters that a tokenizer is trained on, taken from the whole corpus
COUNTED = 4_000_000_000  # characters whose words are counted where a vocabulary is of whole words
AHEAD = 2  # stretches for each process that are read before they are asked for


def chosen(options: Prepare, plan: Plan, sources: Sequence[Source]) -> list[Stretch]:
    """The text that the tokenizer is trained on."""
    return sample.stretches(plan, len(sources), COUNTED if options.tokenizer == "wordlevel" else SAMPLE)


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


def train(options: Prepare, texts: Iterable[str]) -> ours.Made:
    size, keep = options.vocab_size, (options.cased, options.keep_accents)
    if options.tokenizer == "wordlevel":
        trained = wordlevel.train(texts, size, *keep), {}
    elif options.tokenizer == "wordpiece":
        trained = ours.train(list(texts), size, *keep), {}
    else:
        kind, flavour = options.tokenizer.removeprefix("sentencepiece-"), pieces.FLAVOURS[options.specials or "xlnet"]
        trained = pieces.train(texts, kind, size, flavour, *keep)
    tokenizer, config = trained
    return ours.Made(tokenizer, ours.special_ids(tokenizer, {}, options.out), config)
