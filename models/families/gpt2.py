"""GPT-2 (Radford et al. 2019): a causal Transformer decoder with norms before the blocks; also in the sizes of GPT-3.

Hugging Face: GPT2LMHeadModel, and the classes with task heads. GPT-3 (Brown et al. 2020, arXiv:2005.14165) alternates
dense and locally banded layers; here, as in that class, all layers are dense. Its dropout is not published; here it
has none.
"""

import dataclasses
import functools

from models.attention.decoder import Decoder, DecoderConfig, decoder_family
from models.blocks.config import sized
from models.blocks.heads import CLASSIFIER, WORD_HEADS, task_head
from models.blocks.tables import GPT_INNER, gpt_parameters, norm_parameters, same_dropout
from models.core.parameters import Parameter


@dataclasses.dataclass(frozen=True)
class GPT2Config(DecoderConfig):
    """`DecoderConfig`, with smaller initial weights into the residual stream in deeper models."""

    @property
    def output_std(self) -> float:
        """Standard deviation of these initial weights, two in each layer (section 2.3)."""
        return self.init_std * (2 * self.depth) ** -0.5


def parameters(config: GPT2Config) -> list[Parameter]:
    norm = norm_parameters("norm", ("width",), {"model": "transformer.ln_f"})
    return [*gpt_parameters("transformer.wte", "transformer.wpe"), *norm]


_size = functools.partial(sized, GPT2Config)


_gpt3 = functools.partial(_size, positions=2048, dropout=0.0, attention_dropout=0.0)
FAMILY = decoder_family(
    config=GPT2Config,
    sizes={
        "tiny": _size(2, 128, positions=512),
        "mini": _size(4, 256, positions=512),
        # Radford et al. 2019, table 2
        "small": _size(12, 768),
        "medium": _size(24, 1024),
        "large": _size(36, 1280),
        "xl": _size(48, 1600),
        # Brown et al. 2020, table 2.1, changed where its width is not heads times their width
        "gpt3-small": _gpt3(12, 768, 64),
        "gpt3-medium": _gpt3(24, 1024, 64),
        "gpt3-large": _gpt3(24, 1536, 96),
        "gpt3-xl": _gpt3(24, 2048, 128),  # 24 heads in the table
        "gpt3-2.7b": _gpt3(32, 2560, 80),
        "gpt3-6.7b": _gpt3(32, 4096, 128),
        "gpt3-13b": _gpt3(40, 5120, 128),  # a width of 5,140 in the table
        "gpt3-175b": _gpt3(96, 12288, 128),
    },
    trunk=Decoder,
    table=parameters,
    heads=(task_head(CLASSIFIER, "score", drops=False, biased=False), *WORD_HEADS),
    model_type="gpt2",
    classes="GPT2",
    tokens="transformer.wte.weight",
    fields={"n_inner": GPT_INNER, "activation_function": "activation"},
    settings={"attn_pdrop": "attention_dropout", "classifier_dropout": same_dropout("resid_pdrop")},
    prepare="--tokenizer bpe --specials gpt2",
    assumed={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
)
FAMILIES = {"gpt2": FAMILY}
