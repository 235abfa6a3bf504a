"""What a model family declares once: its parameter table, sizes, Hugging Face names and FLOPs.

Sharding, weight decay, per-layer optimiser rules, import, export and the golden tests all read the same table.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
from jax import Array

from models.kernels import Attention
from models.program import Program

LAYERS = "layers"  # the axis that stacks the parameters of equal layers: [depth, ...]


class Parameter(NamedTuple):
    """One array of a family.

    path: its keys in the nested parameter dict, joined by '/'.
    axes: a name per dimension ('layers', 'vocab', 'width', ...), None for a dimension without one.
    hf: checkpoint part -> name in that Hugging Face checkpoint; '{layer}' stands for the index along 'layers'.
        Several parts when a parameter is written to several checkpoints (embeddings that two models share).
    layout: '' when Hugging Face stores the same array, 'T' when it stores each layer's matrix transposed.
    hf_shape: the shape there of each layer's array after that, where it differs: heads on an axis of their own.
    """

    path: str
    axes: tuple[str | None, ...]
    hf: Mapping[str, str]
    layout: str = ""
    hf_shape: tuple[int, ...] | None = None

    @property
    def layer_axes(self) -> tuple[str | None, ...]:
        """The axes of one layer's slice."""
        return self.axes[1:] if self.axes[:1] == (LAYERS,) else self.axes


class HuggingFace(NamedTuple):
    """One Hugging Face checkpoint that a family reads and writes.

    folder: where it lies below the export directory ('' for the directory itself).
    architectures: transformers class -> the config fields that make a model of this class, in order of preference.
    constants: what config.json says of every such model.
    fields: name in config.json -> config field it holds; dots lead into nested configs ('generator.width').
    settings: the same for fields that belong to a training, not to the weights: dropout rates.
    tied: tensor that is not stored -> the stored one that it equals.
    """

    folder: str
    architectures: Mapping[str, Mapping[str, Any]]
    constants: Mapping[str, Any]
    fields: Mapping[str, str]
    settings: Mapping[str, str]
    tied: Mapping[str, str]


class Family(NamedTuple):
    """One model family.

    config: its frozen dataclass.   sizes: published name -> config.
    module: (config, program) -> the Flax module.
    parameters: config -> the table, in a stable order.
    hf: checkpoint part -> HuggingFace.
    flops: (config, batch, length, predictions) -> FLOPs of one forward pass; a multiply-add counts as 2.
    kernels: which of `kernels.KERNELS` its attention may take.
    attentions: (config, length, memory) -> what they then compute, memory the earlier tokens that are remembered.
    """

    config: type
    sizes: dict[str, Any]
    module: Callable[[Any, Program], nn.Module]
    parameters: Callable[[Any], list[Parameter]]
    hf: dict[str, HuggingFace]
    flops: Callable[[Any, int, int, int], float]
    kernels: tuple[str, ...] = ()
    attentions: Callable[[Any, int, int], list[Attention]] = lambda config, length, memory: []


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
Keys = Array | None
