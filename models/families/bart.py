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

from models.attention.absolute import AbsoluteConfig, AbsoluteEncoderDecoder, PlacedSide, absolute_family
from models.blocks.heads import CLASSIFIER, SPANS, TAGGER, task_head
from models.blocks.norm import Norm
from models.blocks.tables import norm_parameters, same_dropout
from models.core.parameters import Parameter, Slot, parameter
from models.core.ranges import POSITIVE, check_ranges

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


class BartSide(PlacedSide):
    """A stack with learned positions, and a norm of the embeddings."""

    def setup(self):
        super().setup()
        init = nn.initializers.normal(self.sizes.init_std)
        self.table = parameter(self, "positions", init, (self.rows, self.sizes.width))
        parameter(self, "padding_positions", nn.initializers.zeros, (OFFSET, self.sizes.width))
        self.embedding_norm = Norm(self.sizes.norm_epsilon, jnp.float32)

    def placed(self, x: Array, positions: Array | None = None) -> Array:
        """See `Side.placed`."""
        of_rows = self.table[: x.shape[1]] if positions is None else jnp.take(self.table, positions, 0, mode="clip")
        return self.embedding_norm(x + of_rows)


class Bart(AbsoluteEncoderDecoder):
    """Both stacks, whose decoder begins with </s>."""

    start: int = START
    side: ClassVar[type] = BartSide


def parameters(config: BartConfig) -> list[Parameter]:
    """Return the rows of BART's parameter table beside those of tokens and stacks."""
    rows = []
    for side in ("encoder", "decoder"):
        places = {"model": Slot(f"model.{side}.embed_positions.weight", axis=0)}
        rows += [Parameter(f"{side}/padding_positions", (None, "embedding"), places)]
        rows += [Parameter(f"{side}/positions", ("position", "embedding"), places)]
        norm = {"model": f"model.{side}.layernorm_embedding"}
        rows += norm_parameters(f"{side}/embedding_norm", ("width",), norm)
    return rows


FAMILY = absolute_family(
    config=BartConfig,
    sizes={
        # Not published; trains within minutes on a CPU.
        "tiny": BartConfig(positions=512, width=128, depth=2, decoder_depth=2, heads=2, feed_forward=512),
        # Lewis et al. 2020, section 2.1, and the published checkpoints
        "base": BartConfig(),
        "large": BartConfig(width=1024, depth=12, decoder_depth=12, heads=16, feed_forward=4096),
    },
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
    constants={"model_type": "bart", "pad_token_id": 1, "decoder_start_token_id": START},
    settings={
        "init_std": "init_std",
        **dict.fromkeys(("activation_dropout", "classifier_dropout"), same_dropout("dropout")),
    },
    pair="cls A sep sep B sep",
    prepare="--tokenizer bpe --specials roberta",
    assumed={"scale_embedding": False},
)
