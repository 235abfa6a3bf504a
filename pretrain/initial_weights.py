"""The weights that --init-from names: a Hugging Face folder or another run's work directory."""

import dataclasses

import jax

from data_pipelines.cloud import in_cloud, is_file, local_folder
from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from models.parameters import Params
from pretrain.huggingface.load import check_vocabulary, load
from pretrain.restore import restore
from pretrain.run_directory import RunDirectory, flat
from pretrain.step import merge


def load_weights(source: str, config, shapes: Params, corpus: Corpus) -> Params:
    """Parameters for a config in this host's memory, a nested dict of NumPy arrays like `shapes`.

    UserError when the source has another model or vocabulary.
    """
    directory = RunDirectory(source)
    if not is_file(directory.recipe):
        if not in_cloud(source):
            return load(source, config, shapes, corpus.tokenizer_path)
        with local_folder(directory.path) as folder:
            return load(folder, config, shapes, corpus.tokenizer_path)
    _check_same_model(source, directory.read_recipe().model, config)
    with local_folder(directory.tokenizer) as tokenizer:
        check_vocabulary(tokenizer, corpus.tokenizer_path)
    restored = restore(directory, devices=_host())
    return jax.device_get(merge(restored.params, restored.frozen))


def _host() -> list[jax.Device]:
    """This host's memory as a device, so that no chip has to hold all parameters; where JAX was told to leave CPUs
    alone (JAX_PLATFORMS), one chip."""
    try:
        return jax.local_devices(backend="cpu")[:1]
    except RuntimeError:
        return jax.local_devices()[:1]


def _check_same_model(source: str, theirs, ours) -> None:
    if type(theirs) is not type(ours):
        kinds = f"it is a {type(theirs).__name__}, the recipe has a {type(ours).__name__}"
        raise UserError(f"--init-from {source}: {kinds}; give a run of the same family")
    old, new = flat(dataclasses.asdict(theirs)), flat(dataclasses.asdict(ours))
    # Dropout and memory may change from run to run: no parameter depends on them.
    free = lambda name: name.endswith("dropout") or name == "memory"
    differing = [name for name in new if old[name] != new[name] and not free(name)]
    if differing:
        listed = ", ".join(f"model.{name} is {old[name]} there and {new[name]} here" for name in differing)
        raise UserError(f"--init-from {source}: {listed}; give the recipe the same values, or another --init-from")
