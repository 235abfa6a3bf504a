"""BART (Lewis et al. 2020, arXiv:1910.13461): the Transformer's encoder and decoder with learned positions, norms of
the embeddings and GELU; it restores texts that noise has damaged.

Hugging Face: BartForConditionalGeneration, and the classes with task heads, which read the decoder's states. Their
position tables have two rows before the first position's, which no token reads; those of an imported model are kept.
"""

import dataclasses
from typing import ClassVar

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from models.attention.absolute import AbsoluteConfig, AbsoluteEncoderDecoder, absolute_family, stack_parameters
from models.attention.encoder_decoder import Stack
from models.blocks.embeddings import token_rows, token_table
from models.blocks.heads import CLASSIFIER, SPANS, TAGGER, task_head
from models.blocks.layer import layer_sizes
from models.blocks.norm import Norm
from models.blocks.tables import norm_parameters, same_dropout
from models.core.family import Inputs
from models.core.noise import site
from models.core.parameters import Noise, Parameter, Slot, parameter
from models.core.ranges import COUNT, POSITIVE, check_ranges
from models.core.sharding import constrain

OFFSET = 2  # rows of Hugging Face's position tables before the first position's
START = 2  # the token </s>, which the decoder reads first


@dataclasses.dataclass(frozen=True)
class BartConfig(AbsoluteConfig):
    """The fields with other defaults, those of BART-base."""

    vocab_size: int = 50265  # number of tokens, without padding rows
    width: int = 768  # hidden size
    heads: int = 12  # attention heads in each layer
    feed_forward: int = 3072  # width inside the feed-forward block
    activation: str = "gelu"  # activation function of the feed-forward block
    dropout: float = 0.1  # dropout rate of embeddings, block outputs, and inside the feed-forward block
    attention_dropout: float = 0.1  # dropout rate of attention probabilities
    init_std: float = 0.02  # standard deviation of the initial weights
    labels: tuple[str, ...] = ()  # classes of a task head

    inner_dropout: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        check_ranges(self, {"init_std": POSITIVE}, "model.")


@dataclasses.dataclass(frozen=True)
class BartTranslationConfig(BartConfig):
    """BART's fields, and those of the encoder in front."""

    source_depth: int = 6  # number of layers of the encoder in front of BART's
    labels: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self):
        super().__post_init__()
        check_ranges(self, {"source_depth": COUNT}, "model.")


class BartStack(Stack):
    """A stack with learned positions, and a norm of the embeddings."""

    def setup(self):
        super().setup()
        init = nn.initializers.normal(self.sizes.init_std)
        self.table = parameter(self, "positions", init, (self.rows, self.sizes.width))
        parameter(self, "padding_positions", nn.initializers.zeros, (OFFSET, self.sizes.width))
        self.embedding_norm = Norm(self.sizes.norm_epsilon, jnp.float32)

    def with_positions(self, x: Array, positions: Array | None = None) -> Array:
        of_rows = self.table[: x.shape[1]] if positions is None else jnp.take(self.table, positions, 0, mode="clip")
        return self.embedding_norm(x + of_rows)


class Bart(AbsoluteEncoderDecoder):
    """Both stacks, whose decoder begins with </s>."""

    start: int = START
    kind: ClassVar[type] = BartStack


class BartTranslation(Bart):
    """BART with another encoder in place of its encoder's embeddings (section 3.4), for a language that it does not
    know."""

    def setup(self):
        super().setup()
        c = self.config
        self.source_tokens = token_table(self, c.vocab_size, c.width, c.init_std, "source_tokens")
        self.source = BartStack(layer_sizes(c), c.source_depth, self.program, rows=c.positions)

    def encode(self, inputs: Inputs, noise: Noise = None) -> Array:
        x = token_rows(constrain(self.source_tokens, "vocab", None), inputs["tokens"])
        x = self.encode_embedded(self.source, x, inputs, site(noise, 4))
        return self.encode_embedded(self.encoder, x.astype(jnp.float32), inputs, noise)


def beginning(stack: str) -> list[Parameter]:
    """Return the rows of the parameter table for a stack's positions and the norm of its embeddings."""
    places = {"model": Slot(f"model.{stack}.embed_positions.weight", axis=0)}
    return [
        Parameter(f"{stack}/padding_positions", (None, "embedding"), places),
        Parameter(f"{stack}/positions", ("position", "embedding"), places),
        *norm_parameters(f"{stack}/embedding_norm", ("width",), {"model": f"model.{stack}.layernorm_embedding"}),
    ]


def parameters(config: BartConfig) -> list[Parameter]:
    """Return the rows of BART's parameter table beside those of tokens and stacks."""
    return [*beginning("encoder"), *beginning("decoder")]


def translation_parameters(config: BartTranslationConfig) -> list[Parameter]:
    """Return the rows of `BartTranslation`'s parameter table beside those of tokens and of BART's stacks."""
    tokens = Parameter("source_tokens", ("vocab", "embedding"), {"model": Slot("model.source.embed_tokens.weight")})
    return [*parameters(config), tokens, *beginning("source"), *stack_parameters("source")]


SIZES = {
    "tiny": {"positions": 512, "width": 128, "depth": 2, "decoder_depth": 2, "heads": 2, "feed_forward": 512},
    # Lewis et al. 2020, section 2.1, and the published checkpoints
    "base": {},
    "large": {"width": 1024, "depth": 12, "decoder_depth": 12, "heads": 16, "feed_forward": 4096},
}
_AS_BART = {
    "constants": {"pad_token_id": 1, "decoder_start_token_id": START},
    "settings": {
        "init_std": "init_std",
        **dict.fromkeys(("activation_dropout", "classifier_dropout"), same_dropout("dropout")),
    },
    "prepare": "--tokenizer bpe --specials roberta",
    "assumed": {"scale_embedding": False},
}
FAMILY = absolute_family(
    config=BartConfig,
    model_type="bart",
    sizes={size: BartConfig(**fields) for size, fields in SIZES.items()},
    trunk=Bart,
    table=parameters,
    heads=(
        task_head(CLASSIFIER, "classification_head.out_proj", "classification_head.dense", "tanh"),
        task_head(TAGGER, ""),
        task_head(SPANS, "qa_outputs", features=2, drops=False),
    ),
    architectures={
        "BartForConditionalGeneration": (),
        "BartForSequenceClassification": (CLASSIFIER,),
        "BartForQuestionAnswering": (SPANS,),
    },
    pair="cls A sep sep B sep",
    **_AS_BART,
)
TRANSLATION = absolute_family(
    config=BartTranslationConfig,
    model_type="bart-translation",
    sizes={
        "tiny": BartTranslationConfig(**SIZES["tiny"], source_depth=1),
        **{size: BartTranslationConfig(**SIZES[size]) for size in ("base", "large")},
    },
    trunk=BartTranslation,
    table=translation_parameters,
    architectures={"BartTranslation": ()},
    fields={"source_layers": "source_depth"},
    continues={"bart": {}},
    pair=None,
    **_AS_BART,
)
FAMILIES = {"bart": FAMILY, "bart-translation": TRANSLATION}
