"""RoBERTa (Liu et al. 2019, arXiv:1907.11692): BERT's encoder without token types, its pair head optional.

Hugging Face: RobertaForMaskedLM. It counts positions from the padding token's id 1 on, so its table has two rows that
no real token reads: what an imported model has there is kept. With the pair head there is no class: AutoModel reads the
trunk and the pooler of the folder.
"""

import dataclasses

from models.attention.encoder import INPUTS, Encoder, EncoderConfig, attentions, seen
from models.blocks.tables import (
    HF_ASSUMED,
    HF_FIELDS,
    HF_SETTINGS,
    HF_SIZES,
    OFFSET_POSITIONS,
    PADDING,
    dense_parameters,
    embedding_parameters,
    layer_parameters,
    lm_head_parameters,
)
from models.core.family import Family, HuggingFace, dense_there
from models.core.parameters import Parameter


@dataclasses.dataclass(frozen=True)
class RobertaConfig(EncoderConfig):
    """What differs from BERT's."""

    vocab_size: int = 50265  # without padding rows
    types: int = 1  # segment types; with one, only separators tell A from B
    norm_epsilon: float = 1e-5  # added to the variance in norms
    pair_head: bool = False  # whether there are a pooler and a next-sentence classifier


class Roberta(Encoder):
    """The encoder with its masked-token head, whose activation is gelu as in the original and in Hugging Face."""

    head_activation: str | None = "gelu"
    padding_positions: int = PADDING + 1


def parameters(config: RobertaConfig) -> list[Parameter]:
    """RoBERTa's parameter table."""
    model = lambda name: {"model": name}
    table = [
        *embedding_parameters("embeddings", model("roberta.embeddings."), before=PADDING + 1),
        *layer_parameters("layers", "model", "roberta"),
        *lm_head_parameters("predictions", "model"),
    ]
    if config.pair_head:
        table += dense_parameters("pooler", ("width", None), model("roberta.pooler.dense"))
        table += dense_parameters("pair", ("width", None), model("pair"))
    return table


def _otherwise(config: RobertaConfig) -> list[str]:
    """What transformers' RoBERTa computes otherwise."""
    pairs = ["there is no head for pairs, as there is no such class: AutoModel and RobertaForMaskedLM load the rest"]
    return dense_there(config) + pairs * config.pair_head


FAMILY = Family(
    config=RobertaConfig,
    sizes={
        "tiny": RobertaConfig(width=128, depth=2, heads=2, feed_forward=512),
        "base": RobertaConfig(),  # Liu et al. 2019, table 9
        "large": RobertaConfig(width=1024, depth=24, heads=16, feed_forward=4096),
    },
    inputs=INPUTS,
    module=Roberta,
    parameters=parameters,
    hf={
        "model": HuggingFace(
            folder="",
            architectures={"RobertaForMaskedLM": {"pair_head": False}, "RobertaForPreTraining": {"pair_head": True}},
            constants={"model_type": "roberta", "pad_token_id": PADDING},
            fields={**HF_FIELDS, **HF_SIZES, "max_position_embeddings": OFFSET_POSITIONS},
            settings=HF_SETTINGS,
            tied={
                "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
                "lm_head.decoder.bias": "lm_head.bias",
            },
            trunk="roberta.",
            pair="cls A sep sep B sep",
            prepare="--tokenizer bpe --specials roberta",
            otherwise=_otherwise,
            assumed=HF_ASSUMED,
        )
    },
    seen=seen,
    attention="self",
    attentions=attentions,
)
