"""What an objective is: the device half of what is learned. The host half are its examples."""

import abc
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import numpy as np
from jax import Array

from data_pipelines.batches import Examples, make_examples
from data_pipelines.corpus import Corpus
from data_pipelines.examples.layout import Feature, Layout
from models.core.parameters import Noise, Params
from pretrain.objectives.phase import Phase
from pretrain.objectives.teacher import Bound

Batch = Mapping[str, Array]  # name -> [batch, ...]
Spec = Mapping[str, Feature]


class Moment(NamedTuple):
    """When a loss is computed.

    keys: u32[rows, 2] noise keys, one per row.   train: whether dropout is on; evaluation may count more.
    step: i32[], how many updates were made before.   teachers: by name, those of the recipe.
    """

    keys: Array
    train: bool
    step: Array | int = 0
    teachers: Mapping[str, Bound] = MappingProxyType({})

    @property
    def noise(self) -> Noise:
        """What switches a model's dropout on."""
        return self.keys if self.train else None


class Term(NamedTuple):
    """A term of the loss over some rows.

    sum: f32[], of the losses.   hits: f32[], of the predictions how many are the best guess, weighted as the losses;
    None where nothing is guessed.
    """

    sum: Array
    hits: Array | None = None


class Objective(abc.ABC):
    """Base of frozen dataclasses whose fields are the objective's hyper-parameters.

    The loss is sum_k c_k * S_k / W_k over named terms k: `loss` gives the sums S_k over the rows that it is handed,
    `weights` the denominators W_k from the batch alone, `coefficients` the c_k. So microbatches, padding and devices
    change nothing but rounding.

    asks: of the model, `protocols` that its trunk must have and names of heads that read it.
    predictions: term -> the batch's arrays of the tokens that it predicts and of their weights.
    left_to_right: whether its first term predicts text token by token: perplexity and bits per byte are of it.
    phase: the class of its recipes' phases.
    teachers: name -> what is asked of each frozen model beside it.
    rowwise: whether a row's loss depends on that row alone, or else on others too: no microbatch has these, and
    held-out figures are then of whole batches alone.
    per_example: of `loss`'s counts in evaluation, those that are [rows, ...]; `report` gets them joined, not summed.
    """

    asks: ClassVar[tuple[type | str, ...]] = ()
    predictions: ClassVar[Mapping[str, tuple[str, str]]] = MappingProxyType({})
    left_to_right: ClassVar[bool] = False
    phase: ClassVar[type[Phase]] = Phase
    teachers: ClassVar[Mapping[str, tuple[type | str, ...]]] = MappingProxyType({})
    rowwise: ClassVar[bool] = True
    per_example: ClassVar[tuple[str, ...]] = ()

    def check(self, model_config, corpus: Corpus, phase: Phase) -> None:
        """UserError when this objective cannot train this model on this corpus in a phase."""
        return

    @abc.abstractmethod
    def rows(self, phase: Phase) -> Layout:
        """The host half: how rows are made. UserError for a phase that they do not fit."""

    def spec(self, phase: Phase) -> Spec:
        """The arrays of a batch, known without data."""
        return self.rows(phase).spec

    def examples(self, corpus: Corpus, split: str, phase: Phase, seed: int) -> Examples:
        """The batches of a phase, of a split of a corpus, in one lane."""
        return make_examples(self.rows(phase), corpus, split, phase.batch_size, seed)

    def memory(self, model_config, train: bool) -> int:
        """Positions before a row that a model remembers, in training or in evaluation."""
        return getattr(model_config, "memory", 0)

    def carry(self, model: nn.Module, phase: Phase, train: bool) -> tuple[Any, Any]:
        """State that passes between batches, and the axes of each leaf ('batch' where rows are)."""
        return {}, {}

    def weights(self, batch: Batch) -> dict[str, Array]:
        """Term -> its denominator f32[], from the batch alone."""
        return {term: batch[weights].sum() for term, (_, weights) in self.predictions.items()}

    def coefficients(self, step: Array | int) -> dict[str, Any]:
        """Term -> its factor."""
        return dict.fromkeys(self.predictions, 1.0)

    @abc.abstractmethod
    def loss(
        self, model: nn.Module, params: Params, batch: Batch, carry, moment: Moment
    ) -> tuple[dict[str, Term], Any, dict[str, Array]]:
        """(its terms, the new carry, counts for `report`, sums over rows of any shape).

        params: the trained and the frozen ones.
        """

    def token_counts(self, corpus: Corpus) -> np.ndarray:
        """f64[vocab]: how often each token is predicted in an epoch of the train split, up to a factor."""
        return corpus.token_counts().astype(np.float64)

    def report(self, counts: Mapping[str, Any]) -> dict[str, float]:
        """Figures beside those that follow from the terms, of counts summed over batches.

        In training without those of `per_example`.
        """
        return {}
