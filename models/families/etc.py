"""BigBird-ETC (Zaheer et al. 2020, arXiv:2007.14062, section 2 and table 8): an encoder of long rows with additional
global tokens, which have parameters of their own, as in ETC (Ainslie et al. 2020, arXiv:2004.08483).

From the BigBird paper: a window of whole blocks, 256 global tokens for 4,096, no random blocks, and dropout 0.1, also
of attention. From ETC, section 3: four pieces of attention; relative keys instead of positions, with distances clipped
at 12 (as in its code); labels by which a global token knows the tokens that belong to it; global tokens that see all
long tokens. Projections are those of ETC's models without sharing (166M parameters with BERT's vocabulary, 558M with
RoBERTa's): two to queries, four each to keys and values, two to the output, and one feed-forward block for both kinds
of token. In a layer both kinds share a norm; embeddings have one norm for each kind. Our own choices: all global tokens
start as the same vector, whereas ETC's code looks up a token; no further relative labels of ETC; no loss on global
tokens (ETC's CPC, which is optional there); no initialisation from BERT.

Hugging Face has no class for this model: an export holds `model.safetensors`, with the table's paths as names and
layers stacked, and the config as `config.json`.
"""

import dataclasses
from collections.abc import Iterable

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from models.attention.etc import KINDS, LongGlobalAttention, Sight, sights
from models.attention.patterns.bigbird import check_odd
from models.attention.patterns.pairs import pairs
from models.attention.patterns.pattern import Pattern
from models.blocks.config import TrunkConfig
from models.blocks.embeddings import token_table
from models.blocks.feed_forward import FeedForward
from models.blocks.heads import TOKENS, WithHeads, token_head
from models.blocks.layer import layer_sizes
from models.blocks.norm import Norm
from models.blocks.stack import stack
from models.blocks.tables import norm_parameters, stacked_parameters
from models.core.family import Input, Inputs, Shape, declare
from models.core.noise import dropout, site
from models.core.parameters import LAYERS, Noise, Parameter, Slot, parameter
from models.core.program import Program
from models.core.ranges import COUNT, check_ranges
from models.core.sharding import constrain


@dataclasses.dataclass(frozen=True)
class EtcConfig(TrunkConfig):
    """Sizes and rates of the model."""

    vocab_size: int = 50265  # number of tokens, without padding rows
    block: int = 84  # tokens of a block
    window: int = 3  # blocks that a long token sees, its own in the middle; odd
    distance: int = 12  # distances beyond this one are clipped to it

    def __post_init__(self):
        super().__post_init__()
        check_ranges(self, {"block": COUNT, "window": COUNT, "distance": COUNT}, "model.")
        check_odd(self.window, "model.")

    @property
    def pattern(self) -> Pattern:
        """Which long tokens see each other."""
        return Pattern("bigbird", self.block, self.window, random=0, global_blocks=0)


class EtcEmbeddings(nn.Module):
    """Embeddings of long tokens and the start vector of all global tokens, each with its own norm."""

    config: EtcConfig

    def setup(self):
        c = self.config
        self.tokens = token_table(self, c.vocab_size, c.width, c.init_std)
        self.global_token = parameter(self, "global", nn.initializers.normal(c.init_std), (1, c.width))
        self.norm, self.global_norm = Norm(c.norm_epsilon, jnp.float32), Norm(c.norm_epsilon, jnp.float32)

    def __call__(self, tokens: Array, global_segments: Array) -> tuple[Array, Array]:
        """Embed i32[batch, length], i32[batch, globals] -> f32[batch, length, width], f32[batch, globals, width]."""
        long = jnp.take(constrain(self.tokens, "vocab", None), tokens, axis=0, mode="clip")
        of_globals = jnp.broadcast_to(self.global_norm(self.global_token), (*global_segments.shape, long.shape[-1]))
        return constrain(self.norm(long), "batch", "length", None), constrain(of_globals, "batch", None, None)


class EtcLayer(nn.Module):
    """A post-norm layer as `stack` calls it: x (long, global) -> the same shapes; slots apply to long tokens only."""

    config: EtcConfig
    program: Program

    @nn.compact
    def __call__(
        self, x: tuple[Array, Array], shared: tuple[Sight, Sight], noise: Noise, state: None, slots: Array | None
    ) -> tuple[tuple[Array, Array], None]:
        sizes, kind_noise = layer_sizes(self.config), (noise, site(noise, 4))  # long tokens use the sites 1 to 3
        attention = LongGlobalAttention(sizes, self.program, self.config.distance, name="attention")
        feed_forward = FeedForward(sizes, self.program.compute, name="feed_forward")
        axes = ("length" if slots is None else None, None)
        computed = attention(x, shared, kind_noise, slots)
        done = tuple(feed_forward(y, keys, axis) for y, keys, axis in zip(computed, kind_noise, axes, strict=False))
        return done + x[len(done) :], None


class Etc(WithHeads):
    """The BigBird-ETC encoder."""

    def setup(self):
        super().setup()
        self.embeddings = EtcEmbeddings(self.config)

    @nn.compact
    def encode(self, inputs: Inputs, noise: Noise = None, slots: Array | None = None) -> Array:
        """See `Encoder.encode`; the output is that of the long tokens."""
        c, segments, of_globals = self.config, inputs["segments"], inputs["global_segments"]
        embedded = self.embeddings(inputs["tokens"], of_globals)

        def drop(x, tag):
            return dropout(x, c.dropout, site(noise, tag)).astype(self.program.compute)

        x = tuple(drop(x, tag) for x, tag in zip(embedded, (0, 2), strict=True))
        seen = sights(segments, of_globals, inputs["global_of"], c.block, c.window)
        layer = EtcLayer(c, self.program, parent=None)
        return stack(self, [layer], c.depth, x, seen, site(noise, 1), self.program, slots)[0][0]


def named_by_path(rows: Iterable[Parameter]) -> tuple[Parameter, ...]:
    """Name rows of the parameter table in the export by their paths."""
    return tuple(row._replace(hf={"model": Slot(row.path)}) for row in rows)


def parameters(config: EtcConfig) -> tuple[Parameter, ...]:
    """Return the trunk's rows of the parameter table."""
    table = [
        Parameter("embeddings/tokens", ("vocab", "embedding"), {}),
        Parameter("embeddings/global", ("type", "embedding"), {}),
        *norm_parameters("embeddings/norm", ("embedding",), {}),
        *norm_parameters("embeddings/global_norm", ("embedding",), {}),
    ]
    for near, far in (KINDS, KINDS[::-1]):
        table.append(Parameter(f"layers/attention/{near}_relative", (LAYERS, None, "heads"), {}))
        keys_and_values = (f"{near}_to_{keys}_{what}" for keys in (near, far) for what in ("key", "value"))
        paths = (f"{near}_query", *keys_and_values, f"{near}_output")
        table += stacked_parameters("layers/attention", dict.fromkeys(paths, ""), {})
    paths = "attention/norm", "feed_forward/up", "feed_forward/down", "feed_forward/norm"
    return named_by_path([*table, *stacked_parameters("layers", dict.fromkeys(paths, ""), {})])


def seen(config: EtcConfig, shape: Shape) -> float:
    """Return the share of (query, key) pairs, of both kinds of queries, that are visible."""
    length, number = shape.length, shape.globals
    hidden = length**2 - float(pairs(config.pattern, 1, 1, length)[0])
    return 1.0 - hidden / (length + number) ** 2


_TOKEN_HEAD = token_head("")

FAMILY = declare(
    config=EtcConfig,
    sizes={
        "tiny": EtcConfig(width=128, depth=2, heads=2, feed_forward=512, block=32),
        # Zaheer et al. 2020, table 8 and appendix E.2
        "base": EtcConfig(),
        "large": EtcConfig(width=1024, depth=24, heads=16, feed_forward=4096, block=169),
    },
    inputs={
        "tokens": Input(("length",)),
        "segments": Input(("length",)),
        "global_of": Input(("length",)),
        "global_segments": Input(("globals",)),
    },
    trunk=Etc,
    table=parameters,
    heads=(dataclasses.replace(_TOKEN_HEAD, parameters=named_by_path(_TOKEN_HEAD.parameters)),),
    architectures={"BigBirdEtc": (TOKENS,)},
    constants={"model_type": "bigbird-etc"},
    fields={
        **{name: name for name in ("vocab_size", "width", "depth", "heads", "feed_forward", "activation")},
        **{name: name for name in ("norm_epsilon", "distance")},
    },
    settings={name: name for name in ("dropout", "attention_dropout", "init_std", "block", "window")},
    pair=None,
    prepare="--tokenizer bpe",
    seen=seen,
)
FAMILIES = {"bigbird-etc": FAMILY}
