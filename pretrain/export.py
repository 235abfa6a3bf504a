"""A run's model as Hugging Face folders."""

from pathlib import Path

from pretrain.huggingface.export import export
from pretrain.restore import restore
from pretrain.run_directory import RunDirectory
from pretrain.step import merge


def export_run(run: Path, to: Path, step: int | None = None) -> list[Path]:
    """Write the model of a checkpoint, by default the newest -> the folders that transformers loads."""
    directory = RunDirectory(run)
    restored = restore(directory, step)
    params = merge(restored.state.params, restored.frozen)
    export(params, restored.assembly.recipe.model, directory.tokenizer, to)
    return [to / part.folder for part in restored.assembly.family.hf.values()]
