"""ALBERT (Lan et al. 2020, arXiv:1909.11942): BERT's encoder with narrow embeddings and layers that share parameters.

Hugging Face: AlbertForPreTraining, AlbertForMaskedLM without the pair head, and the classes with task heads. Its
`inner_group_num` is always 1 here.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from models.attention.encoder import EncoderConfig, encoder_family
from models.blocks.heads import bert_heads, pair_head, token_head
from models.blocks.tables import PRODUCTS, dense_parameters, embedding_parameters, same_dropout, stacked_parameters
from models.core.family import Converter, read_by
from models.core.parameters import Parameter
from models.core.ranges import COUNT, check_choices, check_ranges

# config.sharing -> the blocks that layers share
SHARING = {
    "all": ("attention", "feed_forward"),
    "attention": ("attention",),
    "feed_forward": ("feed_forward",),
    "none": (),
}


@dataclasses.dataclass(frozen=True)
class AlbertConfig(EncoderConfig):
    """The fields with other defaults than BERT's, and new ones."""

    vocab_size: int = 30000  # number of tokens, without padding rows
    embedding: int = 128  # width of the embeddings
    sharing: str = "all"  # which blocks the layers of a group share: all, attention, feed_forward or none
    groups: int = 1  # groups of consecutive layers that share parameters, all of equal size
    activation: str = "gelu_new"  # activation function of the feed-forward block and the masked-token head
    dropout: float = 0.0  # dropout rate of embeddings and block outputs
    attention_dropout: float = 0.0  # dropout rate of attention probabilities
    projects: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        check_ranges(self, {"embedding": COUNT, "groups": COUNT}, "model.")
        check_choices(self, {"sharing": SHARING}, "model.")
        if self.depth % self.groups:
            raise ValueError(f"model.depth={self.depth} is not a multiple of model.groups={self.groups}")

    @property
    def shared_blocks(self) -> tuple[str, ...]:
        return SHARING[self.sharing]


LAYER = {
    **{f"attention/{name}": f"attention.{name}" for name in PRODUCTS},
    "attention/output": "attention.dense",
    "attention/norm": "attention.LayerNorm",
    "feed_forward/up": "ffn",
    "feed_forward/down": "ffn_output",
    "feed_forward/norm": "full_layer_layer_norm",
}


def parameters(config: AlbertConfig) -> list[Parameter]:
    names = {"model": "albert.encoder.embedding_hidden_mapping_in"}
    layers = {"model": "albert.encoder.albert_layer_groups.{layer}.albert_layers.0"}
    return [
        *embedding_parameters("embeddings", {"model": "albert.embeddings."}),
        *dense_parameters("project", ("embedding", "width"), names),
        *(_in_groups(config, row) for row in stacked_parameters("layers", LAYER, layers)),
    ]


def _hf_groups(config: AlbertConfig) -> int:
    """Return the number of groups in Hugging Face, whose layers share all parameters or none."""
    return config.groups if config.sharing == "all" else config.depth


def _in_groups(config: AlbertConfig, row: Parameter) -> Parameter:
    """Return a row with its block's slots for the groups of Hugging Face that share it."""
    _, block, _ = row.path.split("/", 2)
    groups, sets = _hf_groups(config), config.groups if block in config.shared_blocks else config.depth
    layers = None if sets == groups else {group: group * sets // groups for group in range(groups)}
    return row._replace(hf={part: slot._replace(layers=layers) for part, slot in row.hf.items()})


def _groups(fields: Mapping[str, Any]) -> int:
    """Read our number of groups from a config.json."""
    groups = fields.get("sharing_groups")
    return fields["num_hidden_groups"] if groups is None else groups


FAMILY = encoder_family(
    config=AlbertConfig,
    sizes={
        "tiny": AlbertConfig(embedding=64, width=128, depth=2, heads=2, feed_forward=512),
        # Lan et al. 2020, table 1, and the published checkpoints (the paper's rule would give xlarge 32 heads)
        "base": AlbertConfig(),
        "large": AlbertConfig(width=1024, depth=24, heads=16, feed_forward=4096),
        "xlarge": AlbertConfig(width=2048, depth=24, heads=16, feed_forward=8192),
        "xxlarge": AlbertConfig(width=4096, depth=12, heads=64, feed_forward=16384),
    },
    table=parameters,
    heads=bert_heads(
        "albert.pooler", pair_head("sop_classifier.classifier"), tokens=token_head("predictions", "dense", "LayerNorm")
    ),
    classes="Albert",
    model_type="albert",
    decoder="predictions",
    constants={"inner_group_num": 1},
    fields={
        "embedding_size": "embedding",
        "num_hidden_groups": Converter("groups", _hf_groups, _groups),
        # Two entries of our own, for layers that share less; transformers keeps them but does not read them.
        "sharing": read_by("sharing", lambda fields: fields.get("sharing", "all")),
        "sharing_groups": Converter("groups", lambda c: None if c.sharing == "all" else c.groups, _groups),
    },
    settings={"classifier_dropout_prob": same_dropout("hidden_dropout_prob")},
    prepare="--tokenizer sentencepiece-unigram --specials albert",
    assumed={"position_embedding_type": "absolute"},
)
FAMILIES = {"albert": FAMILY}
