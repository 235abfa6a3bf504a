"""Small tokenizers of every kind, each trained once, and texts that are awkward for them."""

import functools
from pydoc_data.topics import topics

import numpy as np
from hypothesis import strategies as st

from data_pipelines.text.encoding import Encoder
from data_pipelines.tokenizers.made import Made
from data_pipelines.tokenizers.table import KINDS, learn
from data_pipelines.tokenizers.training import Training

TEXTS = [
    "The Café's naïve owner, Dr. Müller, sang — loudly!  \t He won 3,141 prizes; didn't he?\n\nHe did.\nTwice  ",
    "ΑΣ Straße İstanbul 日本語 テスト 中文分词。“今天”天气 e\u0301te\u0301 ``quoted'' １２３ ﬁne 한국어 \u2028line",
    "unaffable " * 3 + "x" * 120 + " ##ing # ## [UNK ] 🤗🤗 \ufffd today.It rains\n\n\n  twice.\n",
    *(f"The café's word{number} is\nNot Number {number},000 -- isn't it? " + "=" * number for number in range(60)),
    *(topics[name][:2000] for name in sorted(topics)[:20]),
]
PROBES = [*TEXTS[:3], "☃☃ ☃ a☃b \ufffd\u200b", "▁under ▁ score▁", "zero\u00a0\x1cfile\x0bsep", " ", "\x00a\x07", ""]
WORDS = ["the", "Café", "İ", "中文", "ﬁ", "１", "한", "☃", "🤗", "▁", "``", "''", "3,141", "====", "##", "don't", "a.x"]
SPACES = ["  ", "\n\n", *" \n\t\r\x0b\x0c\x1c\x00\x85\u00a0\u1680\u180e\u2028\u3000\ufeff\u200b\u0301"]
PIECES = st.sampled_from(WORDS) | st.sampled_from(SPACES) | st.text(max_size=5)
# Special tokens are text for the encoder, but not for the tokenizers that it is compared with
TEXT = st.lists(PIECES, max_size=12).map("".join).map(lambda text: text.replace("<", "").replace("[", ""))
SIZES = {"sentencepiece-unigram": 400, "sentencepiece-bpe": 400, "wordlevel": 60, "bpe": 400, "bytes": 384}


def train(kind: str, texts: list[str], options: Training) -> Made:
    return learn(kind, KINDS[kind].count(texts, options), options)


@functools.cache
def make(kind: str, specials: str | None = None, cased=False, keep_accents=False, vocab_size=None, sentinels=0) -> Made:
    """Trained on TEXTS. Those who change what they get take a copy."""
    size = vocab_size or SIZES.get(kind, 300)
    return train(kind, TEXTS, Training(size, cased, keep_accents, specials, sentinels))


def ids(encoder: Encoder, *texts: str) -> list[int]:
    """Of all the texts, one after another."""
    return encoder.encode(list(texts), [np.zeros(0, np.int64)] * len(texts)).tokens.tolist()
