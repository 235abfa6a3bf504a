"""The interface of a task: how it reads files and encodes rows, its head, its loss, its answers and their metrics."""

import abc
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import flax.linen as nn
from jax import Array
from jax.sharding import Mesh
from tyro.conf import Suppress

from data_pipelines.tokenizers.made import Made
from finetune.rows import Rows, TaskRows
from models.blocks.positions import gather_positions
from models.core.noise import site
from models.core.parameters import Noise, Params
from models.core.program import Program
from models.families.registry import family_of
from pretrain.objectives.objective import Batch, Moment, Objective, Spec, Term, inputs_of
from pretrain.objectives.protocols import CausalDecoder, EncoderDecoder

HEAD = 1 << 16  # the site of a head's noise, different from all sites of the trunk
Examples = Sequence[Any]  # of one file; `where` of each is its file and line
Outputs = Mapping[str, Any]  # name -> [rows, ...], outputs of a model
Terms = dict[str, Term]  # of a loss, by name
Answers = Sequence[Mapping[str, Any]]  # a JSON object for each example


@dataclasses.dataclass(frozen=True)
class FinetuningTask(Objective):
    """Base class of tasks, each in a file of finetune/tasks/. Their fields are options for files and the loss.

    columns, of_tokens: the arrays of a batch for each row and for each token, besides the tokens.   texts: number of
    texts in each row that a model reads.   sizes: further fields of the phase.
    """

    columns: ClassVar[Spec] = {}
    of_tokens: ClassVar[Spec] = {}
    texts: ClassVar[int] = 1
    sizes: ClassVar[Mapping[str, int]] = {}

    # Only rows longer than the first number and no longer than the second; (0, 0): all rows of the phase
    bucket: Annotated[tuple[int, int], Suppress] = (0, 0)
    part: Annotated[tuple[int, int], Suppress] = (0, 0)  # range of the model's labels that this task uses; (0, 0): all
    causal: Annotated[bool, Suppress] = False  # whether the model reads from left to right
    at_end: Annotated[bool, Suppress] = False  # whether heads read a row at its last token
    marks_globals: Annotated[bool, Suppress] = False  # whether the model reads which tokens are global

    def suited(self, model_config: Any) -> Self:
        """Return this task adapted to a model."""
        module = family_of(model_config).module(model_config, Program())
        return dataclasses.replace(
            self,
            causal=isinstance(module, CausalDecoder),
            at_end=isinstance(module, CausalDecoder | EncoderDecoder),
            marks_globals=getattr(model_config, "global_projections", False),
        )

    @abc.abstractmethod
    def read(self, file: Path, is_labelled: bool = True) -> Examples:
        """Return the examples of a file, in file order. UserError with file and line if malformed.
        is_labelled: if false, labels may be missing; the `label` of such an example is None."""

    def fitted(self, examples: Examples) -> Self:
        """Return this task with array sizes that fit all these examples."""
        return self

    def labels_of(self, examples: Examples) -> tuple[str, ...]:
        """Return the labels that the head predicts, from the training examples."""
        return ()

    @abc.abstractmethod
    def encode(self, examples: Examples, made: Made, labels: Sequence[str], length: int) -> Rows:
        """Return rows of at most `length` tokens. UserError with file and line for an example that does not fit."""

    def scores(self, model: nn.Module, params: Params, batch: Batch, noise: Noise = None) -> dict[str, Array]:
        """Return the model's outputs for the rows of a batch: name -> [rows, ...]."""
        raise NotImplementedError

    def terms(self, outputs: Outputs, batch: Batch) -> Terms:
        """Return the loss terms of these outputs."""
        raise NotImplementedError

    def forward(self, model: nn.Module, params: Params, batch: Batch, moment: Moment) -> tuple[Outputs, Terms]:
        """Return outputs and loss terms; a task may implement this instead of `scores` and `terms`."""
        outputs = self.scores(model, params, batch, moment.noise)
        return outputs, self.terms(outputs, batch)

    def generated(self, model: nn.Module, params: Params, mesh: Mesh, rows: Rows, made: Made) -> Outputs:
        """Return further outputs: texts that the model generates."""
        return {}

    @abc.abstractmethod
    def answers(self, examples: Examples, rows: Rows, outputs: Outputs, labels: Sequence[str]) -> list[dict[str, Any]]:
        """Return the answer to each example as a JSON object.
        outputs: name -> an array for each row, see `predict.Predictions`."""

    @abc.abstractmethod
    def figures(self, examples: Examples, answers: Answers, labels: Sequence[str]) -> dict[str, float]:
        """Return the metrics of answers to labelled examples; `best.SCORE` is the one that selects models."""

    def chosen(self, figures: Mapping[str, float]) -> Self:
        """Return this task with the settings that were chosen on --dev, from the metrics there."""
        return self

    def written(self, answers: Answers, suffix: str) -> str:
        """Return the content of an answer file whose name ends in `suffix`: one JSON object a line."""
        return "".join(f"{json.dumps(answer, ensure_ascii=False)}\n" for answer in answers)

    def rows(self, phase):
        above, length = self.bucket if self.bucket[1] else (0, phase.length)
        return self.layout(above, length)

    def layout(self, above: int, length: int) -> TaskRows:
        """Return the layout of rows longer than `above` and no longer than `length` tokens."""
        return TaskRows(length, above, tuple(self.columns.items()), tuple(self.of_tokens.items()), self.texts)

    def memory(self, model_config, train):
        return 0

    def loss(self, model, params, batch, carry, moment):
        return self.forward(model, params, batch, moment)[1], carry, {}


def is_causal(model_config: Any) -> bool:
    """Return whether a model of this config reads from left to right."""
    return isinstance(family_of(model_config).module(model_config, Program()), CausalDecoder)


def hidden_states(model: nn.Module, params: Params, batch: Batch, noise: Noise = None, slots: Any = None, **how) -> Any:
    """Return the trunk's hidden states [rows, length, width], or only those at slots i32[rows, n]: [rows, n, width].
    how: of `model.apply`, like `mutable`, with which it also returns what the model records."""
    inputs, variables = inputs_of(model, batch), {"params": params}
    if not isinstance(model, CausalDecoder | EncoderDecoder):
        return model.apply(variables, inputs, noise, slots, method="encode", **how)
    method = "decode" if isinstance(model, CausalDecoder) else "decode_again"
    hidden = model.apply(variables, inputs, noise, method=method, **how)
    return hidden if slots is None else gather_positions(hidden, slots)


def apply_head(model: nn.Module, params: Params, name: str, hidden: Array, noise: Noise = None) -> Array:
    """Return the scores of a head."""
    return model.apply({"params": params}, name, hidden, site(noise, HEAD), method="apply_head")
