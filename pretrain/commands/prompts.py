"""`python -m pretrain prompts`: what a causal decoder answers after so many examples, as a table."""

import dataclasses
import itertools
import json

import jax
import numpy as np
from rich.table import Table

from data_pipelines.cloud import local_folder
from data_pipelines.errors import UserError
from data_pipelines.progress import doing
from data_pipelines.tokenizers import stored
from models.families.registry import name_of
from pretrain.commands.options import Prompts
from pretrain.generation.decoding import check_whole_rows
from pretrain.objectives.next_token_prediction import delimiter
from pretrain.objectives.protocols import CausalDecoder
from pretrain.prompting import figures
from pretrain.prompting.answers import answers
from pretrain.prompting.examples import read
from pretrain.prompting.figures import Figure
from pretrain.prompting.likelihood import log_likelihoods
from pretrain.prompting.prompts import Prompt, Prompter, Template, unescaped
from pretrain.recipes.table import wide_console
from pretrain.storage.run_directory import RunDirectory, write_whole
from pretrain.training.restore import restore, warn_beyond_trained
from pretrain.training.trained import merge
from tpu.mesh import divided_by, named_mesh


def ask(options: Prompts) -> None:
    """Print a row of figures for each number of shots. UserError in one line for what cannot be asked."""
    examples, directory = read(options.examples), RunDirectory(options.run)
    mesh = None if options.mesh is None else named_mesh(options.mesh, jax.local_devices())
    if mesh is not None and options.score == "greedy":
        check_whole_rows(options.mesh, mesh)
    restored = restore(directory, options.step, mesh)
    model = restored.assembly.model
    if not isinstance(model, CausalDecoder):
        raise UserError(f"{options.run}: a model of {name_of(model.config)} is no causal decoder; ask one, like gpt2")
    greedy, positions = options.score == "greedy", model.config.positions
    if greedy and options.max_tokens >= positions:
        raise UserError(
            f"--max-tokens {options.max_tokens}: give from 1 to {positions - 1}, below the model's positions"
        )
    with local_folder(directory.tokenizer) as folder:
        made = stored.load(folder)
    between, room = delimiter(restored.assembly.recipe.objective, made.special), positions - options.max_tokens * greedy
    if between is not None:
        _check_delimited(options)
    prompter = Prompter(options.examples, examples, made, options.template, room, between)
    asked = {shots: prompter(shots, options.seed, not greedy) for shots in dict.fromkeys(options.shots)}
    everything, params = [*itertools.chain(*asked.values())], merge(restored.params, restored.frozen)
    longest = max((len(text.tokens) for prompt in everything for text in prompt.texts), default=0) - 1
    warn_beyond_trained(restored, longest + options.max_tokens * greedy)
    doing("compiling, then asking")
    with divided_by(restored.mesh):
        if greedy:
            limits = {"stop": unescaped(options.stop), "max_tokens": options.max_tokens}
            found = answers(model, params, everything, prompter, **limits, mesh=restored.mesh)
        else:
            found = log_likelihoods(model, params, everything, restored.mesh)
    found, told = iter(found), figures.of_answers if greedy else figures.of_likelihoods
    rows = {shots: told(prompts, [*itertools.islice(found, len(prompts))]) for shots, prompts in asked.items()}
    _show(options, restored.step, asked, rows)


def _check_delimited(options: Prompts) -> None:
    """UserError for what has no place in rows of input and target."""
    if options.template != Template():
        raise UserError(
            "--separator, --between: the run's rows are an input and its target, between which its delimiter stands; "
            "leave them out"
        )
    print("the run's rows are input and target: its delimiter stands between")


def _show(options: Prompts, step: int, asked: dict[int, list[Prompt]], rows: dict[int, dict[str, Figure]]) -> None:
    """The table, and the file."""
    names = list(next(iter(rows.values())))
    table = Table("shots", *names, "shots left out", title=f"{options.examples} of {options.run} at step {step}")
    kept = []
    for shots, of_shots in rows.items():
        left_out = np.array([prompt.left_out for prompt in asked[shots]])
        said = f"{left_out.sum()} of {np.count_nonzero(left_out)} prompts" if left_out.any() else "none"
        table.add_row(str(shots), *(_written(of_shots[name]) for name in names), said)
        named = {name: {"value": value, "standard_error": error} for name, (value, error) in of_shots.items()}
        kept.append({"shots": shots, "left_out": left_out.tolist(), "figures": named})
    console = wide_console()
    console.print(table)
    console.print(f"{len(left_out)} examples; ± is one standard error")
    if options.out:
        about = {"run": str(options.run), "step": step, "examples": str(options.examples), "seed": options.seed}
        about |= {"score": options.score, "stop": options.stop, "max_tokens": options.max_tokens}
        about |= {**dataclasses.asdict(options.template), "rows": kept}
        try:
            write_whole(options.out, json.dumps(about, indent=1, ensure_ascii=False) + "\n")
        except OSError as error:
            raise UserError(
                f"--out {options.out}: cannot write there ({error.strerror}); choose another place"
            ) from None


def _written(figure: Figure) -> str:
    value, error = figure
    return f"{value:.4f}" + ("" if error is None else f" ± {error:.4f}")
