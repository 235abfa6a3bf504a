"""`python -m pretrain eval`: figures on a run's held-out set, beside what guessing reaches."""

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
from data_pipelines.errors import PassingError, UserError
from data_pipelines.progress import doing
from data_pipelines.tokenizers import prefixes
from models.core.ranges import COUNT, SEED
from pretrain.commands.common import changed, check_file, import_models, parse_checked, wide_console, writing
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
    """Evaluate a run on its fixed held-out set, or what a model writes for inputs that have targets."""

    run: Positional[Place]
    """Work directory of the run; with --source also a Hugging Face folder."""
    all: bool = False
    """Every checkpoint, not only the newest."""
    best: str | None = None
    """In place of the newest the one with the lowest held-out loss: of a task, by its name, or of the run, by the name
    loss."""
    corpus: str | None = None
    """Where the run's corpus is now, or several by name, if it has moved."""
    examples: int | None = None
    """Rows of the held-out set: by default 1024, with --stride and --source all."""
    memory: int | None = None
    """Positions that a language model remembers here, if not as many as in its recipe."""
    stride: int | None = None
    """Of all documents whole, in rows that begin so many tokens after each other and predict what no row before has."""
    write: bool = False
    """Of rows of input and target also write targets, and compare: BLEU, chrF, ROUGE, exact match and F1."""
    source: str | None = None
    """Write and compare these alone: documents of a source as of `prepare`, like jsonl:FILE or parallel:FILE,FILE."""
    field: Annotated[tuple[str, ...], UseAppendAction] = ()
    """Of jsonl: and other records, that of inputs, then that of targets; input and target unless told. More are further
    targets of the same input."""
    code: str | None = None
    """Of --source: a control code to stand before each input."""
    task_prefix: str = ""
    """Of --source: text that stands before each input, as of `prepare`."""
    bleu_tokenizer: Literal["13a", "intl", "zh", "char", "none"] = "13a"
    """How sacrebleu cuts words for BLEU: zh for Chinese, char for Japanese."""
    decoding: Annotated[Decoding, arg(name="")] = Decoding()
    seed: int = 0
    """Of what is drawn."""
    out: Path | None = None
    """A file of JSON lines for inputs, targets and what was written; one that is there is replaced."""


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
    """UserError for options that do not go together."""

    def given(names: Sequence[str]) -> list[str]:
        return changed(options, but={field.name for field in dataclasses.fields(options)} - {*names})

    if options.all and options.best is not None:
        raise UserError(f"--best {options.best}: is one checkpoint, --all are all of them; leave one of them out")
    found = [*given(OF_TARGETS), *changed(options.decoding)]
    if found and not options.write and options.source is None:
        raise UserError(f"{', '.join(found)}: no effect where no targets are written; add --write or --source")
    if (found := given(OF_SOURCES)) and options.source is None:
        raise UserError(f"{', '.join(found)}: no effect without --source; add it, or leave them out")
    if (found := given(OF_RUNS)) and options.source is not None:
        raise UserError(f"{', '.join(found)}: no effect with --source, whose targets alone are written; leave them out")
    if options.out is not None:
        check_file(options.out)


def evaluate(options: Eval) -> dict[str, float]:
    """Print held-out figures of the newest or of every checkpoint, beside the baselines -> the newest's figures."""
    from pretrain.storage.run_directory import RunDirectory
    from pretrain.training.evaluate import Evaluators
    from pretrain.training.opened import open_model
    from pretrain.training.placement import of_phase, stages

    if options.source is not None:
        return _of_source(options)
    directory, opened = RunDirectory(options.run), open_model(options.run, best_of=options.best)
    newest = opened.run
    if newest is None:
        raise UserError(f"eval {options.run}: a Hugging Face folder has no objective and no corpus; give a run")
    assembly = newest.assembly if options.memory is None else _remembering(newest.assembly, options.memory)
    assembly = assembly if options.stride is None else striding(assembly, options.stride)
    examples = options.examples or (1024 if options.stride is None else sys.maxsize)
    placed = newest.stages if assembly is newest.assembly else stages(assembly, newest.mesh)
    steps = sorted({newest.step, *(directory.checkpoint_steps() if options.all else [])})
    columns, evaluator, phase, inputs, written = {}, None, None, {}, {}
    for step in steps:
        restored = newest if step == newest.step else _restored(directory, step)
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
            found = written[place].figures.items()
            columns[f"step {step}"] |= {f"{place}/{name}" if place else name: value for name, value in found}
    columns["unigram"] = evaluator.baselines()
    _print(f"held-out figures of {options.run}", columns, [*written.values()], options.out)
    return columns[f"step {newest.step}"]


def _of_source(options: Eval) -> dict[str, float]:
    """Print figures of what is written for the inputs of a source -> these."""
    from data_pipelines.formats.table import parse
    from pretrain.training import targets
    from pretrain.training.opened import open_model

    source = parse(options.source, task_prefix=options.task_prefix, fields=options.field or ("input", "target"))
    if options.field and not hasattr(source.options, "fields"):
        raise UserError(f"--field {options.field[0]}: --source {source} does not read it; leave it out")
    opened = open_model(options.run, best_of=options.best)
    lead = [] if options.code is None else [prefixes.token(opened.tokenizer, options.code)]
    limit = options.examples or sys.maxsize
    asked, left_out = targets.of_source(source, opened.tokenizer, limit, lead, options.out)
    for said in left_out:
        log.warning("--source %s: %s", options.source, said)
    prompts = targets.begun(asked, opened, opened.objectives, options.decoding)
    written = write(options, opened, Inputs(asked, prompts))
    _print(f"targets of {options.source}", {opened.name: written.figures}, [written], options.out)
    return written.figures


class Inputs(NamedTuple):
    """Inputs with their targets, and the prompts that are made of them."""

    asked: "list[Asked]"
    prompts: list[list[int]]


def held_out_inputs(options: Eval, opened: "Opened", evaluators: "Evaluators") -> dict[str, Inputs]:
    """Those of each task and corpus whose rows are inputs and targets; UserError where none's are."""
    from pretrain.objectives.next_token_prediction import INPUT_TARGET
    from pretrain.training import targets

    found = {}
    for place, one in evaluators.of.items():
        if getattr(one.objective, "layout", None) == INPUT_TARGET:
            asked = targets.of_corpus(one.held_out, opened.tokenizer, one.examples)
            found[place] = Inputs(asked, targets.begun(asked, opened, [one.objective], options.decoding))
    if not found:
        raise UserError(
            "--write: the run has no rows of input and target (objective.layout=input-target); give --source with some"
        )
    return found


class Written(NamedTuple):
    """What a model wrote.   asked: the inputs with their targets.   figures: of `metrics`, in percent.   signature: of
    BLEU."""

    asked: "list[Asked]"
    texts: list[str]
    figures: dict[str, float]
    signature: str


def write(options: Eval, opened: "Opened", inputs: Inputs) -> Written:
    """Have the model write the targets of inputs, and compare them."""
    from pretrain import metrics
    from pretrain.training import targets

    doing(f"writing {len(inputs.prompts):,} targets")
    texts = targets.write(opened, inputs.prompts, options.decoding, options.seed)
    figures, signature = metrics.figures(texts, [one.targets for one in inputs.asked], options.bleu_tokenizer)
    return Written(inputs.asked, texts, figures, signature)


def _print(title: str, columns: dict[str, dict[str, float]], written: Sequence[Written], out: Path | None) -> None:
    """The table; of targets also how they were compared, and a line each into a file."""
    from pretrain.storage.run_directory import write_whole

    table = Table("", *columns, title=title)
    for name in dict.fromkeys(name for figures in columns.values() for name in figures):
        cells = (f"{figures[name]:.4f}" if name in figures else "" for figures in columns.values())
        table.add_row(name.replace("_", " "), *cells)
    console = wide_console()
    console.print(table)
    for one in written:
        console.print(f"{len(one.asked):,} targets, from BLEU on in percent; BLEU {one.signature}", highlight=False)
    if out is not None:
        pairs = (pair for one in written for pair in zip(one.asked, one.texts, strict=True))
        lines = ({"input": one.text, "targets": one.targets, "written": text} for one, text in pairs)
        with writing(out):
            write_whole(out, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def _restored(directory: "RunDirectory", step: int) -> "Restored | None":
    """A checkpoint among others; None where it is damaged, or gone since they were listed, which is said."""
    from pretrain.training.opened import restore

    try:
        return restore(directory, step)
    except PassingError:
        raise
    except UserError as error:
        log.warning("step %d is left out: %s", step, error)
        return None


def _remembering(assembly: "Assembly", memory: int) -> "Assembly":
    """The assembly with another memory in evaluation; UserError where an objective does not let it be chosen."""
    from pretrain.recipe import with_objectives

    def remembering(objective):
        if not hasattr(objective, "evaluation_memory"):
            name = assembly.recipe.name
            raise UserError(f"--memory {memory}: {name} has no memory whose length could be chosen; leave it out")
        return dataclasses.replace(objective, evaluation_memory=memory)

    try:
        return assembly._replace(recipe=with_objectives(assembly.recipe, remembering))
    except ValueError as error:
        raise UserError(str(error).replace("objective.evaluation_memory=", "--memory ")) from None


def striding(assembly: "Assembly", stride: int) -> "Assembly":
    """The assembly that reads whole documents, else as in training; UserError where an objective is not of next tokens
    of documents or no row fits."""
    from pretrain.objectives.next_token_prediction import DOCUMENTS, NextTokenPrediction, StridedPerplexity
    from pretrain.recipe import every_task, with_objectives

    name = assembly.recipe.name

    def strided(objective):
        if not isinstance(objective, NextTokenPrediction):
            raise UserError(f"--stride {stride}: {name} does not predict next tokens of rows; leave it out")
        if objective.layout != DOCUMENTS:
            raise UserError(f"--stride {stride}: {name} reads rows of input and target; leave it out")
        return StridedPerplexity(**vars(objective), stride=stride)

    recipe = with_objectives(assembly.recipe, strided)
    for _, phase, task in every_task(recipe):
        task.objective.rows(phase)  # says what is wrong
    return assembly._replace(recipe=recipe)
