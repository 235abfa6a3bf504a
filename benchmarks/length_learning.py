"""Do sparse patterns use the length? A task whose answer lies 3,000 tokens back, and books in rows of 4,096 and of 512.

    python -m benchmarks.length_learning --texts DIR [--out benchmarks/results/length_learning]

DIR holds long plain texts, each a book. Writes OUT.md (the tables) and OUT.png. What is finished is not trained again,
and what was killed goes on.

Answers: a value stands once in a row of 4,096 tokens and is asked for three times: 3,000 tokens later; at position 1,
which is global where a pattern has global tokens; and near by, so that a window alone has something to learn, too. It
begins with shorter rows, which cost less. What a question can know of follows from the pattern's tables, and is what
its loss has a gradient for that is not exactly 0.

Books: BigBird in rows of 4,096 and of 512, with equally many tokens. Both begin with one model of short rows, whose
positions are copied on, and go on with the same text and the same masked tokens, each in its rows; either with the
books as they are, or with rows whose first 24 tokens, of a type of their own, stand again at random places, a third of
them masked there: in training once in every 512 tokens, in tests once, 2,048 to 3,560 tokens later. No place tells
which token is hidden, only the passage and the tokens beside it do. Both lengths begin with rows of 32, then with
longer ones.
"""

import dataclasses
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tyro

from benchmarks import book_rows, far_answers
from benchmarks.book_rows import LONG, PASSAGE, SHORT, SPACING, Books
from benchmarks.rows_training import Trained, gradient_reaches, masked_recipe, predicted, train
from data_pipelines.corpus import Corpus
from models.attention.patterns.pattern import DENSE, Pattern
from models.families import bigbird, longformer
from pretrain.commands.plot import save
from pretrain.recipe import Phase

# No dropout, and a wider start than 0.02, which suits a width of 768: as in `benchmarks.learning`.
SMALL = {"dropout": 0.0, "attention_dropout": 0.0, "init_std": 0.09, "pair_head": False}
ANSWERS_PEAK = 2e-3  # of the rate

# Blocks of 16, so that the published numbers of them are few in a row of 4,096 and all fit one of 128.
BLOCK = 16
OF_BIGBIRD, OF_LONGFORMER = bigbird.FAMILY.sizes["tiny"], longformer.FAMILY.sizes["tiny"]
PATTERNS = {  # name -> (model, fields of its pattern, whether rows name global tokens)
    "BigBird": (OF_BIGBIRD, {}, False),
    "its window alone": (OF_BIGBIRD, {"random": 0, "global_blocks": 0}, False),
    "Longformer": (OF_LONGFORMER, {"windows": (64,)}, True),
    "its windows alone": (OF_LONGFORMER, {"windows": (64,)}, False),
}
PHASES = (Phase(0.6, 128, 64), Phase(0.25, 512, 16), Phase(0.15, LONG, 2))
TESTED = 128  # held-out rows
BACK = far_answers.back_of(LONG)

PIECES = 4096  # of the books' vocabulary
AS_THEY_ARE, RECURRING = "as they are", "a passage recurs"
SHUFFLED, OTHER = "it stood in another order", "other text stood there"  # tests of what is read of a passage
AGAIN_AT = (4, 5, 6)  # the pieces of SHORT in one of which a test's passage stands again


class Stage(NamedTuple):
    """Rows that both lengths begin with: so many of a length, in pieces; few tokens, since at first updates count."""

    number: int
    length: int
    piece: int


class Kind(NamedTuple):
    """How rows are made; what both lengths begin with; the pattern, in rows of more than 128 tokens; with what it was
    found to learn."""

    make: Callable
    begins: tuple[Stage, ...]
    pattern: Pattern
    peak: float
    init_std: float


KINDS = {
    RECURRING: Kind(
        book_rows.recurring,
        (Stage(32, 32, 32), Stage(16, 64, 64), Stage(8, 128, 64), Stage(2, 512, 64)),
        # Two blocks at each end: those of the passage, and as many.
        dataclasses.replace(OF_BIGBIRD.pattern, block=BLOCK, global_blocks=4),
        peak=1e-3,
        init_std=0.09,
    ),
    AS_THEY_ARE: Kind(book_rows.as_they_are, (Stage(16, 32, 32),), OF_BIGBIRD.pattern, peak=5e-4, init_std=0.05),
}
TRAIN, TEST = 0, 1  # seeds


@dataclasses.dataclass(frozen=True)
class Options:
    """Train all, and write what they reached."""

    texts: Path
    """Folder of long plain texts, each a book."""
    folder: Path = Path("runs/length_learning")
    """For the corpus and the runs; finished parts are not done again."""
    out: Path = Path("benchmarks/results/length_learning")
    """Where the tables (.md) and the picture (.png) go."""
    answer_steps: int = 300
    """Of each run of the synthetic task, in batches of 8,192 tokens."""
    passage_steps: tuple[int, ...] = (1000, 400, 400, 300, 120)
    """Of each run on books with passages that recur: in rows of 32, 64, 128 and 512, 1,024 tokens in a batch; then in
    one of 4,096 or 8 of 512."""
    book_steps: tuple[int, ...] = (8000, 200)
    """Of each run on books as they are: in 16 rows of 32; then in one of 4,096 or 8 of 512."""
    seeds: tuple[int, ...] = (0, 1)
    """Of the runs on books."""


def main(options: Options) -> None:
    answered = {name: _answered(name, options) for name in PATTERNS}
    books = book_rows.read(_corpus(options))
    compared = {
        (asked, seed): found
        for kind in KINDS
        for seed in options.seeds
        for asked, found in _compared(kind, seed, books, options).items()
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    lines = [*_head(options), *_of_answers(answered), "", *_of_books(compared, books, options)]
    options.out.with_suffix(".md").write_text("\n".join(lines) + "\n")
    print(options.out.with_suffix(".md").read_text())
    print(_picture(answered, compared, options.out.with_suffix(".png")))


def _head(options: Options) -> list[str]:
    return [
        f"# Learning from what lies far back, {time.strftime('%Y-%m-%d')}",
        "",
        f"`python -m benchmarks.length_learning --texts DIR`: {options.answer_steps} steps of the first task, "
        f"{options.passage_steps} and {options.book_steps} on books; one core;",
        f"AdamW, rates up to {ANSWERS_PEAK} and "
        + " and ".join(f"{found.peak} ({kind}; init_std {found.init_std})" for kind, found in KINDS.items())
        + f", falling linearly; {SMALL}",
        "",
    ]


class Answered(NamedTuple):
    """hits: of held-out rows, [rows, ASKED].   question: the place of one row's far question.
    known: bool[LONG], the tokens that it can know of by the tables.   felt: those for which its loss has a gradient."""

    trained: Trained
    hits: np.ndarray
    question: int
    known: np.ndarray
    felt: np.ndarray


def _answered(name: str, options: Options) -> Answered:
    """A run of the synthetic task, and what it reached."""
    model, fields, named = PATTERNS[name]
    pattern = dataclasses.replace(model.pattern, block=BLOCK, **fields)
    model = dataclasses.replace(model, **SMALL, vocab_size=far_answers.VOCABULARY, pattern=pattern)
    rows = lambda phase, number, *seed: far_answers.rows(phase.length, number, seed, BLOCK, named)
    batches = lambda phase, step: rows(PHASES[phase], PHASES[phase].batch_size, TRAIN, step)
    recipe = masked_recipe(name, model, PHASES, options.answer_steps, 0, ANSWERS_PEAK)
    trained = train(recipe, batches, options.folder / "answers" / f"{name.replace(' ', '-')}.npz")
    tests = (rows(PHASES[-1], PHASES[-1].batch_size, TEST, i) for i in range(TESTED // PHASES[-1].batch_size))
    hits = np.concatenate([predicted(trained, batch)[1] for batch in tests])
    one = far_answers.only(rows(PHASES[-1], 1, TEST), far_answers.FAR)
    question = int(one["prediction_positions"][0, 0])
    known = far_answers.known(model, LONG, question, named)
    return Answered(trained, hits, question, known, gradient_reaches(trained, one))


def _of_answers(answered: dict[str, Answered]) -> list[str]:
    """Their table."""
    asked = [f"asked {where}" for where in far_answers.ASKED]
    lines = [
        f"## Answers {BACK:,} tokens back",
        "",
        f"Accuracy in {TESTED} held-out rows of {LONG:,}; a guess reaches {1 / far_answers.VALUES:.1%}.",
        f"The tiny models, their patterns in blocks of {BLOCK}; phases of "
        + ", ".join(
            f"{phase.batch_size} x {phase.length:,} tokens ({phase.share:.0%} of the steps)" for phase in PHASES
        )
        + ".",
        "",
        f"| pattern | CPU min | {' | '.join(asked)} | of {LONG:,} tokens the far question knows of | the first of them "
        "| gradients that are not 0: where it knows, where it does not |",
        "|---|---|" + "---|" * (len(asked) + 3),
    ]
    for name, found in answered.items():
        first = found.question - int(np.flatnonzero(found.known)[0])
        felt = f"{(found.felt & found.known).sum():,}, {(found.felt & ~found.known).sum():,}"
        reached = [f"{share:.1%}" for share in found.hits.mean(0)]
        cells = [name, f"{found.trained.minutes:.1f}", *reached, f"{found.known.sum():,}", f"{first:,} back", felt]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


class Compared(NamedTuple):
    """losses: side (4,096 or 512 tokens per row) -> of held-out rows of LONG, f32[rows, tests, questions].
    guess: the same by frequencies.   trained: on how many tokens.   minutes: CPU, of both and what they begin with."""

    losses: dict[int, np.ndarray]
    guess: np.ndarray
    trained: str
    minutes: float


def _compared(name: str, seed: int, books: Books, options: Options) -> dict[str, Compared]:
    """Both sides of one kind of rows, trained on the same tokens and asked for the same ones: by the rows asked."""
    folder, kind = options.folder / f"books-seed{seed}", KINDS[name]
    *begun, steps = options.passage_steps if name == RECURRING else options.book_steps
    model = dataclasses.replace(OF_BIGBIRD, **SMALL | {"init_std": kind.init_std}, vocab_size=PIECES)

    def rows(stage: Stage, index: int):
        """step -> batch of the stage's rows."""
        tokens = lambda step: book_rows.drawn(books, stage.number, stage.length, (seed, 2 * index, step))
        return lambda step: kind.make(tokens(step), stage.piece, (seed, 2 * index + 1, step), books.mask)

    def run(name: str, length: int, steps: int, batches, start: Trained | None) -> Trained:
        size = len(batches(0)["tokens"])
        # The pattern's blocks do not fit in short rows.
        pattern = kind.pattern if length > 128 else dataclasses.replace(kind.pattern, name=DENSE)
        of = dataclasses.replace(model, positions=length, pattern=pattern)
        recipe = masked_recipe(name, of, (Phase(1.0, length, size),), steps, seed, kind.peak)
        return train(recipe, lambda _, step: batches(step), folder / f"{kind.make.__name__}-{name}.npz", start)

    start, minutes = None, 0.0
    for index, (stage, number) in enumerate(zip(kind.begins, begun, strict=True)):
        start = run(f"start-{stage.length}", stage.length, number, rows(stage, index), start)
        minutes += start.minutes
    long = rows(Stage(1, LONG, SHORT), len(begun))
    of_side = {LONG: long, SHORT: lambda step: book_rows.cut(long(step))}
    sides = {length: run(f"rows-of-{length}", length, steps, batches, start) for length, batches in of_side.items()}
    minutes += sum(side.minutes for side in sides.values())
    began = ", ".join(
        f"{number * stage.number * stage.length:,} in rows of {stage.length}"
        for stage, number in zip(kind.begins, begun, strict=True)
    )
    trained = f"{began}, then {steps * LONG:,}"
    return {asked: _tested(sides, tests, books, trained, minutes) for asked, tests in _tests(name, books).items()}


def _tests(name: str, books: Books) -> dict[str, list[list[dict[str, np.ndarray]]]]:
    """By the rows asked, for each held-out row the batches of its tests; a passage recurs in one piece of each."""
    make, rows = KINDS[name].make, book_rows.held_out(books)
    if name == AS_THEY_ARE:
        return {name: [[make(row[None], SHORT, (TEST, index), books.mask)] for index, row in enumerate(rows)]}
    at = lambda row, index, piece: make(row[None], SHORT, (TEST, index), books.mask, (piece,))
    tests = [[at(row, index, piece) for piece in AGAIN_AT] for index, row in enumerate(rows)]
    order = np.random.default_rng(TEST).permutation(PASSAGE)
    shuffled = [[_beginning(test, row[order]) for test in of] for of, row in zip(tests, rows, strict=True)]
    before = zip(tests, np.roll(rows, 1, axis=0), strict=True)
    others = [[_beginning(test, row[:PASSAGE]) for test in of] for of, row in before]
    return {name: tests, SHUFFLED: shuffled, OTHER: others}


def _beginning(batch: dict[str, np.ndarray], passage: np.ndarray) -> dict[str, np.ndarray]:
    """The same rows and questions with another passage at their beginning."""
    tokens = batch["tokens"].copy()
    tokens[:, :PASSAGE] = passage
    return batch | {"tokens": tokens}


def _tested(sides: dict[int, Trained], tests: list[list], books: Books, trained: str, minutes: float) -> Compared:
    """Both sides on held-out rows."""
    asked = lambda side, batch: predicted(sides[side], batch if side == LONG else book_rows.cut(batch))[0].ravel()
    losses = {side: np.array([[asked(side, batch) for batch in row] for row in tests]) for side in sides}
    targets = np.array([[batch["prediction_targets"][0] for batch in row] for row in tests])
    counts = np.bincount(np.concatenate(books.train), minlength=PIECES) + 1
    return Compared(losses, -np.log(counts / counts.sum())[targets], trained, minutes)


def _of_books(compared: dict[tuple[str, int], Compared], books: Books, options: Options) -> list[str]:
    """Their table."""
    tested, block = len(book_rows.held_out(books)), OF_BIGBIRD.pattern.block
    lines = [
        f"## Books in rows of {LONG:,} and of {SHORT}",
        "",
        f"BigBird-tiny, {PIECES:,} word pieces; as they are: with its published pattern, in blocks of {block}; where a",
        f"passage recurs: in blocks of {BLOCK}, of which two at each end are global. Both lengths begin with one",
        f"model of short rows. Masked-token loss in nats of the same masked tokens of {tested} held-out",
        f"rows of {LONG:,}, from the last tenth of each book; by frequencies: that of a guess. The difference is the",
        "mean over these rows, with its standard error.",
        "",
        f"| rows | trained tokens | asked | seed | CPU min | by frequencies | rows of {SHORT} "
        f"| rows of {LONG:,} | rows of {SHORT} are worse by |",
        "|---" * 9 + "|",
    ]
    for (kind, seed), found in compared.items():
        for asked, which in _asked(kind, found).items():
            of_rows = (of[:, which].mean(1) for of in (found.guess, found.losses[SHORT], found.losses[LONG]))
            means = (f"{of.mean():.3f}" for of in of_rows)
            worse = "{:+.3f} ± {:.3f}".format(*_worse(found, which))
            cells = [kind, found.trained, asked, str(seed), f"{found.minutes:.1f}", *means, worse]
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def _asked(kind: str, found: Compared) -> dict[str, np.ndarray]:
    """Which questions are told apart: name -> bool[tests, questions]."""
    passage = np.zeros(found.guess.shape[1:], bool)
    if kind == AS_THEY_ARE:
        return {"15% of all tokens": ~passage}
    for test, piece in enumerate(AGAIN_AT):
        passage[test, book_rows.of_passage(piece)] = True
    again = {f"{PASSAGE // SPACING} of the {PASSAGE} tokens that recur": passage}
    return again | {"other tokens": ~passage} if kind == RECURRING else again


def _worse(found: Compared, which: np.ndarray) -> tuple[float, float]:
    """By how many nats short rows are worse, and its standard error, from the means of held-out rows."""
    of_rows = (found.losses[SHORT] - found.losses[LONG])[:, which].mean(1)
    return of_rows.mean(), of_rows.std(ddof=1) / len(of_rows) ** 0.5


def _picture(answered: dict[str, Answered], compared: dict[tuple[str, int], Compared], out: Path) -> Path:
    """What a far question knows of; how the answers were learned; what a passage is worth by how far back it stands."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right, last) = pyplot.subplots(1, 3, figsize=(15, 3.6))
    for row, (name, found) in enumerate(reversed(answered.items())):
        left.fill_between(np.arange(LONG), row - 0.35, row + 0.35, where=found.felt, step="mid", linewidth=0)
        left.plot([found.question - BACK] * 2, [row - 0.4, row + 0.4], color="black")
        left.plot([found.question] * 2, [row - 0.4, row + 0.4], color="black", linestyle=":")
        smooth = np.convolve(found.trained.hits, np.ones(10) / 10, "valid")
        right.plot(np.arange(len(smooth)) + 10, smooth, label=name)
    left.set_yticks(range(len(answered)), list(reversed(answered)))
    left.set_title("tokens whose gradient is not 0; the value (line), the question (dots)", fontsize="small")
    left.set_xlabel("position")
    right.set_title("accuracy of all three questions in training", fontsize="small")
    right.set_xlabel("step")
    right.legend(fontsize="small", frameon=False)
    backs = [f"{piece * SHORT:,} to {(piece + 1) * SHORT - PASSAGE:,}" for piece in AGAIN_AT]
    for (kind, seed), found in compared.items():
        if kind == RECURRING:
            passage = _asked(kind, found)[f"{PASSAGE // SPACING} of the {PASSAGE} tokens that recur"]
            at = [_worse(found, passage & (np.arange(len(AGAIN_AT)) == test)[:, None]) for test in range(len(AGAIN_AT))]
            worth, error = np.array(at).T
            last.errorbar(np.arange(len(at)) + seed / 20, worth, error, fmt="o", capsize=3, label=f"seed {seed}")
    last.set_xticks(range(len(backs)), backs)
    last.set_ylim(bottom=0)
    last.set_title(f"rows of {SHORT} are worse by (nats, standard error)", fontsize="small")
    last.set_xlabel("tokens from the passage to where it recurs")
    last.legend(fontsize="small", frameon=False)
    figure.tight_layout()
    return save(figure, out)


def _corpus(options: Options) -> Corpus:
    """The books in pieces of words; a finished one is taken as it is."""
    out = options.folder / "corpus"
    command = ("data_pipelines", "prepare", "--source", f"text:{options.texts}", "--heldout", "0", "--out", str(out))
    subprocess.run(
        [sys.executable, "-m", *command, "--tokenizer", "wordpiece", "--vocab-size", str(PIECES)], check=True
    )
    return Corpus(out)


if __name__ == "__main__":
    main(tyro.cli(Options))
