"""The plain causal language model: the next token of packed documents, by a decoder without memory (Radford et al.
2018, equation 1)."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import flax.linen as nn
import jax.numpy as jnp

from data_pipelines.examples.document_stream import counts_with_ends
from data_pipelines.examples.next_tokens import InputTarget, PackedDocuments, StridedDocuments, delimiter_token
from models.core.parameters import Params
from models.core.ranges import NOT_NEGATIVE, check_ranges
from pretrain.objectives.blocked_softmax import softmax_sums
from pretrain.objectives.objective import Batch, Moment, Objective, Term, inputs_of
from pretrain.objectives.protocols import CausalDecoder

DOCUMENTS, INPUT_TARGET = "documents", "input-target"
ALL, TARGET = "all", "target"


def delimiter(objective: Objective, special: Mapping[str, int]) -> int | None:
    """The token behind the inputs of rows of input and target; None where an objective reads others."""
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
) -> dict[str, Term]:
    """The terms of a decoder's `targets`, each with weights of its own, and with a z_loss that of the first's.

    predictions: as of `Objective`.   decode: the method that gives what is known before each.   axis: of the targets,
    for the mesh.
    """
    variables = {"params": params}
    hidden = model.apply(variables, inputs_of(model, batch), moment.noise, method=decode)
    factors = model.apply(variables, hidden, method="softmax")
    weights = jnp.stack([batch[weights] for _, weights in predictions.values()])
    nats, hits, squares = softmax_sums(*factors, batch["targets"], weights, z_loss, axis)
    terms = {term: Term(nats[index], hits[index]) for index, term in enumerate(predictions)}
    return terms | ({"z": Term(squares[0])} if z_loss else {})


@dataclasses.dataclass(frozen=True)
class NextTokenPrediction(Objective):
    """Every next token is predicted, from all that the row holds before it."""

    asks = (CausalDecoder,)
    left_to_right = True
    predicts_codes: ClassVar[bool] = True  # of documents; rows of input and target only begin with theirs

    separate: bool = False  # whether tokens see their own document alone
    restart: bool = False  # whether positions begin anew in every document
    z_loss: float = 0.0  # factor of the mean square of the softmax's log-normaliser (PaLM: 1e-4)
    layout: str = DOCUMENTS  # of rows: 'documents' packed, or 'input-target', each of one of two segments
    predict: str = ALL  # of rows of input and target: 'all' or 'target', that alone
    auxiliary: float = 0.0  # then the factor of the mean loss of the input (Radford et al. 2018, section 3.2: 0.5)

    def __post_init__(self):
        check_ranges(self, dict.fromkeys(("z_loss", "auxiliary"), NOT_NEGATIVE), "objective.")
        for field, allowed in {"layout": (DOCUMENTS, INPUT_TARGET), "predict": (ALL, TARGET)}.items():
            if getattr(self, field) not in allowed:
                raise ValueError(f"objective.{field}={getattr(self, field)!r}: use one of {', '.join(allowed)}")
        if self.layout == DOCUMENTS and self.predict == TARGET:
            raise ValueError(f"objective.predict={TARGET!r}: needs objective.layout={INPUT_TARGET}")
        if self.layout == INPUT_TARGET and (self.separate or self.restart):
            raise ValueError(f"objective.layout={INPUT_TARGET!r}: a row is one document; leave separate, restart out")
        if self.auxiliary and self.predict == ALL:
            raise ValueError(f"objective.auxiliary={self.auxiliary}: needs objective.predict={TARGET}")
        if self.auxiliary and self.z_loss:
            raise ValueError(f"objective.z_loss={self.z_loss}: does not go with objective.auxiliary; leave one out")

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
    """For evaluation: of whole documents, each token once, seen from `stride` tokens further on in each row."""

    predicts_codes = False

    stride: int = 1

    def rows(self, phase):
        return StridedDocuments(phase.length, self.stride, self.separate, self.restart)
