"""`python -m finetune augment`: copies the rows of a training file with other words (Jiao et al. 2020, TinyBERT,
arXiv:1909.10351, algorithm 1). Words are predicted in the original text, whatever else a copy changes."""

import dataclasses
import itertools
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tyro.conf import Positional

import finetune.registry  # noqa: F401 (a run's recipe may name a task)
from data_pipelines import noise, similar_words
from data_pipelines.command_line import Place, parse
from data_pipelines.durable import put, writing
from data_pipelines.errors import UserError
from data_pipelines.progress import doing
from data_pipelines.text.encoding import Encoder
from finetune.files import Record, as_text, records
from finetune.inside import looked
from finetune.rows import Row, Rows, joined
from models.core.ranges import COUNT, SEED, SHARE
from pretrain.commands.common import check_file
from pretrain.generation.decoding import fills, log_probabilities
from pretrain.objectives.objective import inputs_of
from pretrain.options import check_options
from pretrain.training.opened import Opened, open_model

LONGEST = 512  # tokens of a text in which words are looked for, or as many as the model has positions
RECORDS = 1_000  # whose words are predicted at once
Word = tuple[int, int, int | None]  # begin and end in characters, and the place of its token if it has one, not unknown

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Augment:
    """Copy the rows of a training file for classify with other words, as TinyBERT does before it learns a task: a word
    of one piece is replaced by one that a masked language model predicts there, a word of several pieces by one of the
    nearest word vectors. Each row stays, and its copies follow it."""

    file: Positional[Path]
    """Training file: .tsv or .csv with a header line, .jsonl or .parquet."""
    model: Place
    """Masked language model: a run's work directory, or a Hugging Face folder."""
    out: Path
    """File to write, which ends in .jsonl."""
    vectors: Path | None = None
    """Word vectors in word2vec's format, text or binary; without them words of several pieces stay."""
    text: tuple[str, ...] = ("text",)
    """Column of the text, or two columns of a pair of texts; each copy has other words in one of them."""
    copies: int = 20
    """Number of copies of each text."""
    rate: float = 0.4
    """Probability that a word of a copy is replaced."""
    candidates: int = 15
    """Number of most probable words, or of nearest words, of which one is drawn."""
    seed: int = 0
    """Random seed."""

    def __post_init__(self):
        check_options(self, {"copies": COUNT, "candidates": COUNT, "rate": SHARE, "seed": SEED})


def main(arguments: Sequence[str]) -> int:
    options = parse(Augment, arguments, "python -m finetune augment")
    if options.out.suffix != ".jsonl" or options.out.exists():
        raise UserError(f"--out {options.out}: must be a new file that ends in .jsonl; give another name")
    found = records(options.file, dict.fromkeys(options.text, "--text"))
    check_file(options.out)
    rows, partial = augmented(options, found), options.out.with_name(f"{options.out.name}.partial")
    with writing(options.out):
        with partial.open("w", encoding="utf-8") as file:
            file.writelines(f"{json.dumps(row, ensure_ascii=False, default=str)}\n" for row in rows)
        put(partial, options.out)
    return 0


def augmented(options: Augment, found: Sequence[Record]) -> Iterator[Mapping[str, Any]]:
    """Return the fields of each record, then of its copies."""
    texts = [as_text(record, name, record.fields[name]) for record in found for name in options.text]
    alike = options.vectors and similar_words.read(str(options.vectors), "--vectors")
    if alike and alike.vectors is None:
        raise UserError(f"--vectors {options.vectors}: has lists of words; give vectors in word2vec's format")
    opened = open_model(options.model)
    words, rows = split(opened, texts)
    if not any(words):
        raise UserError(f"{options.file}: has no words in {' and '.join(options.text)}; name columns with --text")
    doing("predicting words")
    predict = predictor(opened, options.candidates)
    pieces = {text[a:b]: None for text, of in zip(texts, words, strict=True) for a, b, place in of if place is None}
    near = of_vectors(alike, [*pieces], options.candidates) if alike else {}

    def made(first: int) -> Iterator[Mapping[str, Any]]:
        end, columns = min(first + RECORDS, len(found)), len(options.text)
        part = slice(columns * first, columns * end)
        guesses = predict(masked(opened, words[part], rows[part]))
        for row in range(first, end):
            yield found[row].fields
            for at, name in enumerate(options.text, columns * row):
                text, of = texts[at], words[at]
                names = [near.get(text[a:b], ()) if place is None else next(guesses) for a, b, place in of]
                choices = [pair for pair in zip(of, names, strict=True) if pair[1]]
                key = noise.key("augment", options.seed, at)
                for copy in copies(text, choices, key, options.rate, options.copies):
                    yield found[row].fields | {name: copy}

    return itertools.chain.from_iterable(map(made, range(0, len(found), RECORDS)))


def split(opened: Opened, texts: Sequence[str]) -> tuple[list[list[Word]], list[Row]]:
    """Return the words of each text, which have a letter or digit, and its row. UserError if the model predicts no
    masks."""
    made, encoder, special = opened.tokenizer, Encoder(opened.tokenizer.tokenizer), opened.tokenizer.special
    if not fills(opened.module) or "mask" not in special or encoder.word_starts is None:
        raise UserError(f"--model {opened.source}: does not predict masked words; give a BERT or the like")
    made.tokenizer.enable_truncation(min(LONGEST, getattr(opened.config, "positions", LONGEST)))
    words, rows = [[] for _ in texts], []
    for text, of_text in zip(texts, words, strict=True):
        one = made.tokenizer.post_process(encoder.tokenizer.encode(text, add_special_tokens=False))
        ids, offsets, of = one.ids, one.offsets, one.word_ids
        rows.append(Row(np.array(ids, np.int32), np.array(one.type_ids, np.int32)))
        pieces = [[*group] for word, group in itertools.groupby(range(len(of)), of.__getitem__) if word is not None]
        for group in pieces[:-1] if one.overflowing else pieces:  # the last one may be cut
            begin, end = offsets[group[0]][0], offsets[group[-1]][1]
            begin += len(text[begin:end]) - len(text[begin:end].lstrip())  # some tokenizers count the space before
            if any(map(str.isalnum, text[begin:end])):
                is_whole = len(group) == 1 and ids[group[0]] != special.get("unk")
                of_text.append((begin, end, group[0] if is_whole else None))
    return words, rows


def masked(opened: Opened, words: Sequence[list[Word]], rows: Sequence[Row]) -> Rows:
    """Return a row with a mask in place of each word that is one token."""
    pairs = [(row, place) for of, row in zip(words, rows, strict=True) for *_, place in of if place is not None]
    at, mask = (lambda row, place: np.arange(len(row.tokens)) == place), opened.tokenizer.special["mask"]
    return joined([row._replace(tokens=np.where(at(row, place), mask, row.tokens)) for row, place in pairs])


def predictor(opened: Opened, number: int) -> Callable[[Rows], Iterator[list[str]]]:
    """Return the function that predicts the `number` most probable words for the mask of each row."""
    tokenizer, mask = opened.tokenizer.tokenizer, opened.tokenizer.special["mask"]
    starts = Encoder(tokenizer).word_starts
    names = [name.strip() for name in tokenizer.decode_batch([[token] for token in range(len(starts))])]
    ids = np.flatnonzero(starts & [name[:1].isalnum() for name in names])
    number = min(number, len(ids))

    def best(model, params, batch):
        slots = (batch["tokens"] == mask).argmax(1)[:, None]
        scores = log_probabilities(model, params, inputs_of(model, batch), slots)
        return jax.lax.top_k(scores[:, ids], number)[1][None]

    def predict(rows: Rows) -> Iterator[list[str]]:
        found = np.zeros((len(rows), number), np.int32)
        for which, (tops,) in looked(opened, rows, best) if len(rows) else ():
            found[which] = tops
        # In the order of the vocabulary, since rounding differs between batches of other sizes
        return ([names[ids[at]] for at in row] for row in np.sort(found, axis=1))

    return predict


def of_vectors(alike: similar_words.Alike, words: Sequence[str], number: int) -> dict[str, list[str]]:
    """Return word -> the `number` nearest words of vectors, for words that are among them."""
    first = {word: at for at, word in reversed([*enumerate(alike.words)])}
    places = {word: at for word in words if (at := first.get(word, first.get(word.lower()))) is not None}
    if lacking := [word for word in words if word not in places]:
        log.warning("--vectors lacks %s of %s words, such as %s: they stay", len(lacking), len(words), lacking[0])
    known, which = [*places], np.array([*places.values()], np.int64)
    found = similar_words.nearest(alike.vectors, which, min(number, len(alike.words) - 1))
    return {known[row]: [alike.words[at] for at in others] for row, others in found}


def copies(text: str, choices: Sequence[tuple[Word, list[str]]], key: int, rate: float, number: int) -> Iterator[str]:
    """Yield `number` copies of a text, in which each word is replaced with probability `rate` by one of its choices."""
    count, ends = number * len(choices), [0, *(end for (_, end, _), _ in choices)]
    draws = [noise.bits(key, noise.counters(stream, count)).reshape(number, -1) for stream in range(2)]
    taken = noise.below(draws[1], np.array([len(names) for _, names in choices], np.int64))
    for is_replaced, of_copy in zip(draws[0] < rate * 2**32, taken, strict=True):
        words = zip(ends[:-1], choices, is_replaced, of_copy, strict=True)
        changed = (
            text[done:begin] + (names[which] if replaces else text[begin:end])
            for done, ((begin, end, _), names), replaces, which in words
        )
        yield "".join(changed) + text[ends[-1] :]
