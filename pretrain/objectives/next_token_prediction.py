"""The plain causal language model: the next token of packed documents, by a decoder without memory (Radford et al.
2018, equation 1)."""

import dataclasses
import math

import numpy as np

from data_pipelines.examples.document_stream import end_token
from data_pipelines.examples.packed_documents import PackedDocuments
from data_pipelines.examples.strided_documents import StridedDocuments
from data_pipelines.text.token_bytes import token_bytes
from models.core.ranges import NOT_NEGATIVE, check_ranges
from pretrain.objectives import baselines
from pretrain.objectives.blocked_softmax import softmax_sums
from pretrain.objectives.inputs import inputs_of
from pretrain.objectives.objective import Objective
from pretrain.objectives.protocols import CausalDecoder


@dataclasses.dataclass(frozen=True)
class NextTokenPrediction(Objective):
    """Every next token is predicted, from all that the row holds before it."""

    asks = (CausalDecoder,)

    separate: bool = False  # whether tokens see their own document alone
    restart: bool = False  # whether positions begin anew in every document
    z_loss: float = 0.0  # factor of the mean square of the softmax's log-normaliser (PaLM: 1e-4)

    def __post_init__(self):
        check_ranges(self, {"z_loss": NOT_NEGATIVE}, "objective.")

    def rows(self, phase):
        return PackedDocuments(phase.length, self.separate, self.restart)

    def weights(self, batch):
        total = batch["weights"].sum()
        return {"lm": total} | ({"z": total} if self.z_loss else {})

    def coefficients(self, step):
        return {"lm": 1.0} | ({"z": self.z_loss} if self.z_loss else {})

    def loss(self, model, params, batch, carry, moment):
        variables = {"params": params}
        hidden = model.apply(variables, inputs_of(model, batch), moment.noise, method="decode")
        factors = model.apply(variables, hidden, method="softmax")
        sums = softmax_sums(*factors, batch["targets"], batch["weights"][None], self.z_loss)
        (nats,), (hits,), (squares,) = sums
        terms = {"lm": nats} | ({"z": squares} if self.z_loss else {})
        return terms, carry, {"lm_total": batch["weights"].sum(), "lm_nats": nats, "lm_hits": hits}

    def predictions(self, phase):
        return phase.length

    def baselines(self, batches, corpus):
        targets = ((batch["targets"], batch["weights"]) for batch in batches)
        loss, accuracy = baselines.unigram(targets, corpus, end_token(corpus))
        return {"lm_loss": loss, "lm_accuracy": accuracy, "perplexity": float(np.exp(loss))}

    def of_text(self, figures, batches, corpus):
        """Bits per byte where tokens are of bytes."""
        size = token_bytes(corpus.tokenizer_path)
        if size is None:
            return {}
        weights = sum(batch["weights"].sum() for batch in batches)
        predicted = sum((size[batch["targets"]] * batch["weights"]).sum() for batch in batches)
        return {"bits_per_byte": figures["lm_loss"] * weights / max(predicted, 1) / math.log(2)}

    def report(self, counts):
        total = max(counts["lm_total"], 1)
        return {"perplexity": float(np.exp(counts["lm_nats"] / total)), "lm_accuracy": float(counts["lm_hits"] / total)}


@dataclasses.dataclass(frozen=True)
class StridedPerplexity(NextTokenPrediction):
    """For evaluation: of whole documents, each token once, seen from `stride` tokens further on in each row."""

    stride: int = 1

    def rows(self, phase):
        return StridedDocuments(phase.length, self.stride)
