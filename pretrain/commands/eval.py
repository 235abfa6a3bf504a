"""`python -m pretrain eval`: evaluate a run on its held-out set and compare with simple baselines."""

import dataclasses
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from rich.table import Table
from tyro.conf import Positional, UseAppendAction, arg

from data_pipelines.command_line import Place
from data_pipelines.durable import writing
from data_pipelines.errors import PassingError, UserError
from data_pipelines.progress import doing
from data_pipelines.tokenizers import prefixes
from models.core.ranges import COUNT, SEED
from pretrain.commands.common import changed, check_file, import_models, parse_checked, wide_console
from pretrain.generation.settings import Decoding

if TYPE_CHECKING:
    from pretrain.storage.run_directory import RunDirectory
    from pretrain.training.assembly import Assembly
    from pretrain.training.evaluate import Evaluators
    from pretrain.training.opened import Opened, Restored
    from pretrain.training.targets import Asked

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Eval:
    """Evaluate a run on its held-out set, or the texts that a model generates for inputs with known targets."""

    run: Positional[Place]
    """Work directory of the run; with --source, also a Hugging Face folder."""
    all: bool = False
    """Evaluate every checkpoint, not only the newest."""
    best: str | None = None
    """Evaluate the checkpoint with the lowest held-out loss: of a task, given its name, or of the run, given 'loss'."""
    ema: bool = False
    """Evaluate the running mean of the weights, of a run with --optimizer.ema."""
    corpus: str | None = None
    """The run's corpus, if it has moved: DIR, or en=DIR,zh=DIR."""
    examples: int | None = None
    """Number of held-out rows; by default 1024, but all with --stride or --source."""
    memory: int | None = None
    """Memory length in positions of a language model with a memory; by default its recipe's."""
    stride: int | None = None
    """Evaluate whole documents with a sliding window that moves by this many tokens; each token is predicted once."""
    write: bool = False
    """Also generate targets for held-out inputs and score them: BLEU, chrF, ROUGE, exact match and F1."""
    source: str | None = None
    """Only generate and score targets for this source, given as to `prepare`: jsonl:FILE or parallel:FILE,FILE."""
    field: Annotated[tuple[str, ...], UseAppendAction] = ()
    """With --source jsonl: and other records: the field of inputs, then that of targets (default: input, target), then
    those of further targets of the same input."""
    code: str | None = None
    """With --source: control code to put before each input."""
    task_prefix: str = ""
    """With --source: text to put before each input, as with `prepare`."""
    bleu_tokenizer: Literal["13a", "intl", "zh", "char", "none"] = "13a"
    """sacrebleu's tokenizer for BLEU: zh for Chinese, char for Japanese."""
    decoding: Annotated[Decoding, arg(name="")] = Decoding()
    seed: int = 0
    """Random seed for sampling."""
    out: Path | None = None
    """JSON Lines file to write inputs, targets and generated texts to; an existing file is replaced."""


OF_TARGETS = "bleu_tokenizer", "seed", "out"
OF_SOURCES = "field", "code", "task_prefix"
OF_RUNS = "all", "corpus", "memory", "stride", "write"


def main(arguments: Sequence[str]) -> int:
    options = parse_checked(Eval, arguments, "eval", {"examples": COUNT, "seed": SEED})
    _check(options)
    import_models()
    evaluate(options)
    return 0


def _check(options: Eval) -> None:
    """Raise UserError for options that cannot be combined."""

    def changed_among(names: Sequence[str]) -> list[str]:
        return changed(options, but={field.name for field in dataclasses.fields(options)} - {*names})

    if options.all and options.best is not None:
        raise UserError(f"--best {options.best}: cannot be combined with --all; leave one of them out")
    useless = [*changed_among(OF_TARGETS), *changed(options.decoding)]
    if useless and not options.write and options.source is None:
        raise UserError(f"{', '.join(useless)}: no effect without --write or --source; add one of them")
    if (useless := changed_among(OF_SOURCES)) and options.source is None:
        raise UserError(f"{', '.join(useless)}: no effect without --source; add it, or leave them out")
    if (useless := changed_among(OF_RUNS)) and options.source is not None:
        raise UserError(f"{', '.join(useless)}: no effect with --source, which only generates targets; leave them out")
    if options.out is not None:
        check_file(options.out)


def evaluate(options: Eval) -> dict[str, float]:
    """Print held-out metrics of one or every checkpoint next to the baselines -> metrics of the opened checkpoint."""
    from pretrain.storage.run_directory import RunDirectory
    from pretrain.training.evaluate import Evaluators
    from pretrain.training.opened import open_model
    from pretrain.training.placement import of_phase, stages

    if options.source is not None:
        return _of_source(options)
    directory, opened = RunDirectory(options.run), open_model(options.run, best_of=options.best, ema=options.ema)
    newest = opened.run
    if newest is None:
        raise UserError(f"eval {options.run}: a Hugging Face folder has no held-out set; give a run, or --source")
    assembly = newest.assembly if options.memory is None else _remembering(newest.assembly, options.memory)
    assembly = assembly if options.stride is None else striding(assembly, options.stride)
    examples = options.examples or (1024 if options.stride is None else sys.maxsize)
    placed = newest.stages if assembly is newest.assembly else stages(assembly, newest.mesh)
    steps = sorted({newest.step, *(directory.checkpoint_steps() if options.all else [])})
    columns, evaluator, phase, inputs, written = {}, None, None, {}, {}
    for step in steps:
        restored = newest if step == newest.step else _restored(directory, step, options.ema)
        if restored is None:
            continue
        at = opened.at(restored)
        if phase != restored.phase:
            phase = restored.phase
            evaluator = Evaluators(of_phase(placed, phase), directory.open_corpora(options.corpus), examples)
            inputs, written = held_out_inputs(options, at, evaluator) if options.write else {}, {}
        doing(f"evaluating step {step}")
        columns[f"step {step}"] = evaluator(restored.params, restored.frozen, step)
        for place, of_place in inputs.items():
            written[place] = write(options, at, of_place)
            scores = written[place].figures.items()
            columns[f"step {step}"] |= {f"{place}/{name}" if place else name: value for name, value in scores}
    columns["unigram"] = evaluator.baselines()
    _print(f"held-out metrics of {options.run}", columns, [*written.values()], options.out)
    return columns[f"step {newest.step}"]


def _of_source(options: Eval) -> dict[str, float]:
    """Generate targets for the inputs of a source and print their metrics -> the metrics."""
    from data_pipelines.formats.table import parse
    from pretrain.training import targets
    from pretrain.training.opened import open_model

    source = parse(options.source, task_prefix=options.task_prefix, fields=options.field or ("input", "target"))
    if options.field and not hasattr(source.options, "fields"):
        raise UserError(f"--field {options.field[0]}: --source {source} has no fields; leave it out")
    opened = open_model(options.run, best_of=options.best, ema=options.ema)
    lead = [] if options.code is None else [prefixes.token(opened.tokenizer, options.code)]
    limit = options.examples or sys.maxsize
    asked, left_out = targets.of_source(source, opened.tokenizer, limit, lead, options.out)
    for reason in left_out:
        log.warning("--source %s: %s", options.source, reason)
    prompts = targets.make_prompts(asked, opened, opened.objectives, options.decoding)
    written = write(options, opened, Inputs(asked, prompts))
    _print(f"targets of {options.source}", {opened.name: written.figures}, [written], options.out)
    return written.figures


class Inputs(NamedTuple):
    """Inputs with their targets, and the prompts made from them."""

    asked: "list[Asked]"
    prompts: list[list[int]]


def held_out_inputs(options: Eval, opened: "Opened", evaluators: "Evaluators") -> dict[str, Inputs]:
    """Collect the inputs of each task and corpus whose rows are inputs and targets; UserError if there are none."""
    from pretrain.objectives.next_token_prediction import INPUT_TARGET
    from pretrain.training import targets

    inputs = {}
    for place, evaluator in evaluators.of.items():
        if getattr(evaluator.objective, "layout", None) == INPUT_TARGET:
            asked = targets.of_corpus(evaluator.held_out, opened.tokenizer, evaluator.examples)
            inputs[place] = Inputs(asked, targets.make_prompts(asked, opened, [evaluator.objective], options.decoding))
    if not inputs:
        raise UserError("--write: the run has no rows of input and target (objective.layout); use --source instead")
    return inputs


class Written(NamedTuple):
    """Texts that a model generated.   figures: metrics in percent.   signature: how sacrebleu computed BLEU."""

    asked: "list[Asked]"
    texts: list[str]
    figures: dict[str, float]
    signature: str


def write(options: Eval, opened: "Opened", inputs: Inputs) -> Written:
    """Generate a target for each input, and score them."""
    from pretrain import metrics
    from pretrain.training import targets

    doing(f"generating {len(inputs.prompts):,} targets")
    texts = targets.write(opened, inputs.prompts, options.decoding, options.seed)
    figures, signature = metrics.figures(texts, [asked.targets for asked in inputs.asked], options.bleu_tokenizer)
    return Written(inputs.asked, texts, figures, signature)


def _print(title: str, columns: dict[str, dict[str, float]], written: Sequence[Written], out: Path | None) -> None:
    """Print the table and how targets were scored, and write generated targets to --out."""
    from pretrain.storage.run_directory import write_whole

    table = Table("", *columns, title=title)
    for name in dict.fromkeys(name for figures in columns.values() for name in figures):
        cells = (f"{figures[name]:.4f}" if name in figures else "" for figures in columns.values())
        table.add_row(name.replace("_", " "), *cells)
    console = wide_console()
    console.print(table)
    for scored in written:
        console.print(
            f"{len(scored.asked):,} targets; BLEU and the rows below it are in percent; BLEU {scored.signature}",
            highlight=False,
        )
    if out is not None:
        pairs = (pair for scored in written for pair in zip(scored.asked, scored.texts, strict=True))
        lines = ({"input": asked.text, "targets": asked.targets, "written": text} for asked, text in pairs)
        with writing(out):
            write_whole(out, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def _restored(directory: "RunDirectory", step: int, ema: bool) -> "Restored | None":
    """Restore one of several checkpoints; None, with a warning, if it is damaged or was deleted meanwhile."""
    from pretrain.training.opened import restore

    try:
        return restore(directory, step, ema=ema)
    except PassingError:
        raise
    except UserError as error:
        log.warning("step %d is skipped: %s", step, error)
        return None


def _remembering(assembly: "Assembly", memory: int) -> "Assembly":
    """Change the memory length in evaluation; UserError if an objective has no such setting."""
    from pretrain.recipe import with_objectives

    def remembering(objective):
        if not hasattr(objective, "evaluation_memory"):
            name = assembly.recipe.name
            raise UserError(f"--memory {memory}: {name} has no memory length to set; leave it out")
        return dataclasses.replace(objective, evaluation_memory=memory)

    try:
        return assembly._replace(recipe=with_objectives(assembly.recipe, remembering))
    except ValueError as error:
        raise UserError(str(error).replace("objective.evaluation_memory=", "--memory ")) from None


def striding(assembly: "Assembly", stride: int) -> "Assembly":
    """Change the objectives so that they evaluate whole documents with a sliding window. UserError if an objective does
    not predict next tokens of documents, or if the window does not fit."""
    from pretrain.objectives.next_token_prediction import DOCUMENTS, NextTokenPrediction, StridedPerplexity
    from pretrain.recipe import every_task, with_objectives

    name = assembly.recipe.name

    def strided(objective):
        if not isinstance(objective, NextTokenPrediction):
            raise UserError(f"--stride {stride}: {name} does not predict next tokens; leave it out")
        if objective.layout != DOCUMENTS:
            raise UserError(f"--stride {stride}: {name} reads rows of input and target; leave it out")
        return StridedPerplexity(**vars(objective), stride=stride)

    recipe = with_objectives(assembly.recipe, strided)
    for _, phase, task in every_task(recipe):
        task.objective.rows(phase)  # raises UserError
    return assembly._replace(recipe=recipe)
