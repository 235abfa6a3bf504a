"""Sizes of a Transformer layer."""

from typing import NamedTuple


class LayerSizes(NamedTuple):
    """Sizes and rates of one layer, whatever its family.

    width: of the hidden states.   feed_forward: width inside the feed-forward block, to which `activation` applies.
    dropout: of block outputs.   attention_dropout: of attention probabilities.
    init_std: of the initial weights; None for inputs ** -0.5 of each dense layer.   output_std: of the last dense layer
    of each block, if different.
    head_dim: of each head, if not width / heads.   scale: of the scores, if not 1 / sqrt(head_dim).
    biases: whether dense layers have them.   norm: as in `Norm`.   gated, inner_dropout: as in `FeedForward`.
    """

    width: int
    heads: int
    feed_forward: int
    activation: str
    dropout: float
    attention_dropout: float
    norm_epsilon: float
    init_std: float | None
    output_std: float | None = None
    head_dim: int | None = None
    scale: float | None = None
    biases: bool = True
    norm: str = "layer"
    gated: bool = False
    inner_dropout: bool = False

    @property
    def heads_width(self) -> int:
        """Width of all heads together."""
        return self.heads * self.head_dim if self.head_dim else self.width

    def check_usual(self, what: str) -> None:
        """Raise ValueError if one of five fields is set that `what` does not support."""
        fields = ("head_dim", "scale", "biases", "norm", "gated")
        if changed := [name for name in fields if getattr(self, name) != self._field_defaults[name]]:
            raise ValueError(f"{what} does not read {', '.join(changed)}: leave it out")


def layer_sizes(config) -> LayerSizes:
    """Return the sizes of a config with fields or properties of these names; those with a default here are optional."""
    has = lambda field: field not in LayerSizes._field_defaults or hasattr(config, field)
    return LayerSizes(**{field: getattr(config, field) for field in filter(has, LayerSizes._fields)})
