"""Permutation language modelling: predict tokens in a random factorization order (Yang et al. 2019, equation 3).

Only the last 1 / K tokens of the order are predicted (section 2.3), by a query stream that sees their positions but not
the tokens. A row's memory is the reused part of the previous row.
"""

import dataclasses
from types import MappingProxyType

from data_pipelines.errors import UserError
from data_pipelines.examples.document_stream import counts_with_ends
from data_pipelines.examples.permutations import PermutedSpans, Permuting
from pretrain.objectives.cross_entropy import predicted
from pretrain.objectives.masked_language_model import PREDICTIONS
from pretrain.objectives.objective import Objective, carried, inputs_of, remembered
from pretrain.objectives.protocols import Permutable, TokenPredictor


@dataclasses.dataclass(frozen=True)
class PermutationLanguageModel(Objective):
    """The predicted tokens and their order are drawn when rows are made."""

    asks = (Permutable, TokenPredictor)
    predictions = MappingProxyType({"plm": PREDICTIONS})

    permuting: Permuting = Permuting()  # how rows are made, permuted and predicted

    def check(self, model_config, corpus, phase):
        if not self.examples(corpus, "heldout", phase, seed=0).number:
            raise UserError(
                f"--corpus {corpus.path}: its held-out split is shorter than a row of {phase.length} tokens; prepare "
                "it with a larger --heldout, or lower the length"
            )

    def rows(self, phase):
        return PermutedSpans(phase.length, self.permuting)

    def carry(self, model, phase, train):
        return carried(model.empty_memory(phase.batch_size))

    def loss(self, model, params, batch, carry, moment):
        memory = remembered(carry, model, batch["tokens"].shape[0])
        variables, noise = {"params": params}, moment.noise
        inputs = (inputs_of(model, batch), memory, batch["prediction_positions"], self.permuting.reuse_len or None)
        hidden, memory = model.apply(variables, *inputs, noise, method="query")
        logits = model.apply(variables, hidden, method="token_logits")
        term = predicted(logits, batch["prediction_targets"], batch["prediction_weights"])
        return {"plm": term}, carried(memory)[0], {}

    def token_counts(self, corpus, phase):
        return counts_with_ends(corpus)
