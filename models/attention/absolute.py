"""Encoder-decoders with absolute positions and norms behind the blocks, as in BART and the Transformer: config, module,
parameter table, and a function that declares such a family."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from jax import Array

from models.attention.encoder_decoder import INPUTS, EncoderDecoder, Stack, attentions, seen
from models.blocks.config import CHOICES, check_sizes
from models.blocks.embeddings import padding_bias, token_table
from models.blocks.layer import layer_sizes
from models.blocks.tables import PRODUCTS, stacked_parameters
from models.core.family import Family, declare
from models.core.parameters import Parameter, Slot
from models.core.ranges import COUNT, RATE, check_choices, check_ranges

# Names in the config.json of transformers' BART and its relatives -> config fields
HF_FIELDS = {
    "vocab_size": "vocab_size",
    "max_position_embeddings": "positions",
    "d_model": "width",
    "encoder_layers": "depth",
    "decoder_layers": "decoder_depth",
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), "heads"),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), "feed_forward"),
    "activation_function": "activation",
}
_TABLES = "lm_head.weight", "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"


@dataclasses.dataclass(frozen=True)
class AbsoluteConfig:
    """Sizes and rates; the defaults are those of the Transformer's base model (Vaswani et al. 2017, table 3)."""

    vocab_size: int = 37000  # number of tokens, without padding rows
    positions: int = 1024  # length of the longest sequence, in tokens
    width: int = 512  # hidden size
    depth: int = 6  # number of layers of the encoder
    decoder_depth: int = 6  # number of layers of the decoder
    heads: int = 8  # attention heads in each layer
    feed_forward: int = 2048  # width inside the feed-forward block
    activation: str = "relu"  # activation function of the feed-forward block
    dropout: float = 0.1  # dropout rate of embeddings and block outputs
    attention_dropout: float = 0.0  # dropout rate of attention probabilities

    norm_epsilon: ClassVar[float] = 1e-5

    def __post_init__(self):
        counts = dict.fromkeys(("vocab_size", "positions", "decoder_depth"), COUNT)
        check_ranges(self, counts | {"dropout": RATE, "attention_dropout": RATE}, "model.")
        check_sizes(self, "model.")
        check_choices(self, CHOICES, "model.")


class AbsoluteEncoderDecoder(EncoderDecoder):
    """Both stacks, and the embeddings that they share with the softmax.   kind: of both stacks."""

    kind: ClassVar[type[Stack]]

    def setup(self):
        super().setup()
        c = self.config
        self.tokens = token_table(self, c.vocab_size, c.width, c.init_std or c.width**-0.5)
        self.encoder = self.kind(layer_sizes(c), c.depth, self.program, rows=c.positions)
        self.decoder = self.kind(layer_sizes(c), c.decoder_depth, self.program, rows=c.positions)

    def softmax(self, hidden: Array) -> tuple[Array, Array, Array]:
        return hidden, self.tokens, padding_bias(self.config.vocab_size)


def stack_parameters(stack: str, kinds: Sequence[str] = ("self",)) -> list[Parameter]:
    """Return the table rows of a `Stack`, by the names of transformers' BART.   kinds: of attention there."""
    names = {}
    for kind in kinds:
        path = "attention" if kind == "self" else "cross_attention"
        names |= {f"{path}/{name}": f"{kind}_attn.{name[0]}_proj" for name in PRODUCTS}
        names |= {f"{path}/output": f"{kind}_attn.out_proj", f"{path}/norm": f"{kind}_attn_layer_norm"}
    names |= {"feed_forward/up": "fc1", "feed_forward/down": "fc2", "feed_forward/norm": "final_layer_norm"}
    return stacked_parameters(f"{stack}/layers", names, {"model": f"model.{stack}.layers.{{layer}}"})


def absolute_family(model_type: str, table: Callable[[Any], list[Parameter]], **others: Any) -> Family:
    """Declare a family.   model_type: in its config.json.   table: its rows beside those of tokens and stacks.
    others: as in `declare`."""
    tokens = Parameter("tokens", ("vocab", "embedding"), {"model": Slot("model.shared.weight")})
    decoder = stack_parameters("decoder", ("self", "encoder"))
    usual = {
        "inputs": INPUTS,
        "table": lambda c: [tokens, *table(c), *stack_parameters("encoder"), *decoder],
        "seen": seen,
        "attention": "self",
        "attentions": attentions,
        "constants": {"model_type": model_type, "is_encoder_decoder": True},
        "fields": HF_FIELDS,
        "settings": {"dropout": "dropout", "attention_dropout": "attention_dropout"},
        "tied": dict.fromkeys(_TABLES, "model.shared.weight"),
        "prefix": "model.",
        "zeros": ("final_logits_bias",),
    }
    return declare(usual, **others)
