"""`python -m pretrain export`: writes a model as Hugging Face folders."""

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from data_pipelines.cloud import cloud_errors, entries, in_cloud, local_folder, remove_folder, upload
from data_pipelines.command_line import Place
from data_pipelines.errors import UserError
from models.core.ranges import COUNT
from pretrain.commands.common import OfModel, import_models, parse_checked

UNKNOWN = "unknown"  # the Hugging Face name for an unspecified license


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export(OfModel):
    """Write a run's model as Hugging Face folders."""

    to: Place
    """Folder to write."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the weights."""
    average: int = 1
    """Write the mean of the weights of this many of the last checkpoints; with --step, of the last ones up to it."""
    license: str = UNKNOWN
    """License for the model card (README.md), by its Hugging Face name, like apache-2.0 or cc-by-sa-4.0."""


def main(arguments: Sequence[str]) -> int:
    options = parse_checked(Export, arguments, "export", {"average": COUNT})
    if options.best is not None and options.average > 1:
        raise UserError(f"--average {options.average}: cannot be combined with --best {options.best}; leave one out")
    if options.ema and options.average > 1:
        raise UserError(f"--average {options.average}: cannot be combined with --ema; leave one of them out")
    import_models()
    for folder in export_model(options):
        print(folder)
    return 0


def export_model(options: Export) -> list[Path]:
    """Write the model of a checkpoint, chosen as in `open_model`, or the mean of several (`open_mean`), and return the
    folders that transformers loads. A run's export gets a model card."""
    from models.families.registry import family_of
    from pretrain.commands import model_card
    from pretrain.huggingface.export import check_replaceable, export
    from pretrain.training.opened import identity_of, open_mean, open_model
    from tpu.mesh import host_mesh

    source, to, average = options.run, options.to, options.average
    identity = identity_of(source)
    with cloud_errors(f"export --to {to}"):
        check_replaceable(to, identity)
    mesh = host_mesh()
    if average == 1:
        opened = open_model(source, options.step, mesh, options.best, options.ema)
    else:
        opened = open_mean(source, average, options.step, mesh)
    steps = opened.averaged or ([opened.step] if opened.run else [])
    if average > 1:
        print(f"the mean of the checkpoints of steps {', '.join(map(str, steps))}")
    opened.warn_beyond_trained(getattr(opened.config, "positions", 0))

    def card(folder: Path, architecture: str | None) -> None:
        model_card.write_card(folder, to.name, opened, architecture, options.license)

    def write(folder: Path) -> None:
        with local_folder(opened.tokenizer_folder) as tokenizer:
            write_card = card if opened.run else None
            export(opened.params, opened.config, tokenizer, folder, options.dtype, identity, write_card, steps)

    if in_cloud(to):  # folders cannot be renamed there, so an earlier export is overwritten file by file
        with cloud_errors(f"export --to {to}"), tempfile.TemporaryDirectory() as temporary:
            made = Path(temporary) / "export"
            write(made)
            upload(made, to)
            for entry in entries(to):
                if not (made / entry.name).exists():
                    remove_folder(entry)
    else:
        write(to)
    return [to / part.folder for part in family_of(opened.config).hf.values()]
