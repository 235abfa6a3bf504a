"""How fast models train on this machine's first GPU, beside Hugging Face's torch models by torch.compile.

    python -m benchmarks.gpu                          # all rows; the table grows row by row
    python -m benchmarks.gpu --recipes bert-large --lengths 512 --profile traces --out gpu.md

Whole training steps on the same random rows without padding, from the same sizes, AdamW and clipping, dropout as
published; bert-large at 512 tokens also without attention dropout. Ours is the step of `pretrain run` with the program
that it takes by default. torch has bfloat16 by autocast, scaled_dot_product_attention (flash's where it can) without an
attention mask, fused AdamW, and logits at the predicted positions alone, as ours. No pairs of sentences, no memory.

For each row both are made in new processes, one after the other, each with 45% of the GPU's memory; then they take
turns of some steps, which are timed. A row begins with as many tokens as --tokens says and halves its rows where memory
is short. MFU counts the same model FLOPs on both sides, over the GPU's dense bfloat16 peak.
It takes JAX and torch with CUDA: `make setup-dev ACCELERATOR=cuda`.
On a CPU the same runs in float32, to try it: --recipes bert-tiny --lengths 32 --tokens 64 --backend eager.
"""

import dataclasses
import functools
import os
import sys
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.gpu_sides import Case, Ours, Theirs
from benchmarks.turns import Failed, contest, in_turns, ratio
from data_pipelines.command_line import end_with, parse

RECIPES = ("bert-large", "bert-base", "electra-base", "xlnet-base", "gpt2-small")
LENGTHS = (512, 128, 1024)
WITHOUT = {("bert-large", 512)}  # attention dropout, too
SIDES = {"ours": Ours, "torch": Theirs}
HALVINGS = 3  # of the rows, at most
HEAD = (
    "| recipe | tokens | rows | attention dropout | ours tokens/s | torch tokens/s | ours / torch | our MFU | torch's "
    "MFU | our GB | torch's GB | our program |\n|---|---|---|---|---|---|---|---|---|---|---|---|"
)


@dataclasses.dataclass(frozen=True)
class Options:
    """recipes, lengths: of the rows of the table.   tokens: of a batch.   rounds: timed turns.   steps: of a turn.
    backend: of torch.compile: inductor, or eager, which only traces.   dtype, depth, attention, remat: of our program,
    as of `pretrain run`; by default what suits the platform.   profile: a folder for a trace of each row; the ten
    longest operations are printed.   out: a file for the table.
    """

    recipes: tuple[str, ...] = RECIPES
    lengths: tuple[int, ...] = LENGTHS
    tokens: int = 32_768
    rounds: int = 6
    steps: int = 5
    backend: str = "inductor"
    dtype: str | None = None
    depth: str | None = None
    attention: str | None = None
    remat: str | None = None
    profile: Path | None = None
    out: Path | None = None


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
    options = parse(Options, arguments, "python -m benchmarks.gpu")
    rows = cases(options)
    shown = []
    for case in rows:
        measured = measure(case, options)
        lines = [*([] if shown else [conditions(measured, options), HEAD]), line(measured)]
        print(*lines, sep="\n", flush=True)
        shown += lines
        for operation, ms in measured.longest:
            print(f"    {ms:8.3f} ms a step  {operation}", file=sys.stderr)
        if options.out:
            options.out.write_text("\n".join(shown) + "\n")
    return 0


def cases(options: Options) -> list[Case]:
    """The rows of the table."""
    from pretrain.recipes.registry import find

    same = {name: getattr(options, name) for name in ("steps", "backend", "dtype", "depth", "attention", "remat")}
    found = []
    for length in options.lengths:
        for name in options.recipes:
            find(name)
            rates = (None, 0.0) if (name, length) in WITHOUT else (None,)
            rows = max(options.tokens // length, 1)
            found += [Case(name, rows, length, rate, **same) for rate in rates]
    return found


def measure(case: Case, options: Options) -> Measured:
    """Both sides in turns, one alone where the other cannot be run; with fewer rows where memory is short."""
    failures, halvings = {}, HALVINGS
    while len(failures) < len(SIDES):
        makers = {side: functools.partial(make, case) for side, make in SIDES.items() if side not in failures}
        try:
            with contest(makers, sorted(os.sched_getaffinity(0)), warm_up=2) as sides:
                seconds = in_turns(sides, options.rounds)
                about = {side: contestant.ask("about") for side, contestant in sides.items()}
                longest = trace(case, sides["ours"], options.profile) if "ours" in sides and options.profile else []
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


def trace(case: Case, ours, folder: Path) -> list[tuple[str, float]]:
    """The longest operations of our step, none where no trace could be taken; it stays in the folder."""
    rate = "" if case.attention_dropout is None else f"-{case.attention_dropout}"
    try:
        return ours.ask("longest", folder / f"{case.recipe}-{case.length}{rate}")
    except Failed as failure:  # what was measured stands
        print(f"no trace: {failure}", file=sys.stderr)
        return []


def conditions(measured: Measured, options: Options) -> str:
    """Where, when and with what."""
    said = [f"{side}: {about['device']}, {about['platform']}" for side, about in measured.about.items()]
    versions = ", ".join(f"{package} {version(package)}" for package in ("jax", "flax", "torch", "transformers"))
    how = f"torch.compile by {options.backend}; medians of {options.rounds} turns of {options.steps} steps"
    return f"{date.today()}; {'; '.join(said) or 'neither side could be run'}; {versions}; {how}\n"


def line(measured: Measured) -> str:
    """A row of the table."""
    case, about = measured.case, measured.about
    rate = "as published" if case.attention_dropout is None else f"{case.attention_dropout:g}"
    cells = {side: of_side(measured, side) for side in SIDES}
    both = len(measured.seconds) == len(SIDES)
    compared = ratio(measured.seconds["torch"], measured.seconds["ours"]) if both else "-"
    columns = [f"{case.recipe} | {case.length:,} | {case.rows} | {rate}"]
    columns += [cells[side][0] for side in SIDES] + [compared]
    columns += [cells[side][column] for column in (1, 2) for side in SIDES]
    said = [about["ours"]["program"], *about["ours"]["plain"]] if "ours" in about else []
    return f"| {' | '.join([*columns, '; '.join(said)])} |"


def of_side(measured: Measured, side: str) -> tuple[str, str, str]:
    """Tokens/s, MFU and GB, or why there are none."""
    if side in measured.failures:
        why = measured.failures[side]
        return "out of memory" if is_memory(why) else why.splitlines()[0][:100], "-", "-"
    case, ours, memory = measured.case, measured.about.get("ours", {}), measured.about[side]["memory"]
    seconds = np.median(measured.seconds[side][:, 0]) / case.steps
    mfu = f"{ours['flops'] / seconds / ours['peak']:.1%}" if ours.get("peak") else "-"
    return f"{case.rows * case.length / seconds:,.0f}", mfu, f"{memory / 1e9:.1f}" if memory else "-"


if __name__ == "__main__":
    end_with(main)
