"""How fast batches come from the stored corpus on one core, beside Hugging Face's masking collator.

    python -m benchmarks.loader_speed [CORPUS] [--tokens 20000000] [--lengths 128 512] [--batches 64 256]

Ours is the whole way, from the memory-mapped store through `Loader` to masked NumPy batches, without a thread of its
own: from one part, from 16 parts in 8 lanes, and from a mixture of three such corpora. The other side is
`DataCollatorForLanguageModeling` alone (PyTorch, one thread, without whole words): its rows lie ready in memory as
lists with their special tokens marked, so reading, shuffling and packing are not counted; contiguous streams and
permuted spans have no such counterpart. All sides are pinned to the same core, take turns, and are timed by the
processor time that they use; the best of the rounds counts. Rates are millions of non-padding tokens per second. The
corpus is repeated up to --tokens, so that it does not sit in the processor's caches.
"""

import functools
import itertools
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
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

from data_pipelines.batches import make_examples
from data_pipelines.command_line import end_with, parse
from data_pipelines.corpus import Corpus
from data_pipelines.examples.layout import Layout, RowLayout
from data_pipelines.examples.masking import Masking, has_similar_words
from data_pipelines.examples.next_tokens import ContiguousStreams
from data_pipelines.examples.packed_sentences import PackedSentences
from data_pipelines.examples.permutations import PermutedSpans, Permuting
from data_pipelines.examples.segment_pairs import SegmentPairs
from data_pipelines.loader import Loader
from data_pipelines.mixture import make_mixture
from data_pipelines.order import Order
from data_pipelines.store.fields import STORED
from data_pipelines.store.files import describe_files
from pretrain.objectives.span_boundary import SpanBoundaryObjective

ROWS_PER_ROUND = 1024  # few, so that some rounds go undisturbed on a busy machine
MASKS = {"token": Masking(), "word": Masking(unit="word_starts")}
MASKS["n-gram"] = Masking(unit="word_starts", ngrams=(1, 1 / 2, 1 / 3))
MASKS["span"] = SpanBoundaryObjective().masking
MASKS["similar"] = Masking(unit="word_starts", ngrams=(0.4, 0.3, 0.2, 0.1), fate="unit", similar=True)
PARTS, LANES = 16, Order(lanes=8, window=4)
RATES = {"a": 0.5, "b": 0.25, "c": 0.25}  # of a lane of 8 rows each has an even number


@dataclass(frozen=True)
class Options:
    """Compare the rates of the loader and of Hugging Face's collator."""

    corpus: Annotated[Path, tyro.conf.Positional] = Path("corpora/builtin")
    """A corpus made by `python -m data_pipelines prepare`."""
    tokens: int = 20_000_000
    """Repeat its train split up to this size."""
    lengths: tuple[int, ...] = (128, 512)
    """Of rows."""
    batches: tuple[int, ...] = (64, 256)
    """Their rows, of which a mixture in 8 lanes takes 32 or more."""
    rounds: int = 20
    """Of all sides."""


def main(arguments: list[str]) -> int:
    """Measure and print the table -> exit status."""
    options = parse(Options, arguments, "python -m benchmarks.loader_speed")
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    table = Table(title="one core, M tokens/s")
    table.add_column("layout", no_wrap=True)
    for heading in ("length", "batch", "predicted", "plan s", "one part", f"{PARTS} parts, 8 lanes"):
        table.add_column(heading)
    for heading in ("mixture of 3", "collator", "one part / collator"):
        table.add_column(heading)
    with tempfile.TemporaryDirectory() as folder:
        corpus, share = Corpus(options.corpus), options.tokens // 3
        one = repeated(corpus, Path(folder, "one"), options.tokens)
        many = repeated(corpus, Path(folder, "many"), options.tokens, PARTS)
        three = {name: repeated(corpus, Path(folder, name), share, PARTS) for name in RATES}
        for length, batch_size in itertools.product(options.lengths, options.batches):
            for layout, predicted in layouts(length, corpus):
                begin = time.process_time()
                first = make_examples(layout, one, "train", batch_size, 0)
                first.batch(0, np.arange(1))  # which plans
                plan = time.process_time() - begin
                lanes = make_examples(layout, many, "train", batch_size, 0, LANES)
                mixed = make_mixture(dict.fromkeys(three, layout), three, list(RATES.values()), batch_size, 0, LANES)
                ours, theirs = rates([first, lanes, mixed], options.rounds, isinstance(layout, RowLayout))
                compared = (f"{theirs:.1f}", f"{ours[0] / theirs:.0f}x") if theirs else ("", "")
                what = (type(layout).__name__, str(length), str(batch_size), predicted, f"{plan:.2f}")
                table.add_row(*what, *(f"{rate:.1f}" for rate in ours), *compared)
    Console(width=130).print(table)
    return 0


def layouts(length: int, corpus: Corpus) -> Iterator[tuple[Layout, str]]:
    """(layout, what is predicted) for each row of the table."""
    for layout, (predicted, masks) in itertools.product((SegmentPairs, PackedSentences), MASKS.items()):
        if not masks.similar or has_similar_words(corpus):
            yield layout(length, masks), predicted
    for reset in (False, True):
        yield ContiguousStreams(length, reset), "next, reset" if reset else "next"
    for spans in (False, True):
        permuting = Permuting(length // 2, perm_size=length // 2, spans=spans)
        yield PermutedSpans(length, permuting), "span" if spans else "token"


def rates(several: list, rounds: int, compare: bool) -> tuple[list[float], float | None]:
    """(of each examples' loader, of the collator on the first one's rows if they are to be compared)."""
    rows, sides, tokens = np.arange(several[0].batch_size), [], []
    with ExitStack() as stack:
        for examples in several:
            group = examples.together // len(rows)  # steps that the loader builds together
            steps = group * -(-ROWS_PER_ROUND // (group * len(rows)))
            first = [examples.batch(step, rows) for step in range(steps)]
            tokens.append(sum(np.count_nonzero(batch["segments"]) for batch in first))
            loader = stack.enter_context(Loader(examples, 0, steps * (rounds + 1), rows, threads=0))
            sides.append(functools.partial(exhaust, iter(loader), steps))
            if compare and len(sides) == 1:
                corpus = examples.corpus
                tokenizer = AutoTokenizer.from_pretrained(corpus.tokenizer_path)
                collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)
                prepared = [as_lists(batch, corpus.special) for batch in first]
        if compare:
            sides.append(lambda: exhaust(map(collator, prepared), len(prepared)))
            tokens.append(tokens[0])
        taken = [[seconds(side) for side in sides] for _ in range(rounds + 1)][1:]  # the first plans
    found = [number / min(of) / 1e6 for number, of in zip(tokens, zip(*taken, strict=True), strict=True)]
    return found[: len(several)], found[-1] if compare else None


def exhaust(items: Iterator, number: int) -> None:
    for _ in itertools.islice(items, number):
        pass


def seconds(side: Callable[[], None]) -> float:
    begin = time.process_time()
    side()
    return time.process_time() - begin


def as_lists(batch: dict[str, np.ndarray], special: dict[str, int]) -> list[dict[str, list[int]]]:
    """The rows as the collator takes them: without padding, special tokens marked."""
    rows = [row[: np.count_nonzero(segments)] for row, segments in zip(batch["tokens"], batch["segments"], strict=True)]
    marks = [np.isin(row, [special["cls"], special["sep"]]).astype(int) for row in rows]
    return [
        {"input_ids": row.tolist(), "special_tokens_mask": mark.tolist()} for row, mark in zip(rows, marks, strict=True)
    ]


def repeated(corpus: Corpus, folder: Path, tokens: int, parts: int = 1) -> Corpus:
    """A corpus of so many parts, each of copies of the first one's train split, of at least so many tokens in all."""
    part, first = corpus.parts[0], folder / "parts" / "000000"
    copies = -(-tokens // (parts * part.sizes["train"]["tokens"]))
    (first / "train").mkdir(parents=True)
    save = lambda name, array: np.save(first / "train" / f"{name}.npy", array)
    for name, field in corpus.fields.items():
        if field.kept == STORED:
            save(name, np.tile(part.array("train", name), copies))
    for name, offsets in (("sentences", part.sentences("train")), ("documents", part.documents("train"))):
        begins = offsets[:-1] + offsets[-1] * np.arange(copies)[:, None]
        save(name, np.append(begins.ravel(), offsets[-1] * copies))
    for number in range(1, parts):
        shutil.copytree(first, folder / "parts" / f"{number:06}")
    for name in ("tokenizer", "tables"):
        (folder / name).symlink_to((corpus.path / name).absolute())
    entry = corpus.manifest["parts"][0]
    sizes = {name: size * copies for name, size in part.sizes["train"].items()}
    described = entry | {"files": describe_files(first, "*/*.npy"), "splits": entry["splits"] | {"train": sizes}}
    (folder / "manifest.json").write_text(json.dumps(corpus.manifest | {"parts": [described] * parts}))
    return Corpus(folder)


if __name__ == "__main__":
    end_with(main)
