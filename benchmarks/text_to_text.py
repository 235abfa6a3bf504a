"""Does T5 learn? A text's hidden spans, beside frequencies and copying; and a text with three tasks, beside each alone.

    python -m benchmarks.text_to_text --wikitext2 DIR --sst2 DIR --trec DIR --multi30k DIR [--steps 1500]
        [--steps-of-tasks 750] [--seeds 0 1] [--mixture-seeds 0] [--out TABLE.md] [--picture CURVES.png]

DIRs: WikiText-2's train.txt and valid.txt (word level); SST-2's train.tsv and dev.tsv, as GLUE has them; TREC.train.all
and TREC.test.all, as Kim's collection of 2014 has them; Multi30k's train and test_2016_flickr, .en and .de. All have
one vocabulary, trained on all that is trained on. Every input of a task begins with what is asked, in words.

In a mixture each task has as many steps as it has alone, and reads rows of the same sizes. Losses are of held-out
documents, nats a target token. Copying guesses a target's token by how often it stands in its own input, mixed with the
frequencies of the train split at the rate that suits these held-out rows best, which flatters it. Answers and
translations are those of SST-2's dev.tsv and of the others' tests, written token by token. Each run has one core to
itself.
"""

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.learning import table
from benchmarks.wikitext2 import Training, articles, cadence, train
from data_pipelines.command_line import end_with, parse
from data_pipelines.formats.table import parse as parse_source
from pretrain.commands.platform import prepare

VOCABULARY, HELD_OUT = 4000, 1024  # pieces; rows, at most
TEXT, TRANSLATION = "text", "translation"
KINDS = ("description", "entity", "abbreviation", "human", "place", "number")  # of what TREC's questions ask for
NO_DROPOUT = ("--model.dropout", "0", "--model.attention-dropout", "0")
COLUMNS = ("of frequencies", "of copying")
Pair = tuple[str, str]  # an input and what is to be written


@dataclasses.dataclass(frozen=True)
class Options:
    """wikitext2, sst2, trec, multi30k: folders.   steps: of the text alone.   steps_of_tasks: of each task, alone and
    in the mixture.   seeds: of the text alone.   mixture_seeds: of the rest.   folder: for corpora and runs; finished
    parts are not done again.   out, picture: files for the table and the curves."""

    wikitext2: Path
    sst2: Path
    trec: Path
    multi30k: Path
    steps: int = 1500
    steps_of_tasks: int = 750
    seeds: tuple[int, ...] = (0, 1)
    mixture_seeds: tuple[int, ...] = (0,)
    folder: Path = Path("runs/text_to_text")
    out: Path | None = None
    picture: Path | None = None


def main(arguments: list[str]) -> int:
    """Train, evaluate, print the table -> exit status."""
    options = parse(Options, arguments, "python -m benchmarks.text_to_text")
    prepare()
    runs = trainings(options, prepared(options))
    minutes = train(runs)
    rows = []
    for run, spent in zip(runs, minutes, strict=True):
        row = {"run": run.name, "seed": str(run.seed), "steps": run.options[1], "CPU min": f"{spent:.1f}"}
        rows += [row | found for found in reached(run, options.folder)]
    text = f"{time.strftime('%Y-%m-%d')}, `python -m benchmarks.text_to_text {' '.join(arguments)}`\n\n{table(rows)}\n"
    print(text, end="")
    if options.out:
        options.out.write_text(text)
    if options.picture:
        draw(runs, rows, options.picture)
    return 0


def _lines(file: Path, encoding: str = "utf-8") -> list[str]:
    return file.read_text(encoding).removesuffix("\n").split("\n")


def _of_sst2(options: Options, split: str) -> list[Pair]:
    lines = (line.rpartition("\t") for line in _lines(options.sst2 / f"{split.replace('test', 'dev')}.tsv")[1:])
    return [(f"sentiment: {text}", ("negative", "positive")[int(label)]) for text, _, label in lines]


def _of_trec(options: Options, split: str) -> list[Pair]:
    lines = (line.partition(" ") for line in _lines(options.trec / f"TREC.{split}.all", "latin-1"))
    return [(f"question: {text}", KINDS[int(label)]) for label, _, text in lines]


def _of_multi30k(options: Options, split: str) -> list[Pair]:
    name = split.replace("test", "test_2016_flickr")
    sides = (_lines(options.multi30k / f"{name}.{language}") for language in ("en", "de"))
    return [(f"English to German: {english}", german) for english, german in zip(*sides, strict=True)]


TASKS = {"sentiment": _of_sst2, "questions": _of_trec, "translation": _of_multi30k}


def prepared(options: Options) -> dict[str, Path]:
    """Corpora of the text and of each task, of one vocabulary; a finished one is taken as it is. The tests of tasks lie
    beside them."""
    texts, folder = articles(options.wikitext2, options.folder), options.folder
    pairs = {name: read(options, "train") for name, read in TASKS.items()}
    every = _records(folder / "tasks.jsonl", [{"text": "\n".join(pair)} for of in pairs.values() for pair in of])
    given = ("--source", f"jsonl:{every}", "--tokenizer", "sentencepiece-unigram", "--specials", "t5")
    words = _prepare(folder / "words", texts, *given, "--vocab-size", str(VOCABULARY)) / "tokenizer"
    same = ("--tokenizer", str(words), "--heldout", "0.03")
    found = {TEXT: _prepare(folder / TEXT, texts, *same)}
    records = lambda pairs: [{"input": text, "target": target} for text, target in pairs]
    for name, read in TASKS.items():
        _records(_test(folder, name), records(read(options, "test")))
        file = _records(folder / f"{name}.jsonl", records(pairs[name]))
        found[name] = _prepare(folder / name, file, "--field", "input", "--field", "target", *same)
    return found


def _test(folder: Path, task: str) -> Path:
    return folder / f"{task}-test.jsonl"


def _records(path: Path, records: Sequence[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def _prepare(out: Path, source: Path, *options: str) -> Path:
    command = (sys.executable, "-m", "data_pipelines", "prepare", "--source", f"jsonl:{source}", *options)
    subprocess.run([*command, "--out", str(out)], check=True)
    return out


def trainings(options: Options, corpora: dict[str, Path]) -> list[Training]:
    """The text alone, each task alone, and all in one: that first, as it takes longest."""
    mixed, pairs = _mixture(options.folder / "mixture.json"), "--objective.layout input-target"
    every = ",".join(f"{name}={corpus}" for name, corpus in corpora.items())
    all_steps = options.steps_of_tasks * len(corpora)
    chosen = [("mixture", str(mixed), every, "", all_steps, options.mixture_seeds)]
    chosen += [(TEXT, "t5-tiny", str(corpora[TEXT]), "", options.steps, options.seeds)]
    for name in TASKS:
        chosen.append((name, "t5-tiny", str(corpora[name]), pairs, options.steps_of_tasks, options.mixture_seeds))
    return [
        Training(name, recipe, seed, (*cadence(steps), *NO_DROPOUT, *how.split()), folder, corpus)
        for name, recipe, corpus, how, steps, seeds in chosen
        for seed in seeds
        for folder in [options.folder / "runs" / f"{name}-seed{seed}"]
    ]


def _mixture(file: Path) -> Path:
    """t5-tiny with the four as tasks of its phase, which take turns."""
    from pretrain.objectives.next_token_prediction import INPUT_TARGET
    from pretrain.objectives.objective import Task
    from pretrain.objectives.sequence_to_sequence import SequenceToSequence
    from pretrain.recipe import to_json
    from pretrain.recipes.registry import find

    recipe, pairs = find("t5-tiny"), SequenceToSequence(layout=INPUT_TARGET)
    tasks = [Task(TEXT, recipe.objective, corpus=TEXT)]
    tasks += [Task(name, pairs, corpus=name) for name in TASKS]
    phase = dataclasses.replace(recipe.phases[0], tasks=tuple(tasks))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(to_json(dataclasses.replace(recipe, phases=(phase,))))
    return file


def reached(run: Training, folder: Path) -> list[dict[str, str]]:
    """Cells of a run, a row for each thing that it learned.   folder: with the tests."""
    from pretrain.storage.run_directory import RunDirectory
    from pretrain.training.evaluate import Evaluators
    from pretrain.training.opened import open_model, restore
    from pretrain.training.placement import of_phase, stages

    directory = RunDirectory(run.workdir)
    restored, opened = restore(directory), open_model(run.workdir)
    staged = of_phase(stages(restored.assembly, restored.mesh), 0)
    rows = []
    for name, evaluator in Evaluators(staged, directory.open_corpora(), HELD_OUT).of.items():
        figures = evaluator(restored.params, restored.frozen, restored.step)
        task = name or run.name
        row = {"of": task, "held-out nats": f"{figures['lm_loss']:.3f}"}
        row |= dict(zip(COLUMNS, (f"{evaluator.baselines()['lm_loss']:.3f}", f"{copying(evaluator):.3f}"), strict=True))
        rows.append(row | (answers(opened, _test(folder, task)) if task in TASKS else {}))
    return rows


def copying(evaluator) -> float:
    """Nats a target token of a guess by how often it stands in the input, mixed with the train split's frequencies."""
    objective, phase = evaluator.objective, evaluator.stage.phase
    counts = objective.token_counts(evaluator.corpus, phase) + 1.0
    rates, lost, total = np.linspace(0.0, 0.95, 20), 0.0, 0.0
    for batch in evaluator.batches():
        same = (batch["targets"][:, :, None] == batch["tokens"][:, None, :]) * batch["segments"][:, None, :]
        copied = same.sum(-1) / np.maximum(batch["segments"].sum(-1), 1)[:, None]
        often = (counts / counts.sum())[batch["targets"]]
        mixed = rates[:, None, None] * copied + (1 - rates[:, None, None]) * often
        lost += -(np.log(mixed) * batch["weights"]).sum((1, 2))
        total += batch["weights"].sum()
    return float(np.min(lost / total))


def answers(opened, test: Path) -> dict[str, str]:
    """What is written for a test's inputs: BLEU of translations, else the share of right answers, in percent, and that
    of the most frequent one."""
    from pretrain import metrics
    from pretrain.generation.settings import Decoding
    from pretrain.training.targets import begun, of_source, write

    asked, _ = of_source(parse_source(f"jsonl:{test}", fields=("input", "target")), opened.tokenizer, sys.maxsize, [])
    decoding, right = Decoding(max_tokens=48), [one.targets for one in asked]
    written = write(opened, begun(asked, opened, [], decoding), decoding, 0)
    if test == _test(test.parent, TRANSLATION):
        return {"BLEU": f"{metrics.bleu(written, right)[0]:.1f}"}
    often = max(right.count(target) for target in {*right}) / len(right)
    return {
        "right answers": f"{metrics.exact_match(written, right):.1f}",
        "the most frequent one": f"{100 * often:.1f}",
    }


def draw(runs: Sequence[Training], rows: Sequence[dict[str, str]], out: Path) -> None:
    """Held-out losses by the steps of each task."""
    from matplotlib.figure import Figure

    from pretrain.storage.journal import read_metrics
    from pretrain.storage.run_directory import RunDirectory

    names = [TEXT, *TASKS]
    figure = Figure((4.5 * len(names), 3.5), layout="constrained")
    for panel, name in zip(figure.subplots(1, len(names)), names, strict=True):
        for run in runs:
            key, share = (f"{name}/lm_loss", len(names)) if run.name == "mixture" else ("lm_loss", 1)
            entries = read_metrics(RunDirectory(run.workdir), "eval") if run.name in ("mixture", name) else []
            points = [(entry["step"] / share, entry[key]) for entry in entries]
            if points:
                label = f"{'in the mixture' if share > 1 else 'alone'}, seed {run.seed}"
                panel.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label)
        beside = next(row for row in rows if row["of"] == name)
        for column, style in zip(COLUMNS, ("--", ":"), strict=True):
            panel.axhline(float(beside[column]), color="grey", linestyle=style, label=column)
        panel.set(title=name, xlabel="steps of the task")
        panel.grid(alpha=0.3)
        panel.legend(fontsize="small")
    figure.axes[0].set_ylabel("held-out nats a target token")
    figure.savefig(out, dpi=80)


if __name__ == "__main__":
    end_with(main)
