"""BERT (Devlin et al. 2019, arXiv:1810.04805): a bidirectional Transformer encoder with post-layer norms.

Hugging Face: BertForPreTraining, or BertForMaskedLM without the pair head.
"""

import dataclasses

from models.attention.encoder import INPUTS, Encoder, EncoderConfig, attentions, seen
from models.blocks.tables import (
    HF_ASSUMED,
    HF_FIELDS,
    HF_SETTINGS,
    HF_SIZES,
    HF_TIED,
    bert_parameters,
    dense_parameters,
)
from models.core.family import Family, HuggingFace
from models.core.parameters import Parameter


@dataclasses.dataclass(frozen=True)
class BertConfig(EncoderConfig):
    """As all have it."""


class Bert(Encoder):
    """The encoder with its masked-token and next-sentence heads."""


def parameters(config: BertConfig) -> list[Parameter]:
    """BERT's parameter table."""
    model, table = lambda name: {"model": name}, bert_parameters("model")
    if config.pair_head:
        table += dense_parameters("pooler", ("width", None), model("bert.pooler.dense"))
        table += dense_parameters("pair", ("width", None), model("cls.seq_relationship"))
    return table


def _size(depth: int, width: int) -> BertConfig:
    return BertConfig(width=width, depth=depth, heads=width // 64, feed_forward=4 * width)


FAMILY = Family(
    config=BertConfig,
    sizes={  # Turc et al. 2019 (arXiv:1908.08962), table 1; base and large: Devlin et al. 2019, section 3
        "tiny": _size(2, 128),
        "mini": _size(4, 256),
        "small": _size(4, 512),
        "medium": _size(8, 512),
        "base": _size(12, 768),
        "large": _size(24, 1024),
    },
    inputs=INPUTS,
    module=Bert,
    parameters=parameters,
    hf={
        "model": HuggingFace(
            folder="",
            architectures={"BertForPreTraining": {"pair_head": True}, "BertForMaskedLM": {"pair_head": False}},
            constants={"model_type": "bert"},
            fields={**HF_FIELDS, **HF_SIZES},
            settings=HF_SETTINGS,
            tied=HF_TIED,
            trunk="bert.",
            assumed=HF_ASSUMED,
        )
    },
    seen=seen,
    attention="self",
    attentions=attentions,
)
