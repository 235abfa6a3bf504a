"""BigBird ITC (Zaheer et al. 2020, arXiv:2007.14062): BERT for long rows, where a query sees few blocks of keys.

Global are the blocks at both ends of a row ("internal transformer construction") and the tokens that `globals` names.
Attention dropout is applied, as in the paper; Hugging Face's sparse attention never does, and keeps the field.

Hugging Face: BigBirdForPreTraining, or BigBirdForMaskedLM without the pair head. Its sparse attention has a window of 3
blocks and 2 global ones, no other. In training it draws blocks of its own, in evaluation it has the row's first block
in place of each; rows of no more than 5 + 2 * random blocks are dense there.
"""

import dataclasses
from collections.abc import Collection

from models.attention.encoder import EncoderConfig, encoder_family
from models.attention.patterns.pattern import DENSE, Pattern
from models.blocks.heads import PAIR, POOLER, TOKENS, pair_head, pooler, token_head
from models.core.family import Converter


@dataclasses.dataclass(frozen=True)
class BigBirdConfig(EncoderConfig):
    """What differs from BERT's."""

    vocab_size: int = 50358  # without padding rows
    positions: int = 4096  # the longest sequence
    activation: str = "gelu_new"  # inside the feed-forward block and the masked-token head
    pattern: Pattern = Pattern("bigbird")  # which keys a query sees


_ATTENTION = Converter(
    "pattern.name",
    lambda config: "original_full" if config.pattern.name == DENSE else "block_sparse",
    lambda fields: {"original_full": DENSE, "block_sparse": "bigbird"}.get(
        kind := fields.get("attention_type", "block_sparse"), kind
    ),
)


def _otherwise(config: BigBirdConfig, heads: Collection[str]) -> list[str]:
    """What transformers' BigBird computes otherwise."""
    pattern, found = config.pattern, []
    if pattern.name == DENSE:
        return found
    if (pattern.name, pattern.window, pattern.global_blocks) != ("bigbird", 3, 2):
        found += ["the pattern is BigBird's, with a window of 3 blocks and 2 global ones"]
    if pattern.random:
        found += [
            "other blocks are drawn in training (by NumPy, seeded with the layer's number), and in evaluation the "
            "first block stands for each drawn one"
        ]
    return [*found, f"rows of up to {(5 + 2 * pattern.random) * pattern.block} tokens have dense attention"]


FAMILY = encoder_family(
    config=BigBirdConfig,
    sizes={
        # Trains within minutes on a CPU: no published one.
        "tiny": BigBirdConfig(width=128, depth=2, heads=2, feed_forward=512),
        "base": BigBirdConfig(),  # Zaheer et al. 2020, table 8
        "large": BigBirdConfig(width=1024, depth=24, heads=16, feed_forward=4096),
    },
    heads=(
        token_head("cls.predictions"),
        pooler("bert.pooler"),
        pair_head("cls.seq_relationship"),
    ),
    # Both classes have the pooler.
    architectures={"BigBirdForMaskedLM": (TOKENS, POOLER), "BigBirdForPreTraining": (TOKENS, POOLER, PAIR)},
    model_type="big_bird",
    names="bert",
    decoder="cls.predictions",
    constants={"use_bias": True, "rescale_embeddings": False},
    settings={
        "attention_type": _ATTENTION,
        "block_size": "pattern.block",
        "num_random_blocks": "pattern.random",
    },
    prepare="--tokenizer sentencepiece-bpe --specials albert",
    otherwise=_otherwise,
    continues={"bert": {}, "roberta": {}},
)
