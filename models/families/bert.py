"""BERT (Devlin et al. 2019, arXiv:1810.04805): a bidirectional Transformer encoder with post-layer norms.

Hugging Face: BertForPreTraining, or BertForMaskedLM without the pair head.
"""

import dataclasses

import flax.linen as nn
from jax import Array

from models.attention.kernels.kernel import Attention
from models.attention.mask import Mask
from models.attention.patterns.pattern import Pattern
from models.attention.self_attention import attention_of
from models.attention.transformer import encode, encoder_flops
from models.blocks.checks import TABLES, check_encoder
from models.blocks.embeddings import Embeddings
from models.blocks.heads import TokenAndPairHeads
from models.blocks.layer import layer_sizes
from models.blocks.tables import (
    HF_FIELDS,
    HF_SETTINGS,
    HF_SIZES,
    dense_parameters,
    embedding_parameters,
    layer_parameters,
    norm_parameters,
)
from models.core.family import Family, HuggingFace, Input, Inputs, Shape
from models.core.noise import dropout, site
from models.core.parameters import Noise, Parameter, Slot
from models.core.program import Program
from models.core.ranges import check_ranges


@dataclasses.dataclass(frozen=True)
class BertConfig:
    """Sizes and rates of an encoder with its heads."""

    vocab_size: int = 30522  # without padding rows
    positions: int = 512  # the longest sequence
    types: int = 2  # segment types (A, B)
    width: int = 768  # hidden size
    depth: int = 12  # layers
    heads: int = 12  # of attention, in each layer
    feed_forward: int = 3072  # width inside the feed-forward block
    activation: str = "gelu"  # inside the feed-forward block
    dropout: float = 0.1  # of embeddings and block outputs
    attention_dropout: float = 0.1  # of attention probabilities
    norm_epsilon: float = 1e-12  # added to the variance in norms
    init_std: float = 0.02  # of the random weights at the start
    pattern: Pattern = Pattern()  # which keys a query sees
    pair_head: bool = True  # whether there are a pooler and a next-sentence classifier

    def __post_init__(self):
        check_ranges(self, TABLES, "model.")
        check_encoder(self)


class Bert(TokenAndPairHeads):
    """The encoder with its masked-token and next-sentence heads."""

    config: BertConfig
    program: Program

    def setup(self):
        c = self.config
        self.embeddings = Embeddings(c.vocab_size, c.positions, c.types, c.width, c.norm_epsilon, c.init_std)
        self.make_heads(layer_sizes(c), c.vocab_size, c.width, c.pair_head, self.program.compute)

    @nn.compact
    def encode(self, inputs: Inputs, noise: Noise = None, slots: Array | None = None) -> Array:
        """The trunk; noise u32[rows, 2] switches dropout on -> [rows, length, width].

        slots: i32[rows, n], positions to compute alone, as far as the mathematics allows -> [rows, n, width].
        """
        config = self.config
        embedded = self.embeddings(inputs["tokens"], inputs["types"])
        x = dropout(embedded, config.dropout, site(noise, 0)).astype(self.program.compute)
        sizes, mask = layer_sizes(config), Mask(inputs["segments"])
        return encode(self, sizes, config.depth, config.pattern, x, mask, site(noise, 1), self.program, slots)


def attentions(config: BertConfig, length: int, memory: int) -> list[Attention]:
    """For kernels: all layers but the last, which is read at few positions."""
    return [attention_of(layer_sizes(config), length)] * (config.depth > 1)


def parameters(config: BertConfig) -> list[Parameter]:
    """BERT's parameter table."""
    model = lambda name: {"model": name}
    table = [
        *embedding_parameters("embeddings", model("bert.embeddings.")),
        *layer_parameters("layers", "model", "bert"),
        *dense_parameters("predictions/dense", ("width", "embedding"), model("cls.predictions.transform.dense")),
        *norm_parameters("predictions/norm", ("embedding",), model("cls.predictions.transform.LayerNorm")),
        Parameter("predictions/bias", ("vocab",), {"model": Slot("cls.predictions.bias")}),
    ]
    if config.pair_head:
        table += dense_parameters("pooler", ("width", None), model("bert.pooler.dense"))
        table += dense_parameters("pair", ("width", None), model("cls.seq_relationship"))
    return table


def flops(config: BertConfig, shape: Shape, predictions: int) -> float:
    """Forward FLOPs with the vocabulary's logits at `predictions` positions per row, as `Bert` computes them."""
    batch, length, read = shape.batch_size, shape.length, predictions + int(config.pair_head)
    head = 2 * batch * predictions * (config.width**2 + config.width * config.vocab_size)
    pair = 2 * batch * (config.width**2 + 2 * config.width) if config.pair_head else 0
    return encoder_flops(config.width, config.depth, config.feed_forward, batch, length, read) + head + pair


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
    inputs={"tokens": Input(("length",)), "types": Input(("length",)), "segments": Input(("length",))},
    module=Bert,
    parameters=parameters,
    hf={
        "model": HuggingFace(
            folder="",
            architectures={"BertForPreTraining": {"pair_head": True}, "BertForMaskedLM": {"pair_head": False}},
            constants={"model_type": "bert"},
            fields={**HF_FIELDS, **HF_SIZES},
            settings=HF_SETTINGS,
            tied={
                "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
                "cls.predictions.decoder.bias": "cls.predictions.bias",
            },
            trunk="bert.",
        )
    },
    flops=flops,
    attention="self",
    attentions=attentions,
)
