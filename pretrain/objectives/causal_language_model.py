"""Causal language modelling over contiguous streams of text, by models with a memory (maybe of length 0).

Segment-level recurrence: Dai et al. 2019 (arXiv:1901.02860), section 3.2. Row b of a batch continues row b of the
previous batch, so that the model's memory holds the text just before the row.
"""

import dataclasses
from collections.abc import Sequence
from types import MappingProxyType

import jax.numpy as jnp
import numpy as np

from data_pipelines.errors import UserError
from data_pipelines.examples.document_stream import counts_with_ends
from data_pipelines.examples.next_tokens import ContiguousStreams
from models.core.program import Program
from models.core.ranges import COUNT_OR_NONE, check_ranges
from models.families.registry import family_of
from pretrain.objectives.cross_entropy import adaptive_cross_entropy, predicted
from pretrain.objectives.objective import Objective, Term, carried, inputs_of, remembered
from pretrain.objectives.protocols import AdaptivePredictor, Recurrent


@dataclasses.dataclass(frozen=True)
class CausalLanguageModel(Objective):
    """Every token is predicted from the tokens before it in the row and its memory."""

    asks = (Recurrent, AdaptivePredictor)
    predictions = MappingProxyType({"lm": ("targets", "weights")})
    left_to_right = True

    reset: bool = False  # clear the memory at the end of a document; else the next document sees it
    evaluation_memory: int | None = None  # memory length in evaluation, by default as in training

    def __post_init__(self):
        if self.evaluation_memory is not None:
            check_ranges(self, {"evaluation_memory": COUNT_OR_NONE}, "objective.")

    def check(self, model_config, corpus, phase):
        clusters = family_of(model_config).module(model_config, Program()).clusters
        if clusters:  # reading counts is cheap even in a bucket: each part has a file of them
            _check_order(clusters, corpus.token_counts())

    def rows(self, phase):
        return ContiguousStreams(phase.length, self.reset)

    def memory(self, model_config, train):
        return model_config.memory if train or self.evaluation_memory is None else self.evaluation_memory

    def carry(self, model, phase, train):
        return carried(model.empty_memory(phase.batch_size, self.memory(model.config, train)))

    def loss(self, model, params, batch, carry, moment):
        variables = {"params": params}
        memory = remembered(carry, model, batch["tokens"].shape[0])
        inputs = (inputs_of(model, batch), memory, moment.noise)
        hidden, memory = model.apply(variables, *inputs, method="read")
        logits = model.apply(variables, hidden, method="token_logits")
        if model.clusters:
            tails = model.apply(variables, hidden, method="tails")
            losses = adaptive_cross_entropy(logits, tails, batch["targets"].reshape(-1), model.clusters)
            term = Term(jnp.sum(losses * batch["weights"].reshape(-1)))
        else:
            term = predicted(logits, batch["targets"], batch["weights"])
        return {"lm": term}, carried(memory)[0], {}

    def token_counts(self, corpus, phase):
        return counts_with_ends(corpus)


def _check_order(cutoffs: Sequence[int], counts: np.ndarray) -> None:
    """Raise UserError unless clusters that start at these tokens have falling mean frequencies."""
    means = [cluster.mean() for cluster in np.split(counts, cutoffs)]
    for cutoff, before, after in zip(cutoffs, means[:-1], means[1:], strict=True):
        if after > before:
            raise UserError(
                f"model.cutoffs={tuple(cutoffs)}: tokens from {cutoff} on are more frequent in the corpus ({after:.1f} "
                f"times on average) than those before ({before:.1f}), but clusters need falling frequencies; prepare "
                "it with --tokenizer wordlevel, or give --model.cutoffs no numbers"
            )
