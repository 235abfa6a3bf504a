"""The weights that --init-from or a teacher names: a Hugging Face folder or another run's work directory."""

import logging
from collections.abc import Callable

import jax

from data_pipelines.cloud import in_cloud, is_file, local_folder
from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from models.core.parameters import Params, leaves, nest
from models.families.registry import differing_fields, renamed
from pretrain.huggingface.beginning import counterparts, to_target
from pretrain.huggingface.load import check_vocabulary, load
from pretrain.recipe import asked
from pretrain.storage.run_directory import RunDirectory
from pretrain.training.assembly import table_of
from pretrain.training.restore import restore
from pretrain.training.trained import merge
from tpu.mesh import host_mesh

log = logging.getLogger(__name__)


INIT_FROM = "--init-from"


def load_weights(
    setting: str, source: str, config, shapes: Params, corpus: Corpus, start: Callable[[], Params] | None = None
) -> Params:
    """Parameters for a config in this host's memory, a nested dict of NumPy arrays like `shapes`.

    setting: that names the source, with which an error begins.
    start: gives random parameters for heads that the source lacks; without it, that is an error.
    UserError when the source has another model or vocabulary.
    """
    try:
        return _weights(setting, source, config, shapes, corpus, start)
    except UserError as error:
        raise UserError(f"{setting} {error}") from None


def _weights(setting: str, source: str, config, shapes: Params, corpus: Corpus, start) -> Params:
    directory = RunDirectory(source)
    if not is_file(directory.recipe):
        if not in_cloud(source):
            return load(source, config, shapes, corpus.tokenizer_path, start)
        with local_folder(directory.path) as folder:
            return load(folder, config, shapes, corpus.tokenizer_path, start)
    recipe, wanted = directory.read_recipe(), {path for path, _ in leaves(shapes)}
    model = recipe.model
    _check_same_model(source, model, config)
    there = {row.path for row in table_of(model, asked(recipe))}
    begun = {path: name for path, name in counterparts(model, config).items() if path in wanted and name in there}
    lacking, others = sorted(wanted - begun.keys()), sorted(there - set(begun.values()))
    _check_heads(setting, source, lacking, others, anew=start is not None)
    with local_folder(directory.tokenizer) as tokenizer:
        check_vocabulary(tokenizer, corpus.tokenizer_path, model, config)
    restored = restore(directory, mesh=host_mesh())
    trained = jax.device_get(dict(leaves(merge(restored.params, restored.frozen))))
    params = dict(leaves(start())) if start else {}
    ours = {path: array for path, array in to_target(source, trained, model, config).items() if path in wanted}
    return jax.device_get(nest(params | ours))


def _check_same_model(source: str, theirs, ours) -> None:
    if renamed(theirs, ours) is None:
        kinds = f"it is a {type(theirs).__name__}, the recipe has a {type(ours).__name__}"
        raise UserError(f"{source}: {kinds}; give a run of the same family")
    if differing := differing_fields(theirs, ours):
        listed = ", ".join(f"model.{path} is {old} there and {new} here" for path, (old, new) in differing.items())
        raise UserError(f"{source}: {listed}; give the recipe the same values, or another run")


def _check_heads(setting: str, source: str, missing: list[str], others: list[str], anew: bool) -> None:
    """UserError where there are no weights for a head, unless those start anew; heads of which this model has none are
    left out."""
    if missing and not anew:
        anyhow = ", or --init-heads-anew" if setting == INIT_FROM else ""
        raise UserError(f"{source}: has no {', '.join(missing)}; give the recipe the heads that it has{anyhow}")
    if missing:
        log.warning("%s: these start anew: %s", source, ", ".join(missing))
    if others:
        log.warning("%s: left out %s, which this model does not use", source, ", ".join(others))
