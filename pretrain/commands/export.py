"""`python -m pretrain export`: writes a model as Hugging Face folders."""

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from data_pipelines.cloud import cloud_errors, entries, in_cloud, local_folder, remove_folder, upload
from data_pipelines.command_line import Place
from pretrain.commands.common import OfModel, import_models, parse_checked

UNKNOWN = "unknown"  # the Hugging Face name for an unspecified license


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export(OfModel):
    """Write a run's model as Hugging Face folders."""

    to: Place
    """Folder to write."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the weights."""
    license: str = UNKNOWN
    """License for the model card (README.md), by its Hugging Face name, like apache-2.0 or cc-by-sa-4.0."""


def main(arguments: Sequence[str]) -> int:
    options = parse_checked(Export, arguments, "export", {})
    import_models()
    for folder in export_model(options.run, options.to, options.step, options.dtype, options.best, options.license):
        print(folder)
    return 0


def export_model(
    source: Path,
    to: Path,
    step: int | None = None,
    dtype: str = "float32",
    best_of: str | None = None,
    license_name: str = UNKNOWN,
) -> list[Path]:
    """Write the model of a checkpoint, chosen as in `open_model`, and return the folders that transformers loads. A
    run's export gets a model card."""
    from models.families.registry import family_of
    from pretrain.commands.model_card import write_card
    from pretrain.huggingface.export import check_replaceable, export
    from pretrain.training.opened import identity_of, open_model
    from tpu.mesh import host_mesh

    identity = identity_of(source)
    with cloud_errors(f"export --to {to}"):
        check_replaceable(to, identity)
    opened = open_model(source, step, host_mesh(), best_of)
    opened.warn_beyond_trained(getattr(opened.config, "positions", 0))

    def card(folder: Path, architecture: str | None) -> None:
        write_card(folder, to.name, opened, architecture, license_name)

    def write(folder: Path) -> None:
        with local_folder(opened.tokenizer_folder) as tokenizer:
            export(opened.params, opened.config, tokenizer, folder, dtype, identity, card if opened.run else None)

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
