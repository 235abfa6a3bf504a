"""`python -m finetune export`: a finetuned model with its head as a Hugging Face folder."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from tyro.conf import Positional

import finetune.registry  # noqa: F401 (a run's recipe names a task)
from data_pipelines.command_line import Place, parse
from pretrain.commands.export import UNKNOWN, export_model
from pretrain.storage.best import LOSS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export:
    """Write a finetuned model with its head as a Hugging Face folder."""

    run: Positional[Place]
    """Work directory of the run."""
    to: Place
    """Folder to write."""
    step: int | None = None
    """Which checkpoint; by default the best by --dev."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights."""
    license: str = UNKNOWN
    """For the model card (README.md), as the Hugging Face hub names it, like apache-2.0 or cc-by-sa-4.0."""


def main(arguments: Sequence[str]) -> int:
    options = parse(Export, arguments, "python -m finetune export")
    best = LOSS if options.step is None else None
    for folder in export_model(options.run, options.to, options.step, options.dtype, best, options.license):
        print(folder)
    return 0
