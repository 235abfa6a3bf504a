"""Plain causal language modelling: next tokens of packed documents, without a memory (Radford et al. 2018)."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import ClassVar

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from data_pipelines.examples.document_stream import counts_with_ends
from data_pipelines.examples.next_tokens import InputTarget, PackedDocuments, StridedDocuments, delimiter_token
from models.core.parameters import Params
from models.core.ranges import NOT_NEGATIVE, check_choices, check_ranges
from pretrain.objectives.blocked_softmax import Soft, softmax_sums
from pretrain.objectives.objective import Batch, Moment, Objective, Term, inputs_of
from pretrain.objectives.protocols import CausalDecoder

DOCUMENTS, INPUT_TARGET = "documents", "input-target"
ALL, TARGET = "all", "target"


def delimiter(objective: Objective, special: Mapping[str, int]) -> int | None:
    """Return the token between input and target, or None if the objective has no such rows."""
    return delimiter_token(special) if getattr(objective, "layout", None) == INPUT_TARGET else None


def next_token_terms(
    model: nn.Module,
    params: Params,
    batch: Batch,
    predictions: Mapping[str, tuple[str, str]],
    z_loss: float,
    moment: Moment,
    decode: str = "decode",
    axis: str | None = "length",
    smoothing: float = 0.0,
) -> dict[str, Term]:
    """Compute the terms of a decoder's `targets`, one per set of weights, plus the z-loss of the first if z_loss is not
    0, and the excess that label smoothing adds to the first if smoothing is not 0.

    predictions: as in `Objective`.   decode: method that returns the hidden states.   axis: name of the targets' length
    axis, for the mesh.   smoothing: share of the target that is spread over the vocabulary.
    """
    apply = partial(model.apply, {"params": params})
    hidden = apply(inputs_of(model, batch), moment.noise, method=decode)
    return softmax_terms(apply(hidden, method="softmax"), batch, predictions, z_loss, axis, smoothing)


def softmax_terms(
    factors: tuple[Array, Array, Array],
    batch: Batch,
    predictions: Mapping[str, tuple[str, str]],
    z_loss: float,
    axis: str | None = "length",
    smoothing: float = 0.0,
    soft: tuple[str, Soft | None] = ("", None),
) -> dict[str, Term]:
    """Compute the terms of `next_token_terms` from the factors of the logits (`CausalDecoder.softmax`).   soft: name of
    the term of soft targets, and these, if there are any."""
    weights = jnp.stack([batch[weights] for _, weights in predictions.values()])
    sums = softmax_sums(*factors, batch["targets"], weights, z_loss, axis, smoothing, soft[1])
    terms = {term: Term(sums.nats[index], sums.hits[index]) for index, term in enumerate(predictions)}
    terms |= {"z": Term(sums.squares[0])} if z_loss else {}
    terms |= {soft[0]: Term(sums.soft[0])} if soft[1] else {}
    return terms | ({"smoothing": Term(sums.excess[0])} if smoothing else {})


@dataclasses.dataclass(frozen=True)
class NextTokenPrediction(Objective):
    """Every token is predicted from the tokens before it in the row."""

    asks = (CausalDecoder,)
    left_to_right = True
    predicts_codes: ClassVar[bool] = True  # control codes of documents; rows of input and target only begin with them

    separate: bool = False  # tokens attend only to their own document
    restart: bool = False  # positions restart at 0 in every document
    z_loss: float = 0.0  # factor of the mean squared log-normaliser of the softmax (PaLM: 1e-4)
    layout: str = DOCUMENTS  # of rows: 'documents' (packed) or 'input-target' (one document of two segments)
    predict: str = ALL  # in rows of input and target: predict 'all' tokens or only the 'target'
    auxiliary: float = 0.0  # with predict='target': factor of the input's mean loss (Radford et al. 2018: 0.5)

    def __post_init__(self):
        check_ranges(self, dict.fromkeys(("z_loss", "auxiliary"), NOT_NEGATIVE), "objective.")
        check_choices(self, {"layout": (DOCUMENTS, INPUT_TARGET), "predict": (ALL, TARGET)}, "objective.")
        if self.layout == DOCUMENTS and self.predict == TARGET:
            raise ValueError(f"objective.predict={TARGET!r}: needs objective.layout={INPUT_TARGET}; add it")
        if self.layout == INPUT_TARGET and (self.separate or self.restart):
            raise ValueError(f"objective.layout={INPUT_TARGET!r}: a row is one document; leave out separate, restart")
        if self.auxiliary and self.predict == ALL:
            raise ValueError(f"objective.auxiliary={self.auxiliary}: needs objective.predict={TARGET}; add it")
        if self.auxiliary and self.z_loss:
            raise ValueError(f"objective.z_loss={self.z_loss}: conflicts with objective.auxiliary; leave one out")

    def rows(self, phase):
        if self.layout == INPUT_TARGET:
            return InputTarget(phase.length, self.predict == TARGET, self.auxiliary > 0)
        return PackedDocuments(phase.length, self.separate, self.restart)

    @property
    def predictions(self):
        auxiliary = {"auxiliary": ("targets", "auxiliary_weights")} if self.auxiliary else {}
        return {"lm": ("targets", "weights")} | auxiliary

    def weights(self, batch):
        return super().weights(batch) | ({"z": batch["weights"].sum()} if self.z_loss else {})

    def coefficients(self, step):
        named = {"z": self.z_loss, "auxiliary": self.auxiliary}
        return {"lm": 1.0} | {term: factor for term, factor in named.items() if factor}

    def loss(self, model, params, batch, carry, moment):
        return next_token_terms(model, params, batch, self.predictions, self.z_loss, moment), carry, {}

    def token_counts(self, corpus, phase):
        delimiters = [delimiter_token(corpus.special)] if (self.layout, self.predict) == (INPUT_TARGET, ALL) else []
        return counts_with_ends(corpus, delimiters, codes=self.layout == DOCUMENTS and self.predicts_codes)


@dataclasses.dataclass(frozen=True)
class StridedPerplexity(NextTokenPrediction):
    """Evaluation on whole documents with a window that moves by `stride` tokens; each token is predicted once."""

    predicts_codes = False

    stride: int = 1

    def rows(self, phase):
        return StridedDocuments(phase.length, self.stride, self.separate, self.restart)
