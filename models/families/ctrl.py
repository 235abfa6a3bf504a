"""CTRL (Keskar et al. 2019, arXiv:1909.05858): a causal Transformer decoder with norms before the blocks, sinusoidal
positions and scaled embeddings. Its texts begin with a control code.

Hugging Face: CTRLLMHeadModel and CTRLForSequenceClassification.
"""

import dataclasses

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from models.attention.decoder import Decoder, DecoderConfig, decoder_family
from models.attention.relative import sinusoids
from models.blocks.config import check_even
from models.blocks.embeddings import padded_vocab, token_rows, token_table
from models.blocks.heads import CLASSIFIER, WithHeads, task_head
from models.blocks.norm import Norm
from models.blocks.tables import norm_parameters, stacked_parameters
from models.core.family import Inputs
from models.core.parameters import Parameter, Slot, parameter
from models.core.sharding import constrain

EPSILON = 1e-6  # of all norms; Hugging Face's layers use it whatever config.json says


@dataclasses.dataclass(frozen=True)
class CTRLConfig(DecoderConfig):
    """Sizes and rates; the defaults are the published ones."""

    vocab_size: int = 246534
    positions: int = 256
    width: int = 1280
    depth: int = 48
    heads: int = 16
    feed_forward: int = 8192
    activation: str = "relu"
    attention_dropout: float = 0.0
    norm_epsilon: float = EPSILON

    def __post_init__(self):
        super().__post_init__()
        check_even(self)
        if self.activation != "relu":
            raise ValueError(f"model.activation={self.activation!r}: in this family it is relu")
        if self.norm_epsilon != EPSILON:
            raise ValueError(f"model.norm_epsilon={self.norm_epsilon}: in this family it is {EPSILON}")


class FixedPositions(nn.Module):
    """Token embeddings times the square root of their width, plus sinusoids; the table is f32[rows, width]."""

    vocab_size: int
    positions: int
    width: int
    init_std: float

    def setup(self):
        self.tokens = token_table(self, self.vocab_size, self.width, self.init_std)

    def __call__(self, inputs: Inputs) -> Array:
        """See `Embeddings`."""
        tokens, positions = inputs["tokens"], inputs.get("positions")
        embedded = token_rows(constrain(self.tokens, "vocab", None), tokens)
        table = jnp.asarray(sinusoids(self.positions - 1, 0, self.width)[::-1])
        encodings = table[: tokens.shape[1]] if positions is None else jnp.take(table, positions, 0, mode="clip")
        return constrain(embedded * self.width**0.5 + encodings, "batch", "length", None)


class CTRL(Decoder):
    """A decoder whose logits have a bias."""

    def setup(self):
        WithHeads.setup(self)
        c = self.config
        self.embeddings = FixedPositions(c.vocab_size, c.positions, c.width, c.init_std)
        self.norm = Norm(c.norm_epsilon, self.program.compute)
        self.bias = parameter(self, "bias", nn.initializers.zeros, (padded_vocab(c.vocab_size),))

    def softmax(self, hidden: Array) -> tuple[Array, Array, Array]:
        hidden, table, unpadded = super().softmax(hidden)
        return hidden, table, self.bias + unpadded


LAYER = {
    "attention/query": "multi_head_attention.Wq",
    "attention/key": "multi_head_attention.Wk",
    "attention/value": "multi_head_attention.Wv",
    "attention/output": "multi_head_attention.dense",
    "attention/norm": "layernorm1",
    "feed_forward/up": "ffn.0",
    "feed_forward/down": "ffn.2",
    "feed_forward/norm": "layernorm2",
}


def parameters(config: CTRLConfig) -> list[Parameter]:
    return [
        Parameter("embeddings/tokens", ("vocab", "embedding"), {"model": Slot("transformer.w.weight")}),
        *stacked_parameters("layers", LAYER, {"model": "transformer.h.{layer}"}),
        *norm_parameters("norm", ("width",), {"model": "transformer.layernorm"}),
        Parameter("bias", ("vocab",), {"model": Slot("lm_head.bias")}),
    ]


FAMILY = decoder_family(
    config=CTRLConfig,
    sizes={"tiny": CTRLConfig(width=128, depth=2, heads=2, feed_forward=512), "base": CTRLConfig()},
    trunk=CTRL,
    table=parameters,
    heads=(task_head(CLASSIFIER, "classifier", drops=False, biased=False),),
    model_type="ctrl",
    classes="CTRL",
    tokens="transformer.w.weight",
    fields={"dff": "feed_forward"},
    of_softmax=("lm_head.bias",),
    prepare="--tokenizer character-bpe --specials ctrl",
    assumed={"layer_norm_epsilon": EPSILON},
)
FAMILIES = {"ctrl": FAMILY}
