"""Permutation language modelling: predict tokens in a random order of factorisation (Yang et al. 2019, equation 3).

Only the last 1 / K of the order are predicted (section 2.3), by a query stream that knows their positions and not
their tokens; a row's memory is the reused part of the row before it.
"""

import dataclasses

import jax.numpy as jnp

from data_pipelines.errors import UserError
from data_pipelines.examples import permutations
from data_pipelines.examples.document_stream import end_token
from data_pipelines.examples.permutations import Permuting
from pretrain.objectives import baselines, layouts
from pretrain.objectives.cross_entropy import cross_entropy
from pretrain.objectives.initialise import initialise
from pretrain.objectives.memory import carried, remembered
from pretrain.objectives.objective import Objective

INPUTS = ("tokens", "types", "segments", "ranks", "thresholds", "reversed", "prediction_positions")


@dataclasses.dataclass(frozen=True)
class PermutationLanguageModel(Objective):
    """The model offers predict and empty_memory, as `models.families.xlnet.XLNet` does."""

    permuting: Permuting = Permuting()  # how rows are made, permuted and predicted

    def check_phase(self, phase):
        permutations.check_shape(phase.length, phase.batch_size, self.permuting)

    def check(self, model_config, corpus, phases):
        for phase in phases:
            self.examples(corpus, "train", phase.length, phase.batch_size, seed=0).check_size()
            if not self.examples(corpus, "heldout", phase.length, phase.batch_size, seed=0).number:
                raise UserError(
                    f"--corpus {corpus.path}: its held-out split is shorter than a row of {phase.length}; prepare it "
                    "with a larger --heldout, or lower the length"
                )

    def spec(self, length):
        return permutations.spec(length, self.permuting)

    def examples(self, corpus, split, length, batch_size, seed):
        return permutations.PermutedSpans(corpus, split, length, batch_size, seed, self.permuting)

    def init(self, key, model, spec):
        return initialise(key, model, spec, ("tokens", "types", "segments", "prediction_positions"))

    def carry(self, model, batch_size, train):
        return carried(model.empty_memory(batch_size))

    def weights(self, batch):
        return {"plm": batch["prediction_weights"].sum()}

    def coefficients(self, step):
        return {"plm": 1.0}

    def loss(self, model, params, batch, carry, keys, train):
        memory = remembered(carry, model, batch["tokens"].shape[0])
        inputs = (*(batch[name] for name in INPUTS), memory, self.permuting.reuse_len or None, keys if train else None)
        logits, memory = model.apply({"params": params}, *inputs, method="predict")
        losses, hits = cross_entropy(logits, batch["prediction_targets"].reshape(-1))
        weights = batch["prediction_weights"].reshape(-1)
        counts = {"plm_hits": jnp.sum(hits * weights), "plm_total": weights.sum()}
        return {"plm": jnp.sum(losses * weights)}, carried(memory)[0], counts

    def predictions(self, length):
        return permutations.predictions(length, self.permuting)

    def baselines(self, batches, corpus):
        loss, accuracy = baselines.unigram(layouts.targets(batches), corpus, end_token(corpus))
        return {"plm_loss": loss, "plm_accuracy": accuracy}

    def report(self, counts):
        return {"plm_accuracy": float(counts["plm_hits"] / max(counts["plm_total"], 1))}
