"""DistilBERT (Sanh et al. 2019, arXiv:1910.01108): BERT's encoder with half the layers, without token types and pooler.

Hugging Face: DistilBertForMaskedLM and the classes with task heads, whose `qa_dropout` and `seq_classif_dropout` are
the model's dropout.
"""

import dataclasses
from typing import ClassVar

from models.attention.encoder import INPUTS, EncoderConfig, encoder_family
from models.blocks import tables
from models.blocks.checks import check_encoder
from models.blocks.embeddings import Term
from models.blocks.heads import CHOICE, CLASSIFIER, SPANS, TOKENS, WORD_HEADS, task_classes, task_head, token_head
from models.core.parameters import LAYERS, Parameter
from models.core.ranges import COUNT, check_ranges


@dataclasses.dataclass(frozen=True)
class DistilBertConfig(EncoderConfig):
    """The fields with other defaults than BERT's."""

    depth: int = 6  # number of layers
    types: ClassVar[int] = 0
    norm_epsilon: ClassVar[float] = 1e-12

    def __post_init__(self):
        check_ranges(self, {"positions": COUNT}, "model.")
        check_encoder(self)

    @property
    def terms(self) -> tuple[Term, ...]:
        """The embeddings that are added to those of tokens."""
        return (Term("positions", self.positions, "positions", by_place=True),)


def parameters(config: DistilBertConfig) -> list[Parameter]:
    """Return the parameter table of the trunk."""
    layer = [  # parameter, its name in Hugging Face's layer, axes of its kernel or scale
        *((f"attention/{name}", f"attention.{name[0]}_lin", "width", "heads") for name in ("query", "key", "value")),
        ("attention/output", "attention.out_lin", "heads", "width"),
        ("attention/norm", "sa_layer_norm", "width"),
        ("feed_forward/up", "ffn.lin1", "width", "feed_forward"),
        ("feed_forward/down", "ffn.lin2", "feed_forward", "width"),
        ("feed_forward/norm", "output_layer_norm", "width"),
    ]
    table = tables.embedding_parameters("embeddings", {"model": "distilbert.embeddings."})
    table = [row for row in table if row.path != "embeddings/types"]
    for path, name, *axes in layer:
        make = tables.dense_parameters if len(axes) == 2 else tables.norm_parameters
        table += make(f"layers/{path}", (LAYERS, *axes), {"model": f"distilbert.transformer.layer.{{layer}}.{name}"})
    return table


_TOKENS = tables.token_head_parameters(TOKENS, "vocab_transform", "vocab_layer_norm", "vocab_projector.bias")
_FIELDS = {"vocab_size": "vocab_size", "max_position_embeddings": "positions", "activation": "activation"}
_FIELDS |= {"dim": "width", "n_layers": "depth", "n_heads": "heads", "hidden_dim": "feed_forward"}
_SETTINGS = dict.fromkeys(("qa_dropout", "seq_classif_dropout"), tables.same_dropout("dropout"))
_SETTINGS |= {"dropout": "dropout", "attention_dropout": "attention_dropout", "initializer_range": "init_std"}
_PRE = {"dense": "pre_classifier", "between": "relu", "summary": True}
_FAMILY = encoder_family(
    config=DistilBertConfig,
    sizes={
        "tiny": DistilBertConfig(width=128, depth=2, heads=2, feed_forward=512),  # not published
        "base": DistilBertConfig(),  # Sanh et al. 2019, section 3
    },
    table=parameters,
    heads=(
        dataclasses.replace(token_head(""), parameters=tuple(_TOKENS)),
        task_head(CLASSIFIER, "classifier", **_PRE),
        *(task_head(SPANS, "qa_outputs", features=2) if head.name == SPANS else head for head in WORD_HEADS),
        task_head(CHOICE, "classifier", features=1, **_PRE),
    ),
    architectures={
        "DistilBertForMaskedLM": (TOKENS,),
        **task_classes("DistilBert", CLASSIFIER),
        "DistilBertForMultipleChoice": (CHOICE,),
    },
    model_type="distilbert",
    assumed={"sinusoidal_pos_embds": False},
    continues={"bert": {}},
)
_HF = _FAMILY.hf["model"]._replace(
    fields=_FIELDS,
    settings=_SETTINGS,
    tied={"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"},
)
FAMILY = _FAMILY._replace(inputs={name: INPUTS[name] for name in ("tokens", "segments", "globals")}, hf={"model": _HF})
