"""The parameter table, which describes each parameter array of a family."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
from jax import Array

LAYERS = "layers"  # the axis that stacks the parameters of equal layers: [depth or groups, ...]


class Slot(NamedTuple):
    """A parameter's place in a Hugging Face checkpoint.

    name: of its tensor; '{layer}' stands for the index along 'layers' if each layer has its own tensor; without it, one
        tensor holds the whole stack.
    layout: '' if the same array is stored there, 'T' if each layer's matrix is stored transposed.
    shape: of each layer's stored array (after transposing), if different, as with heads on an axis of their own.
    axis: the axis along which the tensor joins all parameters that name it, in the order of the table: GPT-2's `c_attn`
        is query, key and value. None for a tensor of one parameter.
    before: rows along the axis before this parameter's: 2 for RoBERTa's positions. They are written as zeros unless
        another parameter has them.
    layers: number in the name -> index along 'layers', if they differ, because layers share parameters or alternate
        with others.
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
    axes: a name for each dimension ('layers', 'vocab', 'width', ...), or None.
    hf: checkpoint part -> its place in that Hugging Face checkpoint; several parts if several checkpoints have the
        parameter (embeddings that two models share).
    ids: of a large table, the batch's arrays with the rows, along the first axis, that the model reads as `table[ids]`;
        a step then touches no other rows (`pretrain/training/sparse_rows.py`). () if the model may read all rows.
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
    """Return a module's parameter f32[shape]. `module.param` would trace `init` even if the array already exists."""
    existing = module.get_variable("params", name)
    if existing is None:
        return module.param(name, init, shape)
    if existing.shape != shape:
        raise ValueError(f"parameter {name!r} has the shape {existing.shape}, this model needs {shape}")
    return existing


def leaves(tree: Mapping, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, leaf) of a nested dict, paths joined by '/', in sorted order."""
    for key in sorted(tree):
        if isinstance(tree[key], Mapping):
            yield from leaves(tree[key], f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", tree[key]


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the nested dict of {'a/b': leaf}: the inverse of `leaves`."""
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return tree


def count(params: Mapping) -> int:
    """Return the number of scalars in a nested dict of arrays (or of shapes and dtypes)."""
    return sum(leaf.size for _, leaf in leaves(params))


def decays(parameter: Parameter) -> bool:
    """Return whether weight decay applies: to matrices and embeddings, not to biases and norms."""
    return len(parameter.layer_axes) >= 2


Params = dict[str, Any]
Noise = Array | None
