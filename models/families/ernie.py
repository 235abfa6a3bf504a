"""ERNIE 1.0 (Sun et al. 2019, arXiv:1904.09223): BERT's encoder with relu, and a third token type for a dialogue's
third turn.

Hugging Face: ErnieForPreTraining, ErnieForMaskedLM without the pair head, and the classes with task heads, all without
the embedding of tasks that later ERNIEs have.
"""

import dataclasses

from models.attention.encoder import EncoderConfig, encoder_family
from models.blocks.heads import bert_heads, pair_head
from models.blocks.tables import HF_ASSUMED


@dataclasses.dataclass(frozen=True)
class ErnieConfig(EncoderConfig):
    """The fields with other defaults than BERT's."""

    vocab_size: int = 17964  # number of tokens, without padding rows
    types: int = 3  # number of segment types: A and B of a pair, or the three turns of a dialogue
    activation: str = "relu"  # activation function of the feed-forward block


FAMILY = encoder_family(
    config=ErnieConfig,
    sizes={
        "tiny": ErnieConfig(width=128, depth=2, heads=2, feed_forward=512),
        "base": ErnieConfig(),  # Sun et al. 2019, sections 4.1 and 4.2
    },
    heads=bert_heads("ernie.pooler.dense", pair_head("cls.seq_relationship")),
    model_type="ernie",
    decoder="cls.predictions",
    classes="Ernie",
    assumed={**HF_ASSUMED, "use_task_id": False},
)
FAMILIES = {"ernie": FAMILY}
