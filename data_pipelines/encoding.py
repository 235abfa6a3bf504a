"""Sentences to token ids, the same as the tokenizer's own, several times faster for WordPiece.

BERT's normaliser and pre-tokeniser treat the text on either side of a space alone, and natural text repeats its words.
So each distinct run of text between spaces is encoded once, by the tokenizer itself, and looked up afterwards.
"""

import itertools

import numpy as np
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

NOTHING, BREAK = 0, 1  # indices of '' (between two spaces) and of the end of a sentence: no tokens
MOST_WORDS, MOST_CHARACTERS = 400_000, 16_000_000  # the table starts anew beyond these, to bound memory (~150 MB)


class Words(dict):
    """Text between spaces -> its index; a text not seen before gets the next index and waits in `new`."""

    def __init__(self):
        super().__init__({"": NOTHING, "\n": BREAK})
        self.new = []

    def __missing__(self, text):
        self.new.append(text)
        self[text] = index = len(self)
        return index


class Encoder:
    """Encodes sentences with a `tokenizers.Tokenizer` that neither pads nor truncates. Special tokens are not added
    and not recognised: '[MASK]' in a document is ordinary text."""

    def __init__(self, tokenizer: Tokenizer):
        tokenizer.encode_special_tokens = True
        self.tokenizer = tokenizer
        self.continues = _continuing(tokenizer)
        self._forget()

    def encode(self, sentences: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(tokens u32[tokens], word_starts bool[tokens], lengths i64[sentences]) of the sentences one after another."""
        if self.continues is None:
            return self._encode_plainly(sentences)
        text = "\n".join(sentences)
        if text.count("\n") >= max(len(sentences), 1):
            text = "\n".join(sentence.replace("\n", " ") for sentence in sentences)
        words = text.replace("\n", " \n ").split(" ")
        index = np.fromiter(map(self.words.__getitem__, words), np.int64, len(words))
        if self.words.new:
            self._learn()
        count = self.count[index]
        end = np.cumsum(count)
        tokens = self.flat[np.repeat(self.start[index] - end + count, count) + np.arange(end[-1])]
        bounds = np.concatenate([[0], end[index == BREAK], end[-1:]])
        if len(self.words) > MOST_WORDS or self.characters > MOST_CHARACTERS:
            self._forget()
        return tokens, ~self.continues[tokens], np.diff(bounds)[: len(sentences)]

    def _encode_plainly(self, sentences):
        encodings = self.tokenizer.encode_batch(sentences, add_special_tokens=False)  # _fast has no word_ids
        lengths = np.fromiter(map(len, encodings), np.int64, len(encodings))
        tokens = np.fromiter(itertools.chain.from_iterable(e.ids for e in encodings), np.uint32, lengths.sum())
        word_starts = np.ones(len(tokens), bool)
        words = itertools.chain.from_iterable(e.word_ids for e in encodings)
        word = np.fromiter((-1 if w is None else w for w in words), np.int64, len(tokens))
        word_starts[1:] = word[1:] != word[:-1]
        first = np.cumsum(lengths) - lengths
        word_starts[first[lengths > 0]] = True
        return tokens, word_starts, lengths

    def _learn(self):
        """Encode the new words and append them to the table."""
        encodings = self.tokenizer.encode_batch_fast(self.words.new, add_special_tokens=False)
        count = np.fromiter(map(len, encodings), np.int64, len(encodings))
        ids = np.fromiter(itertools.chain.from_iterable(e.ids for e in encodings), np.uint32, count.sum())
        self.count = np.concatenate([self.count, count])
        self.start = np.concatenate([self.start, len(self.flat) + np.cumsum(count) - count])
        self.flat = np.concatenate([self.flat, ids])
        self.characters += sum(map(len, self.words.new))
        self.words.new.clear()

    def _forget(self):
        self.words, self.characters = Words(), 0
        self.count = np.zeros(2, np.int64)  # tokens of each text; 0 for NOTHING and BREAK
        self.start = np.zeros(2, np.int64)  # where they begin in `flat`
        self.flat = np.zeros(0, np.uint32)


def _continuing(tokenizer: Tokenizer) -> np.ndarray | None:
    """bool [vocab]: the tokens that continue a word. None unless the tokenizer treats words between spaces alone."""
    plain_words = (
        isinstance(tokenizer.model, models.WordPiece)
        and isinstance(tokenizer.normalizer, normalizers.BertNormalizer)
        and isinstance(tokenizer.pre_tokenizer, pre_tokenizers.BertPreTokenizer)
        and all(token.special for token in tokenizer.get_added_tokens_decoder().values())
    )
    if not plain_words:
        return None
    continues = np.zeros(1 + max(tokenizer.get_vocab().values()), bool)
    prefix = tokenizer.model.continuing_subword_prefix
    for token, index in tokenizer.get_vocab().items():
        continues[index] = token.startswith(prefix) and len(token) > len(prefix)
    return continues
