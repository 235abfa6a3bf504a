"""The encoder that BERT and similar families share: config, module, attention statistics, and a function that declares
such a family."""

import dataclasses
from typing import Any, ClassVar

import flax.linen as nn
from jax import Array

from models.attention.kernels.kernel import Attention
from models.attention.mask import Mask
from models.attention.multi_head import attention_of
from models.attention.patterns.pairs import pairs
from models.attention.patterns.pattern import Pattern, blocks_of
from models.attention.transformer import encode
from models.blocks import tables
from models.blocks.config import TABLES, TrunkConfig
from models.blocks.embeddings import Embeddings, Term
from models.blocks.heads import WithHeads, usual_classes
from models.blocks.layer import layer_sizes
from models.core.family import Family, Head, Input, Inputs, Shape, declare
from models.core.parameters import Noise, Parameter
from models.core.ranges import check_ranges

INPUTS = {
    **dict.fromkeys(("tokens", "types", "segments"), Input(("length",))),
    "globals": Input(("globals",), required=False),  # of a sparse pattern, see `Mask.globals`
}


@dataclasses.dataclass(frozen=True)
class EncoderConfig(TrunkConfig):
    """Sizes and rates of an encoder; the defaults are those of BERT-base."""

    positions: int = 512  # length of the longest sequence, in tokens
    types: int = 2  # number of segment types (A, B)
    pattern: Pattern = Pattern()  # which keys a query sees
    labels: tuple[str, ...] = ()  # classes of a task head

    def __post_init__(self):
        check_ranges(self, TABLES, "model.")
        super().__post_init__()

    # Descendants override these.
    projects: ClassVar[bool] = False  # whether a projection leads from embeddings to layers, which may differ in width
    global_projections: ClassVar[bool] = False  # whether global tokens have projections of their own
    padding_positions: ClassVar[int] = 0  # `padding` of the `Term` for positions
    shared_blocks: ClassVar[tuple[str, ...]] = ()  # blocks whose parameters layers share
    groups: ClassVar[int] = 1  # into how many groups of consecutive layers that share parameters

    @property
    def terms(self) -> tuple[Term, ...]:
        """The embeddings that are added to those of tokens."""
        positions = Term("positions", self.positions, "positions", by_place=True, padding=self.padding_positions)
        return positions, Term("types", self.types, "types")


class Encoder(WithHeads):
    """Embeddings and layers.   layer: their class, called with config and program, if not `TransformerLayer`."""

    layer: ClassVar[type[nn.Module] | None] = None

    def setup(self):
        super().setup()
        c = self.config
        self.embeddings = Embeddings(c.vocab_size, c.embedding, c.terms, c.norm_epsilon, c.init_std)

    def mask(self, inputs: Inputs) -> Mask:
        """Return which tokens see which."""
        return Mask(inputs["segments"], globals=inputs.get("globals"))

    @nn.compact
    def encode(self, inputs: Inputs, noise: Noise = None, slots: Array | None = None) -> Array:
        """Run the trunk -> [rows, length, width]. Dropout is on if noise u32[rows, 2] is given.
        slots: i32[rows, n], the positions whose output is wanted -> [rows, n, width]; the last layer then computes no
        others."""
        embedded, mask = self.embeddings(inputs), self.mask(inputs)
        layer = self.layer and self.layer(self.config, self.program, parent=None)
        return encode(self, self.config, embedded, mask, noise, self.program, slots, layer)


def attentions(config: EncoderConfig, shape: Shape, memory: int) -> list[Attention]:
    """Return the attentions that a kernel may compute: all layers; without a sparse pattern not the last one, which is
    computed at few positions."""
    blocks = blocks_of(config.pattern, config.depth, config.heads, shape.length)
    return [attention_of(layer_sizes(config), shape.length, blocks=blocks)] * (config.depth > 1 or blocks is not None)


def seen(config: EncoderConfig, shape: Shape) -> float:
    """Return the share of (query, key) pairs that the pattern leaves visible. Global tokens that rows name are few and
    not counted."""
    return float(pairs(config.pattern, config.depth, config.heads, shape.length).mean()) / shape.length**2


def encoder_family(
    model_type: str, heads: tuple[Head, ...], classes: str = "", decoder: str = "", names: str = "", **others: Any
) -> Family:
    """Declare the family of BERT or of a descendant, by its differences from BERT.

    model_type: in its config.json.   names: the prefix of its trunk's tensors, by default model_type.
    classes: how the names of its classes begin, see `usual_classes`.
    decoder: the prefix of the masked-token head's output layer, which is tied to the embeddings; '' without that head.
    others: as in `declare`.
    """
    names = names or model_type
    tied = {
        f"{decoder}.decoder.weight": f"{names}.embeddings.word_embeddings.weight",
        f"{decoder}.decoder.bias": f"{decoder}.bias",
    }
    usual = {
        "inputs": INPUTS,
        "trunk": Encoder,
        "table": lambda c: encoder_parameters(names, c.padding_positions),
        "seen": seen,
        "attention": "self",
        "attentions": attentions,
        "architectures": usual_classes(classes, heads),
        "constants": {"model_type": model_type},
        "fields": tables.HF_FIELDS | tables.HF_SIZES,
        "settings": tables.HF_SETTINGS,
        "tied": tied if decoder else {},
        "prefix": f"{names}.",
        "assumed": tables.HF_ASSUMED,
    }
    return declare(usual, heads=heads, **others)


def encoder_parameters(names: str, padding_positions: int = 0) -> list[Parameter]:
    """Return the parameter table of an `Encoder`.   names: the prefix of its Hugging Face tensors."""
    return [
        *tables.embedding_parameters("embeddings", {"model": f"{names}.embeddings."}, padding_positions),
        *tables.layer_parameters("layers", "model", names),
    ]
