"""What an objective is: the device half of what is learned. The host half are its examples."""

import abc
import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import numpy as np
from jax import Array
from jax.sharding import Sharding
from tyro.conf import Suppress

from data_pipelines.batches import Examples, make_examples
from data_pipelines.corpus import Corpus
from data_pipelines.examples.layout import Feature, Layout
from models.blocks.memory import Memory
from models.core.family import Inputs
from models.core.parameters import Noise, Params
from models.families.registry import family_of
from pretrain.optimizers import Optimizer
from pretrain.schedules import Schedule

TEACHERS = "teachers"  # the path of their parameters, among the frozen ones: teachers/NAME/...


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A part of a recipe."""

    name: str  # by which the objective asks for it
    source: str  # a run's work directory or a Hugging Face folder; read when the run begins, not when it goes on
    model: Any  # its config, that of the source


def scope(name: str) -> str:
    """The scope of what a teacher computes."""
    return f"{TEACHERS}/{name}"


class Bound(NamedTuple):
    """A teacher's module with its parameters, by its name in the recipe."""

    name: str
    module: nn.Module
    params: Params

    def apply(self, *inputs, method: str):
        """What one of its methods gives."""
        with jax.named_scope(scope(self.name)):
            return self.module.apply({"params": self.params}, *inputs, method=method)


@dataclasses.dataclass(frozen=True)
class Task:
    """One of several things that a phase learns, each step one of them."""

    name: str  # before its figures
    objective: Any
    rate: float = 1.0  # how often it comes, beside the others; where its phase has `rates`, these say so
    corpus: str = ""  # the name of the one that it reads; all of them unless given


@dataclasses.dataclass(frozen=True)
class Phase:
    """BERT's first one is 90% of the steps at length 128, its second 10% at 512.

    An objective whose rows have further sizes, a target's length or images per row, has a subclass with fields for
    them (`Objective.phase`).
    """

    share: float  # of the run's steps
    length: int  # tokens per row
    batch_size: int  # rows per step, over all devices
    _: dataclasses.KW_ONLY
    objective: Annotated[Any, Suppress] = None  # the recipe's unless given, as of the next two
    optimizer: Annotated[Optimizer | None, Suppress] = None
    schedule: Annotated[Schedule | None, Suppress] = None  # over the steps of this phase alone
    frozen: tuple[str, ...] = ()  # what is not trained here, beside what the recipe freezes
    tasks: Annotated[tuple[Task, ...], Suppress] = ()  # in place of the objective
    rates: Annotated[str, Suppress] = ""  # of the tasks, by their examples, in place of theirs: as `Recipe.mixture`

    def __str__(self) -> str:
        return f"{self.batch_size} rows of {self.length} tokens"


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


class Sums(NamedTuple):
    """Of a batch, or of several together. weights: the denominator of each term, f32[]."""

    terms: dict[str, Term]
    weights: dict[str, Array]


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

    def token_counts(self, corpus: Corpus, phase: Phase) -> np.ndarray:
        """f64[vocab]: how often each token is predicted in an epoch of the train split, up to a factor."""
        return corpus.token_counts().astype(np.float64)

    def report(self, counts: Mapping[str, Any]) -> dict[str, float]:
        """Figures beside those that follow from the terms, of counts summed over batches.

        In training without those of `per_example`.
        """
        return {}


def inputs_of(model: nn.Module, batch: Batch) -> Inputs:
    """The declared arrays that a batch has."""
    return {name: batch[name] for name in family_of(model.config).inputs if name in batch}


def shapes_of(spec: Spec, rows: int, sharding: Sharding | None = None) -> dict[str, jax.ShapeDtypeStruct]:
    """A batch of so many rows, as shapes and dtypes."""
    of = jax.ShapeDtypeStruct
    return {name: of((rows, *one.shape), one.dtype, sharding=sharding) for name, one in spec.items()}


def initialise(key: Array, model: nn.Module, spec: Spec) -> Params:
    """Random parameters of a model for batches of a spec; one blank row stands for the batch."""
    row = inputs_of(model, {name: one.blank(1) for name, one in spec.items()})
    return jax.jit(model.init)(key, row)["params"]


AXES = {"hidden": ("layers", "batch", None, None), "segments": ("batch", None)}


def carried(memory: Memory) -> tuple[dict[str, Any], dict[str, tuple]]:
    """(carry, axes); both are empty for a memory of no positions, which no checkpoint could hold."""
    return (memory._asdict(), AXES) if memory.segments.shape[1] else ({}, {})


def remembered(carry: dict[str, Any], model: nn.Module, batch_size: int) -> Memory:
    """The memory that a carry holds."""
    return Memory(**carry) if carry else model.empty_memory(batch_size, 0)
