"""`python -m finetune export`: writes a finetuned model with its head as a Hugging Face folder."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from tyro.conf import Positional

import finetune.registry  # noqa: F401 (a run's recipe names a task)
from data_pipelines.command_line import Place, parse
from pretrain.commands import export
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
    """Step of the checkpoint; by default the best one on --dev."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the weights."""
    license: str = UNKNOWN
    """License for the model card (README.md), by its Hugging Face name, like apache-2.0 or cc-by-sa-4.0."""


def main(arguments: Sequence[str]) -> int:
    options = parse(Export, arguments, "python -m finetune export")
    best = LOSS if options.step is None else None
    for folder in export_model(export.Export(**vars(options), best=best)):
        print(folder)
    return 0
