"""The parameter table: what each array of a family is."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
from jax import Array

LAYERS = "layers"  # the axis that stacks the parameters of equal layers: [depth or groups, ...]


class Slot(NamedTuple):
    """A parameter's place in a Hugging Face checkpoint.

    name: of its tensor; '{layer}' stands for the index along 'layers', each of which has a tensor of its own; without
        it, the whole stack is one.
    layout: '' when the same array is stored there, 'T' when each layer's matrix is stored transposed.
    shape: that of each layer's array there after that, where it differs: heads on an axis of their own.
    axis: along it, the tensor holds all parameters that name it one after the other, as the table lists them: GPT-2's
        `c_attn` is query, key and value. None for a tensor of one parameter.
    before: rows along the axis that the tensor has before this parameter's: 2 in RoBERTa's positions. They are written
        as zeros where no other parameter has them.
    layers: number in the name -> index along 'layers', where they are not the same: layers that share parameters, or
        that take turns with others.
    """

    name: str
    layout: str = ""
    shape: tuple[int, ...] | None = None
    axis: int | None = None
    before: int = 0
    layers: Mapping[int, int] | None = None


class Parameter(NamedTuple):
    """One array of a family.

    path: its keys in the nested parameter dict, joined by '/'.
    axes: a name per dimension ('layers', 'vocab', 'width', ...), None for a dimension without one.
    hf: checkpoint part -> its place in that Hugging Face checkpoint.
        Several parts when a parameter is written to several checkpoints (embeddings that two models share).
    ids: of a large table, the batch's arrays that say which of its rows, along the first axis, a model reads by
        `table[ids]`: a step then touches no others (`pretrain/training/sparse_rows.py`). () where it may read all.
    """

    path: str
    axes: tuple[str | None, ...]
    hf: Mapping[str, Slot]
    ids: tuple[str, ...] = ()

    @property
    def layer_axes(self) -> tuple[str | None, ...]:
        """The axes of one layer's slice."""
        return self.axes[1:] if self.axes[:1] == (LAYERS,) else self.axes


def parameter(module: nn.Module, name: str, init: Callable[..., Array], shape: tuple[int, ...]) -> Array:
    """A module's parameter f32[shape]. `module.param` would trace `init` also wherever the array is given."""
    given = module.get_variable("params", name)
    if given is None:
        return module.param(name, init, shape)
    if given.shape != shape:
        raise ValueError(f"parameter {name!r} has the shape {given.shape}, this model needs {shape}")
    return given


def leaves(tree: Mapping, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(path, leaf) of a nested dict, paths joined by '/', in sorted order."""
    for key in sorted(tree):
        if isinstance(tree[key], Mapping):
            yield from leaves(tree[key], f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", tree[key]


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The nested dict of {'a/b': leaf}: the inverse of `leaves`."""
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return tree


def count(params: Mapping) -> int:
    """Number of scalars in a nested dict of arrays (or of shapes and dtypes)."""
    return sum(leaf.size for _, leaf in leaves(params))


def decays(parameter: Parameter) -> bool:
    """Whether weight decay applies: matrices and embeddings, not biases and norms."""
    return len(parameter.layer_axes) >= 2


Params = dict[str, Any]
Noise = Array | None
