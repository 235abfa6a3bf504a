"""Checks of configs, shared by several families."""

from models.blocks.activations import ACTIVATIONS
from models.core.ranges import COUNT, COUNT_OR_NONE, POSITIVE, RATE, check_ranges

TABLES = {"positions": COUNT, "types": COUNT}
SIZES = dict.fromkeys(("width", "depth", "heads", "feed_forward"), COUNT)
SHARED = {"vocab_size": COUNT, "dropout": RATE, "attention_dropout": RATE}
SHARED |= {"norm_epsilon": POSITIVE, "init_std": POSITIVE}


def check_encoder(config) -> None:
    """Check the fields that configs of encoders and decoders share; raises ValueError that names the field."""
    check_ranges(config, SHARED, "model.")
    check_sizes(config, "model.")
    check_activation(config)


def check_activation(config) -> None:
    """Raise ValueError for an unknown activation."""
    if config.activation not in ACTIVATIONS:
        raise ValueError(f"model.activation={config.activation!r}: use one of {', '.join(ACTIVATIONS)}")


def check_sizes(sizes, prefix: str) -> None:
    """Check the sizes of layers; a model of several encoders has them for each.   prefix: before the field's name."""
    check_ranges(sizes, SIZES, prefix)
    if getattr(sizes, "head_dim", None) is None and sizes.width % sizes.heads:
        raise ValueError(f"{prefix}width={sizes.width} is not a multiple of {prefix}heads={sizes.heads}")


def check_relative(config) -> None:
    """Check the fields that configs with relative attention share; raises ValueError that names the field."""
    check_encoder(config)
    check_ranges(config, {"memory": COUNT_OR_NONE}, "model.")
    if config.width % 2:
        raise ValueError(f"model.width={config.width}: must be even, for sines and cosines")
