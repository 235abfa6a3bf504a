"""Count the words that tokenizers are trained on, in bounded memory and time.

Counts of different texts may be added, in any order, before a vocabulary is learnt from them.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from data_pipelines.errors import UserError
from data_pipelines.text.encoding import SPACE

LONGEST = 256  # characters in a word; a longer word counts as several
RUN = re.compile(f"[{SPACE}]{{0,8}}[^{SPACE}]{{1,{LONGEST}}}")
MOST_WORDS = 8_000_000  # counted at a time (~1 GB); if there are more, rare ones are forgotten
MOST_CHARACTERS = 8_000_000  # in the distinct words of a vocabulary's training; rare words are left out
MOST_FED = 40_000_000  # words to train on, with repetition; if there are more, counts are scaled down
SMALLEST_VOCABULARY = 64
RARE = 50  # a character is rare if it occurs less than 1 / RARE times as often as an average token
COVERAGE = 0.9995  # share of the text's characters that the alphabet covers, beyond its 1,000 most frequent ones


@dataclass(frozen=True)
class Training:
    """What is asked of a tokenizer to train: size, normalisation, special tokens."""

    vocab_size: int = 30_522
    cased: bool = False
    keep_accents: bool = False
    specials: str | None = None  # one of its kind's; default: the first
    sentinels: int = 0

    @property
    def keeps_accents(self) -> bool:
        return self.cased or self.keep_accents


def count_words(texts: Iterable[str], words_of: Callable[[str], Iterable[str]], run: re.Pattern = RUN) -> Counter:
    """Count the words of texts. words_of(run) yields the words in a run: a word with the white space before it."""
    runs = Counter()
    for text in texts:
        runs.update(run.findall(text))
        if len(runs) > MOST_WORDS:
            floor = sorted(runs.values())[len(runs) // 2]
            runs = Counter({run: count for run, count in runs.items() if count > floor})
    words = Counter()
    for run, count in runs.items():
        for word in words_of(run):
            words[word] += count
    return words


def bounded(words: Counter) -> list[tuple[str, int]]:
    """Return the most frequent words, MOST_CHARACTERS in all: (word, count), by falling count, then spelling."""
    room, kept = MOST_CHARACTERS, []
    for word, count in sorted(words.items(), key=lambda item: (-item[1], item[0])):
        room -= len(word)
        if room < 0:
            break
        kept.append((word, count))
    return kept


def pre_tokenized(normalizer, pre_tokenizer) -> Callable[[str], Iterator[str]]:
    """Return the `words_of` of a pipeline of `tokenizers`."""

    def words_of(run: str) -> Iterator[str]:
        text = run if normalizer is None else normalizer.normalize_str(run)
        return (word for word, _ in pre_tokenizer.pre_tokenize_str(text))

    return words_of


def merge(words: list[tuple[str, int]], model: models.Model, trainer: trainers.Trainer) -> dict:
    """Train a byte-pair model or a WordPiece on words without white space. Returns the model of a tokenizer.json."""
    learner = Tokenizer(model)
    learner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    scale = min(1.0, MOST_FED / max(sum(count for _, count in words), 1))
    learner.train_from_iterator(_repeated(words, scale), trainer)
    return json.loads(learner.to_str())["model"]


def _repeated(words: list[tuple[str, int]], scale: float) -> Iterator[str]:
    """Yield each word as often as it occurs, scaled: the trainer takes no counts."""
    for word, count in words:
        for left in range(max(round(count * scale), 1), 0, -1000):
            yield " ".join([word] * min(left, 1000))


def check_size(options: Training, least: int) -> None:
    if options.vocab_size < least:
        raise UserError(f"--vocab-size {options.vocab_size}: use at least {least}")


def characters_of(words: list[tuple[str, int]]) -> Counter:
    """Count how often each character occurs."""
    counts = Counter()
    for word, count in words:
        for character in word:
            counts[character] += count
    return counts


def by_frequency(characters: Counter) -> list[str]:
    return sorted(characters, key=lambda character: (-characters[character], character))


def covering(characters: Counter, vocab_size: int) -> list[str]:
    """Return the most frequent characters, which get a token of their own: at most a quarter of the vocabulary, or up
    to three quarters if they are no rarer than tokens are, as in Chinese."""
    total, covered, alphabet = characters.total(), 0, []
    for character in by_frequency(characters)[: vocab_size * 3 // 4]:
        rare = characters[character] < max(total / (RARE * vocab_size), 2)
        if (len(alphabet) >= vocab_size // 4 and rare) or (len(alphabet) >= 1000 and covered >= COVERAGE * total):
            break
        alphabet.append(character)
        covered += characters[character]
    return alphabet
