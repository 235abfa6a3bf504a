"""How fast batches come from the stored corpus on one core, beside Hugging Face's masking collator.

    python -m benchmarks.loader_speed [CORPUS] [--tokens 20000000]

Ours is the whole way, from the memory-mapped store through `Loader` to masked NumPy batches, without a thread of its
own. The other side is `DataCollatorForLanguageModeling` alone (PyTorch, one thread, without whole words): its rows lie
ready in memory as lists with their special tokens marked, so reading, shuffling and packing are not counted. Both sides
are pinned to the same core, take turns, and are timed by the processor time that they use; the best of the rounds
counts. Rates are millions of non-padding tokens per second. The corpus is repeated up to --tokens, so that it does not
sit in the processor's caches. Contiguous streams and permuted spans have no such counterpart: only ours is timed.

    python -m benchmarks.loader_speed [CORPUS] --orders

compares the same examples from one part, from 16 parts in 8 lanes, and from a mixture of three such corpora.
"""

import itertools
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer, DataCollatorForLanguageModeling

from benchmarks.repeated import repeated
from data_pipelines.batches import make_examples
from data_pipelines.command_line import parse
from data_pipelines.corpus import Corpus
from data_pipelines.examples.layout import Layout, RowLayout
from data_pipelines.examples.masking import Masking
from data_pipelines.examples.packed_sentences import PackedSentences
from data_pipelines.examples.permutations import PermutedSpans, Permuting
from data_pipelines.examples.segment_pairs import SegmentPairs
from data_pipelines.examples.streams import ContiguousStreams
from data_pipelines.loader import Loader
from data_pipelines.mixture import make_mixture
from data_pipelines.order import Order

TOKENS_PER_ROUND = 131_072  # short, so that some rounds go undisturbed on a busy machine
ROWS_PER_ROUND = 4096  # where orders are compared, which build thousands of rows together
MASKS = {"token": Masking(), "word": Masking(whole_word=True)}
MASKS["n-gram"] = Masking(whole_word=True, ngrams=(1, 1 / 2, 1 / 3))
ORDERS = ("one part", "16 parts, 8 lanes", "mixture of 3")
PARTS, LANES = 16, Order(lanes=8, window=4)
RATES = {"a": 0.5, "b": 0.25, "c": 0.25}  # of a lane of 8 rows each has an even number


@dataclass(frozen=True)
class Options:
    """Compare the rates of the loader and of Hugging Face's collator."""

    corpus: Annotated[Path, tyro.conf.Positional] = Path("corpora/builtin")
    """A corpus made by `python -m data_pipelines prepare`."""
    tokens: int = 20_000_000
    """Repeat its train split up to this size."""
    rounds: int = 20
    """Of both sides."""
    orders: bool = False
    """Compare orders instead."""


def main(options: Options) -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    (compare_orders if options.orders else compare_collators)(options)


def compare_collators(options: Options) -> None:
    table = Table(
        "layout", "length", "batch", "predicted", "plan s", "M tokens/s", "collator", "ratio", title="one core"
    )
    with tempfile.TemporaryDirectory() as folder:
        corpus = repeated(Corpus(options.corpus), Path(folder), options.tokens)
        for length, batch_size in itertools.product((128, 512), (32, 256)):
            for layout, choice in layouts(length):
                begin = time.process_time()
                examples = make_examples(layout, corpus, "train", batch_size, seed=0)
                examples.batch(0, np.arange(1))  # which plans
                plan = time.process_time() - begin
                ours, theirs = rates(examples, options.rounds, isinstance(layout, RowLayout))
                figures = (f"{theirs:.1f}", f"{ours / theirs:.0f}x") if theirs else ("", "")
                name = type(layout).__name__
                table.add_row(name, str(length), str(batch_size), choice, f"{plan:.2f}", f"{ours:.1f}", *figures)
    Console(width=100).print(table)


def layouts(length: int) -> Iterator[tuple[Layout, str]]:
    """(layout, what is predicted) for each row of the table."""
    for layout, (predicted, masks) in itertools.product((SegmentPairs, PackedSentences), MASKS.items()):
        yield layout(length, masks), predicted
    for reset in (False, True):
        yield ContiguousStreams(length, reset), "next, reset" if reset else "next"
    for spans in (False, True):
        permuting = Permuting(length // 2, perm_size=length // 2, spans=spans)
        yield PermutedSpans(length, permuting), "span" if spans else "token"


def compare_orders(options: Options) -> None:
    table = Table("layout", "length", "batch", *ORDERS, "lanes / one", "mixture / one", title="one core, M tokens/s")
    with tempfile.TemporaryDirectory() as folder:
        corpus, share = Corpus(options.corpus), options.tokens // 3
        one = repeated(corpus, Path(folder, "one"), options.tokens)
        many = repeated(corpus, Path(folder, "many"), options.tokens, PARTS)
        three = {name: repeated(corpus, Path(folder, name), share, PARTS) for name in RATES}
        for length, batch_size in itertools.product((128, 512), (64, 256)):
            spans = PermutedSpans(length, Permuting(length // 2, perm_size=length // 2))
            for layout in (SegmentPairs(length), PackedSentences(length), ContiguousStreams(length), spans):
                mixed = dict.fromkeys(three, layout)
                made = (
                    make_examples(layout, one, "train", batch_size, 0),
                    make_examples(layout, many, "train", batch_size, 0, LANES),
                    make_mixture(mixed, three, list(RATES.values()), batch_size, 0, LANES),
                )
                found = in_turns(made, options.rounds, length)
                shown = [f"{rate:.1f}" for rate in found] + [f"{rate / found[0]:.2f}" for rate in found[1:]]
                table.add_row(type(layout).__name__, str(length), str(batch_size), *shown)
    Console(width=120).print(table)


def in_turns(several, rounds: int, length: int) -> list[float]:
    """Millions of tokens, padding too where there is some, per second of processor time: the best round of each."""
    batch_size, taken = several[0].batch_size, [[] for _ in several]
    group = [examples.together // batch_size for examples in several]  # steps that the loader builds together
    steps = [of * -(-ROWS_PER_ROUND // (of * batch_size)) for of in group]
    with ExitStack() as stack:
        loader = lambda examples, of: Loader(examples, 0, of * (rounds + 1), np.arange(batch_size), threads=0)
        loaders = [iter(stack.enter_context(loader(*one))) for one in zip(several, steps, strict=True)]
        for _ in range(rounds + 1):  # the first plans
            for batches, of, seconds in zip(loaders, steps, taken, strict=True):
                begin = time.process_time()
                for _ in itertools.islice(batches, of):
                    pass
                seconds.append(time.process_time() - begin)
    return [of * batch_size * length / min(seconds[1:]) / 1e6 for of, seconds in zip(steps, taken, strict=True)]


def rates(examples, rounds: int, compare: bool) -> tuple[float, float | None]:
    """(the loader's, the collator's if they are to be compared) millions of non-padding tokens per second of processor
    time."""
    steps = max(1, TOKENS_PER_ROUND // (examples.batch_size * examples.layout.length))
    rows = np.arange(examples.batch_size)
    first = [examples.batch(step, rows) for step in range(steps)]
    tokens = sum(np.count_nonzero(batch["segments"]) for batch in first)
    tokenizer = AutoTokenizer.from_pretrained(examples.corpus.tokenizer_path)
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)
    prepared = [as_lists(batch, examples.corpus.special) for batch in first] if compare else []
    ours, theirs = [], []
    with Loader(examples, 0, steps * rounds, rows, threads=0) as loader:
        batches = iter(loader)
        for _ in range(rounds):
            begin = time.process_time()
            for _ in itertools.islice(batches, steps):
                pass
            middle = time.process_time()
            for batch in prepared:
                collator(batch)
            ours.append(middle - begin)
            theirs.append(time.process_time() - middle)
    return tokens / min(ours) / 1e6, tokens / min(theirs) / 1e6 if compare else None


def as_lists(batch: dict[str, np.ndarray], special: dict[str, int]) -> list[dict[str, list[int]]]:
    """The rows as the collator takes them: without padding, special tokens marked."""
    rows = [row[: np.count_nonzero(segments)] for row, segments in zip(batch["tokens"], batch["segments"], strict=True)]
    marks = [np.isin(row, [special["cls"], special["sep"]]).astype(int) for row in rows]
    return [
        {"input_ids": row.tolist(), "special_tokens_mask": mark.tolist()} for row, mark in zip(rows, marks, strict=True)
    ]


if __name__ == "__main__":
    main(parse(Options, sys.argv[1:], "python -m benchmarks.loader_speed"))
