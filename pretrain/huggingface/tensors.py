"""The one place that knows how parameters map to the tensors of a Hugging Face checkpoint, in both directions."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from models.core.parameters import LAYERS, Parameter, leaves
from models.families.registry import family_of

LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {"": lambda array: array, "T": np.transpose}


def views(params: Mapping, config, part: str) -> dict[str, tuple[str, np.ndarray]]:
    """Name of each tensor stored for a part -> (parameter path, the view of that parameter in the tensor's layout).

    params: nested dict of NumPy arrays. Views leave the vocabulary's padding rows out. Reading them exports, writing
    into them imports.
    """
    arrays = dict(leaves(params))
    tensors = {}
    for parameter in family_of(config).parameters(config):
        if part in parameter.hf:
            slices = _slices(parameter, arrays[parameter.path], config.vocab_size)
            for name, view in zip(_names(parameter, part, len(slices)), slices, strict=True):
                tensors[name] = (parameter.path, view)
    return tensors


def _names(parameter: Parameter, part: str, number: int) -> list[str]:
    return [parameter.hf[part].replace("{layer}", str(layer)) for layer in range(number)]


def _slices(parameter: Parameter, array: np.ndarray, vocab_size: int) -> list[np.ndarray]:
    """The parameter's tensors: one, or one per layer of a stack."""
    stacked = parameter.axes[:1] == (LAYERS,)
    unpadded = tuple(slice(vocab_size if axis == "vocab" else None) for axis in parameter.layer_axes)
    layers = [array[layer, ...] for layer in range(len(array))] if stacked else [array]
    arrays = [LAYOUTS[parameter.layout](layer[unpadded]) for layer in layers]
    return [array.reshape(parameter.hf_shape or array.shape, copy=False) for array in arrays]


def field(config, path: str) -> Any:
    """The value of a config field; dots lead into nested configs."""
    for name in path.split("."):
        config = getattr(config, name)
    return config


def architecture(config, part: str) -> str:
    """The transformers class of a part of this config's family."""
    classes = family_of(config).hf[part].architectures
    return next(name for name, fields in classes.items() if all(field(config, f) == v for f, v in fields.items()))
