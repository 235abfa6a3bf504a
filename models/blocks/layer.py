"""What every Transformer layer is made with."""

from typing import NamedTuple


class LayerSizes(NamedTuple):
    """Sizes and rates of one layer, whatever its family.

    width: of the hidden states.   feed_forward: inside the feed-forward block, where `activation` is.
    dropout: of block outputs.   attention_dropout: of attention probabilities.
    init_std: of the random weights at the start.   output_std: of those of the blocks' last products, if another.
    """

    width: int
    heads: int
    feed_forward: int
    activation: str
    dropout: float
    attention_dropout: float
    norm_epsilon: float
    init_std: float
    output_std: float | None = None


def layer_sizes(config) -> LayerSizes:
    """Those of a config that has fields of these names; it need not have `output_std`."""
    *fields, last = LayerSizes._fields
    return LayerSizes(*(getattr(config, field) for field in fields), getattr(config, last, None))
