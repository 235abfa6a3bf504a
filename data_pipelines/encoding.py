"""Sentences to token ids, the same as the tokenizer's own, several times faster for the kinds that `prepare` trains.

Their normalisers and pre-tokenisers treat the text on either side of a space alone, and natural text repeats its words.
So each distinct run of text between spaces is encoded once, by the tokenizer itself, and looked up afterwards.
"""

import itertools
import json

import numpy as np
from tokenizers import Tokenizer

from data_pipelines.pieces import WORD

NOTHING, BREAK = 0, 1  # indices of '' (between two spaces) and of the end of a sentence: no tokens
METASPACE = {"type": "Metaspace", "replacement": WORD, "prepend_scheme": "always", "split": True}
ALONE = {"NFKD", "NFKC", "StripAccents", "Lowercase"}  # what these do ends at a space, before and after it
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
        written = json.loads(tokenizer.to_str())
        self.tokenizer = _without_specials(tokenizer, written)
        self.continues = _continuing(written)
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


def _without_specials(tokenizer: Tokenizer, written: dict) -> Tokenizer:
    """The tokenizer with special tokens that no text spells. A unigram or word model finds them like any other token;
    a space in front, which their words never hold, hides them."""
    specials = {token["content"] for token in written["added_tokens"] if token["special"]}
    model = written["model"]
    hide = lambda token: f" {token}" if token in specials and token != model.get("unk_token") else token
    if model["type"] == "Unigram":
        model = model | {"vocab": [[hide(token), score] for token, score in model["vocab"]]}
    elif model["type"] == "WordLevel":
        model = model | {"vocab": {hide(token): index for token, index in model["vocab"].items()}}
    else:
        tokenizer.encode_special_tokens = True
        return tokenizer
    plain = [token for token in written["added_tokens"] if not token["special"]]
    return Tokenizer.from_str(json.dumps(written | {"model": model, "added_tokens": plain, "post_processor": None}))


def _continuing(written: dict) -> np.ndarray | None:
    """bool [vocab]: the tokens that continue a word. None unless the tokenizer treats words between spaces alone.
    written: its tokenizer.json."""
    model = written["model"]
    splits, changes = _steps(written["pre_tokenizer"], "pretokenizers"), _steps(written["normalizer"], "normalizers")
    kinds = model["type"], [step["type"] for step in splits], [step["type"] for step in changes]
    if not all(token["special"] for token in written["added_tokens"]):
        return None
    if kinds == ("WordPiece", ["BertPreTokenizer"], ["BertNormalizer"]):
        prefix = model["continuing_subword_prefix"]
        begins = lambda token: not token.startswith(prefix) or token == prefix
    elif kinds == ("WordLevel", ["WhitespaceSplit"], ["BertNormalizer"]):
        begins = lambda token: True
    elif splits == [{"type": "WhitespaceSplit"}, METASPACE] and all(map(_alone, changes)):
        begins = lambda token: token.startswith(WORD)
    else:
        return None
    vocab = model["vocab"] if isinstance(model["vocab"], dict) else {t: i for i, (t, _) in enumerate(model["vocab"])}
    continues = np.zeros(1 + max(vocab.values()), bool)
    for token, index in vocab.items():
        continues[index] = not begins(token)
    return continues


def _steps(part: dict | None, inside: str) -> list[dict]:
    """Those of a normaliser or pre-tokeniser."""
    return part.get(inside, [part]) if part else []


def _alone(change: dict) -> bool:
    """A step of normalising does the same to the text on either side of a space whatever is on the other."""
    replaces_words = change["type"] == "Replace" and " " not in change["pattern"].get("String", " ")
    return replaces_words or change["type"] in ALONE
