"""Bags of words."""

from pathlib import Path

import numpy as np

from data_pipelines.errors import UserError
from data_pipelines.text.encoding import Encoder


def bag(path: Path, encoder: Encoder, vocab: int) -> tuple[np.ndarray, list[str]]:
    """The words of a file, one a line -> (bool[vocab]: the tokens that are one of them in the middle of a text; the
    words of several tokens, which no next token can be and which are left out, as by PPLM's authors).

    UserError where no word is left.
    """
    try:
        words = [word for line in path.read_text("utf-8").splitlines() if (word := line.strip())]
    except (OSError, ValueError) as error:
        raise UserError(f"--words {path}: cannot be read as text ({error}); give a file with a word a line") from None
    if not words:
        raise UserError(f"--words {path}: holds no word; write one on each line")
    texts = encoder.tokens([f" {word}" for word in words])
    tokens = [int(text[0]) for text in texts if len(text) == 1]
    if not tokens:
        raise UserError(f"--words {path}: none of its {len(words)} words is one token of this model; give others")
    return np.isin(np.arange(vocab), tokens), [word for word, text in zip(words, texts, strict=True) if len(text) != 1]
