"""What every Transformer layer is made with."""

from typing import NamedTuple


class LayerSizes(NamedTuple):
    """Sizes and rates of one layer, whatever its family.

    width: of the hidden states.   feed_forward: inside the feed-forward block, where `activation` is.
    dropout: of block outputs.   attention_dropout: of attention probabilities.
    init_std: of the random weights at the start, None for inputs ** -0.5 of each product.   output_std: of those of
    the blocks' last products, if another.
    head_dim: of each head, if not width / heads.   scale: of the scores, if not 1 / sqrt(head_dim).
    biases: whether products have them.   norm: as of `Norm`.   gated, inner_dropout: as of `FeedForward`.
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
        """Of all heads together."""
        return self.heads * self.head_dim if self.head_dim else self.width

    def check_usual(self, what: str) -> None:
        """ValueError from what reads none of these five, where one of them is set."""
        fields = ("head_dim", "scale", "biases", "norm", "gated")
        if changed := [name for name in fields if getattr(self, name) != self._field_defaults[name]]:
            raise ValueError(f"{what} does not read {', '.join(changed)}: leave it out")


def layer_sizes(config) -> LayerSizes:
    """Those of a config that has fields or properties of these names; it need not have what has a default here."""
    has = lambda field: field not in LayerSizes._field_defaults or hasattr(config, field)
    return LayerSizes(**{field: getattr(config, field) for field in filter(has, LayerSizes._fields)})
