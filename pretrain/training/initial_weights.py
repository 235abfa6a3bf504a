"""The weights that --init-from or a teacher names: a Hugging Face folder or another run's work directory."""

import re
from collections.abc import Callable

import jax

from data_pipelines.cloud import is_file, local_folder
from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from models.core.parameters import Params, leaves, nest
from pretrain.huggingface.config import check_same
from pretrain.huggingface.load import ANEW, check_heads, check_vocabulary, counterparts, load, to_target
from pretrain.recipe import asked
from pretrain.storage.run_directory import RunDirectory
from pretrain.training.assembly import table_of
from pretrain.training.restore import restore
from pretrain.training.trained import merge
from tpu.mesh import host_mesh

INIT_FROM = "--init-from"


def load_weights(
    setting: str, source: str, config, shapes: Params, corpus: Corpus, start: Callable[[], Params] | None = None
) -> Params:
    """Parameters for a config in this host's memory, a nested dict of NumPy arrays like `shapes`.

    setting: that names the source, with which an error begins.
    start: gives random parameters for heads that the source lacks; without it, that is an error.
    UserError when the source has another model or vocabulary.
    """
    directory = RunDirectory(source)
    try:
        if is_file(directory.recipe):
            return _of_run(directory, config, shapes, corpus, start)
        with local_folder(directory.path) as folder:
            return load(folder, config, shapes, corpus.tokenizer_path, start)
    except UserError as error:
        said = str(error)
        if setting != INIT_FROM:  # a teacher's model has no heads of its own to train
            said = re.sub(f"(, or|;) {ANEW}$", "", said).replace(
                "--model.", f"--{setting.removesuffix('source')}model."
            )
        raise UserError(f"{setting} {said}") from None


def _of_run(directory: RunDirectory, config, shapes: Params, corpus: Corpus, start) -> Params:
    source, recipe = str(directory.path), directory.read_recipe()
    check_same(source, recipe.model, config)
    wanted, there = dict(leaves(shapes)), {row.path for row in table_of(recipe.model, asked(recipe))}
    begun = {path: name for path, name in counterparts(recipe.model, config).items() if path in wanted}
    lacking = [path for path in wanted if begun.get(path) not in there]
    check_heads(source, lacking, there - set(begun.values()), anew=start is not None)
    with local_folder(directory.tokenizer) as tokenizer:
        check_vocabulary(tokenizer, corpus.tokenizer_path, recipe.model, config)
    restored = restore(directory, mesh=host_mesh())
    trained = jax.device_get(dict(leaves(merge(restored.params, restored.frozen))))
    found = to_target(source, trained, recipe.model, config)
    params = dict(leaves(start())) if start else {}
    return jax.device_get(nest(params | {path: array for path, array in found.items() if path in wanted}))
