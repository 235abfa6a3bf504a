"""BERT (Devlin et al. 2019, arXiv:1810.04805): a bidirectional Transformer encoder with post-layer norms.

Hugging Face: BertForPreTraining, or BertForMaskedLM without the pair head.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from models import kernels
from models.attention import Mask, attention
from models.kernels import attend_rows, rows_fit, splash
from models.layers import (
    ACTIVATIONS,
    Dense,
    FromHeads,
    Norm,
    ToHeads,
    Weights,
    gather_rows,
    padded_vocab,
    product,
    stack,
    tied_logits,
    token_table,
)
from models.noise import dropout, fold
from models.parameters import Family, HuggingFace, Keys, Parameter
from models.program import Program, kept
from models.ranges import COUNT, POSITIVE, RATE, check_ranges
from models.row_attention import interleaved
from models.sharding import constrain


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
    pair_head: bool = True  # whether there are a pooler and a next-sentence classifier

    def __post_init__(self):
        check_ranges(self, TABLES, "model.")
        check_encoder(self)


TABLES = {"positions": COUNT, "types": COUNT}
SIZES = dict.fromkeys(("width", "depth", "heads", "feed_forward"), COUNT)
SHARED = {"vocab_size": COUNT, "dropout": RATE, "attention_dropout": RATE}
SHARED |= {"norm_epsilon": POSITIVE, "init_std": POSITIVE}


def check_encoder(config) -> None:
    """The checks that every encoder config of this shape shares; ValueError names the field."""
    check_ranges(config, SHARED | SIZES, "model.")
    if config.width % config.heads:
        raise ValueError(f"model.width={config.width} is not a multiple of model.heads={config.heads}")
    if config.activation not in ACTIVATIONS:
        raise ValueError(f"model.activation={config.activation!r}: use one of {', '.join(ACTIVATIONS)}")


class Embeddings(nn.Module):
    """Sum of token, position and type embeddings, normalised; the tables are f32[rows, width]."""

    vocab_size: int
    positions: int
    types: int
    width: int
    norm_epsilon: float
    init_std: float

    def setup(self):
        normal = nn.initializers.normal(self.init_std)
        self.tokens = token_table(self, self.vocab_size, self.width, self.init_std)
        self.position_table = self.param("positions", normal, (self.positions, self.width))
        self.type_table = self.param("types", normal, (self.types, self.width))
        self.norm = Norm(self.norm_epsilon, jnp.float32)

    def __call__(self, tokens: Array, types: Array) -> Array:
        """tokens, types i32[batch, length] -> f32[batch, length, width], before dropout."""
        table = constrain(self.tokens, "vocab", None)
        summed = jnp.take(table, tokens, axis=0, mode="clip") + self.position_table[: tokens.shape[1]]
        # A sum over the few types instead of a gather, whose gradient would be a scatter of [batch, length] rows.
        onehot = (types[..., None] == jnp.arange(self.types)).astype(jnp.float32)
        return constrain(self.norm(summed + onehot @ self.type_table), "batch", "length", None)


class Attention(nn.Module):
    """Multi-head self-attention block with its residual and norm: x, mask -> norm(x + dropout(attend(x))).

    With positions i32[batch, n], queries at those alone: [batch, length, width] -> [batch, n, width].
    """

    config: BertConfig
    program: Program

    @nn.compact
    def __call__(self, x: Array, mask: Mask, keys: Keys, positions: Array | None = None) -> Array:
        config, dtype, kind = self.config, self.program.compute, self.program.attention
        if positions is None:
            read, rows = x, "length"
            if kind != "xla":
                kernels.require(kind, attention_of(config, x.shape[1]))
            y = self.by_kernel(x, mask) if kind == "splash" else self.by_heads(x, x, mask, keys, kind)
        else:  # too few queries for a kernel's blocks
            read, rows = gather_rows(x, positions), None
            mask = mask._replace(queries=gather_rows(mask.segments, positions))
            y = self.by_heads(read, x, mask, keys, "xla")
        y = Norm(config.norm_epsilon, dtype, name="norm")(read + dropout(y, config.dropout, site(keys, 2)))
        return constrain(y, "batch", rows, None)

    def by_heads(self, read: Array, x: Array, mask: Mask, keys: Keys, kind: str) -> Array:
        """Queries of read [batch, n, width] to all of x; heads beside each other in [.., heads, head_dim]."""
        config, width = self.config, x.shape[-1]
        dense = lambda name: Dense(width, config.init_std, self.program.compute, name=name)
        split = lambda y: y.reshape(*y.shape[:2], config.heads, width // config.heads)
        q, k, v = (kept(split(dense(name)(y))) for name, y in (("query", read), ("key", x), ("value", x)))
        mixed = attention(q, k, v, mask, dropout_rate=config.attention_dropout, keys=site(keys, 1), kind=kind)
        return dense("output")(kept(mixed.reshape(read.shape)))

    def by_kernel(self, x: Array, mask: Mask) -> Array:
        """By the TPU's kernels."""
        config, (_, length, width) = self.config, x.shape
        sizes = (width, config.init_std, self.program.compute)
        names = ("query", "key", "value")
        if not rows_fit(attention_of(config, length)):  # heads one after the other: [batch, heads, length, head_dim]
            q, k, v = (kept(ToHeads(*sizes, heads=config.heads, name=name)(x)) for name in names)
            return FromHeads(*sizes, name="output")(splash(q, k, v, mask.segments))
        matrices, biases = zip(*(Weights(*sizes, name=name)(width) for name in names), strict=True)
        # One product for all three. Without the barrier XLA:TPU transposes activations to take its gradient apart.
        products = kept(product(x, jax.lax.optimization_barrier(interleaved(*matrices))))
        return Dense(*sizes, name="output")(attend_rows(products, interleaved(*biases), mask.segments, config.heads))


class FeedForward(nn.Module):
    """Position-wise block with its residual and norm: x -> norm(x + dropout(down(activation(up(x))))).

    rows: the name of x's second axis, None where it is not the whole length.
    """

    config: BertConfig
    program: Program

    @nn.compact
    def __call__(self, x: Array, keys: Keys, rows: str | None) -> Array:
        config, dtype = self.config, self.program.compute
        y = Dense(config.feed_forward, config.init_std, dtype, name="up")(x)
        y = ACTIVATIONS[config.activation](constrain(y, "batch", rows, "feed_forward"))
        y = Dense(x.shape[-1], config.init_std, dtype, name="down")(y)
        y = Norm(config.norm_epsilon, dtype, name="norm")(x + dropout(y, config.dropout, site(keys, 3)))
        return constrain(y, "batch", rows, None)


class BertLayer(nn.Module):
    """One post-norm Transformer layer: x [batch, length, width] -> the same, or at positions i32[batch, n] alone."""

    config: BertConfig
    program: Program

    def setup(self):
        self.attention = Attention(self.config, self.program)
        self.feed_forward = FeedForward(self.config, self.program)

    def __call__(self, x: Array, mask: Mask, keys: Keys, positions: Array | None = None) -> Array:
        rows = "length" if positions is None else None
        return self.feed_forward(self.attention(x, mask, keys, positions), keys, rows)


class TokenHead(nn.Module):
    """The masked-token head up to the tied decoder: dense, activation, norm; and the decoder's bias."""

    width: int
    vocab_size: int
    activation: str
    norm_epsilon: float
    init_std: float
    dtype: jnp.dtype

    def setup(self):
        self.dense = Dense(self.width, self.init_std, self.dtype)
        self.norm = Norm(self.norm_epsilon, self.dtype)
        self.bias = self.param("bias", nn.initializers.zeros, (padded_vocab(self.vocab_size),))

    def __call__(self, hidden: Array, table: Array) -> Array:
        """hidden [n, width of the encoder], table f32[padded vocab, width] -> logits f32[n, padded vocab]."""
        y = self.norm(ACTIVATIONS[self.activation](self.dense(hidden)))
        return tied_logits(y, table, self.bias, self.vocab_size)


class Bert(nn.Module):
    """The encoder with its masked-token and next-sentence heads."""

    config: BertConfig
    program: Program

    def setup(self):
        c, dtype = self.config, self.program.compute
        self.embeddings = Embeddings(c.vocab_size, c.positions, c.types, c.width, c.norm_epsilon, c.init_std)
        self.predictions = TokenHead(c.width, c.vocab_size, c.activation, c.norm_epsilon, c.init_std, dtype)
        if c.pair_head:
            self.pooler = Dense(c.width, c.init_std, dtype)
            self.pair = Dense(2, c.init_std, jnp.float32)

    @nn.compact
    def encode(
        self, tokens: Array, types: Array, segments: Array, keys: Keys = None, positions: Array | None = None
    ) -> Array:
        """i32[batch, length] each; keys u32[batch, 2] switch dropout on -> [batch, length, width].

        positions: i32[batch, n], to compute these alone as far as the mathematics allows -> [batch, n, width].
        """
        config = self.config
        x = dropout(self.embeddings(tokens, types), config.dropout, site(keys, 0)).astype(self.program.compute)
        layer = BertLayer(config, self.program, parent=None)
        return stack(self, layer, config.depth, x, Mask(segments), site(keys, 1), self.program, positions)

    def __call__(self, tokens: Array, types: Array, segments: Array, positions: Array, keys: Keys = None):
        """i32[batch, length] each, positions i32[batch, n]; keys u32[batch, 2] switch dropout on.

        -> (token logits f32[batch * n, padded vocab], next-sentence logits f32[batch, 2] or None without pair head);
        class 0: B follows A.
        """
        first = int(self.config.pair_head)  # the pooler reads position 0
        hidden = self.encode(tokens, types, segments, keys, jnp.pad(positions, ((0, 0), (first, 0))))
        pair = self.pair(jnp.tanh(self.pooler(hidden[:, 0]))) if self.config.pair_head else None
        read = constrain(hidden[:, first:].reshape(-1, hidden.shape[-1]), "batch", None)
        return self.predictions(read, self.embeddings.tokens), pair


def attention_of(config: BertConfig, length: int, part: str = "") -> kernels.Attention:
    """What a layer's attention asks of a kernel."""
    return kernels.Attention(length, config.width, config.heads, config.attention_dropout, part=part)


def attentions(config: BertConfig, length: int, memory: int) -> list[kernels.Attention]:
    """For kernels: all layers but the last, which is read at few positions."""
    return [attention_of(config, length)] * (config.depth > 1)


def site(keys: Keys, tag: int) -> Keys:
    """The keys for one place in the model that draws noise; None without noise."""
    return None if keys is None else fold(keys, tag)


def embedding_parameters(prefix: str, hf: dict[str, str]) -> list[Parameter]:
    """Table rows of `Embeddings`; hf: checkpoint part -> prefix of its names there."""
    name = lambda suffix: {part: base + suffix for part, base in hf.items()}
    return [
        Parameter(f"{prefix}/tokens", ("vocab", "embedding"), name("word_embeddings.weight")),
        Parameter(f"{prefix}/positions", ("position", "embedding"), name("position_embeddings.weight")),
        Parameter(f"{prefix}/types", ("type", "embedding"), name("token_type_embeddings.weight")),
        *norm_parameters(f"{prefix}/norm", ("embedding",), name("LayerNorm")),
    ]


def norm_parameters(prefix: str, axes: tuple, hf: dict[str, str]) -> list[Parameter]:
    """Table rows of `Norm`."""
    return [
        Parameter(f"{prefix}/scale", axes, {part: f"{base}.weight" for part, base in hf.items()}),
        Parameter(f"{prefix}/bias", axes, {part: f"{base}.bias" for part, base in hf.items()}),
    ]


def dense_parameters(prefix: str, axes: tuple, hf: dict[str, str]) -> list[Parameter]:
    """Table rows of `Dense`; axes: ([layers,] in, out)."""
    return [
        Parameter(f"{prefix}/kernel", axes, {part: f"{base}.weight" for part, base in hf.items()}, "T"),
        Parameter(f"{prefix}/bias", axes[:-2] + axes[-1:], {part: f"{base}.bias" for part, base in hf.items()}),
    ]


def layer_parameters(prefix: str, part: str, hf: str) -> list[Parameter]:
    """Table rows of a stack of `BertLayer`; hf: the model's prefix there, like 'bert'."""
    layer = f"{hf}.encoder.layer.{{layer}}"
    dense = lambda path, axes, name: dense_parameters(
        f"{prefix}/{path}", ("layers", *axes), {part: f"{layer}.{name}"}
    )
    norm = lambda path, name: norm_parameters(f"{prefix}/{path}", ("layers", "width"), {part: f"{layer}.{name}"})
    return [
        *dense("attention/query", ("width", "heads"), "attention.self.query"),
        *dense("attention/key", ("width", "heads"), "attention.self.key"),
        *dense("attention/value", ("width", "heads"), "attention.self.value"),
        *dense("attention/output", ("heads", "width"), "attention.output.dense"),
        *norm("attention/norm", "attention.output.LayerNorm"),
        *dense("feed_forward/up", ("width", "feed_forward"), "intermediate.dense"),
        *dense("feed_forward/down", ("feed_forward", "width"), "output.dense"),
        *norm("feed_forward/norm", "output.LayerNorm"),
    ]


def parameters(config: BertConfig) -> list[Parameter]:
    """BERT's parameter table."""
    model = lambda name: {"model": name}
    table = [
        *embedding_parameters("embeddings", model("bert.embeddings.")),
        *layer_parameters("layers", "model", "bert"),
        *dense_parameters("predictions/dense", ("width", "embedding"), model("cls.predictions.transform.dense")),
        *norm_parameters("predictions/norm", ("embedding",), model("cls.predictions.transform.LayerNorm")),
        Parameter("predictions/bias", ("vocab",), model("cls.predictions.bias")),
    ]
    if config.pair_head:
        table += dense_parameters("pooler", ("width", None), model("bert.pooler.dense"))
        table += dense_parameters("pair", ("width", None), model("cls.seq_relationship"))
    return table


# Names in Hugging Face's config.json -> config fields
HF_FIELDS = {
    "vocab_size": "vocab_size",
    "max_position_embeddings": "positions",
    "type_vocab_size": "types",
    "hidden_act": "activation",
    "layer_norm_eps": "norm_epsilon",
}
HF_SIZES = {
    "hidden_size": "width",
    "num_hidden_layers": "depth",
    "num_attention_heads": "heads",
    "intermediate_size": "feed_forward",
}
HF_SETTINGS = {
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
    "initializer_range": "init_std",
}


def encoder_flops(width: int, depth: int, feed_forward: int, batch: int, length: int, read: int) -> float:
    """Forward FLOPs of a Transformer encoder: projections, attention products and feed-forward.

    read: positions per row that the last layer computes; it needs keys and values of all.
    """
    keys_and_values = 2 * 2 * width**2
    per_query = 2 * (2 * width**2 + 2 * width * feed_forward) + 4 * length * width
    return float(batch * (depth * length * keys_and_values + ((depth - 1) * length + read) * per_query))


def flops(config: BertConfig, batch: int, length: int, predictions: int) -> float:
    """Forward FLOPs with the vocabulary's logits at `predictions` positions per row, as `Bert` computes them."""
    read = predictions + int(config.pair_head)
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
        )
    },
    flops=flops,
    kernels=("splash", "cudnn"),
    attentions=attentions,
)
