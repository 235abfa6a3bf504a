"""The base class of objectives, which compute losses on the device, and the phases, tasks and teachers of a recipe."""

import abc
import dataclasses
from collections.abc import Mapping
from functools import partial
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
from models.core.program import Program
from models.core.sharding import placed_by
from models.families.registry import family_of
from pretrain.optimizers import Optimizer
from pretrain.schedules import Schedule

TEACHERS = "teachers"  # path of their parameters among the frozen ones: teachers/NAME/...


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A frozen model of a recipe that an objective needs."""

    name: str  # name by which the objective refers to it
    source: str  # work directory of a run, or a Hugging Face folder; read when the run starts, not on resume
    model: Any  # config of the model in the source
    # What the student's weights begin with: '' for nothing, embeddings (all outside of the layers), or also the layers
    # skip (every n-th), first, last, or those with these numbers, from 1 on: '1 3 5'
    copied: str = ""
    best: bool = False  # whether to read a run's best checkpoint in place of its newest


def scope(name: str) -> str:
    """Return the name scope of a teacher's computations."""
    return f"{TEACHERS}/{name}"


class Bound(NamedTuple):
    """A teacher's module with its parameters, by its name in the recipe."""

    name: str
    module: nn.Module
    params: Params

    def apply(self, *inputs, **how):
        """Call one of its methods, as `self.module.apply` does."""
        with jax.named_scope(scope(self.name)):
            return self.module.apply({"params": self.params}, *inputs, **how)


@dataclasses.dataclass(frozen=True)
class Task:
    """One of several tasks of a phase; each step trains one task."""

    name: str  # prefix of its metrics
    objective: Any
    rate: float = 1.0  # frequency relative to the other tasks, unless the phase has `rates`
    corpus: str = ""  # name of the corpus that it reads; by default all


@dataclasses.dataclass(frozen=True)
class Phase:
    """A part of the training with its own sequence length and batch size, like BERT's last 10% of steps at length 512.
    A phase of rows with further sizes, like a target length, is a subclass with fields for them (`Objective.phase`)."""

    share: float  # share of the run's steps
    length: int  # sequence length: tokens per row
    batch_size: int  # global batch size: rows per step
    _: dataclasses.KW_ONLY
    objective: Annotated[Any, Suppress] = None  # by default the recipe's, like the next two
    optimizer: Annotated[Optimizer | None, Suppress] = None
    schedule: Annotated[Schedule | None, Suppress] = None  # over the steps of this phase only
    global_base: float | None = None  # the model's in this phase, by default the recipe's
    frozen: tuple[str, ...] = ()  # path prefixes frozen in this phase, besides the recipe's
    tasks: Annotated[tuple[Task, ...], Suppress] = ()  # replace the objective
    rates: Annotated[str, Suppress] = ""  # rates of tasks by their numbers of examples, like `Recipe.mixture`

    def __str__(self) -> str:
        return f"{self.batch_size} rows of {self.length} tokens"


Batch = Mapping[str, Array]  # name -> [batch, ...]
Spec = Mapping[str, Feature]


class Moment(NamedTuple):
    """The circumstances of a loss.   keys: u32[rows, 2], one noise key per row.   train: dropout is on; else `loss` may
    return more counts.   step: i32[], number of updates so far.   teachers: of the recipe, by name."""

    keys: Array
    train: bool
    step: Array | int = 0
    teachers: Mapping[str, Bound] = MappingProxyType({})

    @property
    def noise(self) -> Noise:
        """Return the keys of a model's dropout, or None in evaluation."""
        return self.keys if self.train else None


class Term(NamedTuple):
    """A term of the loss.   sum: f32[], weighted sum of losses.   hits: f32[], of correct predictions, if any."""

    sum: Array
    hits: Array | None = None


class Sums(NamedTuple):
    """The terms of one or more batches.   weights: f32[], the denominator of each term."""

    terms: dict[str, Term]
    weights: dict[str, Array]


class Objective(abc.ABC):
    """Base of frozen dataclasses whose fields are the objective's hyper-parameters.

    The loss is sum_k c_k * S_k / W_k over named terms k: `loss` returns the sums S_k over its rows, `weights` the
    denominators W_k, of the batch alone, and `coefficients` the c_k: microbatches and devices change only rounding.

    asks: `protocols` that the model's trunk must have, and names of heads.
    predictions: term -> names of the batch's arrays with its target tokens and their weights.
    left_to_right: whether the first term predicts text token by token, so that it has perplexity and bits per byte.
    phase: class of the phases in its recipes.
    teachers: name of a frozen model -> what it must have, like `asks`.
    rowwise: whether the loss of a row depends on that row only. If not, microbatches are refused, and evaluation uses
    full batches.
    stored: how many soft targets of a place (`data_pipelines/soft_targets.py`) are in batches of training.
    per_example: counts of `loss` in evaluation with shape [rows, ...]; `report` gets them concatenated, not summed.
    """

    asks: ClassVar[tuple[type | str, ...]] = ()
    predictions: ClassVar[Mapping[str, tuple[str, str]]] = MappingProxyType({})
    left_to_right: ClassVar[bool] = False
    phase: ClassVar[type[Phase]] = Phase
    teachers: ClassVar[Mapping[str, tuple[type | str, ...]]] = MappingProxyType({})
    rowwise: ClassVar[bool] = True
    stored: ClassVar[int] = 0
    per_example: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self):
        """Check the fields; ValueError for the first problem."""
        return

    def check(self, model_config, corpus: Corpus, phase: Phase) -> None:
        """Raise UserError if this objective cannot train this model on this corpus in a phase."""
        return

    @abc.abstractmethod
    def rows(self, phase: Phase) -> Layout:
        """Return the layout by which the host makes rows. UserError if the phase does not fit it."""

    def spec(self, phase: Phase) -> Spec:
        """Return shapes and dtypes of a batch's arrays, without reading data."""
        return self.rows(phase).spec

    def examples(self, corpus: Corpus, split: str, phase: Phase, seed: int) -> Examples:
        """Make the batches of a phase from a split of a corpus, in one lane."""
        return make_examples(self.rows(phase), corpus, split, phase.batch_size, seed)

    def projections(self, model_config, teachers: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
        """Return path -> (rows, columns) of matrices beside the model that the loss needs; UserError if a teacher does
        not fit the model.   teachers: name -> config."""
        return {}

    def memory(self, model_config, train: bool) -> int:
        """Return the model's memory length in positions, in training or in evaluation."""
        return getattr(model_config, "memory", 0)

    def carry(self, model: nn.Module, phase: Phase, train: bool) -> tuple[Any, Any]:
        """Return (initial state that is passed between batches, axes of each leaf, with 'batch' for rows)."""
        return {}, {}

    def weights(self, batch: Batch) -> dict[str, Array]:
        """Compute term -> denominator f32[], from the batch alone."""
        return {term: batch[weights].sum() for term, (_, weights) in self.predictions.items()}

    def coefficients(self, step: Array | int) -> dict[str, Any]:
        """Return term -> factor in the loss."""
        return dict.fromkeys(self.predictions, 1.0)

    @abc.abstractmethod
    def loss(
        self, model: nn.Module, params: Params, batch: Batch, carry, moment: Moment
    ) -> tuple[dict[str, Term], Any, dict[str, Array]]:
        """Compute (terms, new carry, counts for `report`: sums over rows, of any shape).   params: with frozen ones."""

    def token_counts(self, corpus: Corpus, phase: Phase) -> np.ndarray:
        """Count how often each token is predicted in an epoch of the train split, up to a factor: f64[vocab]."""
        return corpus.token_counts().astype(np.float64)

    def report(self, counts: Mapping[str, Any]) -> dict[str, float]:
        """Compute metrics besides those of the terms, from counts that are summed over batches."""
        return {}


def inputs_of(model: nn.Module, batch: Batch) -> Inputs:
    """Select the arrays of a batch that the model's family declares as inputs."""
    return {name: batch[name] for name in family_of(model.config).inputs if name in batch}


def shapes_of(spec: Spec, rows: int, sharding: Sharding | None = None) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of a batch with this number of rows."""
    shape = jax.ShapeDtypeStruct
    return {name: shape((rows, *entry.shape), entry.dtype, sharding=sharding) for name, entry in spec.items()}


def initialise(key: Array, model: nn.Module, spec: Spec) -> Params:
    """Initialize the parameters of a model for batches of a spec, with one blank row as the batch. Whatever the
    program, plain operations make them: the trace is shared, without cuDNN's kernel, which `vmap` fails on."""
    model = model.clone(program=Program())
    row = inputs_of(model, {name: entry.blank(1) for name, entry in spec.items()})
    with placed_by(None):  # a mesh, for which a step may be being traced, could not divide one row
        return _initialised(model, key, row)


@partial(jax.jit, static_argnums=0)  # traced once for all that ask for the shapes or the parameters of a model
def _initialised(model: nn.Module, key: Array, row: Inputs) -> Params:
    return model.init(key, row)["params"]


AXES = {"hidden": ("layers", "batch", None, None), "segments": ("batch", None)}


def carried(memory: Memory) -> tuple[dict[str, Any], dict[str, tuple]]:
    """Return (carry, axes) of a memory; both are empty for length 0, which a checkpoint could not store."""
    return (memory._asdict(), AXES) if memory.segments.shape[1] else ({}, {})


def remembered(carry: dict[str, Any], model: nn.Module, batch_size: int) -> Memory:
    """Return the memory in a carry."""
    return Memory(**carry) if carry else model.empty_memory(batch_size, 0)
