"""DeBERTa V2 and V3 (He et al. 2021, arXiv:2006.03654 and arXiv:2111.09543): an encoder with disentangled attention.

V2 predicts masked tokens by the enhanced mask decoder: the last layer, run twice with queries to which absolute
positions are added (section 3.2; the authors' code). V3 detects replaced tokens, as ELECTRA does: the discriminator's
token embeddings are the generator's, through which it has no gradient, plus differences of its own (section 3.3). V2's
convolution is not implemented, so the published xlarge and xxlarge cannot be read.

Hugging Face: DebertaV2ForMaskedLM with `legacy=False`, which has no enhanced mask decoder, and the classes with task
heads. V3's discriminator is a DebertaV2Model; no class has its head, which is in mask_predictions.safetensors.
"""

import dataclasses
from collections.abc import Collection, Mapping
from operator import itemgetter
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from models.attention.disentangled import BLOCK, Buckets, DisentangledAttention
from models.attention.mask import Mask
from models.blocks.activations import ACTIVATIONS
from models.blocks.config import TrunkConfig
from models.blocks.dense import Dense
from models.blocks.embeddings import Embeddings
from models.blocks.feed_forward import FeedForward
from models.blocks.heads import CHOICE, CLASSIFIER, TOKENS, WORD_HEADS, WithHeads, task_head, token_head, usual_classes
from models.blocks.layer import layer_sizes
from models.blocks.norm import Norm
from models.blocks.positions import gather_positions
from models.blocks.stack import stack
from models.blocks.tables import HF_FIELDS, HF_SETTINGS, HF_SIZES, dense_parameters, layer_parameters, norm_parameters
from models.core.family import Converter, Input, Inputs, Shape, declare, read_by
from models.core.noise import dropout, site
from models.core.parameters import Noise, Parameter, Slot, parameter
from models.core.program import Program
from models.core.ranges import COUNT, check_ranges

STEPS = 2  # how often the enhanced mask decoder runs the last layer
INPUTS = {"tokens": Input(("length",)), "segments": Input(("length",))}


@dataclasses.dataclass(frozen=True)
class DebertaConfig(TrunkConfig):
    """Sizes and rates; the defaults are those of DeBERTaV3-base's discriminator."""

    vocab_size: int = 128100  # number of tokens, without padding rows
    positions: int = 512  # length of the longest sequence, in tokens
    buckets: int = 256  # of distances to either side; half of them have a single distance
    furthest: int = 512  # from this distance on, all distances share a bucket
    enhanced_decoder: bool = True  # whether masked tokens are predicted with absolute positions
    activation: str = "gelu"  # activation function of the feed-forward block and the masked-token head
    dropout: float = 0.1  # dropout rate of embeddings, buckets and block outputs
    norm_epsilon: float = 1e-7  # added to the variance in norms
    labels: tuple[str, ...] = ()  # classes of a task head

    def __post_init__(self):
        super().__post_init__()
        check_ranges(self, dict.fromkeys(("positions", "buckets", "furthest"), COUNT), "model.")
        if self.buckets % 2 or self.furthest <= self.buckets // 2 + 1:
            wrong = "buckets must be even, and the furthest distance above half of them plus 1"
            raise ValueError(f"model.buckets={self.buckets}, furthest={self.furthest}: {wrong}")


@dataclasses.dataclass(frozen=True)
class DebertaV3Config(DebertaConfig):
    """Sizes and rates of both encoders; the depth is the discriminator's."""

    generator_depth: int = 6  # number of layers of the generator

    def __post_init__(self):
        super().__post_init__()
        check_ranges(self, {"generator_depth": COUNT}, "model.")

    def encoder(self, part: str) -> DebertaConfig:
        """Return the config of one of the two encoders."""
        own = {"generator": {"depth": self.generator_depth}, "discriminator": {"enhanced_decoder": False}}[part]
        common = {field.name: getattr(self, field.name) for field in dataclasses.fields(DebertaConfig)}
        return DebertaConfig(**common | own)


class DebertaLayer(nn.Module):
    """A layer as `stack` calls it: x [batch, length, width] -> the same shape, or only the positions `slots`."""

    config: DebertaConfig
    program: Program

    def setup(self):
        c, sizes = self.config, layer_sizes(self.config)
        self.attention = DisentangledAttention(sizes, Buckets(c.buckets, c.furthest), self.program)
        self.feed_forward = FeedForward(sizes, self.program.compute)

    def __call__(self, x: Array, shared, noise: Noise, state: None = None, slots: Array | None = None):
        """shared: (mask, the buckets' embeddings, those of positions or None). With slots and positions, the layer is
        the enhanced mask decoder."""
        mask, table, positions = shared
        context = self.attention.context(x, table, site(noise, 4))
        if slots is None:
            return self.feed_forward(self.attention(x, context, mask, noise), noise), None
        queries = gather_positions(x, slots)
        if positions is not None:
            queries += jnp.take(positions, slots, axis=0, mode="clip").astype(x.dtype)
        for step in range(1 if positions is None else STEPS):
            of_step = noise if step == 0 else site(noise, 4 + step)
            queries = self.feed_forward(self.attention(queries, context, mask, of_step, slots), of_step, None)
        return queries, None


class Encoder(nn.Module):
    """The layers with their embeddings of buckets and, for the enhanced mask decoder, of positions."""

    config: DebertaConfig
    program: Program

    def setup(self):
        c = self.config
        table = lambda name, rows: parameter(self, name, nn.initializers.normal(c.init_std), (rows, c.width))
        self.buckets, self.buckets_norm = table("buckets", 2 * c.buckets), Norm(c.norm_epsilon, jnp.float32)
        self.positions = table("positions", c.positions) if c.enhanced_decoder else None

    @nn.compact
    def __call__(
        self, embedded: Array, segments: Array, noise: Noise, slots: Array | None = None, decodes: bool = False
    ) -> Array:
        """Run embedded f32[batch, length, width] through the layers -> [batch, length, width], or only the positions
        `slots` i32[batch, n].   decodes: whether the enhanced mask decoder computes them."""
        c, program = self.config, self.program
        x = dropout(embedded, c.dropout, site(noise, 0)).astype(program.compute)
        shared = Mask(segments), self.buckets_norm(self.buckets), self.positions if decodes else None
        layer = DebertaLayer(c, program, parent=None)
        return stack(self, [layer], c.depth, x, shared, site(noise, 1), program, slots)[0]


class Deberta(WithHeads):
    """Embeddings and layers.   differs: whether its token embeddings are differences from another table's (He et al.
    2021b, section 3.3)."""

    differs: bool = False

    def setup(self):
        super().setup()
        c = self.config
        init_std = 0.0 if self.differs else c.init_std
        self.embeddings = Embeddings(c.vocab_size, c.width, (), c.norm_epsilon, init_std)
        self.encoder = Encoder(c, self.program)

    def encode(
        self, inputs: Inputs, noise: Noise = None, slots: Array | None = None, table: Array | None = None
    ) -> Array:
        """Run the trunk -> [rows, length, width]. Dropout is on if noise u32[rows, 2] is given.

        slots: i32[rows, n], the positions whose output is wanted -> [rows, n, width]; in a model with the masked-token
        head by the enhanced mask decoder, if the config has it.   table: the other one f32[rows, width], if it differs.
        """
        decodes = any(head.name == TOKENS for head in self.heads)
        return self.encoder(self.embeddings(inputs, table), inputs["segments"], noise, slots, decodes)


class Detector(nn.Module):
    """Scores of tokens, positive for replaced ones, from their hidden states and the first token's (authors' code)."""

    config: DebertaConfig
    program: Program

    @nn.compact
    def __call__(self, hidden: Array) -> Array:
        """hidden [rows, length, width] -> f32[rows, length]."""
        c, dtype = self.config, self.program.compute
        first = hidden[:, :1].astype(jnp.float32)  # so that its gradient, a sum over the row, is float32
        read = Norm(c.norm_epsilon, dtype, name="norm")(first + hidden)
        dense = Dense(c.width, c.init_std, dtype, name="dense")(read)
        return Dense(1, c.init_std, jnp.float32, name="score")(ACTIVATIONS[c.activation](dense))[..., 0]


class DebertaV3(nn.Module):
    """The generator, and the discriminator with its detector of replaced tokens."""

    config: DebertaV3Config
    program: Program

    def setup(self):
        self.generator = Deberta(self.config.encoder("generator"), self.program, (TOKEN_HEAD,))
        self.discriminator = Deberta(self.config.encoder("discriminator"), self.program, differs=True)
        self.detector = Detector(self.config, self.program)

    def generate(self, inputs: Inputs, slots: Array, noise: Noise = None) -> Array:
        """Return the generator's logits f32[rows * n, padded vocab] at positions `slots` i32[rows, n]."""
        return self.generator.token_logits(self.generator.encode(inputs, noise, slots))

    def encode(self, inputs: Inputs, noise: Noise = None, slots: Array | None = None) -> Array:
        """Run the discriminator's trunk, the part that is finetuned -> [rows, length, width], or only the positions
        `slots` i32[rows, n]."""
        table = jax.lax.stop_gradient(self.generator.embeddings.tokens)
        return self.discriminator.encode(inputs, noise, slots, table)

    def token_scores(self, hidden: Array) -> Array:
        """Return f32[rows, length], the logit that a token was replaced, for hidden [rows, length, width]."""
        return self.detector(hidden)

    def __call__(self, inputs: Inputs):
        return self.generate(inputs, inputs["tokens"][:, :1]), self.token_scores(self.encode(inputs))


def _parameters(config: DebertaConfig, prefix: str = "", part: str = "model") -> list[Parameter]:
    """Return the table rows of a `Deberta` without heads."""
    table = lambda path, axes, name: Parameter(prefix + path, axes, {part: Slot(f"deberta.{name}.weight")})
    norm = lambda path, name: norm_parameters(prefix + path, ("embedding",), {part: f"deberta.{name}.LayerNorm"})
    positions = table("encoder/positions", ("position", "embedding"), "embeddings.position_embeddings")
    return [
        table("embeddings/tokens", ("vocab", "embedding"), "embeddings.word_embeddings"),
        *norm("embeddings/norm", "embeddings"),
        table("encoder/buckets", (None, "embedding"), "encoder.rel_embeddings"),
        *norm("encoder/buckets_norm", "encoder"),
        *[positions] * config.enhanced_decoder,
        *layer_parameters(f"{prefix}encoder/layers", part, "deberta", "_proj"),
    ]


def _v3_parameters(config: DebertaV3Config) -> list[Parameter]:
    """Return the table rows of a `DebertaV3`."""
    rows, hf = [], lambda name: {"discriminator": f"mask_predictions.{name}"}
    for part in ("generator", "discriminator"):
        rows += _parameters(config.encoder(part), f"{part}/", part)
    for row in TOKEN_HEAD.parameters:
        rows.append(row._replace(path=f"generator/{row.path}", hf={"generator": row.hf["model"]}))
    rows += norm_parameters("detector/norm", ("embedding",), hf("LayerNorm"))
    rows += dense_parameters("detector/dense", ("width", None), hf("dense"))
    return rows + dense_parameters("detector/score", ("width", None), hf("classifer"))  # as the authors spell it


def _terms(fields: Mapping[str, Any]) -> int:
    """Read `pos_att_type` of config.json, which must name both terms; the value is that of another field."""
    named = fields["pos_att_type"]
    if {*(named.split("|") if isinstance(named, str) else named)} != {"c2p", "p2c"}:
        raise TypeError
    return fields["position_buckets"]


def _furthest(fields: Mapping[str, Any]) -> int:
    furthest = fields.get("max_relative_positions", -1)
    return furthest if furthest > 0 else fields["max_position_embeddings"]


_DECODER = {"enhanced_decoder": read_by("enhanced_decoder", lambda fields: fields.get("enhanced_decoder", False))}
_LEGACY = (
    "transformers' legacy head has other names; make the model with DebertaV2Config(legacy=False), or start the head "
    "anew with --init-heads-anew"
)
_NO_POSITIONS = "transformers has none; put enhanced_decoder=false into config.json, give --model.no-enhanced-decoder"


def _otherwise(config: DebertaConfig, heads: Collection[str]) -> list[str]:
    return ["tokens are predicted without the enhanced mask decoder"] * (TOKENS in heads and config.enhanced_decoder)


def seen(config: DebertaConfig, shape: Shape) -> float:
    """Return the share of the products of whole rows that the scores need: of four of each query with each key, bands
    of distances multiply 1 + block / length and 2 times as many for the terms of positions."""
    return 4 / (5 + min(BLOCK / shape.length, 1.0))


_WITHOUT_DECODER = _parameters(DebertaConfig(enhanced_decoder=False))
TOKEN_HEAD = token_head("lm_predictions.lm_head", "dense", "LayerNorm")
_POOLED = {"dense": "pooler.dense", "between": "gelu", "summary": True}
_HEADS = (
    TOKEN_HEAD,
    task_head(CLASSIFIER, "classifier", **_POOLED),
    *WORD_HEADS,
    task_head(CHOICE, "classifier", features=1, **_POOLED),
)
_SIZES = {
    "tiny": {"width": 128, "depth": 2, "heads": 2, "feed_forward": 512},
    # He et al. 2021b, table 9 and the published checkpoints
    "small": {"depth": 6},
    "base": {},
    "large": {"width": 1024, "depth": 24, "heads": 16, "feed_forward": 4096},
}
_as_buckets = lambda value, read: Converter("buckets", lambda c: value, read)
_USUAL = {
    "inputs": INPUTS,
    "seen": seen,
    "constants": {
        "model_type": "deberta-v2",
        "relative_attention": True,
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
        "position_biased_input": False,
    },
    "fields": {
        **{name: field for name, field in (HF_FIELDS | HF_SIZES).items() if field != "types"},
        "position_buckets": "buckets",
        "max_relative_positions": read_by("furthest", _furthest),
        "pos_att_type": _as_buckets(["p2c", "c2p"], _terms),
        "legacy": _as_buckets(False, itemgetter("position_buckets")),
    },
    "settings": HF_SETTINGS,
    "prefix": "deberta.",
    "prepare": "--tokenizer sentencepiece-unigram --specials deberta --cased",
    "assumed": {"type_vocab_size": 0, "conv_kernel_size": 0, "pooler_hidden_act": "gelu"},
    "untied": {"lm_predictions.lm_head.bias": _LEGACY, "deberta.embeddings.position_embeddings.weight": _NO_POSITIONS},
}
FAMILY = declare(
    _USUAL,
    config=DebertaConfig,
    sizes={name: DebertaConfig(**sizes) for name, sizes in _SIZES.items()},
    trunk=Deberta,
    table=_parameters,
    heads=_HEADS,
    architectures={"DebertaV2Model": (), **usual_classes("DebertaV2", _HEADS)},
    fields=_DECODER,
    otherwise=_otherwise,
    continues={"deberta-v3": {row.path: f"discriminator/{row.path}" for row in _WITHOUT_DECODER}},
)
V3 = declare(
    _USUAL,
    parts={
        "discriminator": {"architectures": {"DebertaV2Model": ()}, "beside": "mask_predictions"},
        "generator": {
            "folder": "generator",
            "architectures": {"DebertaV2ForMaskedLM": ()},
            "fields": {"num_hidden_layers": "generator_depth", **_DECODER},
            "otherwise": _otherwise,
        },
    },
    config=DebertaV3Config,
    sizes={size: DebertaV3Config(**of, generator_depth=of.get("depth", 12) // 2) for size, of in _SIZES.items()},
    trunk=DebertaV3,
    table=_v3_parameters,
    differences={"discriminator/embeddings/tokens": "generator/embeddings/tokens"},
)
FAMILIES = {"deberta-v2": FAMILY, "deberta-v3": V3}
