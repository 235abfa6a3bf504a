"""How much text tokens stand for, where that is known of the token alone."""

import functools
from pathlib import Path

import numpy as np

from data_pipelines.text.encoding import BYTES, Encoder
from data_pipelines.tokenizers import stored


@functools.lru_cache(maxsize=8)
def token_bytes(path: Path) -> np.ndarray | None:
    """i64 [vocab]: the bytes of each token of a byte-level tokenizer, 0 for special ones; None for another, which may
    change text before it cuts it. path: of the tokenizer's files."""
    tokenizer = stored.load(path).tokenizer
    encoder = Encoder(tokenizer)
    if encoder.runs is not BYTES or encoder.prefix:
        return None
    widths = np.zeros(tokenizer.get_vocab_size(), np.int64)
    widths[: len(encoder.widths)] = encoder.widths
    widths[list(tokenizer.get_added_tokens_decoder())] = 0
    return widths
