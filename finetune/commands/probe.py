"""`python -m finetune probe`: what can be read off each layer of a frozen model."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.table import Table
from tyro.conf import Positional

import finetune.registry  # noqa: F401 (a run's recipe may name a task)
from data_pipelines.command_line import Place, parse
from data_pipelines.errors import UserError
from data_pipelines.progress import busy
from finetune.rows import Rows
from finetune.sentences import NONE, Sentence
from finetune.tasks.tag import Tag, tags_of
from models.core.ranges import COUNT, SEED
from pretrain.commands.common import check_file, save_picture, wide_console, writing
from pretrain.options import check_options
from pretrain.recipe import LENGTH
from pretrain.storage.best import SCORE
from pretrain.storage.run_directory import write_whole

RANGES = {"length": LENGTH, "words": COUNT, "seed": SEED}
ALWAYS, MIX = "most frequent tag", "mix of all"  # rows of the table beside the layers'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Probing:
    """Train a linear probe of tags on each layer of a frozen model, and on a mix of all (probe.tsv, probe.png)."""

    run: Positional[Place]
    """Work directory of the run, or a Hugging Face folder."""
    train: Path
    """File of words with tags, as of `run tag`."""
    dev: Path
    """File of those to evaluate on."""
    out: Path
    """Folder to write to."""
    step: int | None = None
    """Which checkpoint; by default the newest."""
    token_column: int | None = None
    """Column of words, as of `run tag`."""
    label_column: int | None = None
    """Column of tags, as of `run tag`."""
    length: int = 128
    """Tokens of a row, at most."""
    words: int = 50_000
    """How many to train on, at most: those of sentences drawn by the seed. All layers of them are held in memory."""
    seed: int = 0
    """Of the sentences that are drawn."""

    def __post_init__(self):
        check_options(self, RANGES)


def main(arguments: Sequence[str]) -> int:
    options = parse(Probing, arguments, "python -m finetune probe")
    check_file(options.out / "probe.tsv")
    lines = probe(options)
    table = Table(*(names := list(lines[0])))
    for line in lines:
        table.add_row(*(of if isinstance(of, str) else f"{of:.4f}" for of in line.values()))
    wide_console().print(table)
    rows = ["\t".join(map(str, line.values())) for line in lines]
    with writing(options.out):
        write_whole(options.out / "probe.tsv", "".join(f"{row}\n" for row in ("\t".join(names), *rows)))
    print(_draw(lines, options.out / "probe.png"))
    return 0


def probe(options: Probing) -> list[dict]:
    """Of each line of the table the figures by name, and a layer's share in the mix."""
    from finetune.probing import fit, predicted, standardised, word_states
    from pretrain.training.opened import open_model

    try:
        task = Tag(token_column=options.token_column, label_column=options.label_column)
    except ValueError as error:
        raise UserError(str(error)) from None
    train, dev = task.read(options.train), task.read(options.dev)
    labels = task.labels_of(train)
    train = _drawn(train, options)
    opened = open_model(options.run, options.step)
    rows = [task.encode(of, opened.tokenizer, labels, options.length) for of in (train, dev)]
    with busy("reading the layers"):
        states = [word_states(opened, of) for of in rows]
    standardised(*states)
    answers = [of.of_tokens["labels"][of.of_tokens["words"] != NONE] for of in rows]
    figures = lambda classes: _figures(task, dev, rows[1], classes, labels)
    lines, (seen, held_out) = [{"layer": ALWAYS, **figures(np.zeros(len(states[1]), int))}], states
    depth = seen.shape[1] - 1
    with busy("training probes"):
        for layer in range(depth + 1):
            of = slice(layer, layer + 1)
            found = predicted(fit(seen[:, of], answers[0], len(labels)), held_out[:, of])
            lines.append({"layer": str(layer) if layer else "0 (embeddings)", **figures(found)})
        mix = fit(seen, answers[0], len(labels))
    shares = np.exp(mix.mix) / np.exp(mix.mix).sum()
    lines.append({"layer": MIX, **figures(predicted(mix, held_out))})
    given = ["", *map(float, shares), ""]
    return [line | {"share in the mix": share} for line, share in zip(lines, given, strict=True)]


def _drawn(examples: Sequence[Sentence], options: Probing) -> list[Sentence]:
    """Sentences of as many words as are trained on, in the file's order."""
    sizes = np.array([len(example.words) for example in examples])
    order = np.random.default_rng(options.seed).permutation(len(examples))
    kept = np.sort(order[: max(1, int((sizes[order].cumsum() <= options.words).sum()))])
    if len(kept) < len(examples):
        print(f"training on {sizes[kept].sum():,} of {sizes.sum():,} words, see --words")
    return [examples[number] for number in kept]


def _figures(task: Tag, dev: Sequence[Sentence], rows: Rows, classes: np.ndarray, labels: Sequence[str]) -> dict:
    """How good classes of all words that have pieces are."""
    is_word = rows.of_tokens["words"] != NONE
    whole = np.zeros(len(is_word), int)
    whole[is_word] = classes
    tags = tags_of(dev, rows, np.split(whole, rows.starts[1:-1]), labels)
    found = task.figures(dev, [{"tags": of} for of in tags], labels)
    return {name: value for name, value in found.items() if name != SCORE}


def _draw(lines: Sequence[dict], out: Path) -> Path:
    from matplotlib.figure import Figure

    name, depth = list(lines[0])[1], len(lines) - 3
    figure = Figure((6, 4), layout="constrained")
    axes = figure.subplots()
    values = [line[name] for line in lines]
    marks = {
        "a layer": axes.plot(range(depth + 1), values[1:-1], "o-")[0],
        MIX: axes.axhline(values[-1], color="C1", linestyle="--"),
        ALWAYS: axes.axhline(values[0], color="grey", linestyle=":"),
    }
    axes.set_xlabel("layer, 0: embeddings")
    axes.set_ylabel(name)
    axes.set_xticks(range(0, depth + 1, 1 + depth // 16))
    axes.grid(alpha=0.3)
    return save_picture(figure, marks, 3, out)
