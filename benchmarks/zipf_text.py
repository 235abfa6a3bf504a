"""Made-up text of any size whose words follow Zipf's law, for measurements that real text is too small for.

    python -m benchmarks.zipf_text FOLDER --megabytes 1000

The word of rank r comes with a probability proportional to 1 / r, spelt at random from syllables, more of them where
it is rare. Sentences have 4 to 36 words, documents a log-normal number of sentences, with a blank line between
documents (`--documents blank-line`). File n is a function of (seed, n) alone, and is written piece by piece.
"""

import sys
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from data_pipelines.command_line import parse

WORDS = 200_000
FILE_BYTES = 32_000_000
DOCUMENTS_AT_ONCE = 500
SENTENCES = 15  # median of a document


@dataclass(frozen=True)
class Options:
    """Write files of made-up text."""

    folder: Annotated[Path, tyro.conf.Positional]
    """To be filled with 000000.txt, 000001.txt ..."""
    megabytes: int = 100
    """Of all files together, to a document."""
    seed: int = 0


def write(folder: Path, size: int, seed: int = 0) -> None:
    """Files of together at least `size` bytes, by less than a document more."""
    folder.mkdir(parents=True, exist_ok=True)
    words, law = spellings(seed), np.cumsum(1 / np.arange(1, WORDS + 1))
    for number, begin in enumerate(range(0, size, FILE_BYTES)):
        left, generator = min(FILE_BYTES, size - begin), np.random.default_rng((seed, number))
        with open(folder / f"{number:06}.txt", "wb") as file:
            while left > 0:
                text = [document.encode() for document in documents(generator, words, law)]
                needed = next(
                    (n for n, bytes_ in enumerate(accumulate(map(len, text)), 1) if bytes_ >= left), len(text)
                )
                left -= file.write(b"".join(text[:needed]))


def documents(generator: np.random.Generator, words: list[str], law: np.ndarray) -> list[str]:
    """Some documents, a sentence to a line, each with a blank line behind it.

    law: f64 [words], running sums of the words' frequencies.
    """
    sentences = np.maximum(generator.lognormal(np.log(SENTENCES), 1, DOCUMENTS_AT_ONCE).astype(int), 1)
    lengths = generator.integers(4, 37, sentences.sum())
    drawn = np.searchsorted(law, generator.random(lengths.sum()) * law[-1])
    drawn = iter([words[word] for word in drawn])
    lines = (" ".join([next(drawn) for _ in range(length)]) for length in lengths)
    return [
        "".join(f"{line[0].upper()}{line[1:]}.\n" for _, line in zip(range(count), lines, strict=False)) + "\n"
        for count in sentences
    ]


def spellings(seed: int) -> list[str]:
    """WORDS different words, by falling frequency."""
    generator = np.random.default_rng((seed, WORDS))
    syllables = [first + vowel for first in "bdfghklmnprstvz" for vowel in ("a", "e", "i", "o", "u", "an", "er", "is")]
    found: dict[str, None] = {}  # in order
    while len(found) < WORDS:
        count = 1 + int(np.log(len(found) + 1) / 3) + generator.integers(0, 2)
        found["".join(syllables[index] for index in generator.integers(0, len(syllables), count))] = None
    return list(found)


if __name__ == "__main__":
    options = parse(Options, sys.argv[1:], "python -m benchmarks.zipf_text")
    write(options.folder, options.megabytes * 1_000_000, options.seed)
