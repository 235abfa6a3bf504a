"""The tokenizer that `prepare` trains, and the text that it is trained on."""

import itertools
from collections.abc import Iterator

from data_pipelines import pieces, wordlevel
from data_pipelines import tokenizers as ours
from data_pipelines.formats.problems import Problems
from data_pipelines.formats.table import read
from data_pipelines.prepare.options import Prepare

SAMPLE = 32_000_000  # characters that a tokenizer is trained on, taken from the whole corpus
SAMPLE_PLACES = 64


def train(options: Prepare, parsed, units) -> ours.Made:
    size, keep = options.vocab_size, (options.cased, options.keep_accents)
    if options.tokenizer == "wordlevel":
        trained = wordlevel.train(_texts(parsed, units), size, *keep), {}
    elif options.tokenizer == "wordpiece":
        trained = ours.train(_sample(parsed, units), size, *keep), {}
    else:
        kind, flavour = options.tokenizer.removeprefix("sentencepiece-"), pieces.FLAVOURS[options.specials or "xlnet"]
        trained = pieces.train(_sample(parsed, units), kind, size, flavour, *keep)
    tokenizer, config = trained
    return ours.Made(tokenizer, ours.special_ids(tokenizer, {}, options.out), config)


def _texts(parsed, units) -> Iterator[str]:
    """All of the corpus, piece by piece."""
    for part in itertools.chain.from_iterable(units):
        for document in read(parsed[part.source], part, Problems()):
            yield from (segment.text for segment in document.segments)


def _sample(parsed, units) -> list[str]:
    """At most SAMPLE characters, from the beginnings of evenly spaced units."""
    chosen = [units[index * len(units) // SAMPLE_PLACES] for index in range(SAMPLE_PLACES)]
    chosen = units if len(units) <= SAMPLE_PLACES else chosen
    texts = []
    for unit in chosen:
        left = SAMPLE // len(chosen)
        for part in unit:
            for text in _texts(parsed, [(part,)]):
                texts.append(text[:left])
                left -= len(texts[-1])
                if not left:
                    break
            if not left:
                break
    return texts
