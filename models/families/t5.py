"""T5 (Raffel et al. 2020, arXiv:1910.10683): an encoder and a decoder with relative position biases instead of
positions, RMS norms before the blocks, and no other biases. T5 1.1 (Shazeer 2020, arXiv:2002.05202), ByT5 (Xue et al.
2022, arXiv:2105.13626) and mT5 (Xue et al. 2021, arXiv:2010.11934) have gated blocks and untied output weights.

Hugging Face: T5ForConditionalGeneration, MT5ForConditionalGeneration, where two texts of one row see each other.
"""

import dataclasses
from typing import ClassVar

from jax import Array

from models.attention.distances import Buckets
from models.attention.encoder_decoder import INPUTS, EncoderDecoder, Stack, attentions, seen
from models.blocks.config import CHOICES, SIZES
from models.blocks.embeddings import padding_bias, token_table
from models.blocks.layer import layer_sizes
from models.blocks.tables import stacked_parameters
from models.core.family import Converter, Family, declare, read_by
from models.core.parameters import Parameter, Slot
from models.core.ranges import COUNT, POSITIVE, RATE, check_choices, check_ranges


@dataclasses.dataclass(frozen=True)
class T5Config:
    """Sizes and rates; the defaults are those of T5-base."""

    vocab_size: int = 32128  # number of tokens, without padding rows
    width: int = 768  # hidden size
    depth: int = 12  # number of layers of the encoder
    decoder_depth: int = 12  # number of layers of the decoder
    heads: int = 12  # attention heads in each layer
    head_dim: int = 64  # width of each head
    feed_forward: int = 3072  # width inside the feed-forward block
    activation: str = "relu"  # activation function of the feed-forward block
    gated: bool = False  # whether the feed-forward block has a gate: activation(x U) * (x V)
    tied: bool = True  # whether the output weights are the token embeddings
    buckets: int = 32  # of distances; each has a bias in each head
    furthest: int = 128  # from this distance on, all distances share a bucket
    dropout: float = 0.1  # dropout rate of embeddings, block and stack outputs, inside the feed-forward block
    attention_dropout: float = 0.1  # dropout rate of attention probabilities
    norm_epsilon: float = 1e-6  # added to the mean square in norms

    scale: ClassVar[float] = 1.0
    biases: ClassVar[bool] = False
    norm: ClassVar[str] = "rms"
    inner_dropout: ClassVar[bool] = True
    init_std: ClassVar[None] = None

    def __post_init__(self):
        sizes = dict.fromkeys(("vocab_size", "decoder_depth", "head_dim", "furthest", *SIZES), COUNT)
        check_ranges(self, sizes | {"dropout": RATE, "attention_dropout": RATE, "norm_epsilon": POSITIVE}, "model.")
        check_choices(self, CHOICES, "model.")
        if self.buckets < 4 or self.buckets % 4 or self.furthest <= self.buckets // 2:
            wrong = "buckets must be a multiple of 4, and the furthest distance above half of them"
            raise ValueError(f"model.buckets={self.buckets}, furthest={self.furthest}: {wrong}")


@dataclasses.dataclass(frozen=True)
class MT5Config(T5Config):
    """Sizes and rates; the defaults are those of mT5-base."""

    vocab_size: int = 250112
    feed_forward: int = 2048
    activation: str = "gelu_new"
    gated: bool = True
    tied: bool = False
    dropout: float = 0.0
    attention_dropout: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        if self.tied:
            raise ValueError("model.tied=True: mT5's output weights are not tied; use False, or a T5 recipe")


class T5(EncoderDecoder):
    """Both stacks, the embeddings that they share, and the output weights."""

    def setup(self):
        super().setup()
        c = self.config
        self.tokens = token_table(self, c.vocab_size, c.width, 1.0)
        # As in Mesh TensorFlow, so that initial logits are near 1; transformers' std of 1 gives sqrt(width).
        self.lm_head = None if c.tied else token_table(self, c.vocab_size, c.width, c.width**-0.5, "lm_head")
        sizes, buckets = layer_sizes(c), Buckets(c.buckets, c.furthest, ahead=True)
        self.encoder = Stack(sizes, c.depth, self.program, pre_norm=True, buckets=buckets)
        self.decoder = Stack(sizes, c.decoder_depth, self.program, True, buckets._replace(ahead=False))

    def softmax(self, hidden: Array) -> tuple[Array, Array, Array]:
        """See `Decoder.softmax`; hidden is divided by sqrt(width) if the table is the embeddings, which are large."""
        bias = padding_bias(self.config.vocab_size)
        if self.config.tied:
            return hidden * self.config.width**-0.5, self.tokens, bias
        return hidden, self.lm_head, bias


def parameters(config: T5Config) -> list[Parameter]:
    matrix = lambda path, axes, name: Parameter(path, axes, {"model": Slot(f"{name}.weight")})
    rows = [matrix("tokens", ("vocab", "embedding"), "shared")]
    rows += [matrix("lm_head", ("vocab", "embedding"), "lm_head")] * (not config.tied)
    for side in ("encoder", "decoder"):
        bias = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias"
        names = _layer(config, has_context=side == "decoder")
        rows += [matrix(f"{side}/distances", (None, None), bias)]
        rows += stacked_parameters(f"{side}/layers", names, {"model": f"{side}.block.{{layer}}"}, biased=False)
        rows += [matrix(f"{side}/norm/scale", ("width",), f"{side}.final_layer_norm")]
    return rows


def _layer(config: T5Config, has_context: bool) -> dict[str, str]:
    """Return path of a norm or dense layer -> its name in Hugging Face's layer.   has_context: whether there is
    cross-attention."""
    attention = {"query": "q", "key": "k", "value": "v", "output": "o"}
    inner = {"up": "wi_0", "gate": "wi_1"} if config.gated else {"up": "wi"}
    blocks = [("attention", "SelfAttention", attention)]
    blocks += [("cross_attention", "EncDecAttention", attention)] * has_context
    blocks += [("feed_forward", "DenseReluDense", inner | {"down": "wo"})]
    names = {}
    for number, (path, block, products) in enumerate(blocks):
        names[f"{path}/norm"] = f"layer.{number}.layer_norm"
        names |= {f"{path}/{name}": f"layer.{number}.{block}.{hf}" for name, hf in products.items()}
    return names


def _block(config: T5Config) -> str:
    """Return `feed_forward_proj` of config.json, where 'gated-gelu' means gelu_new."""
    return f"gated-{config.activation.removesuffix('_new')}" if config.gated else config.activation


def _activation(fields) -> str:
    named = fields.get("feed_forward_proj", "relu")
    return "gelu_new" if named == "gated-gelu" else named.rpartition("-")[2]


def _tied(fields) -> bool:
    """Read whether output weights are tied. transformers 5 writes `tie_word_embeddings` as true even if they are not;
    for T5 it also writes whether hidden states are multiplied by 1 / sqrt(width), which only tied models do."""
    if fields.get("model_type") == "mt5":
        return False
    return fields.get("scale_decoder_outputs", fields.get("tie_word_embeddings", True))


_buckets_end = lambda fields: fields.get("relative_attention_max_distance", 128)
_decoder_depth = lambda fields: fields.get("num_decoder_layers") or fields["num_layers"]
_NO_SOFTMAX = (
    "transformers 5 saves none where it made the model anew, whose softmax has there the embeddings' weights, and here "
    "its own; set model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone()) and save it again"
)
FIELDS = {
    "vocab_size": "vocab_size",
    "d_model": "width",
    "num_layers": "depth",
    "num_decoder_layers": read_by("decoder_depth", _decoder_depth),
    "num_heads": "heads",
    "d_kv": "head_dim",
    "d_ff": "feed_forward",
    "feed_forward_proj": Converter("activation", _block, _activation),
    "is_gated_act": read_by("gated", lambda fields: fields.get("feed_forward_proj", "relu").startswith("gated-")),
    "tie_word_embeddings": read_by("tied", _tied),
    "relative_attention_num_buckets": "buckets",
    "relative_attention_max_distance": read_by("furthest", _buckets_end),
    "layer_norm_epsilon": "norm_epsilon",
}


def _family(config: type, model_type: str, name: str, sizes: dict[str, T5Config]) -> Family:
    tokens = dict.fromkeys(("pad_token_id", "decoder_start_token_id"), 0)
    rate = read_by("attention_dropout", lambda fields: fields.get("attention_dropout", fields["dropout_rate"]))
    return declare(
        config=config,
        sizes=sizes,
        inputs=INPUTS,
        trunk=T5,
        table=parameters,
        seen=seen,
        attention="self",
        attentions=attentions,
        architectures={f"{name}ForConditionalGeneration": ()},
        constants={"model_type": model_type, "is_encoder_decoder": True, **tokens},
        fields=FIELDS,
        settings={"dropout_rate": "dropout", "attention_dropout": rate},
        tied=dict.fromkeys(("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"), "shared.weight"),
        untied={"lm_head.weight": _NO_SOFTMAX},
        pair=None,
        prepare="--tokenizer sentencepiece-unigram --specials t5",
        otherwise=lambda c, _: ["model.activation=gelu is gelu_new"] * (c.gated and c.activation == "gelu"),
    )


def _size(kind: type, depth: int, width: int, heads: int, feed_forward: int, **changes) -> T5Config:
    changes = {"decoder_depth": depth} | changes
    return kind(width=width, depth=depth, heads=heads, feed_forward=feed_forward, **changes)


_GATED = {"activation": "gelu_new", "gated": True, "tied": False, "dropout": 0.0, "attention_dropout": 0.0}
_OF_1_1 = {
    "small": (8, 512, 6, 1024),
    "base": (12, 768, 12, 2048),
    "large": (24, 1024, 16, 2816),
    "xl": (24, 2048, 32, 5120),
    "xxl": (24, 4096, 64, 10240),
}


def _byt5(depth: int, *sizes: int) -> T5Config:
    return _size(T5Config, depth, *sizes, decoder_depth=depth // 3, vocab_size=384, **_GATED)


FAMILY = _family(
    T5Config,
    "t5",
    "T5",
    {
        "tiny": _size(T5Config, 2, 128, 2, 512),
        # Raffel et al. 2020, section 3.7 and the published checkpoints
        "small": _size(T5Config, 6, 512, 8, 2048),
        "base": _size(T5Config, 12, 768, 12, 3072),
        "large": _size(T5Config, 24, 1024, 16, 4096),
        "3b": _size(T5Config, 24, 1024, 32, 16384, head_dim=128),
        "11b": _size(T5Config, 24, 1024, 128, 65536, head_dim=128),
        **{f"1.1-{size}": _size(T5Config, *sizes, **_GATED) for size, sizes in _OF_1_1.items()},
        "byt5-small": _byt5(12, 1472, 6, 3584),
        "byt5-base": _byt5(18, 1536, 12, 3968),
        "byt5-large": _byt5(36, 1536, 16, 3840),
        "byt5-xl": _byt5(36, 2560, 32, 6720),
        "byt5-xxl": _byt5(36, 4672, 64, 12352),
    },
)
_OF_MT5 = {"tiny": (2, 128, 2, 512)} | _OF_1_1  # the first trains within minutes on a CPU
MT5 = _family(MT5Config, "mt5", "MT5", {size: _size(MT5Config, *sizes) for size, sizes in _OF_MT5.items()})
FAMILIES = {"mt5": MT5, "t5": FAMILY}
