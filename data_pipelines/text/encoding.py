"""Encode texts to token ids: the tokenizer's, several times faster for the kinds that `prepare` trains.

A text is cut into runs (a word with the white space before it) such that the tokenizer treats the text on either side
of a cut alone. Each distinct run is encoded once, by the tokenizer itself, and then looked up.
"""

import bisect
import functools
import itertools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

WORD = "▁"  # SentencePiece's mark at the beginning of a word
METASPACE = {"type": "Metaspace", "replacement": WORD, "prepend_scheme": "always", "split": True}
ALONE = {"NFKD", "NFKC", "StripAccents", "Lowercase"}  # these act on the text on either side of a space alone
SPACE = r" \t\n\r\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
CONTROL_SPACE = r"\x0b\x0c\x85"  # white space, but BERT's normaliser removes it
# Characters that BERT treats as words: Chinese ones, and their punctuation
SINGLE = r"\u3400-\u4dbf\u4e00-\u9fff、。，．！？；：（）《》〈〉「」『』【】〔〕“”‘’…—·"
# Characters that Unicode's normal forms replace, if at all, one by one, whichever of these are next to them
PLAIN = [*map(chr, range(0x21, 0x7F)), *"、。，．！？；：（）《》〈〉「」『』【】“”—·"]
PLAIN += map(chr, range(0x4E00, 0xA000))
MOST_RUNS, MOST_CHARACTERS = 400_000, 16_000_000  # beyond these the table starts anew, to bound memory (~150 MB)


def _runs(space: str, single: str = "", after: str = "") -> re.Pattern:
    return re.compile((f"[{single}]|" if single else "") + f"[{space}]*[^{space}{single}]+{after}|[{space}]+")


PYTHON_SPACE = r"\s\x1c-\x1f"  # Python's \s, written for other regex engines
CTRL_WORD = re.compile(f"[^{PYTHON_SPACE}]+\n?")
SPACED, CHINESE = _runs(SPACE), _runs(SPACE, SINGLE)
BYTES, CTRL = _runs(SPACE + CONTROL_SPACE), _runs(PYTHON_SPACE, after="\n?")
LEADS = {BYTES: SPACE + CONTROL_SPACE, CTRL: PYTHON_SPACE}  # the white space before a run; default: SPACE
BYTE_ALPHABET = pre_tokenizers.ByteLevel.alphabet()
BYTE_SPACES = ("Ġ", "Ċ", "ĉ", "č")  # how byte-level tokens write space, newline, tab, return


def byte_characters() -> list[str]:
    """Return how byte-level tokens write each byte: printable ones as such, others from chr(256) on (GPT-2's)."""
    printable, others = {*range(33, 127), *range(161, 173), *range(174, 256)}, map(chr, itertools.count(256))
    return [chr(byte) if byte in printable else next(others) for byte in range(256)]


class Encoded(NamedTuple):
    """Encoded texts, one after the other. A place is a character of a text, or its end."""

    tokens: np.ndarray  # u32 [tokens]
    lengths: np.ndarray  # i64 [texts]
    ended: np.ndarray  # i64 [places]: how many tokens of that text end at or before the place
    straddled: np.ndarray  # bool [places]: a token begins before the place and ends after it
    word_starts: np.ndarray | None  # bool [tokens]; None if the encoder's `word_starts` tells by token


class Table(dict):
    """Run -> its index. A run that was not seen before gets the next index and waits in `new`."""

    def __init__(self):
        super().__init__()
        self.new = []

    def __missing__(self, run):
        self.new.append(run)
        self[run] = index = len(self)
        return index


class Encoder:
    """Encodes texts with a `tokenizers.Tokenizer`, whose special tokens are neither added nor recognised. word_starts:
    bool [vocab], the tokens that begin a word; None if that depends on more than the token."""

    def __init__(self, tokenizer: Tokenizer):
        written = json.loads(tokenizer.to_str())
        self.runs, self.word_starts, self.word_ends = _reading(written)
        self.lead = re.compile(f"[{LEADS.get(self.runs, SPACE)}]*")
        self.prefix = bool(self.runs) and written["pre_tokenizer"].get("add_prefix_space", False)
        if self.prefix:
            written["pre_tokenizer"]["add_prefix_space"] = False  # once per text, not for each run
        self.bytes = _bytes(written) if self.runs is BYTES and not self.prefix else None
        self.tokenizer = _without_specials(written)
        self.widths, self.safe = _widths(written, self.runs)
        self._forget()

    def encode(self, texts: list[str], places: Sequence[np.ndarray]) -> Encoded:
        """Encode texts. places: for each text, i64 [places in it]."""
        if self.bytes is not None:
            return self._encode_bytes(texts, places)
        if self.runs is None:
            return self._encode_plainly(texts, places)
        if self.prefix:
            texts, places = _prefixed(texts, places)
        runs_of = list(map(self.runs.findall, texts))
        runs = list(itertools.chain.from_iterable(runs_of))
        texts_at = _bounds(map(len, runs_of), len(runs_of))  # the first run of each text
        begin = _bounds(map(len, runs), len(runs))
        text = np.repeat(np.arange(len(places)), [len(each) for each in places])
        at = begin[texts_at[text]] + np.concatenate([np.zeros(0, np.int64), *places])
        run = np.searchsorted(begin, at, "right") - 1
        offset = at - begin[run]
        measured, inside = self._sort(runs, run, offset)
        index = np.fromiter(map(self.table.__getitem__, runs), np.int64, len(runs))
        spans = self._learn([runs[run[place]] for place in inside])
        count = self.count[index]
        first = _bounds(count)
        tokens = self.flat[np.repeat(self.start[index] - first[:-1], count) + np.arange(first[-1])]
        ended, straddled = first[run], np.zeros(len(at), bool)
        if self.widths is not None and len(measured):
            ended[measured], straddled[measured] = self._measure(
                tokens, first, "".join(texts), begin, run[measured], at[measured]
            )
        for place in inside:
            more, straddled[place] = _place(spans[runs[run[place]]], offset[place])
            ended[place] += more
        ended -= first[texts_at[text]]
        if len(self.table) > MOST_RUNS or self.characters > MOST_CHARACTERS:
            self._forget()
        lengths, word_starts = np.diff(first[texts_at]), None
        if self.word_ends is not None:
            word_starts = np.concatenate([np.ones(1, bool), self.word_ends[tokens]])[: len(tokens)]
            word_starts[first[texts_at[:-1]][lengths > 0]] = True
        return Encoded(tokens, lengths, ended, straddled, word_starts)

    def tokens(self, texts: list[str]) -> list[np.ndarray]:
        """Return the tokens of each text, u32 [tokens]."""
        encoded = self.encode(texts, [np.zeros(0, np.int64)] * len(texts))
        return np.split(encoded.tokens, np.cumsum(encoded.lengths)[:-1]) if texts else []

    def _sort(self, runs: list[str], run: np.ndarray, offset: np.ndarray) -> tuple[np.ndarray, list[int]]:
        """Divide the places inside runs into those that the widths of tokens locate, and those that need offsets."""
        later = np.flatnonzero(offset)
        if self.runs is BYTES:
            return later, []
        measured, inside, plain = [], [], {}
        for place in later.tolist():
            where = runs[run[place]]
            if where not in plain:
                plain[where] = self.lead.match(where).end(), self.safe is not None and self.safe.fullmatch(where)
            lead, safe = plain[where]
            if offset[place] > lead:
                (measured if safe else inside).append(place)
        return np.array(measured, np.int64), inside

    def _measure(self, tokens, first, text: str, begin, run, at) -> tuple[np.ndarray, np.ndarray]:
        """Return, for each place `at` of all texts (`text`), how many tokens end at or before it, and whether one
        straddles it. In a safe run ▁ and each character but white space are in one token; bytes always are."""
        if self.runs is BYTES:
            target = _bytes_before(text)[at]
            ends = np.cumsum(self.widths[tokens])
        else:
            space = [self.lead.match(text, place).end() - place for place in begin[run].tolist()]
            ends = np.cumsum(self.widths[tokens])
            target = _bounds(self.widths[tokens])[first[run]] + at - begin[run] - space + 1
        ended = np.searchsorted(ends, target, "right")
        return ended, np.where(ended > 0, ends[ended - 1], 0) < target

    def _encode_bytes(self, texts, places):
        tokens = self.bytes[np.frombuffer("".join(texts).encode(), np.uint8)]
        lengths = np.array([len(text.encode()) for text in texts], np.int64)
        ended = [_bytes_before(text)[each] for text, each in zip(texts, places, strict=True)]
        ended = np.concatenate([np.zeros(0, np.int64), *ended])
        return Encoded(tokens, lengths, ended, np.zeros(len(ended), bool), None)

    def _encode_plainly(self, texts, places):
        encodings = self.tokenizer.encode_batch(texts, add_special_tokens=False)  # encode_batch_fast gives no word_ids
        lengths = np.fromiter(map(len, encodings), np.int64, len(encodings))
        tokens = np.fromiter(itertools.chain.from_iterable(e.ids for e in encodings), np.uint32, lengths.sum())
        spans = (encoding.offsets for encoding in encodings)
        found = [_place(each, at) for each, some in zip(spans, places, strict=True) for at in some.tolist()]
        ended, straddled = np.array(found, np.int64).reshape(-1, 2).T
        word_starts = None
        if self.word_starts is None:
            word_starts = np.ones(len(tokens), bool)
            words = itertools.chain.from_iterable(e.word_ids for e in encodings)
            word = np.fromiter((-1 if w is None else w for w in words), np.int64, len(tokens))
            word_starts[1:] = word[1:] != word[:-1]
            first = np.cumsum(lengths) - lengths
            word_starts[first[lengths > 0]] = True
        return Encoded(tokens, lengths, ended, straddled.astype(bool), word_starts)

    def _learn(self, looked_into: list[str]) -> dict[str, list[tuple[int, int]]]:
        """Encode the new runs and append them to the table. Returns the tokens' offsets in runs `looked_into`."""
        distinct = list(dict.fromkeys(looked_into))
        known = dict(zip(distinct, self.tokenizer.encode_batch(distinct, add_special_tokens=False), strict=True))
        new = self.table.new
        plain = [run for run in new if run not in known]
        fast = dict(zip(plain, self.tokenizer.encode_batch_fast(plain, add_special_tokens=False), strict=True))
        encodings = [fast[run] if run in fast else known[run] for run in new]
        count = np.fromiter(map(len, encodings), np.int64, len(encodings))
        ids = np.fromiter(itertools.chain.from_iterable(e.ids for e in encodings), np.uint32, count.sum())
        self.count = np.concatenate([self.count, count])
        self.start = np.concatenate([self.start, len(self.flat) + np.cumsum(count) - count])
        self.flat = np.concatenate([self.flat, ids])
        self.characters += sum(map(len, new))
        new.clear()
        return {run: encoding.offsets for run, encoding in known.items()}

    def _forget(self):
        self.table, self.characters = Table(), 0
        self.count = np.zeros(0, np.int64)  # tokens of each run
        self.start = np.zeros(0, np.int64)  # where each run begins in `flat`
        self.flat = np.zeros(0, np.uint32)


def _bounds(counts, length: int = -1) -> np.ndarray:
    """Return [0, the sums of counts so far]; counts: an array, or an iterable of `length` integers."""
    counts = np.fromiter(counts, np.int64, length) if length >= 0 else counts
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def _bytes_before(text: str) -> np.ndarray:
    """Return the bytes of UTF-8 before each place: i64 [characters + 1]."""
    code = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    return _bounds(1 + (code > 0x7F) + (code > 0x7FF) + (code > 0xFFFF))


def _place(spans: list[tuple[int, int]], at: int) -> tuple[int, bool]:
    """Return (tokens that end at or before character `at`, whether one begins before it and ends after it)."""
    ended = bisect.bisect_right(spans, at, key=lambda span: span[1])
    return ended, ended < len(spans) and spans[ended][0] < at


def _prefixed(texts, places):
    """Put before each text the space that its tokenizer would add, and move its places."""
    moved = [bool(text) and text[0] != " " for text in texts]
    texts = [f" {text}" if moves else text for moves, text in zip(moved, texts, strict=True)]
    return texts, [np.where(each, each + moves, 0) for moves, each in zip(moved, places, strict=True)]


def _without_specials(written: dict) -> Tokenizer:
    """Return the tokenizer with special tokens that no text can spell. Unigram and word models find them like any other
    token; a space in front, which their words never hold, hides them."""
    specials = {token["content"] for token in written["added_tokens"] if token["special"]}
    model = written["model"]

    def hide(token):
        return f" {token}" if token in specials and token != model.get("unk_token") else token

    plain = written | {"post_processor": None, "padding": None, "truncation": None}
    if model["type"] == "Unigram":
        model = model | {"vocab": [[hide(token), score] for token, score in model["vocab"]]}
    elif model["type"] == "WordLevel":
        model = model | {"vocab": {hide(token): index for token, index in model["vocab"].items()}}
    else:
        tokenizer = Tokenizer.from_str(json.dumps(plain))
        tokenizer.encode_special_tokens = True
        return tokenizer
    others = [token for token in written["added_tokens"] if not token["special"]]
    tokenizer = Tokenizer.from_str(json.dumps(plain | {"model": model, "added_tokens": others}))
    if model["type"] == "Unigram":  # the library reads numbers from JSON without their last bit, which decides ties
        vocab = [(token, score) for token, score in model["vocab"]]
        tokenizer.model = models.Unigram(vocab, model["unk_id"], model["byte_fallback"])
    return tokenizer


def _reading(written: dict) -> tuple[re.Pattern | None, np.ndarray | None, np.ndarray | None]:
    """Return how a tokenizer's texts are cut into runs that it treats alone, and bool [vocab]: the tokens that begin a
    word, or those that end one. None for unknown kinds. written: its tokenizer.json."""
    model = written["model"]
    splits, changes = _steps(written["pre_tokenizer"], "pretokenizers"), _steps(written["normalizer"], "normalizers")
    kinds = model["type"], [step["type"] for step in splits], [step["type"] for step in changes]
    begins = ends = None
    if not all(token["special"] for token in written["added_tokens"]):
        return None, None, None
    if kinds == ("WordPiece", ["BertPreTokenizer"], ["BertNormalizer"]):
        prefix = model["continuing_subword_prefix"]
        runs = CHINESE if changes[0]["handle_chinese_chars"] else SPACED
        begins = lambda token: not token.startswith(prefix) or token == prefix
    elif kinds == ("BPE", ["BertPreTokenizer"], ["BertNormalizer"]) and model["end_of_word_suffix"]:
        runs = CHINESE if changes[0]["handle_chinese_chars"] else SPACED
        ends = lambda token: token.endswith((model["end_of_word_suffix"], "<unk>"))
    elif kinds == ("BPE", ["Split"], []) and splits[0]["pattern"] == {"Regex": CTRL_WORD.pattern}:
        runs, ends = CTRL, lambda token: token.endswith((model["end_of_word_suffix"], "<unk>"))
    elif kinds == ("WordLevel", ["WhitespaceSplit"], ["BertNormalizer"]):
        runs, begins = SPACED, lambda token: True
    elif splits == [{"type": "WhitespaceSplit"}, METASPACE] and all(map(_alone, changes)):
        runs, begins = SPACED, lambda token: token.startswith(WORD)
    elif kinds == ("BPE", ["ByteLevel"], []) and {*BYTE_ALPHABET} <= {*model["vocab"]}:
        if not splits[0]["use_regex"] and model["merges"]:
            return None, None, None
        runs, begins = BYTES, lambda token: token.startswith(BYTE_SPACES)
    else:
        return None, None, None
    return runs, begins and _by_token(written, begins), ends and _by_token(written, ends)


def _by_token(written: dict, about: Callable[[str], bool | int]) -> np.ndarray:
    """Return `about` of each token, [vocab]; 0 for added tokens."""
    ids, added = _ids(written["model"]), [token["id"] for token in written["added_tokens"]]
    values = np.zeros(1 + max([*ids.values(), *added]), type(about("")))
    values[[*ids.values()]] = [*map(about, ids)]
    return values


def _ids(model: dict) -> dict[str, int]:
    vocab = model["vocab"]
    return vocab if isinstance(vocab, dict) else {token: index for index, (token, _) in enumerate(vocab)}


def _bytes(written: dict) -> np.ndarray | None:
    """Return the token of each byte, u32 [256], if every byte is a token; else None."""
    if written["model"]["merges"]:
        return None
    return np.array([written["model"]["vocab"][character] for character in byte_characters()], np.uint32)


def _widths(written: dict, runs: re.Pattern | None) -> tuple[np.ndarray | None, re.Pattern | None]:
    """Return i64 [vocab], the bytes of each byte-level token or the characters of each piece, and a pattern of the runs
    in which these locate the end of a piece, of characters that normalise to a single one; or None."""
    if runs is BYTES:
        return _by_token(written, len), None
    if runs is not SPACED or METASPACE not in _steps(written["pre_tokenizer"], "pretokenizers"):
        return None, None
    vocab = _ids(written["model"])
    normalizer = Tokenizer.from_str(json.dumps(written)).normalizer
    normal = {c: normalizer.normalize_str(c) if normalizer else c for c in PLAIN}
    changes = _steps(written["normalizer"], "normalizers")
    together = "".join(change["pattern"]["String"] for change in changes if change["type"] == "Replace")
    safe = [c for c in PLAIN if len(normal[c]) == 1 and normal[c] in vocab and c not in together]
    return _by_token(written, len), re.compile(f"[{SPACE}]*[{re.escape(''.join(safe))}]*") if safe else None


def _steps(part: dict | None, inside: str) -> list[dict]:
    """Return the steps of a normaliser or pre-tokeniser."""
    return part.get(inside, [part]) if part else []


def _alone(change: dict) -> bool:
    """Return whether a normalising step changes the text on either side of a space whatever is on the other."""
    replaces_words = change["type"] == "Replace" and " " not in change["pattern"].get("String", " ")
    return replaces_words or change["type"] in ALONE


@functools.lru_cache(maxsize=8)
def token_bytes(path: Path) -> np.ndarray | None:
    """Return the bytes of each token of a byte-level tokenizer, 0 for special ones: i64 [vocab]; None for another
    tokenizer, which may change text before it cuts it. path: folder of the tokenizer's files."""
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    encoder = Encoder(tokenizer)
    if encoder.runs is not BYTES or encoder.prefix:
        return None
    widths = np.zeros(tokenizer.get_vocab_size(), np.int64)
    widths[: len(encoder.widths)] = encoder.widths
    widths[list(tokenizer.get_added_tokens_decoder())] = 0
    return widths
