"""`python -m finetune probe`: what can be read off each layer of a frozen model."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tyro.conf import Positional

from data_pipelines.command_line import Place, parse
from data_pipelines.errors import UserError
from data_pipelines.progress import busy
from finetune.commands.eval import answered, finetuned
from finetune.files import Told, tell
from finetune.rows import Rows
from finetune.sentences import NONE
from finetune.tables import show, store
from finetune.task import Examples, FinetuningTask
from finetune.tasks.classify import Classify
from finetune.tasks.tag import Tag
from finetune.texts import fitting
from models.core.ranges import COUNT, SEED
from pretrain.commands.common import check_file, save_picture
from pretrain.options import check_options
from pretrain.recipe import LENGTH
from pretrain.storage.best import LOSS, SCORE

if TYPE_CHECKING:
    from pretrain.training.opened import Opened

RANGES = {"length": LENGTH, "words": COUNT, "seed": SEED}
LAST = 4  # layers that are read side by side
ALWAYS, MIX, FINETUNED = "most frequent", "mix of all", "finetuned"  # lines of the table beside the layers'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Probing:
    """Train linear probes on a frozen model: one on each layer, on a mix of all and on the last four side by side
    (probe.tsv, probe.png). They tell the tags of words, or with --text the classes of texts."""

    run: Positional[Place]
    """Work directory of the run, or a Hugging Face folder."""
    train: Path
    """File of words with tags, as of `run tag`; with --text of texts with labels, as of `run classify`."""
    dev: Path
    """File of those to evaluate on."""
    out: Path
    """Folder to write to."""
    text: tuple[str, ...] = ()
    """Columns of one text or two. What a layer says of them is the mean over all their tokens that are not special."""
    label: str = "label"
    """Column of the class, with --text."""
    finetuned: Path | None = None
    """A run of finetuning on the same labels, whose score on --dev is a line of the table, too."""
    task: str = ""
    """Of a --finetuned on several tasks, which one."""
    step: int | None = None
    """Which checkpoint; by default the newest."""
    token_column: int | None = None
    """Column of words, as of `run tag`."""
    label_column: int | None = None
    """Column of tags, as of `run tag`."""
    length: int = 128
    """Tokens of a row, at most."""
    words: int = 50_000
    """How many words, or texts, to train on, at most: of examples drawn by the seed. All layers of them are held in
    memory."""
    seed: int = 0
    """Of the examples that are drawn."""

    def __post_init__(self):
        check_options(self, RANGES)
        for name in ("token_column", "label_column"):
            if self.text and getattr(self, name) is not None:
                raise UserError(f"--{name.replace('_', '-')}: is of words, --text of texts; leave one of them out")
        if self.task and self.finetuned is None:
            raise UserError(f"--task {self.task}: is of --finetuned; give that, too")


def main(arguments: Sequence[str]) -> int:
    options = parse(Probing, arguments, "python -m finetune probe")
    check_file(options.out / "probe.tsv")
    lines = probe(options)
    show(lines)
    store(lines, options.out / "probe.tsv")
    print(_draw(lines, options.out / "probe.png"))
    return 0


def probe(options: Probing) -> list[dict]:
    """Of each line of the table the figures by name, and a layer's share in the mix."""
    from finetune.probing import fit, predicted, side_by_side, standardised, text_states, word_states
    from pretrain.training.opened import open_model

    task = _task(options)
    train, dev = task.read(options.train), task.read(options.dev)
    labels = task.labels_of(train)
    beside = {FINETUNED: _of_finetuned(options, task, dev, labels)} if options.finetuned else {}
    train = _drawn(train, options)
    opened = open_model(options.run, options.step)
    length = fitting(options.length, opened.config)
    rows = [task.encode(of, opened.tokenizer, labels, length) for of in (train, dev)]
    if options.text:
        _tell_empty(opened, ((train, rows[0]), (dev, rows[1])))
    with busy("reading the layers"):
        states = [(text_states if options.text else word_states)(opened, of) for of in rows]
    standardised(*states)
    answers = [of.columns["labels"] if options.text else of.of_tokens["labels"][_is_word(of)] for of in rows]
    (seen, held_out), depth = states, states[0].shape[1] - 1
    figures = lambda classes: _figures(task, dev, rows[1], classes, labels)
    trained = lambda states: fit(states, answers[0], len(labels))
    lines = {ALWAYS: figures(np.full(len(held_out), np.bincount(answers[0]).argmax()))}
    with busy("training probes"):
        for layer in range(depth + 1):
            of = slice(layer, layer + 1)
            found = predicted(trained(seen[:, of]), held_out[:, of])
            lines[str(layer) if layer else "0 (embeddings)"] = figures(found)
        mix, last = trained(seen), min(LAST, depth)
        joined = [side_by_side(of, last) for of in states]
        lines[MIX] = figures(predicted(mix, held_out))
        lines[f"last {last} side by side"] = figures(predicted(trained(joined[0]), joined[1]))
    shares = [float(share) for share in np.exp(mix.mix) / np.exp(mix.mix).sum()]
    given = ["", *shares, *[""] * (len(lines) + len(beside) - 1 - len(shares))]
    return [
        {"layer": name, **line, "share in the mix": share}
        for (name, line), share in zip((lines | beside).items(), given, strict=True)
    ]


def _task(options: Probing) -> FinetuningTask:
    try:
        if options.text:
            return Classify(text=options.text, label=options.label)
        return Tag(token_column=options.token_column, label_column=options.label_column)
    except ValueError as error:
        raise UserError(str(error)) from None


def _of_finetuned(options: Probing, task: FinetuningTask, dev: Examples, labels: Sequence[str]) -> Mapping[str, float]:
    """The figures of a run that tells the same of the same. UserError where it tells something else."""
    from pretrain.training.opened import open_model

    opened = open_model(options.finetuned, best_of=LOSS)
    its, known = finetuned(opened, options.task)
    if type(its) is not type(task) or {*known} != {*labels} or [*its.read(options.dev)] != [*dev]:
        told = ", ".join(known) or "no classes"
        raise UserError(f"--finetuned {options.finetuned}: tells other things ({told}) than --train; give another run")
    return _shown(answered(opened, its, known, dev)[0])


def _drawn(examples: Examples, options: Probing) -> Examples:
    """Those with as many words as are trained on, in the file's order; a text counts as one."""
    sizes = np.array([1 if options.text else len(example.words) for example in examples])
    order = np.random.default_rng(options.seed).permutation(len(examples))
    kept = np.sort(order[: max(1, int((sizes[order].cumsum() <= options.words).sum()))])
    if len(kept) < len(examples):
        what = "texts" if options.text else "words"
        print(f"training on {sizes[kept].sum():,} of {sizes.sum():,} {what}, see --words")
    return [examples[number] for number in kept]


def _tell_empty(opened: "Opened", files: Sequence[tuple[Examples, Rows]]) -> None:
    from finetune.inside import are_special

    told = Told(list)
    for examples, rows in files:
        counts = np.concatenate([[0], np.cumsum(~are_special(opened.tokenizer, rows.tokens))])
        for number in np.flatnonzero(np.diff(counts[rows.starts]) == 0):
            told["texts with no token but special ones, of which layers say 0"].append(examples[number].where)
    tell(told)


def _is_word(rows: Rows) -> np.ndarray:
    return rows.of_tokens["words"] != NONE


def _figures(
    task: FinetuningTask, dev: Examples, rows: Rows, classes: np.ndarray, labels: Sequence[str]
) -> Mapping[str, float]:
    """How good classes of all words that have pieces, or of all texts, are."""
    if isinstance(task, Classify):
        outputs = {"logits": np.eye(len(labels))[classes]}
    else:
        whole = np.zeros(len(rows.tokens), int)
        whole[_is_word(rows)] = classes
        outputs = {"tags": np.split(whole, rows.starts[1:-1])}
    return _shown(task.figures(dev, task.answers(dev, rows, outputs, labels), labels))


def _shown(figures: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in figures.items() if name not in (SCORE, LOSS)}


def _draw(lines: Sequence[dict], out: Path) -> Path:
    from matplotlib.figure import Figure

    name = list(lines[0])[1]
    layers = [line[name] for line in lines if line["share in the mix"] != ""]
    figure = Figure((6, 4), layout="constrained")
    axes = figure.subplots()
    marks = {"a layer": axes.plot(range(len(layers)), layers, "o-")[0]}
    for number, line in enumerate(line for line in lines if line["share in the mix"] == ""):
        how = {"color": f"C{number}", "linestyle": "--"} if number else {"color": "grey", "linestyle": ":"}
        marks[line["layer"]] = axes.axhline(line[name], **how)
    axes.set_xlabel("layer, 0: embeddings")
    axes.set_ylabel(name)
    axes.set_xticks(range(0, len(layers), 1 + len(layers) // 16))
    axes.grid(alpha=0.3)
    return save_picture(figure, marks, 3, out)
