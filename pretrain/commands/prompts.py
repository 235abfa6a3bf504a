"""`python -m pretrain prompts`: evaluate a causal decoder on questions, zero-shot and few-shot."""

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from rich.table import Table
from tyro.conf import arg

from data_pipelines.durable import writing
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
)
from pretrain.prompting.prompts import Prompt, Prompter, Template, read, unescaped

if TYPE_CHECKING:
    from pretrain.prompting.asking import Figure
    from pretrain.training.opened import Opened


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompts(OfModel):
    """Evaluate a causal decoder on the questions of a file, each after some answered examples (shots) of that file."""

    examples: Path
    """JSON Lines file of {"input", "target"}, or of {"input", "choices", "answer"}."""
    shots: tuple[int, ...] = (0,)
    """Numbers of answered examples before each question; the table has one row per number."""
    seed: int = 0
    """Random seed of the draw of examples; one seed draws the same for all models."""
    score: Literal["likelihood", "greedy"] = "likelihood"
    """likelihood: log probability of the targets. greedy: share of greedily decoded texts that equal their target."""
    stop: str = "\\n"
    """With --score greedy: the text ends before this string, in which \\n is a newline."""
    max_tokens: int = 32
    """With --score greedy: maximum number of tokens to generate."""
    template: Annotated[Template, arg(name="")] = Template()
    out: Path | None = None
    """JSON file to write the metrics to; an existing file is replaced."""
    mesh: str | None = None
    """Mesh of this machine's devices, as in `run`; by default the automatic mesh of `run`."""


def main(arguments: Sequence[str]) -> int:
    options = parse_checked(Prompts, arguments, "prompts", {"seed": SEED, "max_tokens": COUNT})
    if min(options.shots, default=-1) < 0:
        raise UserError(f"--shots {' '.join(map(str, options.shots))}: give numbers from 0 on, as in --shots 0 1 8")
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
    opened = open_model(options.run, options.step, mesh, options.best, options.ema)
    opened.check_decodes()
    greedy, positions = options.score == "greedy", opened.config.positions
    if greedy and options.max_tokens >= positions:
        raise UserError(f"--max-tokens {options.max_tokens}: the model has {positions} positions; give fewer")
    tokenizer, room = opened.tokenizer, positions - options.max_tokens * greedy
    between = delimiter(opened.objective, tokenizer.special)
    if between is not None:
        if options.template != Template():
            cause = "the run was trained with a delimiter of its own between input and target; leave them out"
            raise UserError(f"--separator, --between: {cause}")
        print("prompts use the delimiter between input and target that the run was trained with")
    prompter = Prompter(examples, tokenizer, options.template, room, between)
    prompts_of = {shots: prompter(shots, options.seed, not greedy) for shots in dict.fromkeys(options.shots)}
    everything = [*itertools.chain(*prompts_of.values())]
    longest = max((len(text.tokens) for prompt in everything for text in prompt.texts), default=0) - 1
    opened.warn_beyond_trained(longest + options.max_tokens * greedy)
    doing("compiling, then scoring prompts")
    with divided_by(opened.mesh):
        if greedy:
            limits = {"stop": unescaped(options.stop), "max_tokens": options.max_tokens}
            results = asking.answers(opened.module, opened.params, everything, prompter, **limits, mesh=opened.mesh)
        else:
            results = asking.log_likelihoods(opened.module, opened.params, everything, opened.mesh)
    results, summarize = iter(results), asking.of_answers if greedy else asking.of_likelihoods
    rows = {
        shots: summarize(prompts, [*itertools.islice(results, len(prompts))]) for shots, prompts in prompts_of.items()
    }
    _show(options, opened, prompts_of, rows)
    return 0


def _show(
    options: Prompts, opened: "Opened", prompts_of: dict[int, list[Prompt]], rows: dict[int, dict[str, "Figure"]]
) -> None:
    """Print the table and write the --out file.   prompts_of, rows: by number of shots."""
    from pretrain.prompting.asking import with_error
    from pretrain.storage.run_directory import write_whole

    names = list(next(iter(rows.values())))
    table = Table("shots", *names, "shots left out", title=f"{options.examples} of {opened.name}")
    records = []
    for shots, metrics in rows.items():
        left_out = np.array([prompt.left_out for prompt in prompts_of[shots]])
        cell = f"{left_out.sum()} of {np.count_nonzero(left_out)} prompts" if left_out.any() else "none"
        table.add_row(str(shots), *(with_error(metrics[name]) for name in names), cell)
        named = {name: {"value": value, "standard_error": error} for name, (value, error) in metrics.items()}
        records.append({"shots": shots, "left_out": left_out.tolist(), "figures": named})
    console = wide_console()
    console.print(table)
    console.print(f"{len(left_out)} examples; ± is one standard error")
    if options.out:
        about = {"run": str(options.run), "step": opened.step, "examples": str(options.examples), "seed": options.seed}
        about |= {"score": options.score, "stop": options.stop, "max_tokens": options.max_tokens}
        about |= {**dataclasses.asdict(options.template), "rows": records}
        with writing(options.out):
            write_whole(options.out, json.dumps(about, indent=1, ensure_ascii=False) + "\n")
