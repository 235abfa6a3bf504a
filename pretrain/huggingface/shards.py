"""A model's tensors as files that safetensors and transformers read: one, or several with an index."""

import json
import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from pretrain.huggingface.tensors import Tensor

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LIMIT = 5_000_000_000  # bytes of a file's tensors, but for one that is larger


def write(stored: Mapping[str, Tensor], folder: Path, dtype: np.dtype, mode_of: Path, limit: int) -> None:
    """Write tensors into a folder; what one file holds is copied in memory at a time.

    mode_of: a file whose permissions these get: the library makes them for their owner alone.
    """
    shards = _shards({name: math.prod(tensor.shape) * dtype.itemsize for name, tensor in stored.items()}, limit)
    names = [WHOLE] if len(shards) == 1 else [_name(number, len(shards)) for number in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        _write_one({key: stored[key] for key in shard}, folder / name, dtype)
        shutil.copymode(mode_of, folder / name)
    if len(shards) > 1:
        places = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        total = {"total_size": sum(size for shard in shards for size in shard.values())}
        (folder / INDEX).write_text(json.dumps({"metadata": total, "weight_map": places}, indent=2) + "\n", "utf-8")


def _write_one(stored: Mapping[str, Tensor], file: Path, dtype: np.dtype) -> None:
    arrays = {name: np.ascontiguousarray(tensor.array().astype(dtype, copy=False)) for name, tensor in stored.items()}
    try:
        save_file(arrays, file, metadata={"format": "pt"})
    except SafetensorError as error:  # what it says of a full disk
        raise OSError(str(error)) from error


def _shards(sizes: Mapping[str, int], limit: int) -> list[dict[str, int]]:
    """Sizes by name, cut into stretches of at most `limit` where no single one is larger."""
    shards: list[dict[str, int]] = [{}]
    for name, size in sizes.items():
        if shards[-1] and sum(shards[-1].values()) + size > limit:
            shards.append({})
        shards[-1][name] = size
    return shards


def _name(number: int, of: int) -> str:
    return f"model-{number:05}-of-{of:05}.safetensors"


def is_weights(name: str) -> bool:
    """Whether a file of this name is one of `write`'s."""
    return name in (WHOLE, INDEX) or re.fullmatch(r"model-\d{5}-of-\d{5}\.safetensors", name) is not None
