"""Map parameters to the tensors of a Hugging Face checkpoint, for both import and export."""

import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from models.core.family import Converter, Head
from models.core.parameters import LAYERS, Parameter, Slot, leaves
from models.families.registry import family_of

LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {"": lambda array: array, "T": np.transpose}


class Piece(NamedTuple):
    """A parameter's part of a tensor.   view: of the parameter, in the tensor's layout.   axis, start: where it begins.
    origin: the parameter's path, and the index along 'layers' if it is stacked."""

    origin: tuple[str, int | None]
    view: np.ndarray
    axis: int
    start: int

    @property
    def place(self) -> tuple[slice, ...]:
        """Return the slices of the tensor that the view fills."""
        return (slice(None),) * self.axis + (slice(self.start, self.start + self.view.shape[self.axis]),)


class Tensor(NamedTuple):
    """A tensor of a Hugging Face checkpoint, as views of parameters."""

    pieces: tuple[Piece, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        last = self.pieces[-1]
        return tuple(last.start + size if axis == last.axis else size for axis, size in enumerate(last.view.shape))

    def array(self) -> np.ndarray:
        """Assemble the stored array; rows without a parameter are zeros."""
        if self.shape == self.pieces[0].view.shape:
            return self.pieces[0].view
        whole = np.zeros(self.shape, self.pieces[0].view.dtype)
        for piece in self.pieces:
            whole[piece.place] = piece.view
        return whole


def summed(params: Mapping[str, np.ndarray], config, sign: int = 1) -> dict[str, np.ndarray]:
    """Replace `Family.differences` among parameters, path -> array, by the sums; or back, with the sign -1."""
    named = family_of(config).differences.items()
    return {**params, **{path: params[path] + sign * params[base] for path, base in named if path in params}}


def tensors(params: Mapping, config, part: str) -> dict[str, Tensor]:
    """Return name -> tensor for the tensors of a part.   params: nested dict of NumPy arrays, all or some of the
    model's parameters. Views leave out padding of the vocabulary. Export reads the views, import writes into them."""
    arrays, pieces = dict(leaves(params)), {}
    for parameter in family_of(config).every_parameter(config):
        if part not in parameter.hf or parameter.path not in arrays:
            continue
        slot = parameter.hf[part]
        for name, layer in _names(parameter, slot, arrays[parameter.path]):
            view = _view(parameter, slot, arrays[parameter.path], layer, config.vocab_size)
            before, axis = pieces.get(name, ()), slot.axis or 0
            if before and slot.axis is None:
                raise ValueError(f"{name} is assigned to both {before[-1].origin[0]} and {parameter.path}")
            start = before[-1].start + before[-1].view.shape[axis] if before else slot.before
            pieces[name] = (*before, Piece((parameter.path, layer), view, axis, start))
    return {name: Tensor(parts) for name, parts in pieces.items()}


def _names(parameter: Parameter, slot: Slot, array: np.ndarray) -> list[tuple[str, int | None]]:
    """List (name of a tensor, its index along 'layers', or None if the parameter is not stacked)."""
    if parameter.axes[:1] != (LAYERS,) or "{layer}" not in slot.name:
        return [(slot.name, None)]
    layers = slot.layers or {layer: layer for layer in range(len(array))}
    return [(slot.name.replace("{layer}", str(number)), layer) for number, layer in layers.items()]


def _view(parameter: Parameter, slot: Slot, array: np.ndarray, layer: int | None, vocab_size: int) -> np.ndarray:
    """View one layer of a parameter, or all of it, in the stored layout."""
    axes = parameter.axes if layer is None else parameter.layer_axes
    unpadded = tuple(slice(vocab_size if axis == "vocab" else None) for axis in axes)
    array = LAYOUTS[slot.layout]((array if layer is None else array[layer, ...])[unpadded])
    return array.reshape(slot.shape or array.shape, copy=False)


def fields(config, part: str) -> dict[str, Any]:
    """Return the fields of config.json for a config."""
    model = family_of(config).hf[part]
    known = {**model.fields, **model.settings}

    def value(place):
        return place.write(config) if isinstance(place, Converter) else operator.attrgetter(place)(config)

    return {name: value(place) for name, place in known.items()}


def architecture(config, part: str, names: Collection[str]) -> str | None:
    """Return the transformers class with exactly the heads among these names (of parameters, for example), or None."""
    heads, classes = heads_in(config, names), family_of(config).hf[part].architectures
    return next((name for name, of_class in classes.items() if {*heads} == {*of_class}), None)


def absent(config, part: str, names: Collection[str]) -> tuple[str, ...]:
    """Return the tensors of a part that the transformers class with these heads lacks."""
    return family_of(config).hf[part].of_softmax if heads_in(config, names) else ()


def heads_in(config, names: Collection[str]) -> list[str]:
    """Select the names of heads that Hugging Face has."""
    return [head.name for head in _heads(config, names) if not head.is_nameless]


def heads_beside(config, names: Collection[str]) -> list[str]:
    """Select the names of heads that no Hugging Face class has."""
    return [head.name for head in _heads(config, names) if head.is_nameless]


def _heads(config, names: Collection[str]) -> list[Head]:
    return [head for head in family_of(config).heads if head.name in names]
