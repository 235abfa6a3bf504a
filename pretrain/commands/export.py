"""A run's model as Hugging Face folders."""

import tempfile
from pathlib import Path

from data_pipelines.cloud import cloud_errors, entries, in_cloud, local_folder, remove_folder, upload
from models.core.parameters import Params
from pretrain.huggingface.export import check_replaceable, export
from pretrain.storage.run_directory import RunDirectory
from pretrain.training.restore import restore, warn_beyond_trained
from pretrain.training.trained import merge
from tpu.mesh import host_mesh


def export_run(run: Path, to: Path, step: int | None = None, dtype: str = "float32") -> list[Path]:
    """Write the model of a checkpoint, by default the newest -> the folders that transformers loads."""
    directory = RunDirectory(run)
    with cloud_errors(f"export --to {to}"):
        check_replaceable(to, directory.identity())
    restored = restore(directory, step, host_mesh())
    params, config = merge(restored.params, restored.frozen), restored.assembly.recipe.model
    warn_beyond_trained(restored, getattr(config, "positions", 0))
    with local_folder(directory.tokenizer) as tokenizer:
        if in_cloud(to):
            _export_to_cloud(params, config, tokenizer, to, dtype, directory.identity())
        else:
            export(params, config, tokenizer, to, dtype, directory.identity())
    return [to / part.folder for part in restored.assembly.family.hf.values()]


def _export_to_cloud(params: Params, config, tokenizer: Path, to: Path, dtype: str, run: str) -> None:
    """Folders cannot be renamed there: an earlier export is overwritten file by file."""
    with cloud_errors(f"export --to {to}"), tempfile.TemporaryDirectory() as temporary:
        made = Path(temporary) / "export"
        export(params, config, tokenizer, made, dtype, run)
        upload(made, to)
        for entry in entries(to):
            if not (made / entry.name).exists():
                remove_folder(entry)
