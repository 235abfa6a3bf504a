"""What every Transformer layer is made with."""

from typing import NamedTuple


class LayerSizes(NamedTuple):
    """Sizes and rates of one layer, whatever its family.

    width: of the hidden states.   feed_forward: inside the feed-forward block, where `activation` is.
    dropout: of block outputs.   attention_dropout: of attention probabilities.
    """

    width: int
    heads: int
    feed_forward: int
    activation: str
    dropout: float
    attention_dropout: float
    norm_epsilon: float
    init_std: float


def layer_sizes(config) -> LayerSizes:
    """Those of a config that has fields of these names."""
    return LayerSizes(*(getattr(config, field) for field in LayerSizes._fields))
