"""Do models learn? On WikiText-2, beside token frequencies, beside counting, and beside each other.

    python -m benchmarks.learning STUDY --wikitext2 DIR [--only NAME ...] [--seeds 0 1] [--steps 4500] [--out TABLE.md]

DIR holds WikiText-2's train.txt and valid.txt (word level). Each article is a document; what is held out is drawn by
document hash. Each run has one core to itself, as many run at once as there are cores. Studies:
    detection   BERT-mini and an ELECTRA of its size
    memory      Transformer-XL with memory and without, otherwise alike, both also in rows of 2 and 4 times the length
                that they were trained with (and with a memory of that length, or none); XLNet in random orders
    pairs       which of two runs of text comes first, and whether they belong together: a guess reaches 50%
    counting    GPT-2 in rows of 256, a row's first tokens without what stands before it, beside a Kneser-Ney trigram
                on the same tokens
    noises      BART with each of its noises, beside copying: a guess by how often a token stands in the input, mixed
                with frequencies at the rate that suits the held-out rows best
    units       BERT whose masks are pieces, words or spans of words, each also on rows masked by pieces and by words
    copies      BERT with new masks in every epoch, and with ten fixed ones of each row, or one
    optimizers  BERT by AdamW, Muon and Lion, and the step at which each reaches some losses
    blocks      ModernBERT's layers beside BERT's, of equal FLOPs
    distillation    students of a BERT-mini by its logits, its layers, their attention or that of the last, beside a
                student alone; all predict the masked tokens too
    cloze       UniLM, whose predictions from left to right are beside a Kneser-Ney trigram of the same tokens, which
                sees what is masked before them
The table has all held-out figures, cross-entropy in nats, where frequencies give one too that in brackets. `python -m
pretrain plot` draws the runs' curves.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import tyro

from benchmarks import kneser_ney
from benchmarks.wikitext2 import Training, cadence, corpus, train
from data_pipelines.command_line import end_with, parse, unknown
from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.examples.masking import Masking
from pretrain.commands.platform import prepare
from pretrain.objectives.distillation import Distillation
from pretrain.objectives.matching import Match
from pretrain.objectives.objective import Teacher
from pretrain.recipe import Recipe, to_json
from pretrain.recipes.registry import find

# 2 million words do not fill a vocabulary of more than a few thousand pieces.
VOCABULARY = 2048
# No text is seen often enough to be learned by heart: no dropout. A wider start than BERT's 0.02, which suits a width
# of 768. Short rows and small batches below: in so short a training the number of updates counts most.
SHARED = "--model.dropout 0 --model.attention-dropout 0 --model.init-std 0.05 "
REACHED = (4.0, 3.5)  # nats
SLOWLY = "--schedule.peak 5e-4 --schedule.warmup 0.1 "


class Run(NamedTuple):
    """teacher: the run of the study that this one learns from.   losses: by which it does."""

    recipe: str
    options: str = ""
    steps: int = 4500
    teacher: str = ""
    losses: tuple[Match, ...] = ()


class Trained(NamedTuple):
    """What is known of a run at its end.   held_out: the evaluator of its rows.   figures: on them.
    evaluate: of another assembly, on so many rows.   evaluations: those of the run."""

    assembly: Any
    held_out: Any
    figures: dict[str, float]
    evaluate: Callable
    evaluations: list[dict[str, float]]


class Study(NamedTuple):
    """shared: options of all runs.   rows: held out, or all that there are.   also: further cells of a run."""

    tokenizer: str
    shared: str
    runs: dict[str, Run]
    also: Callable[[Trained, Corpus], dict[str, str]] = lambda run, corpus: {}
    rows: int = 1024


def longer_rows(run: Trained, corpus: Corpus) -> dict[str, str]:
    """Losses in rows 2 and 4 times as long, with a memory as long as they where the model has one."""
    recipe, found = run.assembly.recipe, {}
    if "lm_loss" not in run.figures:
        return {}
    for factor in (2, 4):
        length = recipe.phases[0].length * factor
        memory = length if recipe.model.memory else 0
        phase = dataclasses.replace(recipe.phases[0], length=length)
        objective = dataclasses.replace(recipe.objective, evaluation_memory=memory)
        longer = run.assembly._replace(recipe=dataclasses.replace(recipe, phases=(phase,), objective=objective))
        found[f"lm_loss, {factor}x"] = f"{run.evaluate(longer, 1024 // factor)['lm_loss']:.3f}"
    return found


def beyond_chance(run: Trained, corpus: Corpus) -> dict[str, str]:
    """By how many standard errors pairs are above 50%, and above what the lengths of the two segments would reach: of
    two runs of whole sentences the last overshoots."""
    term = next(name for name in ("sentence_order", "next_sentence") if f"{name}_accuracy" in run.figures)
    pairs = sum((batch[term] >= 0).sum() for batch in run.held_out.batches())
    accuracy = run.figures[f"{term}_accuracy"]
    above = lambda chance: f"{(accuracy - chance) / math.sqrt(chance * (1 - chance) / pairs):.1f}"
    lengths = by_lengths(run.held_out.batches(), term)
    return {"pairs": f"{pairs}", "above 50%": above(0.5), "by lengths": f"{lengths:.1%}", "above that": above(lengths)}


def by_lengths(batches, term: str) -> float:
    """Accuracy of the better of two guesses: the longer segment is the first, or the second."""
    right = total = 0.0
    for batch in batches:
        second = (batch["types"] > 0).sum(axis=1) - 1  # and its [SEP]
        first = batch["segments"].sum(axis=1) - second - 3
        labelled = batch[term] >= 0
        guess = np.where(first == second, 0.5, first < second)  # an even guess where they are equally long
        right += np.abs(guess - (1 - batch[term]))[labelled].sum()
        total += labelled.sum()
    return max(right, total - right) / total


def below_the_trigram(run: Trained, corpus: Corpus) -> dict[str, str]:
    """What counting reaches on the same tokens, by the order of its grams, and how far the run is below the last."""
    losses = _counted(corpus)
    return {
        "Kneser-Ney, 1 to 3": ", ".join(f"{loss:.3f}" for loss in losses),
        "nats below": f"{losses[-1] - run.figures['lm_loss']:+.3f}",
    }


@functools.cache
def _counted(corpus: Corpus) -> list[float]:
    return [kneser_ney.held_out_loss(corpus, order) for order in range(1, 4)]


def beside_copying(run: Trained, corpus: Corpus) -> dict[str, str]:
    """What copying from the input reaches."""
    from benchmarks.text_to_text import copying

    return {"copying": f"{copying(run.held_out):.3f}"}


def below_the_trigram_at_masks(run: Trained, corpus: Corpus) -> dict[str, str]:
    """What counting reaches at the masked tokens of rows that are read from left to right, after their two tokens."""
    from data_pipelines.examples.unified_pairs import FIRST_TYPES, LEFT_TO_RIGHT

    found = []
    for batch in run.held_out.batches():
        tokens, places = batch["tokens"].copy(), batch["prediction_positions"]
        used = batch["prediction_weights"] > 0
        row = np.nonzero(used)[0]
        tokens[row, places[used]] = batch["prediction_targets"][used]
        read = (batch["types"][row, 0] == FIRST_TYPES[LEFT_TO_RIGHT]) & (places[used] >= 2)
        found.append(tokens[row[read, None], places[used][read, None] + np.arange(-2, 1)])
    grams, vocab = np.concatenate(found), corpus.vocab_size
    train = kneser_ney.stream(corpus, "train")
    likely = kneser_ney.probabilities(kneser_ney.fit(train, 3, vocab), grams.ravel(), vocab)[::3]
    return {"Kneser-Ney trigram": f"{-np.log(likely).mean():.3f}", "tokens": f"{len(grams):,}"}


def by_pieces_and_words(run: Trained, corpus: Corpus) -> dict[str, str]:
    """Losses at single masked pieces, and at masked whole words."""
    recipe, found = run.assembly.recipe, {}
    for unit in ("token", "word_starts"):
        objective = dataclasses.replace(recipe.objective, masking=Masking(unit=unit))
        other = run.assembly._replace(recipe=dataclasses.replace(recipe, objective=objective))
        found[f"mlm at {unit}"] = f"{run.evaluate(other, 1024)['mlm_loss']:.3f}"
    return found


def steps_to_losses(run: Trained, corpus: Corpus) -> dict[str, str]:
    """The steps at which held-out losses are first reached, between two evaluations by interpolation."""
    steps, losses = ([evaluated[name] for evaluated in run.evaluations] for name in ("step", "mlm_loss"))
    best = np.minimum.accumulate(losses)
    found = {}
    for nats in REACHED:
        at = float(np.interp(-nats, -best, steps)) if best[-1] <= nats <= best[0] else None
        found[f"steps to {nats}"] = "" if at is None else f"{at:,.0f}"
    return found


def flops_of_a_step(run: Trained, corpus: Corpus) -> dict[str, str]:
    """Model FLOPs of a train step."""
    from pretrain.training.step import model_flops

    recipe = run.assembly.recipe
    return {"GFLOPs a step": f"{model_flops(recipe, recipe.phases[0]) / 1e9:.2f}"}


_PAIR_ROWS = "--phases.0.length 64 --phases.0.batch-size 32 --optimizer.name adamw "
_STREAM = "--phases.0.length 32 --phases.0.batch-size 16 --model.memory "
# A second moment that remembers longer where batches are small.
_DECODER = "--phases.0.length 256 --phases.0.batch-size 4 --optimizer.b2 0.99 --schedule.name warmup-stable-decay "
_DECODER += "--schedule.peak 1e-3 --schedule.warmup 0.05 --schedule.decay 0.3 "
_PACKED, _NO_PAIRS = "--objective.layout packed-sentences ", "--objective.no-next-sentence "
_MASKED = _NO_PAIRS + _PACKED
_GEOMETRIC = "--objective.masking.ngrams " + " ".join(f"{0.2 * 0.8**n:.4f}" for n in range(10))
_WORDS = "--objective.masking.unit word_starts "
_ALONE = "--objective.noises.permute 0 --objective.noises.infill 0 --objective.noises.{}"
_SOFT = Match("logits", "kl", temperature=2.0)
_LAYERS = Match("embeddings", "mse"), Match("hidden", "mse")
_STUDENT = "--model.heads 4 --schedule.peak 1e-3 "  # as many heads as the teacher has
_LAST = Match("attention", "kl", layers="top"), Match("values", "kl", layers="top")

STUDIES = {
    "detection": Study(
        "wordpiece",
        SHARED + SLOWLY + "--phases.0.length 32 --phases.0.batch-size 16 --objective.layout packed-sentences",
        {
            # Whole words: a generator predicts the pieces of a word one by one, and what does not make a word is the
            # first thing that a discriminator learns to find.
            "electra-mini": Run("electra-mini", "--objective.masking.unit word_starts"),
            "bert-mini": Run("bert-mini", "--objective.no-next-sentence --objective.masking.rate 0.2"),
        },
    ),
    "memory": Study(
        "sentencepiece-unigram",
        SHARED,
        {
            "transformer-xl with memory": Run("transformer-xl-tiny", _STREAM + "32"),
            "transformer-xl without": Run("transformer-xl-tiny", _STREAM + "0"),
            "xlnet": Run("xlnet-tiny"),
        },
        longer_rows,
    ),
    "pairs": Study(
        "wordpiece",
        SHARED + SLOWLY + _PAIR_ROWS,
        {
            "sentence order": Run("bert-tiny", "--objective.no-next-sentence --objective.sentence-order"),
            "next sentence": Run("bert-tiny"),
        },
        beyond_chance,
        rows=8192,
    ),
    "counting": Study(
        "sentencepiece-unigram",
        SHARED + _DECODER,
        {"gpt2-mini": Run("gpt2-mini", steps=11000), "gpt2-tiny": Run("gpt2-tiny", steps=8000)},
        below_the_trigram,
    ),
    "noises": Study(
        "bpe --specials roberta",
        "--model.dropout 0 --model.attention-dropout 0 " + SLOWLY,
        {
            "infilling, permutation": Run("bart-tiny"),
            "infilling": Run("bart-tiny", _ALONE.format("infill 0.3")),
            "masking": Run("bart-tiny", _ALONE.format("mask 0.15")),
            "deletion": Run("bart-tiny", _ALONE.format("delete 0.15")),
            "permutation": Run("bart-tiny", "--objective.noises.infill 0"),
            "rotation": Run("bart-tiny", _ALONE.format("rotate 1")),
        },
        beside_copying,
    ),
    "units": Study(
        "wordpiece",
        SHARED + SLOWLY + _PAIR_ROWS + _PACKED,
        {
            "pieces": Run("bert-tiny", _NO_PAIRS),
            "whole words": Run("bert-tiny", _NO_PAIRS + _WORDS),
            "spans": Run("bert-tiny", _NO_PAIRS + _WORDS + _GEOMETRIC),
            "spans and their ends": Run("spanbert-tiny", "--optimizer.epsilon 1e-6 --optimizer.decay 0.01"),
        },
        by_pieces_and_words,
    ),
    "copies": Study(
        "wordpiece",
        SHARED + SLOWLY + _PAIR_ROWS + _MASKED,
        {
            "new": Run("bert-tiny"),
            "ten": Run("bert-tiny", "--objective.masking.copies 10"),
            "one": Run("bert-tiny", "--objective.masking.copies 1"),
        },
    ),
    "optimizers": Study(
        "wordpiece",
        SHARED + "--phases.0.length 64 --phases.0.batch-size 32 --schedule.warmup 0.1 " + _MASKED,
        {
            "adamw": Run("bert-tiny", "--optimizer.name adamw --schedule.peak 1e-3"),
            "muon": Run("bert-tiny", "--optimizer.name muon --schedule.peak 1e-3"),
            "muon, twice the rate": Run("bert-tiny", "--optimizer.name muon --schedule.peak 2e-3"),
            "adamw, twice the rate": Run("bert-tiny", "--optimizer.name adamw --schedule.peak 2e-3"),
            "lion": Run("bert-tiny", "--optimizer.name lion --optimizer.b2 0.99 --schedule.peak 1e-4"),
        },
        steps_to_losses,
    ),
    "blocks": Study(
        "wordpiece",
        SHARED + SLOWLY + "--phases.0.length 128 --phases.0.batch-size 16 --optimizer.name adamw " + _MASKED,
        {
            "bert": Run("bert-tiny", "--model.depth 3"),
            "modernbert": Run("modernbert-tiny", "--objective.masking.rate 0.15"),
        },
        flops_of_a_step,
    ),
    "distillation": Study(
        "wordpiece",
        SHARED + "--phases.0.length 64 --phases.0.batch-size 32 --schedule.warmup 0.1 " + _MASKED,
        {
            "teacher": Run("bert-mini", "--schedule.peak 5e-4", steps=3000),
            "alone": Run("bert-tiny", _STUDENT, 1200),
            "logits": Run("bert-tiny", _STUDENT, 1200, "teacher", (_SOFT,)),
            "layers": Run("bert-tiny", _STUDENT, 1200, "teacher", _LAYERS),
            "layers and attention": Run("bert-tiny", _STUDENT, 1200, "teacher", (*_LAYERS, Match("scores", "mse"))),
            "last attention": Run("bert-tiny", _STUDENT, 1200, "teacher", _LAST),
            "logits and layers": Run("bert-tiny", _STUDENT, 1200, "teacher", (_SOFT, *_LAYERS)),
        },
    ),
    "cloze": Study(
        "wordpiece",
        SHARED + "--phases.0.length 64 --phases.0.batch-size 16",
        {"unilm": Run("unilm-tiny", steps=10000)},
        below_the_trigram_at_masks,
    ),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """Train each model of a study with each seed, and write what it reached."""

    study: Annotated[str, tyro.conf.Positional]
    """detection, memory, pairs, counting, noises, units, copies, optimizers, blocks, distillation or cloze."""
    wikitext2: Path
    """Folder with train.txt and valid.txt."""
    only: tuple[str, ...] = ()
    """Runs by their names; all by default."""
    seeds: tuple[int, ...] = (0, 1)
    """Of each run; a teacher has only the first."""
    steps: int = 0
    """Of each run; 0 for the study's."""
    folder: Path = Path("runs/learning")
    """For the corpora and the runs; finished parts are not done again."""
    out: Path | None = None
    """A file for the table."""

    def __post_init__(self):
        if self.study not in STUDIES:
            raise UserError(unknown("no study", self.study, STUDIES))
        for name in self.only:
            if name not in STUDIES[self.study].runs:
                raise UserError(unknown("--only: no run", name, STUDIES[self.study].runs))


def main(arguments: list[str]) -> int:
    """Train, evaluate, print the table -> exit status."""
    options = parse(Options, arguments, "python -m benchmarks.learning")
    prepare()
    study, folder = STUDIES[options.study], options.folder / options.study
    prepared = corpus(options.wikitext2, folder, study.tokenizer, VOCABULARY)
    runs = trainings(study, options, folder, prepared)
    taught = [run for run in runs if "--teacher" in run.options]
    alone = [run for run in runs if run not in taught]
    minutes = dict(zip([*alone, *taught], train(alone) + train(taught), strict=True))
    rows = [
        {"model": run.name, "seed": str(run.seed), "CPU min": f"{spent:.1f}"} | reached(run, study, Corpus(prepared))
        for run, spent in minutes.items()
    ]
    text = f"{time.strftime('%Y-%m-%d')}, `python -m benchmarks.learning {' '.join(arguments)}`\n\n{table(rows)}\n"
    print(text, end="")
    if options.out:
        options.out.write_text(text)
    return 0


def trainings(study: Study, options: Options, folder: Path, prepared: Path) -> list[Training]:
    """The runs that the options choose."""
    found, teachers = [], {run.teacher for run in study.runs.values()}
    chosen = {name: run for name, run in study.runs.items() if not options.only or name in options.only}
    for name, run in chosen.items():
        for seed in options.seeds[:1] if name in teachers else options.seeds:
            given = (*cadence(options.steps or run.steps), *study.shared.split(), *run.options.split())
            workdir = lambda name, seed=seed: folder / f"{name.replace(' ', '-')}-seed{seed}"
            recipe = run.recipe
            if run.teacher:
                given += ("--teacher", str(workdir(run.teacher, options.seeds[0])))
                recipe = str(folder / f"{name}.json")
                folder.mkdir(parents=True, exist_ok=True)
                Path(recipe).write_text(to_json(student(run)))
            found.append(Training(name, recipe, seed, given, workdir(name), str(prepared)))
    return found


def student(run: Run) -> Recipe:
    """The run's recipe, with its losses beside its own."""
    recipe = find(run.recipe)
    fields = vars(recipe.objective) | {"losses": run.losses, "next_sentence": False}
    teachers = (Teacher("teacher", "", recipe.model),)
    return dataclasses.replace(recipe, objective=Distillation(**fields), teachers=teachers)


def reached(run: Training, study: Study, prepared: Corpus) -> dict[str, str]:
    """Cells of a run: its held-out figures, what frequencies reach in brackets, and the study's own."""
    from pretrain.storage.journal import read_metrics
    from pretrain.storage.run_directory import RunDirectory
    from pretrain.training.evaluate import Evaluators
    from pretrain.training.opened import restore
    from pretrain.training.placement import of_phase, stages

    directory = RunDirectory(run.workdir)
    restored, corpora = restore(directory), directory.open_corpora()

    def evaluators(assembly, rows: int) -> Evaluators:
        return Evaluators(of_phase(stages(assembly, restored.mesh), 0), corpora, rows)

    def evaluated(those: Evaluators) -> dict[str, float]:
        return those(restored.params, restored.frozen, restored.step)

    held_out = evaluators(restored.assembly, study.rows)
    figures, guess = evaluated(held_out), held_out.baselines()
    again = lambda assembly, rows: evaluated(evaluators(assembly, rows))
    (of_corpus,) = held_out.of.values()
    evaluations = read_metrics(directory, "eval")
    found = study.also(Trained(restored.assembly, of_corpus, figures, again, evaluations), prepared)
    beside = {name: f" ({value:.3f})" for name, value in guess.items()}
    return {name: f"{value:.3f}{beside.get(name, '')}" for name, value in figures.items()} | found


def table(rows: list[dict[str, str]]) -> str:
    """Markdown, with a column for each name that any row has."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, ["---"] * len(columns), *([row.get(name, "") for name in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


if __name__ == "__main__":
    end_with(main)
