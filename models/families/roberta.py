"""RoBERTa (Liu et al. 2019, arXiv:1907.11692): BERT's encoder without token types, its pair head optional.

Hugging Face: RobertaForMaskedLM, and the classes with task heads. Their positions start after the padding token's id 1,
so their table has two rows that no real token reads; those of an imported model are kept. No class has the pair head:
AutoModel reads the trunk and the pooler of such a folder.
"""

import dataclasses
from collections.abc import Collection
from typing import ClassVar

from models.attention.encoder import EncoderConfig, encoder_family
from models.blocks.heads import PAIR, pair_head, roberta_heads
from models.blocks.tables import OFFSET_POSITIONS, PADDING
from models.core.family import dense_there


@dataclasses.dataclass(frozen=True)
class RobertaConfig(EncoderConfig):
    """The fields with other defaults than BERT's."""

    vocab_size: int = 50265  # number of tokens, without padding rows
    types: int = 1  # number of segment types; with one, only separators tell A from B
    norm_epsilon: float = 1e-5  # added to the variance in norms
    padding_positions: ClassVar[int] = PADDING + 1


def _otherwise(config: RobertaConfig, heads: Collection[str]) -> list[str]:
    pairs = ["there is no head for pairs, as there is no such class: AutoModel and RobertaForMaskedLM load the rest"]
    return dense_there(config, heads) + pairs * (PAIR in heads)


FAMILY = encoder_family(
    config=RobertaConfig,
    sizes={
        "tiny": RobertaConfig(width=128, depth=2, heads=2, feed_forward=512),
        "base": RobertaConfig(),  # Liu et al. 2019, table 9
        "large": RobertaConfig(width=1024, depth=24, heads=16, feed_forward=4096),
    },
    heads=roberta_heads("roberta", pair_head("pair")),
    classes="Roberta",
    model_type="roberta",
    decoder="lm_head",
    constants={"pad_token_id": PADDING},
    fields={"max_position_embeddings": OFFSET_POSITIONS},
    pair="cls A sep sep B sep",
    prepare="--tokenizer bpe --specials roberta",
    otherwise=_otherwise,
)
FAMILIES = {"roberta": FAMILY}
