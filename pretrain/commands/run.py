"""`python -m pretrain run`: trains a recipe, or resumes the run in the work directory."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from data_pipelines.cloud import is_remote
from data_pipelines.corpus import Corpus, named
from data_pipelines.errors import UserError
from pretrain.commands.arguments import parse_recipe
from pretrain.commands.platform import keep_compiled_with, may_be_one_of_several
from pretrain.options import Options

if TYPE_CHECKING:
    from pretrain.recipe import Recipe


def main(arguments: Sequence[str]) -> int:
    recipe, options = parse_run(arguments)
    for name in options.track:
        if find_spec(name) is None:
            raise UserError(f"--track {name}: the package is not installed; run `pip install {name}`")
    if options.coordinator is None and not may_be_one_of_several():
        for path in named(options.corpus).values():
            if not is_remote(path):
                Corpus(path)  # report a wrong path before the imports below, which take seconds
    from data_pipelines.soft_targets import SoftTargets
    from pretrain.storage.run_directory import RunDirectory
    from pretrain.training.signals import stop_request
    from pretrain.training.teaching import of_stored, with_sources
    from tpu.cluster import ending_together, join
    from tpu.compiled import keep_programs_whole

    if options.soft_targets is not None:
        targets = SoftTargets(options.soft_targets)
        recipe = of_stored(recipe, targets.manifest["k"], targets.digest)
    recipe = with_sources(recipe, options.teacher, RunDirectory(options.workdir))
    with stop_request() as stop:
        join(options.coordinator, options.processes, options.process)
        with ending_together():
            keep_compiled_with(options.workdir)
            keep_programs_whole()
            from pretrain.training.run import run

            return run(recipe, options, stop)


def parse_run(arguments: Sequence[str]) -> tuple["Recipe", Options]:
    """Parse `bert-tiny --corpus DIR --workdir DIR --model.depth 3` into the changed recipe and the options."""
    usage = "python -m pretrain run bert-tiny --corpus DIR --workdir DIR"
    for index, argument in enumerate(arguments):
        if argument.split("=")[0].replace("_", "-") == "--model.vocab-size":
            given = " ".join(arguments[index : index + 1 + ("=" not in argument)])
            raise UserError(f"{given}: the corpus sets the vocabulary; leave it out, and give prepare --vocab-size")
    return parse_recipe(arguments, Options, usage, "Train {}, or resume the run in --workdir.")
