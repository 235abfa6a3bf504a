"""`python -m pretrain prompts`: what a causal decoder answers after so many examples, as a table."""

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from rich.table import Table
from tyro.conf import arg

from data_pipelines.errors import UserError
from data_pipelines.progress import doing
from models.core.ranges import COUNT, SEED
from pretrain.commands.common import (
    OfModel,
    check_apart,
    check_file,
    import_models,
    parse_checked,
    wide_console,
    writing,
)
from pretrain.prompting.prompts import Prompt, Prompter, Template, read, unescaped

if TYPE_CHECKING:
    from pretrain.prompting.asking import Figure
    from pretrain.training.opened import Opened


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompts(OfModel):
    """Ask a causal decoder questions of a file, each after some of the others with their answers."""

    examples: Path
    """A file of JSON lines: {"input", "target"}, or {"input", "choices", "answer"}."""
    shots: tuple[int, ...] = (0,)
    """How many answered examples stand before each question; one row of the table for each number."""
    seed: int = 0
    """Draws them, alike for all models."""
    score: Literal["likelihood", "greedy"] = "likelihood"
    """How likely targets are, or how many of them the likeliest text, token by token, equals."""
    stop: str = "\\n"
    """Greedy text ends before this, in which \\n is a newline."""
    max_tokens: int = 32
    """Greedy text has at most so many tokens."""
    template: Annotated[Template, arg(name="")] = Template()
    out: Path | None = None
    """A JSON file for the figures; one that is there is replaced."""
    mesh: str | None = None
    """How this machine's devices share the work, as of `run`, whose automatic mesh is the default."""


def main(arguments: Sequence[str]) -> int:
    options = parse_checked(Prompts, arguments, "prompts", {"seed": SEED, "max_tokens": COUNT})
    if min(options.shots, default=-1) < 0:
        raise UserError("--shots: give numbers from 0 on, as in --shots 0 1 8")
    if options.score == "likelihood":
        for option in "stop", "max_tokens":
            if (value := getattr(options, option)) != getattr(Prompts, option):
                raise UserError(f"--{option.replace('_', '-')} {value}: has no effect without --score greedy; add it")
    import_models()
    import jax

    from pretrain.generation.decoding import check_whole_rows
    from pretrain.objectives.next_token_prediction import delimiter
    from pretrain.prompting import asking
    from pretrain.training.opened import open_model
    from tpu.mesh import divided_by, named_mesh

    if options.out:
        check_apart(options.out, options.examples)
        check_file(options.out)
    examples = read(options.examples)
    mesh = None if options.mesh is None else named_mesh(options.mesh, jax.local_devices())
    if mesh is not None and options.score == "greedy":
        check_whole_rows(options.mesh, mesh)
    opened = open_model(options.run, options.step, mesh, options.best)
    opened.check_decodes()
    greedy, positions = options.score == "greedy", opened.config.positions
    if greedy and options.max_tokens >= positions:
        raise UserError(
            f"--max-tokens {options.max_tokens}: give from 1 to {positions - 1}, below the model's positions"
        )
    tokenizer, room = opened.tokenizer, positions - options.max_tokens * greedy
    between = delimiter(opened.objective, tokenizer.special)
    if between is not None:
        if options.template != Template():
            beside = "the run's rows are an input and its target, between which its delimiter stands; leave them out"
            raise UserError(f"--separator, --between: {beside}")
        print("the run's rows are input and target: its delimiter stands between")
    prompter = Prompter(examples, tokenizer, options.template, room, between)
    asked = {shots: prompter(shots, options.seed, not greedy) for shots in dict.fromkeys(options.shots)}
    everything = [*itertools.chain(*asked.values())]
    longest = max((len(text.tokens) for prompt in everything for text in prompt.texts), default=0) - 1
    opened.warn_beyond_trained(longest + options.max_tokens * greedy)
    doing("compiling, then asking")
    with divided_by(opened.mesh):
        if greedy:
            limits = {"stop": unescaped(options.stop), "max_tokens": options.max_tokens}
            found = asking.answers(opened.module, opened.params, everything, prompter, **limits, mesh=opened.mesh)
        else:
            found = asking.log_likelihoods(opened.module, opened.params, everything, opened.mesh)
    found, told = iter(found), asking.of_answers if greedy else asking.of_likelihoods
    rows = {shots: told(prompts, [*itertools.islice(found, len(prompts))]) for shots, prompts in asked.items()}
    _show(options, opened, asked, rows)
    return 0


def _show(
    options: Prompts, opened: "Opened", asked: dict[int, list[Prompt]], rows: dict[int, dict[str, "Figure"]]
) -> None:
    """The table, and the file."""
    from pretrain.prompting.asking import with_error
    from pretrain.storage.run_directory import write_whole

    names = list(next(iter(rows.values())))
    table = Table("shots", *names, "shots left out", title=f"{options.examples} of {opened.name}")
    kept = []
    for shots, of_shots in rows.items():
        left_out = np.array([prompt.left_out for prompt in asked[shots]])
        said = f"{left_out.sum()} of {np.count_nonzero(left_out)} prompts" if left_out.any() else "none"
        table.add_row(str(shots), *(with_error(of_shots[name]) for name in names), said)
        named = {name: {"value": value, "standard_error": error} for name, (value, error) in of_shots.items()}
        kept.append({"shots": shots, "left_out": left_out.tolist(), "figures": named})
    console = wide_console()
    console.print(table)
    console.print(f"{len(left_out)} examples; ± is one standard error")
    if options.out:
        about = {"run": str(options.run), "step": opened.step, "examples": str(options.examples), "seed": options.seed}
        about |= {"score": options.score, "stop": options.stop, "max_tokens": options.max_tokens}
        about |= {**dataclasses.asdict(options.template), "rows": kept}
        with writing(options.out):
            write_whole(options.out, json.dumps(about, indent=1, ensure_ascii=False) + "\n")
