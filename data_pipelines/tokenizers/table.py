"""The kinds of tokenizers that can be trained. A new kind is a file here and a line below."""

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

from data_pipelines.errors import UserError
from data_pipelines.tokenizers import bpe, pieces, words
from data_pipelines.tokenizers.made import Made, with_sentinels
from data_pipelines.tokenizers.training import Training


class Kind(NamedTuple):
    """count: counts the words of texts; counts may be added. learn: makes the tokenizer from counts; the same counts
    give the same tokenizer. specials: the choices of --specials, the first of which is the default."""

    count: Callable[[Iterable[str], Training], Counter]
    learn: Callable[[Counter, Training], Made]
    specials: tuple[str, ...] = ()
    whole: bool = False  # counts far more of a corpus than the others


KINDS = {
    "wordpiece": Kind(words.count, words.learn),
    "sentencepiece-unigram": Kind(
        partial(pieces.count, kind="unigram"), partial(pieces.learn, kind="unigram"), pieces.SPECIALS
    ),
    "sentencepiece-bpe": Kind(partial(pieces.count, kind="bpe"), partial(pieces.learn, kind="bpe"), pieces.SPECIALS),
    "wordlevel": Kind(words.count_whole, words.learn_whole, whole=True),
    "bpe": Kind(bpe.count_bytes, bpe.learn_bytes, tuple(bpe.OF_BYTES)),
    "character-bpe": Kind(bpe.count_characters, bpe.learn_characters, tuple(bpe.OF_CHARACTERS)),
    "bytes": Kind(lambda texts, options: Counter(), bpe.learn_alone),
}


def learn(kind: str, counted: Counter, options: Training) -> Made:
    made = KINDS[kind].learn(counted, options)
    return with_sentinels(made, options.sentinels) if options.sentinels else made


def check_specials(kind: str, specials: str | None) -> None:
    """Raise UserError for special tokens that a kind of tokenizer does not have. kind: also a path of a tokenizer."""
    choices = KINDS[kind].specials if kind in KINDS else ()
    if specials and specials not in choices:
        may = f"{kind} has {' and '.join(choices)}" if choices else "leave it out"
        raise UserError(f"--specials {specials}: --tokenizer {kind} does not have these; {may}")
