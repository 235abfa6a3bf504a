"""BERT (Devlin et al. 2019, arXiv:1810.04805): a bidirectional Transformer encoder with post-layer norms.

Hugging Face: BertForPreTraining, BertForMaskedLM without the pair head, and the classes with task heads.
"""

import dataclasses
import functools

from models.attention.encoder import EncoderConfig, encoder_family
from models.blocks.config import sized
from models.blocks.heads import bert_heads, pair_head
from models.blocks.span_boundary import boundary_head


@dataclasses.dataclass(frozen=True)
class BertConfig(EncoderConfig):
    """`EncoderConfig` unchanged."""


_size = functools.partial(sized, BertConfig)
FAMILY = encoder_family(
    config=BertConfig,
    sizes={  # Turc et al. 2019 (arXiv:1908.08962), table 1; base and large: Devlin et al. 2019, section 3
        "tiny": _size(2, 128),
        "mini": _size(4, 256),
        "small": _size(4, 512),
        "medium": _size(8, 512),
        "base": _size(12, 768),
        "large": _size(24, 1024),
    },
    heads=bert_heads("bert.pooler.dense", pair_head("cls.seq_relationship"), boundary_head()),
    model_type="bert",
    decoder="cls.predictions",
    classes="Bert",
)
FAMILIES = {"bert": FAMILY}
