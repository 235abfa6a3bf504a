"""GPT (Radford et al. 2018): a causal Transformer decoder with norms after the blocks.

Hugging Face: OpenAIGPTLMHeadModel and OpenAIGPTForSequenceClassification.
"""

import dataclasses

from models.attention.decoder import Decoder, DecoderConfig, decoder_family
from models.blocks.heads import CLASSIFIER, task_head
from models.blocks.tables import GPT_INNER, gpt_parameters
from models.core.family import Converter
from models.core.ranges import check_choices

ACTIVATIONS = {"gelu_new": "gelu", "relu": "relu"}  # our names -> names in config.json


@dataclasses.dataclass(frozen=True)
class GPTConfig(DecoderConfig):
    """Sizes and rates; the defaults are the published ones."""

    vocab_size: int = 40478
    positions: int = 512

    def __post_init__(self):
        super().__post_init__()
        check_choices(self, {"activation": ACTIVATIONS}, "model.")
        if self.feed_forward != 4 * self.width:
            wrong = f"in this family it is 4 x model.width; use {4 * self.width}"
            raise ValueError(f"model.feed_forward={self.feed_forward}: {wrong}")


class GPT(Decoder):
    """A decoder with norms after the blocks."""

    pre_norm: bool = False


FAMILY = decoder_family(
    config=GPTConfig,
    sizes={"tiny": GPTConfig(positions=256, width=128, depth=2, heads=2, feed_forward=512), "base": GPTConfig()},
    trunk=GPT,
    table=lambda config: gpt_parameters("transformer.tokens_embed", "transformer.positions_embed"),
    heads=(task_head(CLASSIFIER, "score", drops=False, biased=False),),
    model_type="openai-gpt",
    classes="OpenAIGPT",
    tokens="transformer.tokens_embed.weight",
    fields={
        "n_inner": GPT_INNER,
        "afn": Converter(
            "activation",
            lambda config: ACTIVATIONS[config.activation],
            lambda fields: {hf: name for name, hf in ACTIVATIONS.items()}.get(fields["afn"], fields["afn"]),
        ),
    },
    settings={"attn_pdrop": "attention_dropout"},
    prepare="--tokenizer character-bpe --specials gpt",
)
FAMILIES = {"gpt": FAMILY}
