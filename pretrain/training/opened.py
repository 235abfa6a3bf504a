"""A trained model to be read, whatever it is stored as: a run at one of its checkpoints, or a Hugging Face folder."""

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
from jax.sharding import Mesh

from data_pipelines.cloud import is_file, local_folder
from data_pipelines.errors import UserError
from data_pipelines.examples.layout import Feature
from data_pipelines.progress import doing
from data_pipelines.tokenizers import stored
from data_pipelines.tokenizers.made import Made
from models.core import program as programs
from models.core.parameters import Params
from models.families.registry import family_of, name_of
from pretrain.huggingface.config import config_from, folders, heads_in_folder, is_listing
from pretrain.huggingface.load import load
from pretrain.objectives.objective import Objective, initialise
from pretrain.objectives.protocols import CausalDecoder
from pretrain.recipe import Recipe, phase_after, tasks_of
from pretrain.storage.run_directory import RunDirectory
from pretrain.training.restore import Restored, restore, warn_beyond_trained
from pretrain.training.trained import merge
from tpu.mesh import row_mesh
from tpu.rules import parameter_shardings


class Opened(NamedTuple):
    """params: of the module, with those that were frozen, on the mesh.   tokenizer_folder: of its files, maybe gs://.
    run: what was restored of one; None for a Hugging Face folder."""

    source: Path
    module: nn.Module
    params: Params
    mesh: Mesh
    tokenizer: Made
    tokenizer_folder: Path
    run: Restored | None = None

    @property
    def config(self) -> Any:
        return self.module.config

    @property
    def recipe(self) -> Recipe | None:
        return self.run and self.run.assembly.recipe

    @property
    def objective(self) -> Objective | None:
        """That of the phase which the run has come to, of several tasks the first one's."""
        if self.run is None:
            return None
        recipe, phase = self.recipe, phase_after(self.recipe, self.run.step)
        return tasks_of(recipe, recipe.phases[phase])[0].objective

    @property
    def step(self) -> int | None:
        return self.run and self.run.step

    @property
    def name(self) -> str:
        """For titles."""
        return str(self.source) if self.step is None else f"{self.source} at step {self.step}"

    @property
    def row_length(self) -> int:
        """Of the rows of its last phase; of a folder, of as many as it has positions."""
        return self.recipe.phases[-1].length if self.run else getattr(self.config, "positions", 512)

    def check_decodes(self) -> None:
        """UserError unless it is a causal decoder."""
        if not isinstance(self.module, CausalDecoder):
            raise UserError(
                f"{self.source}: a model of {name_of(self.config)} is no causal decoder; take one, like gpt2"
            )

    def warn_beyond_trained(self, length: int) -> None:
        """Say so where a text of this length, or an export, has positions that no row of the run had."""
        if self.run:
            warn_beyond_trained(self.run, length)


def open_model(source: Path, step: int | None = None, mesh: Mesh | None = None) -> Opened:
    """The model in a work directory or in a Hugging Face folder, which we or transformers wrote.

    step: of a run; None for its newest checkpoint.   mesh: where the parameters lie; by default that of `restore` for a
    run, else all of this process's devices with whole parameters each.   UserError where nothing can be read.
    """
    directory = RunDirectory(source)
    if _is_hugging_face(directory):
        if step is not None:
            raise UserError(f"--step {step}: {source} is a Hugging Face folder, of one step; leave it out")
        doing(f"reading {source}")
        with local_folder(directory.path) as folder:
            return _read(directory.path, folder, mesh or row_mesh(jax.local_devices(), []))
    if not is_file(directory.recipe):
        raise UserError(
            f"{source} is no run: it has no recipe.json, and no Hugging Face folder: it has no config.json; make a run "
            "with `python -m pretrain run`"
        )
    restored = restore(directory, step, mesh)
    params = merge(restored.params, restored.frozen)
    with local_folder(directory.tokenizer) as folder:
        tokenizer = stored.load(folder)
    return Opened(source, restored.assembly.model, params, restored.mesh, tokenizer, directory.tokenizer, restored)


def identity_of(source: Path) -> str:
    """Sources that have the same are the same model, however long it was trained."""
    directory = RunDirectory(source)
    if not _is_hugging_face(directory):
        return directory.identity()
    return hashlib.sha256(str(source).encode()).hexdigest()[:16]


def _is_hugging_face(directory: RunDirectory) -> bool:
    found = is_listing(directory.path) or is_file(directory.path / "config.json")
    return found and not is_file(directory.recipe)


def _read(source: Path, folder: Path, mesh: Mesh) -> Opened:
    """A Hugging Face folder.   folder: its copy on this machine."""
    config = config_from(folder)
    family, heads = family_of(config), heads_in_folder(folder, config)
    module = family.module(config, programs.default(), heads)
    spec = {name: Feature((1,) * len(one.shape), one.dtype) for name, one in family.inputs.items() if one.required}
    shapes = jax.eval_shape(lambda: initialise(jax.random.key(0), module, spec))
    first = next(iter(folders(folder, family).values()))
    params, tokenizer = load(folder, config, shapes, first), stored.load(first)
    placed = jax.device_put(params, parameter_shardings(family.parameters(config, heads), shapes, mesh))
    return Opened(source, module, placed, mesh, tokenizer, first if folder == source else source)
