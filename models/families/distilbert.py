"""DistilBERT (Sanh et al. 2019, arXiv:1910.01108): BERT's encoder with half the layers, without token types and pooler.

Hugging Face: DistilBertForMaskedLM and the classes with task heads, whose `qa_dropout` and `seq_classif_dropout` are
the model's dropout.
"""

import dataclasses
from typing import ClassVar

from models.attention.encoder import INPUTS, EncoderConfig, encoder_family
from models.blocks import tables
from models.blocks.config import TrunkConfig, sized
from models.blocks.embeddings import Term
from models.blocks.heads import CHOICE, CLASSIFIER, SPANS, TOKENS, WORD_HEADS, task_head, token_head
from models.core.parameters import Parameter
from models.core.ranges import COUNT, check_ranges


@dataclasses.dataclass(frozen=True)
class DistilBertConfig(EncoderConfig):
    """The fields with other defaults than BERT's."""

    depth: int = 6  # number of layers
    types: ClassVar[int] = 0
    norm_epsilon: ClassVar[float] = 1e-12

    def __post_init__(self):
        check_ranges(self, {"positions": COUNT}, "model.")
        TrunkConfig.__post_init__(self)

    @property
    def terms(self) -> tuple[Term, ...]:
        """The embeddings that are added to those of tokens."""
        return (Term("positions", self.positions, "positions", by_place=True),)


_LAYER = {  # parameter -> its name in Hugging Face's layer
    **{f"attention/{name}": f"attention.{name[0]}_lin" for name in tables.PRODUCTS},
    "attention/output": "attention.out_lin",
    "attention/norm": "sa_layer_norm",
    "feed_forward/up": "ffn.lin1",
    "feed_forward/down": "ffn.lin2",
    "feed_forward/norm": "output_layer_norm",
}


def parameters(config: DistilBertConfig) -> list[Parameter]:
    table = tables.embedding_parameters("embeddings", {"model": "distilbert.embeddings."})
    table = [row for row in table if row.path != "embeddings/types"]
    return table + tables.stacked_parameters("layers", _LAYER, {"model": "distilbert.transformer.layer.{layer}"})


_TOKENS = tables.token_head_parameters(TOKENS, "vocab_transform", "vocab_layer_norm", "vocab_projector.bias")
_FIELDS = {"vocab_size": "vocab_size", "max_position_embeddings": "positions", "activation": "activation"}
_FIELDS |= {"dim": "width", "n_layers": "depth", "n_heads": "heads", "hidden_dim": "feed_forward"}
_SETTINGS = dict.fromkeys(("qa_dropout", "seq_classif_dropout"), tables.same_dropout("dropout"))
_SETTINGS |= {"dropout": "dropout", "attention_dropout": "attention_dropout", "initializer_range": "init_std"}
_PRE = {"dense": "pre_classifier", "between": "relu", "summary": True}
_FAMILY = encoder_family(
    config=DistilBertConfig,
    sizes={
        "tiny": sized(DistilBertConfig, 2, 128),
        "base": DistilBertConfig(),  # Sanh et al. 2019, section 3
    },
    table=parameters,
    inputs={name: INPUTS[name] for name in ("tokens", "segments", "globals")},
    heads=(
        dataclasses.replace(token_head(""), parameters=tuple(_TOKENS)),
        task_head(CLASSIFIER, "classifier", **_PRE),
        *WORD_HEADS[:-1],
        task_head(SPANS, "qa_outputs", features=2),
        task_head(CHOICE, "classifier", features=1, **_PRE),
    ),
    classes="DistilBert",
    model_type="distilbert",
    tied={"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"},
    assumed={"sinusoidal_pos_embds": False},
    continues={"bert": {}},
)
FAMILY = _FAMILY._replace(hf={"model": _FAMILY.hf["model"]._replace(fields=_FIELDS, settings=_SETTINGS)})
FAMILIES = {"distilbert": FAMILY}
