"""Print the statistics of a corpus and examples as a model sees them, and check that its files are unchanged."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tokenizers import Tokenizer

from data_pipelines.corpus import Corpus
from data_pipelines.manifest import SPLITS
from data_pipelines.text.encoding import WORD

FREQUENT = 40  # tokens to list
VALUES = 8  # values of a field to list
BAR = 40  # characters in the longest bar of a histogram
LABELS = {"next_sentence": ("B follows A", "B is random"), "sentence_order": ("B follows A", "A follows B")}
MASKED, RANDOM, KEPT = "bold white on red", "bold black on yellow", "bold black on green"


@dataclass(frozen=True)
class Show:
    """Print a corpus's statistics and, with --recipe, a few examples as its model sees them, corruptions in colour."""

    corpus: Annotated[str, tyro.conf.Positional]
    """The corpus: a directory made by prepare, or several that are trained on together: en=DIR,zh=DIR."""
    recipe: str | None = None
    """The recipe whose examples to show: a name listed by `python -m pretrain recipes`, or a run's recipe.json."""
    examples: int = 3
    """How many examples to show."""


@dataclass(frozen=True)
class Verify:
    """Hash every file of a corpus and of its tokenizer. Exit status 0 if all are as `prepare` wrote them; otherwise 2,
    and an error that names the first file that differs."""

    corpus: Annotated[str, tyro.conf.Positional]
    """A directory made by `prepare`, or a URL such as gs://BUCKET/NAME, which is copied to this host part by part."""


def show_statistics(corpus: Corpus, tokenizer: Tokenizer, console: Console) -> None:
    """Print sizes per split, histograms of lengths, compression, frequent tokens, and what prepare could not read."""
    manifest = corpus.manifest
    console.print(f"{corpus.path}, fingerprint {corpus.fingerprint[:12]}", style="bold", markup=False, soft_wrap=True)
    sizes = Table("split", "documents", "sentences", "tokens")
    for split in SPLITS:
        sizes.add_row(split, *(f"{count:,}" for count in corpus.size(split).values()))
    console.print(sizes)
    fields = ", ".join(f"{name} ({field.per})" for name, field in corpus.fields.items())
    console.print(f"parts: {len(corpus.parts):,}; fields: {fields}", markup=False, soft_wrap=True)
    stored = [prefix for stage in manifest.get("stages", ()) for prefix in stage["settings"].get("task_prefix", ())]
    if prefixes := dict.fromkeys(filter(None, stored)):
        console.print(f"inputs begin with: {', '.join(map(repr, prefixes))}", markup=False, soft_wrap=True)
    for name, field in corpus.fields.items():
        if field.values:
            values = _listed([value for value in field.values if value])
        elif field.per == "document":
            first = corpus.parts[0].column("train", name)[:VALUES].tolist()
            values = f"{', '.join(map(str, first))} and so on"
        else:
            continue
        console.print(f"{name}: {values}", markup=False, soft_wrap=True)
    tokens = sum(corpus.size(split)["tokens"] for split in SPLITS)
    frequency = corpus.token_counts()
    used = np.count_nonzero(frequency)
    line = f"vocabulary {corpus.vocab_size:,}, of which {used:,} occur"
    if "unk" in corpus.special:
        line += f"; {frequency[corpus.special['unk']] / max(frequency.sum(), 1):.3%} of the tokens are unknown"
    console.print(line)
    characters = sum(part.entry.characters for part in corpus.parts)
    console.print(f"{characters / max(tokens, 1):.2f} characters per token")
    documents, sentences = _lengths(corpus)
    console.print(_histogram("tokens per document, train", documents))
    console.print(_histogram("tokens per sentence, train", sentences))
    order = np.argsort(-frequency, kind="stable")[: min(FREQUENT, used)]
    listed = "  ".join(f"{tokenizer.id_to_token(int(index))} {frequency[index]:,}" for index in order)
    if tokenizer.token_to_id("Ġ") is not None:
        console.print("byte-level tokens: Ġ is a space, Ċ a newline, and a letter such as é is two characters")
    console.print("most frequent tokens:", style="bold")
    console.print(listed, markup=False)
    show_problems(manifest["counts"], console)


def show_problems(problems: dict, console: Console) -> None:
    """Print one line for each kind of input problem."""
    for problem, seen in problems.items():
        line = f"{seen['count']:,} {problem}; the first: {seen['first']}"
        console.print(line, style="yellow", markup=False, soft_wrap=True)


def _listed(values: list[str]) -> str:
    more = len(values) - VALUES
    return ", ".join(values[:VALUES]) + (f" and {more:,} more" if more > 0 else "")


def _lengths(corpus: Corpus) -> tuple[np.ndarray, np.ndarray]:
    """Return histograms of tokens per document and per sentence in the train split, int64 [64] each: entry e counts
    lengths from 2^(e-1) to 2^e - 1. One part is in memory at a time."""
    sums = np.zeros((2, 64), np.int64)
    for part in corpus.parts:
        for row, lengths in enumerate((part.lengths("train"), np.diff(part.sentences("train")))):
            sums[row] += np.bincount(np.frexp(lengths)[1], minlength=64)
        corpus.release("train", [part.index])
    return sums[0], sums[1]


def _histogram(title: str, counts: np.ndarray) -> Table:
    """Return a table with bars. counts: as `_lengths` returns them."""
    table = Table("from", "to", "count", "", title=title, title_justify="left", box=None)
    found = np.flatnonzero(counts)
    for exponent in range(found[0], found[-1] + 1) if len(found) else ():
        bar = "█" * round(BAR * counts[exponent] / counts.max())
        table.add_row(f"{1 << max(exponent - 1, 0):,}", f"{(1 << exponent) - 1:,}", f"{counts[exponent]:,}", bar)
    return table


def show_examples(tokenizer: Tokenizer, mask: int, batch: dict[str, np.ndarray], console: Console) -> None:
    """Print each row of a batch: the model's input and, at predicted positions, the target.

    mask: id of [MASK].   batch: tokens i32[n, length], segments i32[n, length] (0 = padding); either weights f32[n,
    length] (each token predicts the next; of an encoder's input, targets and weights [n, target_length] are the
    decoder's, with decoder_segments), or prediction_positions and prediction_targets i32[n, predictions] and
    prediction_weights f32[n, predictions] (0 = unused). Optional: next_sentence or sentence_order i32[n] (-1: one
    segment); reversed i32[n], with ranks i32[n, length], the order in which tokens are predicted.
    """
    if "prediction_positions" in batch:
        named = (" masked ", MASKED), (" replaced by a random token ", RANDOM), (" kept, to be predicted ", KEPT)
        legend = Text(" ").join(Text(*entry) for entry in named)
        console.print(Text.assemble("\n", legend, "   with the original after the arrow"))
    for row in range(len(batch["tokens"])):
        targets = _predicted(batch, row)
        real = batch["segments"][row] > 0
        predictions = len(targets) if "prediction_positions" in batch else int(batch["weights"][row].sum())
        heading = f"\nexample {row}: {real.sum()} tokens of {len(real)}, {predictions} to predict"
        for label in LABELS.keys() & batch.keys():
            heading += f", {(*LABELS[label], 'one segment')[batch[label][row]]}"
        if "reversed" in batch and batch["reversed"][row]:
            heading += ", runs backwards"
        console.print(heading, style="bold")
        console.print(_coloured(tokenizer, batch["tokens"][row][real], targets, mask))
        if "decoder_segments" in batch:
            target = batch["targets"][row][batch["decoder_segments"][row] > 0]
            console.print(Text("target ", style="bold").append(_coloured(tokenizer, target, {}, mask)))
        if "reversed" in batch:
            turns = sorted(targets, key=lambda position: batch["ranks"][row][position])
            order = [(f"{at} {tokenizer.id_to_token(targets[at])}", KEPT) for at in turns]
            console.print(Text("predicted in the order ").append(Text("  ").join(Text(*turn) for turn in order)))


def _predicted(batch: dict[str, np.ndarray], row: int) -> dict[int, int]:
    """Return position -> target of a row's predictions at chosen positions; {} where each token predicts the next."""
    if "prediction_positions" not in batch:
        return {}
    used = batch["prediction_weights"][row] > 0
    positions, targets = (batch[f"prediction_{name}"][row][used].tolist() for name in ("positions", "targets"))
    return dict(zip(positions, targets, strict=True))


def _coloured(tokenizer: Tokenizer, tokens: np.ndarray, targets: dict[int, int], mask: int) -> Text:
    """Return the tokens as text; at each position in `targets` an arrow to the original, coloured by the corruption."""
    text = Text()
    specials = {index for index, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    marked = tokenizer.token_to_id(WORD) is not None  # the first piece of a word is marked, else later ones
    for position, token in enumerate(tokens.tolist()):
        piece = tokenizer.id_to_token(token)
        if position not in targets:
            begins = token in specials or (piece.startswith(WORD) if marked else not piece.startswith("##"))
            text.append(" " if position and begins else "")
            text.append(piece.removeprefix("##").removeprefix(WORD), style="dim" if token in specials else "")
            continue
        target = targets[position]
        style = MASKED if token == mask else KEPT if token == target else RANDOM
        text.append(" ")
        text.append(piece if token == target else f"{piece}→{tokenizer.id_to_token(target)}", style=style)
    return text


def verify(options: Verify, console: Console) -> None:
    """Hash every file of a corpus. Raises UserError at the first that differs."""
    corpus = Corpus(options.corpus)
    corpus.verify()
    parts, size = len(corpus.parts), sum(file["bytes"] for part in corpus.parts for file in part.entry.files.values())
    line = f"{corpus.source}: {parts} part{'s' * (parts > 1)}, {size / 1e6:,.1f} MB, as prepare wrote them"
    console.print(line, markup=False, soft_wrap=True)
