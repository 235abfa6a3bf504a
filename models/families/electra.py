"""ELECTRA (Clark et al. 2020, arXiv:2003.10555): a small generator replaces tokens, a discriminator detects them.

Both are BERT encoders that share their embeddings; each projects them to its own width if that differs.
Hugging Face has no joint class: the discriminator is ElectraForPreTraining, the generator ElectraForMaskedLM. ENCODER
is the discriminator's encoder as a separate family, for tasks: ElectraForSequenceClassification and so on.
"""

import dataclasses

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jax import Array

from models.attention.encoder import EncoderConfig, encoder_family, encoder_parameters
from models.attention.kernels.kernel import Attention
from models.attention.mask import Mask
from models.attention.multi_head import attention_of
from models.attention.patterns.pairs import pairs
from models.attention.patterns.pattern import Pattern, blocks_of
from models.attention.transformer import encode
from models.blocks import tables
from models.blocks.activations import ACTIVATIONS
from models.blocks.config import CHOICES, SHARED, TABLES, check_sizes
from models.blocks.dense import Dense
from models.blocks.embeddings import Embeddings
from models.blocks.heads import CHOICE, CLASSIFIER, WORD_HEADS, TokenHead, task_head
from models.blocks.layer import layer_sizes
from models.blocks.tables import HF_ASSUMED, HF_SIZES, dense_parameters, layer_parameters
from models.core.family import Input, Inputs, Shape, declare
from models.core.parameters import Noise, Parameter
from models.core.program import Program
from models.core.ranges import COUNT, check_choices, check_ranges


@dataclasses.dataclass(frozen=True)
class Tower:
    """Sizes of one of the two encoders."""

    width: int  # hidden size
    depth: int  # number of layers
    heads: int  # attention heads in each layer
    feed_forward: int  # width inside the feed-forward block


@dataclasses.dataclass(frozen=True)
class ElectraConfig:
    """Sizes and rates of both encoders, which share embeddings."""

    vocab_size: int = 30522  # number of tokens, without padding rows
    positions: int = 512  # length of the longest sequence, in tokens
    types: int = 2  # number of segment types (A, B)
    embedding: int = 768  # width of the shared embeddings
    discriminator: Tower = Tower(768, 12, 12, 3072)
    generator: Tower = Tower(256, 12, 4, 1024)
    activation: str = "gelu"  # activation function of the feed-forward block
    dropout: float = 0.1  # dropout rate of embeddings and block outputs
    attention_dropout: float = 0.1  # dropout rate of attention probabilities
    norm_epsilon: float = 1e-12  # added to the variance in norms
    init_std: float = 0.02  # standard deviation of the initial weights
    pattern: Pattern = Pattern()  # which keys a query sees

    def __post_init__(self):
        check_ranges(self, TABLES | SHARED | {"embedding": COUNT}, "model.")
        check_choices(self, CHOICES, "model.")
        for tower in ("discriminator", "generator"):
            check_sizes(getattr(self, tower), f"model.{tower}.")

    def encoder(self, part: str) -> "TowerConfig":
        """Return the config of one of the two encoders."""
        common = {name: value for name, value in vars(self).items() if not isinstance(value, Tower)}
        return TowerConfig(**common, **vars(getattr(self, part)))


@dataclasses.dataclass(frozen=True)
class TowerConfig(EncoderConfig):
    """The config of one encoder, whose layers may differ in width from its embeddings."""

    embedding: int = 768  # width of the embeddings

    @property
    def projects(self) -> bool:
        return self.embedding != self.width


class Encoder(nn.Module):
    """An encoder that reads the shared embeddings."""

    config: TowerConfig
    program: Program

    @nn.compact
    def __call__(self, embedded: Array, segments: Array, noise: Noise, slots: Array | None = None) -> Array:
        """Run embedded [batch, length, embedding] through the layers -> [batch, length, width].
        segments: i32[batch, length].   slots: i32[batch, n], the only positions to return -> [batch, n, width]."""
        return encode(self, self.config, embedded, Mask(segments), noise, self.program, slots)


class Generator(nn.Module):
    """An encoder with a masked-token head over the shared token embeddings."""

    config: ElectraConfig
    program: Program

    def setup(self):
        c, dtype = self.config, self.program.compute
        self.encoder = Encoder(c.encoder("generator"), self.program)
        # The head's activation is always gelu, as in the original code and in Hugging Face.
        self.predictions = TokenHead(c.embedding, c.vocab_size, "gelu", c.norm_epsilon, c.init_std, dtype)


class Discriminator(nn.Module):
    """An encoder with one score per token: positive means replaced."""

    config: ElectraConfig
    program: Program

    def setup(self):
        c, dtype = self.config, self.program.compute
        self.encoder = Encoder(c.encoder("discriminator"), self.program)
        self.dense = Dense(c.discriminator.width, c.init_std, dtype)
        self.score = Dense(1, c.init_std, jnp.float32)

    def __call__(self, hidden: Array) -> Array:
        """Return f32[rows, n], the logit that a token was replaced, for hidden [rows, n, width]."""
        return self.score(ACTIVATIONS[self.config.activation](self.dense(hidden)))[..., 0]


class Electra(nn.Module):
    """The generator and the discriminator over shared embeddings."""

    config: ElectraConfig
    program: Program

    def setup(self):
        c = self.config
        terms = c.encoder("discriminator").terms
        self.embeddings = Embeddings(c.vocab_size, c.embedding, terms, c.norm_epsilon, c.init_std)
        self.generator = Generator(c, self.program)
        self.discriminator = Discriminator(c, self.program)

    def generate(self, inputs: Inputs, slots: Array, noise: Noise = None) -> Array:
        """Return the generator's logits f32[rows * n, padded vocab] at positions `slots` i32[rows, n]."""
        embedded = self.embeddings(inputs)
        hidden = self.generator.encoder(embedded, inputs["segments"], noise, slots)
        return self.generator.predictions(hidden, self.embeddings.tokens)

    def encode(self, inputs: Inputs, noise: Noise = None, slots: Array | None = None) -> Array:
        """Run the discriminator's trunk, the part that is finetuned -> [rows, length, width].
        slots: i32[rows, n], the only positions to return -> [rows, n, width]."""
        embedded = self.embeddings(inputs)
        return self.discriminator.encoder(embedded, inputs["segments"], noise, slots)

    def token_scores(self, hidden: Array) -> Array:
        """Return f32[rows, n], the logit that a token was replaced, for hidden [rows, n, width]."""
        return self.discriminator(hidden)

    def __call__(self, inputs: Inputs):
        logits = self.generate(inputs, inputs["tokens"][:, :1])
        return logits, self.token_scores(self.encode(inputs))


def parameters(config: ElectraConfig) -> list[Parameter]:
    """Return ELECTRA's parameter table; the shared embeddings are written to both checkpoints."""
    both = {"discriminator": "electra.embeddings.", "generator": "electra.embeddings."}
    table = tables.embedding_parameters("embeddings", both)
    for part in ("generator", "discriminator"):
        model = lambda name, part=part: {part: name}
        if getattr(config, part).width != config.embedding:
            axes = ("embedding", "width")
            table += dense_parameters(f"{part}/encoder/project", axes, model("electra.embeddings_project"))
        table += layer_parameters(f"{part}/encoder/layers", part, "electra")
    names = "generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head.bias"
    table += tables.token_head_parameters("generator/predictions", *names, part="generator")
    score = lambda name: {"discriminator": f"discriminator_predictions.{name}"}
    table += dense_parameters("discriminator/dense", ("width", None), score("dense"))
    table += dense_parameters("discriminator/score", ("width", None), score("dense_prediction"))
    return table


def seen(config: ElectraConfig, shape: Shape) -> float:
    """Return the share of (query, key) pairs that the pattern leaves visible: the mean of both encoders, weighted by
    the cost of a pair."""
    towers = config.generator, config.discriminator
    visible = [pairs(config.pattern, tower.depth, tower.heads, shape.length).mean() for tower in towers]
    return float(np.average(visible, weights=[tower.depth * tower.width for tower in towers])) / shape.length**2


def attentions(config: ElectraConfig, shape: Shape, memory: int) -> list[Attention]:
    """Return the attentions that a kernel may compute: all layers of both encoders, except the generator's last, which
    is computed at few positions."""
    described = []
    for part in ("discriminator", "generator"):
        tower = getattr(config, part)
        blocks = blocks_of(config.pattern, tower.depth, tower.heads, shape.length)
        if part == "generator" and tower.depth == 1 and blocks is None:
            continue
        described.append(attention_of(layer_sizes(config.encoder(part)), shape.length, blocks=blocks, part=part))
    return described


_sizes_of = lambda tower: {name: f"{tower}.{field}" for name, field in HF_SIZES.items()}
_LARGE = Tower(1024, 24, 16, 4096)
FAMILY = declare(
    config=ElectraConfig,
    sizes={
        "tiny": ElectraConfig(embedding=128, discriminator=Tower(128, 2, 2, 512), generator=Tower(64, 2, 1, 256)),
        "mini": ElectraConfig(embedding=128, discriminator=Tower(256, 4, 4, 1024), generator=Tower(64, 4, 1, 256)),
        # Clark et al. 2020, table 6; generator widths: small 1/4, base 1/3, large 1/4 of the discriminator's.
        "small": ElectraConfig(embedding=128, discriminator=Tower(256, 12, 4, 1024), generator=Tower(64, 12, 1, 256)),
        "base": ElectraConfig(),
        "large": ElectraConfig(embedding=1024, discriminator=_LARGE, generator=Tower(256, 24, 4, 1024)),
    },
    inputs={"tokens": Input(("length",)), "types": Input(("length",)), "segments": Input(("length",))},
    trunk=Electra,
    table=parameters,
    parts={
        "discriminator": {"architectures": {"ElectraForPreTraining": ()}, "fields": _sizes_of("discriminator")},
        "generator": {
            "folder": "generator",
            "architectures": {"ElectraForMaskedLM": ()},
            "fields": _sizes_of("generator"),
            "tied": {"generator_lm_head.weight": "electra.embeddings.word_embeddings.weight"},
        },
    },
    constants={"model_type": "electra"},
    fields={**tables.HF_FIELDS, "embedding_size": "embedding"},
    settings=tables.HF_SETTINGS,
    prefix="electra.",
    assumed=HF_ASSUMED,
    seen=seen,
    attention="self",
    attentions=attentions,
)


def _encoder_parameters(config: TowerConfig) -> list[Parameter]:
    project = dense_parameters("project", ("embedding", "width"), {"model": "electra.embeddings_project"})
    return [*encoder_parameters("electra"), *project * config.projects]


_ENCODER_SIZES = {size: config.encoder("discriminator") for size, config in FAMILY.sizes.items()}
ENCODER = encoder_family(
    config=TowerConfig,
    sizes=_ENCODER_SIZES,
    table=_encoder_parameters,
    heads=(
        task_head(CLASSIFIER, "classifier.out_proj", "classifier.dense", "gelu"),  # whatever the layers' activation
        *WORD_HEADS,
        task_head(CHOICE, "classifier", "sequence_summary.summary", "gelu", features=1, summary=True),
    ),
    classes="Electra",
    model_type="electra",
    fields={"embedding_size": "embedding"},
    settings={"summary_last_dropout": tables.same_dropout("hidden_dropout_prob")},
    assumed={**HF_ASSUMED, "summary_type": "first", "summary_use_proj": True, "summary_activation": "gelu"},
    continues={
        "electra": {
            row.path: f"discriminator/encoder/{row.path}"
            for row in _encoder_parameters(_ENCODER_SIZES["mini"])
            if not row.path.startswith("embeddings/")
        }
    },
)
FAMILIES = {"electra": FAMILY, "electra-encoder": ENCODER}
