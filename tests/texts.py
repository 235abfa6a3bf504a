"""Texts with something to learn: words whose frequencies fall as 1 / rank, in sentences that follow a habit."""

from pathlib import Path

import numpy as np

SYLLABLES = ("ba", "de", "ki", "lo", "mu", "na", "po", "ri", "su", "te", "vo", "za")


def write_texts(folder: Path, documents: int, seed: int) -> Path:
    """Write one file per document -> the folder."""
    folder.mkdir()
    rng = np.random.default_rng(seed)
    words = ["".join(rng.choice(SYLLABLES, rng.integers(1, 4))) for _ in range(150)]
    frequencies = 1 / np.arange(1, len(words) + 1)
    frequencies /= frequencies.sum()

    def sentence() -> str:
        first = rng.choice(len(words), rng.integers(2, 6), p=frequencies)
        # Every second word is decided by the one before it.
        chosen = [words[i] for index in first for i in (index, (7 * index + 3) % len(words))]
        return " ".join(chosen).capitalize() + "."

    for number in range(documents):
        text = " ".join(sentence() for _ in range(rng.integers(2, 9)))
        (folder / f"{number:03}.txt").write_text(text + "\n")
    return folder
