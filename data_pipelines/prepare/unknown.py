"""How much of a corpus its tokenizer does not know, and which vocabulary would."""

import io
from collections import Counter
from pathlib import Path

import numpy as np

from data_pipelines.over_parts import over_parts
from data_pipelines.prepare.options import LARGEST_VOCABULARY
from data_pipelines.store.parts import part_name
from data_pipelines.tokenizers.training import by_frequency, characters_of, covering
from data_pipelines.tokenizers.words import WHOLE_SPECIALS

PARTS = 16  # that are looked at
MOST = 0.001  # share of tokens beyond which something should be done
ALPHABETS = ("wordpiece", "character-bpe")  # a quarter of their vocabulary may be characters


def share(out: Path, manifest: dict) -> float | None:
    """Of the tokens to be trained on, in evenly spaced parts; None where no token stands for what is unknown."""
    number, unknown = len(manifest["parts"]), manifest["special"].get("unk")
    if unknown is None:
        return None
    counts = lambda part: np.load(io.BytesIO((out / part_name(part) / "train" / "token_counts.npy").read_bytes()))
    parts = sorted({index * number // PARTS for index in range(PARTS)})
    total = over_parts(counts, np.add, lambda: np.zeros(manifest["vocab_size"], np.int64), parts)
    return float(total[unknown] / max(total.sum(), 1))


def enough(kind: str, words: Counter) -> int | None:
    """The size of a vocabulary of this kind that leaves at most half of MOST of these words unknown, or as few as it
    can; None where that does not depend on the size."""
    if kind == "wordlevel":
        counts = np.sort(np.fromiter(words.values(), np.int64, len(words)))[::-1]
        return min(_needed(counts) + len(WHOLE_SPECIALS), LARGEST_VOCABULARY)
    if kind not in ALPHABETS:
        return None
    characters = characters_of([*words.items()])
    rank = {character: index for index, character in enumerate(by_frequency(characters))}
    rarest = np.zeros(len(rank), np.int64)  # the words of which this is the rarest character
    for word, count in words.items():
        rarest[max(rank[character] for character in word)] += count
    return 4 * min(_needed(rarest), len(covering(characters, len(characters))))


def _needed(counts: np.ndarray) -> int:
    """How many of the first make up all but half of MOST."""
    return int(np.searchsorted(np.cumsum(counts), (1 - MOST / 2) * counts.sum())) + 1
