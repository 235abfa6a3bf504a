"""What a model family declares once: its parameter table, sizes, Hugging Face names and FLOPs.

Sharding, weight decay, per-layer optimiser rules, import, export and the golden tests all read the same table.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn

from models.core.parameters import Parameter
from models.core.program import Program


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
    attentions: Callable[[Any, int, int], list] = lambda config, length, memory: []
