"""MobileBERT (Sun et al. 2020, arXiv:2004.02984): many thin layers, and IB-BERT, the wide teacher that they learn from.

A token's vector is made from the narrow embeddings of the token and its neighbours (section 3.4). The blocks of a layer
have another width than what leads from layer to layer, with bottlenecks between (3.1); there are several feed-forward
blocks (3.2), and scale and bias alone in place of norms (3.3). IB-BERT is the same with layers that are wider inside.

Hugging Face: MobileBertForPreTraining, MobileBertForMaskedLM without the pair head, and the classes with task heads, as
published without a dense pooler. The embedding of padding is trained, as in the authors' code, since the token before
padding reads it; transformers keeps its first value.
"""

import dataclasses
import functools
from typing import ClassVar

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from models.attention.encoder import Encoder, EncoderConfig, encoder_family
from models.attention.mask import Mask
from models.attention.multi_head import MultiHeadAttention
from models.attention.patterns.blocks import Blocks
from models.blocks import heads as of_blocks
from models.blocks.dense import Dense
from models.blocks.embeddings import Embeddings, token_rows, token_table
from models.blocks.feed_forward import FeedForward
from models.blocks.heads import TOKENS
from models.blocks.layer import layer_sizes
from models.blocks.norm import Norm
from models.blocks.positions import gather_positions
from models.blocks.tables import dense_parameters, embedding_parameters, norm_parameters
from models.core.family import Converter, Inputs, dense_there
from models.core.noise import dropout, site
from models.core.parameters import LAYERS, Noise, Parameter, Slot
from models.core.program import Program
from models.core.ranges import COUNT, check_choices, check_ranges
from models.core.sharding import constrain

# What attention reads: queries and keys a bottleneck of their own, and values the hidden states; all the layer's
# bottleneck; or all the hidden states -> the axes that keys and values are made from
SHARED, NARROW, HIDDEN = "shared", "narrow", "hidden"
READS = {SHARED: ("inner", "width"), NARROW: ("inner", "inner"), HIDDEN: ("width", "width")}
NORMS = {"affine": "no_norm", "layer": "layer_norm"}  # config.norm -> its name in Hugging Face
EPSILON = 1e-5  # of the layer norms that have torch's in Hugging Face


@dataclasses.dataclass(frozen=True)
class MobileBertConfig(EncoderConfig):
    """The fields with other defaults than BERT's, and new ones."""

    width: int = 512  # hidden size between layers
    depth: int = 24  # number of layers
    heads: int = 4  # attention heads in each layer
    feed_forward: int = 512  # width inside the feed-forward blocks
    activation: str = "relu"  # activation function of the feed-forward blocks
    dropout: float = 0.0  # dropout rate of embeddings and layer outputs
    embedding: int = 128  # width of the tokens' embeddings
    bottleneck: int = 128  # width of the blocks of a layer
    reads: str = SHARED  # what attention reads: shared, narrow or hidden
    stacked: int = 4  # feed-forward blocks in each layer
    norm: str = "affine"  # affine, scale and bias alone, or layer

    def __post_init__(self):
        super().__post_init__()
        check_ranges(self, dict.fromkeys(("embedding", "bottleneck", "stacked"), COUNT), "model.")
        check_choices(self, {"reads": READS, "norm": NORMS}, "model.")
        if self.bottleneck % self.heads:
            raise ValueError(f"model.bottleneck={self.bottleneck} is not a multiple of model.heads={self.heads}")
        if self.embedding > self.width:
            raise ValueError(f"model.embedding={self.embedding}: must be at most model.width={self.width}")

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        return self.bottleneck // self.heads


class TrigramEmbeddings(Embeddings):
    """Embeddings in which a token reads the rows of both its neighbours, padding too, but not another segment's."""

    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, inputs: Inputs) -> Array:
        x, segments = token_rows(constrain(self.tokens, "vocab", None), inputs["tokens"]), inputs["segments"]
        read = (segments[:, 1:] == segments[:, :-1]) | (segments[:, 1:] == 0)
        after, before = (jnp.where(read[..., None], of, 0) for of in (x[:, 1:], x[:, :-1]))
        pad = lambda of, *widths: jnp.pad(of, ((0, 0), widths, (0, 0)))
        three = jnp.concatenate([pad(after, 0, 1), x, pad(before, 1, 0)], axis=-1)
        return self.with_terms(Dense(self.width, self.init_std, self.dtype, name="project")(three), inputs)


class MobileBertLayer(nn.Module):
    """A layer as `stack` calls it, see `TransformerLayer`. Dropout stands at its end alone."""

    config: MobileBertConfig
    program: Program

    def setup(self):
        c, dtype = self.config, self.program.compute
        sizes = layer_sizes(c)._replace(width=c.bottleneck, dropout=0.0)
        dense, norm = lambda width: Dense(width, c.init_std, dtype), lambda: Norm(c.norm_epsilon, dtype, c.norm)
        self.narrow, self.narrow_norm, self.widen, self.norm = dense(c.bottleneck), norm(), dense(c.width), norm()
        if c.reads == SHARED:
            self.shared, self.shared_norm = dense(c.bottleneck), norm()
        self.attention = MultiHeadAttention(sizes, self.program)
        blocks = [sizes] * (c.stacked - 1) + [sizes._replace(norm_epsilon=EPSILON)]
        self.feed_forwards = [FeedForward(of_block, dtype) for of_block in blocks]

    def __call__(
        self, x: Array, mask: Mask, noise: Noise, state: Blocks | None = None, slots: Array | None = None
    ) -> tuple[Array, None]:
        c, axis = self.config, "length" if slots is None else None
        mask = mask if state is None else dataclasses.replace(mask, blocks=state)
        narrow, keys, values = constrain(self.narrow_norm(self.narrow(x)), "batch", "length", None), x, None
        if c.reads == SHARED:
            keys, values = constrain(self.shared_norm(self.shared(x)), "batch", "length", None), x
        elif c.reads == NARROW:
            keys = narrow
        y = self.attention(keys, mask, noise, slots, values=values, residual=narrow)
        for feed_forward in self.feed_forwards:
            y = feed_forward(y, noise, axis)
        x = x if slots is None else gather_positions(x, slots)
        return constrain(self.norm(x + dropout(self.widen(y), c.dropout, site(noise, 5))), "batch", axis, None), None


class MobileBert(Encoder):
    """Embeddings and layers."""

    layer: ClassVar[type[nn.Module]] = MobileBertLayer

    def setup(self):
        of_blocks.WithHeads.setup(self)
        c = self.config
        of_tables = c.vocab_size, c.width, c.terms, EPSILON, c.init_std, c.norm, c.embedding
        self.embeddings = TrigramEmbeddings(*of_tables, self.program.compute)


class WideTokenHead(of_blocks.TokenHead):
    """A `TokenHead` with logits over the tied embeddings and more columns beside them."""

    @nn.compact
    def __call__(self, hidden: Array, table: Array) -> Array:
        more = token_table(self, self.vocab_size, self.width - table.shape[1], self.init_std, "more_tokens")
        return super().__call__(hidden, jnp.concatenate([table, more], axis=1))


def parameters(config: MobileBertConfig) -> list[Parameter]:
    keys, values = READS[config.reads]
    layer = [  # parameter, its name in Hugging Face's layer, axes of its kernel or scale
        ("narrow", "bottleneck.input.dense", "width", "bottleneck"),
        ("narrow_norm", "bottleneck.input.LayerNorm", "inner"),
        ("attention/query", "attention.self.query", keys, "heads"),
        ("attention/key", "attention.self.key", keys, "heads"),
        ("attention/value", "attention.self.value", values, "heads"),
        ("attention/output", "attention.output.dense", "heads", "inner"),
        ("attention/norm", "attention.output.LayerNorm", "inner"),
        ("widen", "output.bottleneck.dense", "bottleneck", "width"),
        ("norm", "output.bottleneck.LayerNorm", "width"),
    ]
    for number in range(config.stacked):
        path, name = f"feed_forwards_{number}", f"ffn.{number}." * (number < config.stacked - 1)
        layer += [(f"{path}/up", f"{name}intermediate.dense", "inner", "feed_forward")]
        layer += [(f"{path}/down", f"{name}output.dense", "feed_forward", "inner")]
        layer += [(f"{path}/norm", f"{name}output.LayerNorm", "inner")]
    if config.reads == SHARED:
        name = "bottleneck.attention"
        layer += [("shared", f"{name}.dense", "width", "bottleneck"), ("shared_norm", f"{name}.LayerNorm", "inner")]
    tokens, *others = embedding_parameters("embeddings", {"model": "mobilebert.embeddings."})
    wide = lambda axes: tuple("width" if axis == "embedding" else axis for axis in axes)
    table = [tokens, *(row._replace(axes=wide(row.axes)) for row in others)]
    name = "mobilebert.embeddings.embedding_transformation"
    table += dense_parameters("embeddings/project", (None, "width"), {"model": name})
    for path, name, *axes in layer:
        make = dense_parameters if len(axes) == 2 else norm_parameters
        table += make(f"layers/{path}", (LAYERS, *axes), {"model": f"mobilebert.encoder.layer.{{layer}}.{name}"})
    return table


_reads = lambda f: NARROW if f["use_bottleneck_attention"] else SHARED if f["key_query_shared_bottleneck"] else HIDDEN
_head = lambda c, p: WideTokenHead(c.width, c.vocab_size, c.activation, c.norm_epsilon, c.init_std, p.compute)
_OURS = {theirs: name for name, theirs in NORMS.items()}
_UNREAD = ["queries and keys do not load, as they read another width"]
_MORE = Parameter(f"{TOKENS}/more_tokens", ("vocab", None), {"model": Slot("cls.predictions.dense.weight", "T")})
_TOKENS, _, *_HEADS = of_blocks.bert_heads("", of_blocks.pair_head("cls.seq_relationship"))  # without the pooler
_ib_bert = functools.partial(MobileBertConfig, activation="gelu", dropout=0.1, reads=HIDDEN, stacked=1, norm="layer")
FAMILY = encoder_family(
    config=MobileBertConfig,
    sizes={
        "tiny": MobileBertConfig(width=256, depth=4, embedding=64, bottleneck=64, heads=2, feed_forward=256),
        # Sun et al. 2020, table 1, where "small" is MobileBERT-TINY
        "small": MobileBertConfig(reads=NARROW, stacked=2),
        "base": MobileBertConfig(),
        "ib-bert-tiny": _ib_bert(width=256, depth=4, embedding=64, bottleneck=256, heads=2, feed_forward=1024),
        "ib-bert": _ib_bert(bottleneck=1024, feed_forward=4096),
    },
    trunk=MobileBert,
    table=parameters,
    heads=(
        dataclasses.replace(_TOKENS, module=_head, parameters=(*_TOKENS.parameters, _MORE)),
        *(dataclasses.replace(head, reads="") for head in _HEADS),
    ),
    model_type="mobilebert",
    decoder="cls.predictions",
    classes="MobileBert",
    constants={"classifier_activation": False, "use_bottleneck": True, "trigram_input": True},
    fields={
        "embedding_size": "embedding",
        "intra_bottleneck_size": "bottleneck",
        "use_bottleneck_attention": Converter("reads", lambda c: c.reads == NARROW, _reads),
        "key_query_shared_bottleneck": Converter("reads", lambda c: c.reads == SHARED, _reads),
        "num_feedforward_networks": "stacked",
        "normalization_type": Converter("norm", lambda c: NORMS[c.norm], lambda f: _OURS.get(f["normalization_type"])),
    },
    otherwise=lambda c, heads: dense_there(c, heads) + _UNREAD * (c.reads == HIDDEN and c.bottleneck != c.width),
)
FAMILIES = {"mobilebert": FAMILY}
