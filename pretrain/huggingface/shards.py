"""A model's tensors as files that safetensors and transformers read: one, or several with an index."""

import json
import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError
from safetensors.numpy import save_file

from pretrain.huggingface.tensors import Tensor

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LIMIT = 5_000_000_000  # bytes of a file's tensors, but for one that is larger


def write(stored: Mapping[str, Tensor], folder: Path, dtype: np.dtype, mode_of: Path) -> None:
    """Write tensors into a folder; what one file holds is copied in memory at a time.

    mode_of: a file whose permissions these get: the library makes them for their owner alone.
    """

    def size(tensor: Tensor) -> int:
        return math.prod(tensor.shape) * dtype.itemsize

    split = split_state_dict_into_shards_factory(
        stored, get_storage_size=size, filename_pattern="model{suffix}.safetensors", max_shard_size=LIMIT
    )
    for name, keys in split.filename_to_tensors.items():
        _write_one({key: stored[key] for key in keys}, folder / name, dtype)
        shutil.copymode(mode_of, folder / name)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", "utf-8")


def _write_one(stored: Mapping[str, Tensor], file: Path, dtype: np.dtype) -> None:
    arrays = {name: np.ascontiguousarray(tensor.array().astype(dtype, copy=False)) for name, tensor in stored.items()}
    try:
        save_file(arrays, file, metadata={"format": "pt"})
    except SafetensorError as error:  # what it says of a full disk
        raise OSError(str(error)) from error


def is_weights(name: str) -> bool:
    """Whether a file of this name is one of `write`'s."""
    return name in (WHOLE, INDEX) or re.fullmatch(r"model-\d{5}-of-\d{5}\.safetensors", name) is not None
