"""How fast models train on this machine's first GPU, or on its CPU, beside Hugging Face's torch models.

    python -m benchmarks.train_speed                        # all of the device's rows; the table grows row by row
    python -m benchmarks.train_speed --only bert-tiny gpt2-mini --rounds 12                             # of a CPU's
    python -m benchmarks.train_speed --only bert-large --lengths 512 --profile traces --out gpu.md      # of a GPU's

Whole training steps on the same random rows without padding, from the same sizes, AdamW and clipping. Ours is the step
of `pretrain run` with the program that it takes by default. torch has scaled_dot_product_attention (flash's where it
can) without an attention mask, fused AdamW, and logits at the predicted positions alone, as ours. No pairs of
sentences, no memory. On a GPU torch has bfloat16 by autocast, and torch.compile; a CPU's steps are in float32.

For each row both are made in new processes on the same cores, one after the other, on a GPU each with 45% of its
memory; then they take turns of some steps, which are timed. With --lengths (on a GPU always) a row is any recipe at a
length: it begins with as many tokens as --tokens says and halves its rows where memory is short. MFU counts the same
model FLOPs on both sides, over the device's dense bfloat16 peak where that is known.
A GPU takes JAX and torch with CUDA: `make setup-dev ACCELERATOR=cuda`.
"""

import dataclasses
import functools
import os
import sys
from collections.abc import Mapping
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.sides import Case, Ours, Theirs
from benchmarks.turns import Failed, contest, in_turns, milliseconds, ratio
from data_pipelines.command_line import end_with, parse, unknown
from data_pipelines.errors import UserError
from pretrain.commands.platform import accelerators

SIDES = {"ours": Ours, "torch": Theirs}
HALVINGS = 3  # of the rows, at most


class Shape(NamedTuple):
    """A row of a CPU's table.   rows, length: of a batch.   rounds: timed steps.   changes: fields of the model, beside
    a vocabulary of 8,192 and dropout 0.1."""

    recipe: str
    rows: int
    length: int
    rounds: int
    changes: Mapping[str, Any] = {}


LONG = {"depth": 4}  # of 12 layers, so that torch's has room
NANOGPT = {"width": 128, "depth": 4, "heads": 4, "feed_forward": 512, "vocab_size": 106}
NANOGPT |= {"dropout": 0.0, "attention_dropout": 0.0}
SURE = {"dropout": 0.0, "attention_dropout": 0.0}  # ModernBERT's dropout stands elsewhere in torch
SHAPES = {
    "bert-tiny": Shape("bert-tiny", 32, 128, 30),
    "bert-mini": Shape("bert-mini", 32, 128, 12),
    "bert-base": Shape("bert-base", 8, 128, 6, {"vocab_size": 30522}),
    "albert-tiny": Shape("albert-tiny", 32, 128, 30),
    "electra-tiny": Shape("electra-tiny", 32, 128, 30),
    "deberta-v2-tiny": Shape("deberta-v2-tiny", 32, 128, 20),
    "deberta-v3-tiny": Shape("deberta-v3-tiny", 8, 512, 10),
    "xlnet-tiny": Shape("xlnet-tiny", 32, 128, 20),
    "gpt2-tiny": Shape("gpt2-tiny", 32, 128, 20),
    "gpt2-mini": Shape("gpt2-mini", 16, 256, 10),
    "gpt2-small": Shape("gpt2-small", 4, 256, 5, {"vocab_size": 50257}),
    "t5-tiny": Shape("t5-tiny", 32, 128, 20),
    "t5-small": Shape("t5-small", 4, 512, 5, {"vocab_size": 32128}),
    "bart-tiny": Shape("bart-tiny", 32, 128, 20),
    "bart-base": Shape("bart-base", 4, 128, 5, {"vocab_size": 50265}),
    "nanogpt": Shape("gpt2-tiny", 12, 64, 50, NANOGPT),  # what its README trains on a CPU
    "modernbert-rows-of-1024": Shape("modernbert-tiny", 4, 1024, 10, SURE),
    "modernbert-long-row": Shape("modernbert-tiny", 1, 8192, 4, SURE),
    "bert-rows-of-512": Shape("bert-base", 8, 512, 3, LONG),  # as many tokens as in the long rows
    "bigbird-long-row": Shape("bigbird-base", 1, 4096, 3, LONG),
    "longformer-long-row": Shape("longformer-base", 1, 4096, 3, LONG),
}
ON_GPU = ("bert-large", "bert-base", "electra-base", "xlnet-base", "gpt2-small")
GPU_LENGTHS = (512, 128, 1024)
WITHOUT = {("bert-large", 512)}  # attention dropout, too
GPU_ROUNDS, GPU_STEPS = 6, 5
HEAD = (
    "| model | rows | tokens | attention dropout | ours, ms (CPU) | torch, ms (CPU) | torch / ours | ours tokens/s "
    "| torch tokens/s | our MFU | torch's MFU | our GB | torch's GB | our program |\n" + "|---" * 14 + "|"
)


@dataclasses.dataclass(frozen=True)
class Options:
    """only: rows of the table; with lengths, recipes.   lengths, tokens: of the rows, and of a batch.   vocab: size of
    the vocabulary, 0 for the table's.   rounds: timed turns, 0 for the table's.   steps: of a turn; 0 for 5 on a GPU,
    else 1.   threads: cores of each side, 0 for all.   backend: of torch.compile: inductor, as on a GPU, or eager,
    which only traces.   dtype, depth, attention, remat: of our program, as of `pretrain run`; by default what suits the
    platform.   profile: a folder for a trace of each row; the ten longest operations are printed.   out: a file for the
    table.
    """

    only: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()
    tokens: int = 32_768
    vocab: int = 0
    rounds: int = 0
    steps: int = 0
    threads: int = 0
    backend: str | None = None
    dtype: str | None = None
    depth: str | None = None
    attention: str | None = None
    remat: str | None = None
    profile: Path | None = None
    out: Path | None = None


class Row(NamedTuple):
    """name: in the table.   rounds: timed turns."""

    name: str
    case: Case
    rounds: int


class Measured(NamedTuple):
    """Of the sides that could be run.   seconds: side -> those of a turn [rounds, (wall, CPU)].   about: side -> what
    it says of itself.   failures: side -> why it could not.   longest: of our trace."""

    case: Case
    seconds: dict[str, np.ndarray]
    about: dict[str, dict[str, Any]]
    failures: dict[str, str]
    longest: list[tuple[str, float]]


def main(arguments: list[str]) -> int:
    """Measure and print the table, a row as soon as it is known -> exit status."""
    options = parse(Options, arguments, "python -m benchmarks.train_speed")
    shown = []
    for row in rows_of(options, bool(accelerators())):
        measured = measure(row, options)
        lines = [*([] if shown else [conditions(measured), HEAD]), line(row.name, measured)]
        print(*lines, sep="\n", flush=True)
        shown += lines
        for operation, ms in measured.longest:
            print(f"    {ms:8.3f} ms a step  {operation}", file=sys.stderr)
        if options.out:
            options.out.write_text("\n".join(shown) + "\n")
    return 0


def rows_of(options: Options, gpu: bool) -> list[Row]:
    """The rows of the table, on a GPU or a CPU."""
    from pretrain.recipes.registry import find

    same = {name: getattr(options, name) for name in ("backend", "dtype", "depth", "attention", "remat")}
    same["steps"] = options.steps or (GPU_STEPS if gpu else 1)
    words = {"vocab_size": options.vocab} if options.vocab else {}
    found = []
    if gpu or options.lengths:
        for length in options.lengths or GPU_LENGTHS:
            for name in options.only or ON_GPU:
                find(name)
                rows = max(options.tokens // length, 1)
                for rate in ({}, {"attention_dropout": 0.0})[: 1 + ((name, length) in WITHOUT)]:
                    found.append(
                        Row(name, Case(name, rows, length, words | rate, **same), options.rounds or GPU_ROUNDS)
                    )
        return found
    for name in options.only or SHAPES:
        if name not in SHAPES:
            raise UserError(unknown("--only: no row", name, SHAPES) + "; with --lengths any recipe")
        recipe, rows, length, rounds, changes = SHAPES[name]
        changes = {"vocab_size": 8192, "dropout": 0.1, "attention_dropout": 0.1, **changes, **words}
        found.append(Row(name, Case(recipe, rows, length, changes, **same), options.rounds or rounds))
    return found


def measure(row: Row, options: Options) -> Measured:
    """Both sides in turns, one alone where the other cannot be run; with fewer rows where memory is short."""
    case, failures, halvings = row.case, {}, HALVINGS
    cores = sorted(os.sched_getaffinity(0))[: options.threads or None]
    while len(failures) < len(SIDES):
        makers = {side: functools.partial(make, case) for side, make in SIDES.items() if side not in failures}
        try:
            with contest(makers, cores, warm_up=2) as sides:
                seconds = in_turns(sides, row.rounds)
                about = {side: contestant.ask("about") for side, contestant in sides.items()}
                folder = options.profile and options.profile / f"{row.name}-{case.length}"
                longest = trace(sides["ours"], folder) if "ours" in sides and folder else []
            return Measured(case, seconds, about, failures, longest)
        except Failed as failure:
            if is_memory(str(failure)) and halvings and case.rows > 1:
                case, halvings = dataclasses.replace(case, rows=case.rows // 2), halvings - 1
            else:
                failures[failure.side] = str(failure)
    return Measured(case, {}, {}, failures, [])


def is_memory(failure: str) -> bool:
    """Whether a side failed for want of memory."""
    return "RESOURCE_EXHAUSTED" in failure or "out of memory" in failure.lower()


def trace(ours, folder: Path) -> list[tuple[str, float]]:
    """The longest operations of our step, none where no trace could be taken; it stays in the folder."""
    try:
        return ours.ask("longest", folder)
    except Failed as failure:  # what was measured stands
        print(f"no trace: {failure}", file=sys.stderr)
        return []


def conditions(measured: Measured) -> str:
    """Where, when and with what."""
    said = [f"{side}: {about['device']}, {about['platform']}" for side, about in measured.about.items()]
    versions = ", ".join(f"{package} {version(package)}" for package in ("jax", "flax", "torch", "transformers"))
    how = f"medians of turns of {measured.case.steps} steps"
    return f"{date.today()}; {'; '.join(said) or 'neither side could be run'}; {versions}; {how}\n"


def line(name: str, measured: Measured) -> str:
    """A row of the table."""
    case, about = measured.case, measured.about
    rate = case.changes.get("attention_dropout")
    cells = {side: of_side(measured, side) for side in SIDES}
    both = len(measured.seconds) == len(SIDES)
    compared = ratio(measured.seconds["torch"], measured.seconds["ours"]) if both else "-"
    columns = [f"{name} | {case.rows} | {case.length:,} | {'as published' if rate is None else f'{rate:g}'}"]
    columns += [cells[side][0] for side in SIDES] + [compared]
    columns += [cells[side][column] for column in (1, 2, 3) for side in SIDES]
    said = [about["ours"]["program"], *about["ours"]["plain"]] if "ours" in about else []
    return f"| {' | '.join([*columns, '; '.join(said)])} |"


def of_side(measured: Measured, side: str) -> tuple[str, str, str, str]:
    """Milliseconds of a step, or why there are none; tokens/s, MFU and GB."""
    if side in measured.failures:
        why = measured.failures[side]
        return "out of memory" if is_memory(why) else why.splitlines()[0][:100], "-", "-", "-"
    case, ours, memory = measured.case, measured.about.get("ours", {}), measured.about[side]["memory"]
    each = measured.seconds[side] / case.steps
    seconds = np.median(each[:, 0])
    mfu = f"{ours['flops'] / seconds / ours['peak']:.1%}" if ours.get("peak") else "-"
    size = f"{memory / 1e9:.1f}" if memory else "-"
    return milliseconds(each), f"{case.rows * case.length / seconds:,.0f}", mfu, size


if __name__ == "__main__":
    end_with(main)
