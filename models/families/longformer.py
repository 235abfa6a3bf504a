"""Longformer (Beltagy et al. 2020, arXiv:2004.05150): RoBERTa for long rows, where a token sees a window around it.

Each layer has its own window, and each head may see every nth token of a wider window (dilation). Chosen tokens of a
row, its `globals`, see all tokens and are seen by all; their attention has separate projections, which are not trained
if no row has global tokens.

Hugging Face: LongformerForMaskedLM and the classes with task heads, which have no dilation and take a row's global
tokens from `global_attention_mask`.
"""

import dataclasses
from collections.abc import Collection
from typing import ClassVar

import numpy as np

from models.attention.encoder import EncoderConfig, encoder_family, encoder_parameters
from models.attention.patterns.pattern import Pattern, check
from models.blocks.heads import roberta_heads
from models.blocks.tables import OFFSET_POSITIONS, PADDING, PRODUCTS, stacked_parameters
from models.core.family import Converter
from models.core.parameters import Parameter


@dataclasses.dataclass(frozen=True)
class LongformerConfig(EncoderConfig):
    """The fields with other defaults than BERT's."""

    vocab_size: int = 50265  # number of tokens, without padding rows
    positions: int = 4096  # length of the longest sequence, in tokens
    types: int = 1  # number of segment types; with one, only separators tell A from B
    norm_epsilon: float = 1e-5  # added to the variance in norms
    pattern: Pattern = Pattern("longformer", block=128)  # which keys a query sees
    padding_positions: ClassVar[int] = PADDING + 1
    global_projections: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        check(self.pattern, self.depth, self.heads, self.positions)


def _table(config: LongformerConfig) -> list[Parameter]:
    names = {f"attention/global/{name}": f"attention.self.{name}_global" for name in PRODUCTS}
    layer = {"model": "longformer.encoder.layer.{layer}"}
    rows = encoder_parameters("longformer", config.padding_positions)
    return rows + stacked_parameters("layers", names, layer)


_LEAVES = [f"{name}/{leaf}" for name in PRODUCTS for leaf in ("kernel", "bias")]
_FROM_LOCAL = {f"layers/attention/global/{leaf}": f"layers/attention/{leaf}" for leaf in _LEAVES}

_WINDOWS = Converter(
    "pattern.windows",
    lambda config: config.pattern.windows[0] if len(config.pattern.windows) == 1 else list(config.pattern.windows),
    lambda fields: tuple(np.atleast_1d(fields.get("attention_window", 512)).tolist()),
)


def _otherwise(config: LongformerConfig, heads: Collection[str]) -> list[str]:
    pattern = config.pattern
    if pattern.name != "longformer":
        return [f"the pattern is Longformer's, not model.pattern.name={pattern.name}"]
    return ["windows are not dilated"] if set(pattern.dilations) != {1} else []


FAMILY = encoder_family(
    config=LongformerConfig,
    sizes={
        "tiny": LongformerConfig(width=128, depth=2, heads=2, feed_forward=512),
        "base": LongformerConfig(),  # Beltagy et al. 2020, section 5: RoBERTa's sizes, windows of 512
        "large": LongformerConfig(width=1024, depth=24, heads=16, feed_forward=4096),
    },
    table=_table,
    heads=roberta_heads("longformer"),
    classes="Longformer",
    model_type="longformer",
    decoder="lm_head",
    constants={"pad_token_id": PADDING},
    fields={"max_position_embeddings": OFFSET_POSITIONS},
    settings={"attention_window": _WINDOWS},
    pair="cls A sep sep B sep",
    prepare="--tokenizer bpe --specials roberta",
    otherwise=_otherwise,
    assumed={},
    continues={"roberta": _FROM_LOCAL},
)
FAMILIES = {"longformer": FAMILY}
