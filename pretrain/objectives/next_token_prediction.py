"""The plain causal language model: the next token of packed documents, by a decoder without memory (Radford et al.
2018, equation 1)."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from data_pipelines.examples.document_stream import end_token
from data_pipelines.examples.packed_documents import PackedDocuments
from pretrain.objectives import baselines
from pretrain.objectives.cross_entropy import cross_entropy
from pretrain.objectives.inputs import inputs_of
from pretrain.objectives.objective import Objective
from pretrain.objectives.protocols import CausalDecoder


@dataclasses.dataclass(frozen=True)
class NextTokenPrediction(Objective):
    """Every next token is predicted, from all that the row holds before it."""

    asks = (CausalDecoder,)

    separate: bool = False  # whether tokens see their own document alone
    restart: bool = False  # whether positions begin anew in every document

    def rows(self, phase):
        return PackedDocuments(phase.length, self.separate, self.restart)

    def weights(self, batch):
        return {"lm": batch["weights"].sum()}

    def coefficients(self, step):
        return {"lm": 1.0}

    def loss(self, model, params, batch, carry, moment):
        variables = {"params": params}
        hidden = model.apply(variables, inputs_of(model, batch), moment.noise, method="decode")
        logits = model.apply(variables, hidden, method="token_logits")
        losses, hits = cross_entropy(logits, batch["targets"].reshape(-1))
        weights = batch["weights"].reshape(-1)
        total = jnp.sum(losses * weights)
        return {"lm": total}, carry, {"lm_total": weights.sum(), "lm_nats": total, "lm_hits": jnp.sum(hits * weights)}

    def predictions(self, phase):
        return phase.length

    def baselines(self, batches, corpus):
        targets = ((batch["targets"], batch["weights"]) for batch in batches)
        loss, accuracy = baselines.unigram(targets, corpus, end_token(corpus))
        return {"lm_loss": loss, "lm_accuracy": accuracy, "perplexity": float(np.exp(loss))}

    def report(self, counts):
        total = max(counts["lm_total"], 1)
        return {"perplexity": float(np.exp(counts["lm_nats"] / total)), "lm_accuracy": float(counts["lm_hits"] / total)}
