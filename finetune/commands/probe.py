"""`python -m finetune probe`: trains linear probes on the layers of a frozen model."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from tyro.conf import Positional

from data_pipelines.command_line import Place, parse
from data_pipelines.errors import UserError
from data_pipelines.progress import busy
from finetune.commands.eval import answered, finetuned
from finetune.files import Told, tell
from finetune.inside import are_special
from finetune.probing import fit, predicted, side_by_side, standardised, text_states, word_states
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
from pretrain.training.opened import Opened, open_model

RANGES = {"length": LENGTH, "words": COUNT, "seed": SEED}
LAST = 4  # number of last layers to concatenate
ALWAYS, MIX, FINETUNED = "most frequent", "mix of all", "finetuned"  # table rows besides those of layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Probing:
    """Train linear probes on a frozen model: one on each layer, one on a mix of all layers and one on the last four
    layers concatenated (probe.tsv, probe.png). They predict tags of words, or with --text classes of texts."""

    run: Positional[Place]
    """Work directory of the run, or a Hugging Face folder."""
    train: Path
    """Training file: tagged words, as for `run tag`; with --text, labelled texts, as for `run classify`."""
    dev: Path
    """Held-out file to evaluate on."""
    out: Path
    """Folder to write to."""
    text: tuple[str, ...] = ()
    """Columns of one text or a pair. Probes read the mean hidden state of all tokens that are not special."""
    label: str = "label"
    """Column of the class, with --text."""
    finetuned: Path | None = None
    """Finetuning run on the same labels; the table also shows its score on --dev."""
    task: str = ""
    """Task of --finetuned, if that run has several tasks."""
    step: int | None = None
    """Step of the checkpoint; by default the newest."""
    token_column: int | None = None
    """Column of words, as for `run tag`."""
    label_column: int | None = None
    """Column of tags, as for `run tag`."""
    length: int = 128
    """Maximum number of tokens in a row."""
    words: int = 50_000
    """Maximum number of words, or texts, to train on, from examples drawn at random. Memory holds the hidden states of
    all their layers."""
    seed: int = 0
    """Random seed for drawing examples."""

    def __post_init__(self):
        check_options(self, RANGES)
        for name in ("token_column", "label_column"):
            if self.text and getattr(self, name) is not None:
                option = name.replace("_", "-")
                raise UserError(f"--{option}: is for words, but --text is for texts; leave one of them out")
        if self.task and self.finetuned is None:
            raise UserError(f"--task {self.task}: has no effect without --finetuned; add it, or leave this out")


def main(arguments: Sequence[str]) -> int:
    options = parse(Probing, arguments, "python -m finetune probe")
    check_file(options.out / "probe.tsv")
    lines = probe(options)
    show(lines)
    store(lines, options.out / "probe.tsv")
    print(_draw(lines, options.out / "probe.png"))
    return 0


def probe(options: Probing) -> list[dict]:
    """Return the rows of the table: metrics by name, and a layer's share in the mix."""
    task = _task(options)
    train, dev = task.read(options.train), task.read(options.dev)
    labels = task.labels_of(train)
    beside = {FINETUNED: _of_finetuned(options, task, dev, labels)} if options.finetuned else {}
    train = _drawn(train, options)
    opened = open_model(options.run, options.step)
    length = fitting(options.length, opened.config)
    rows = [task.encode(examples, opened.tokenizer, labels, length) for examples in (train, dev)]
    if options.text:
        _tell_empty(opened, ((train, rows[0]), (dev, rows[1])))
    with busy("reading the layers"):
        states = [(text_states if options.text else word_states)(opened, split) for split in rows]
    standardised(*states)
    of_words = lambda split: split.of_tokens["labels"][_is_word(split)]
    answers = [split.columns["labels"] if options.text else of_words(split) for split in rows]
    (seen, held_out), depth = states, states[0].shape[1] - 1
    figures = lambda classes: _figures(task, dev, rows[1], classes, labels)
    trained = lambda states: fit(states, answers[0], len(labels))
    lines = {ALWAYS: figures(np.full(len(held_out), np.bincount(answers[0]).argmax()))}
    with busy("training probes"):
        for layer in range(depth + 1):
            one = slice(layer, layer + 1)
            found = predicted(trained(seen[:, one]), held_out[:, one])
            lines[str(layer) if layer else "0 (embeddings)"] = figures(found)
        mix, last = trained(seen), min(LAST, depth)
        joined = [side_by_side(split, last) for split in states]
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
    """Return the metrics of a run on the same task, labels and examples. UserError if any of these differ."""
    opened = open_model(options.finetuned, best_of=LOSS)
    its_task, known = finetuned(opened, options.task)
    if type(its_task) is not type(task) or {*known} != {*labels} or [*its_task.read(options.dev)] != [*dev]:
        theirs = f"other labels or columns ({', '.join(known) or 'none'}) than --train"
        raise UserError(f"--finetuned {options.finetuned}: has {theirs}; give another run")
    return _shown(answered(opened, its_task, known, dev)[0])


def _drawn(examples: Examples, options: Probing) -> Examples:
    """Return examples drawn at random, in file order, with at most --words words; a text counts as one."""
    sizes = np.array([1 if options.text else len(example.words) for example in examples])
    order = np.random.default_rng(options.seed).permutation(len(examples))
    kept = np.sort(order[: max(1, int((sizes[order].cumsum() <= options.words).sum()))])
    if len(kept) < len(examples):
        what = "texts" if options.text else "words"
        print(f"training on {sizes[kept].sum():,} of {sizes.sum():,} {what}, see --words")
    return [examples[number] for number in kept]


def _tell_empty(opened: Opened, files: Sequence[tuple[Examples, Rows]]) -> None:
    told = Told(list)
    for examples, rows in files:
        counts = np.concatenate([[0], np.cumsum(~are_special(opened.tokenizer, rows.tokens))])
        for number in np.flatnonzero(np.diff(counts[rows.starts]) == 0):
            told["texts with only special tokens, whose hidden states are set to 0"].append(examples[number].where)
    tell(told)


def _is_word(rows: Rows) -> np.ndarray:
    return rows.of_tokens["words"] != NONE


def _figures(task: FinetuningTask, dev: Examples, rows: Rows, classes: np.ndarray, labels: Sequence[str]) -> dict:
    """Return the metrics of predicted classes, of all words that have pieces or of all texts."""
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
    marks = {"one layer": axes.plot(range(len(layers)), layers, "o-")[0]}
    for number, line in enumerate(line for line in lines if line["share in the mix"] == ""):
        how = {"color": f"C{number}", "linestyle": "--"} if number else {"color": "grey", "linestyle": ":"}
        marks[line["layer"]] = axes.axhline(line[name], **how)
    axes.set_xlabel("layer (0: embeddings)")
    axes.set_ylabel(name)
    axes.set_xticks(range(0, len(layers), 1 + len(layers) // 16))
    axes.grid(alpha=0.3)
    return save_picture(figure, marks, 3, out)
