"""The config that most families share, and checks of configs."""

import dataclasses
from typing import Any, ClassVar

from models.blocks.activations import ACTIVATIONS
from models.core.ranges import COUNT, COUNT_OR_NONE, POSITIVE, RATE, check_choices, check_ranges

TABLES = {"positions": COUNT, "types": COUNT}
SIZES = dict.fromkeys(("width", "depth", "heads", "feed_forward"), COUNT)
SHARED = {"vocab_size": COUNT, "dropout": RATE, "attention_dropout": RATE}
SHARED |= {"norm_epsilon": POSITIVE, "init_std": POSITIVE}
CHOICES = {"activation": ACTIVATIONS}


@dataclasses.dataclass(frozen=True)
class TrunkConfig:
    """Sizes and rates of a trunk of equal layers; the defaults are those of BERT-base."""

    vocab_size: int = 30522  # number of tokens, without padding rows
    width: int = 768  # hidden size
    depth: int = 12  # number of layers
    heads: int = 12  # attention heads in each layer
    feed_forward: int = 3072  # width inside the feed-forward block
    activation: str = "gelu"  # activation function of the feed-forward block
    dropout: float = 0.1  # dropout rate of embeddings and block outputs
    attention_dropout: float = 0.1  # dropout rate of attention probabilities
    norm_epsilon: float = 1e-12  # added to the variance in norms
    init_std: float = 0.02  # standard deviation of the initial weights

    def __post_init__(self):
        check_ranges(self, SHARED, "model.")
        check_sizes(self, "model.")
        check_choices(self, CHOICES, "model.")

    @property
    def embedding(self) -> int:
        """Width of the embeddings."""
        return self.width


@dataclasses.dataclass(frozen=True)
class RememberingConfig(TrunkConfig):
    """The config of a model with relative distances and a memory."""

    dropout: float = 0.1  # dropout rate of embeddings, distances, block outputs, inside the feed-forward block
    memory: int = 384  # how many earlier tokens are remembered in training

    inner_dropout: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        check_ranges(self, {"memory": COUNT_OR_NONE}, "model.")
        check_even(self)


def check_sizes(sizes, prefix: str) -> None:
    """Check the sizes of layers; a model of several encoders has them for each.   prefix: before the field's name."""
    check_ranges(sizes, SIZES, prefix)
    if getattr(sizes, "head_dim", None) is None and sizes.width % sizes.heads:
        raise ValueError(f"{prefix}width={sizes.width} is not a multiple of {prefix}heads={sizes.heads}")


def check_even(config) -> None:
    """Raise ValueError for a width that is odd."""
    if config.width % 2:
        raise ValueError(f"model.width={config.width}: must be even, for sines and cosines")


def sized(config: type, depth: int, width: int, head_dim: int = 64, **changes) -> Any:
    """Return a config with a feed-forward block four times as wide as the layers."""
    return config(width=width, depth=depth, heads=width // head_dim, feed_forward=4 * width, **changes)
