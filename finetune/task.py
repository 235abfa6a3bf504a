"""What a task is: how its files become rows, its head, its loss, what it answers and how good the answers are."""

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
from pretrain.objectives.protocols import CausalDecoder

HEAD = 1 << 16  # the site of a head's noise, apart from those of a trunk
Examples = Sequence[Any]  # those of a file, each with its `where`
Outputs = Mapping[str, Any]  # name -> [rows, ...], what a model says of rows


@dataclasses.dataclass(frozen=True)
class FinetuningTask(Objective):
    """Base of tasks, one a file in finetune/tasks/. Their fields say how files are read, and the loss.

    columns, of_tokens: what a batch has of each row, and of each token, beside the tokens.   texts: that a model reads
    of each row.   sizes: further fields of its phase.
    """

    columns: ClassVar[Spec] = {}
    of_tokens: ClassVar[Spec] = {}
    texts: ClassVar[int] = 1
    sizes: ClassVar[Mapping[str, int]] = {}

    # Rows longer than the first and no longer than the second alone; 0: those of the phase
    bucket: Annotated[tuple[int, int], Suppress] = (0, 0)
    part: Annotated[tuple[int, int], Suppress] = (0, 0)  # of the model's labels those of this task; (0, 0): all
    causal: Annotated[bool, Suppress] = False  # whether the model reads from left to right
    marks_globals: Annotated[bool, Suppress] = False  # whether it is told which tokens see all and all see

    def suited(self, model_config: Any) -> Self:
        """The same task as it is for a model."""
        marks_globals = getattr(model_config, "global_projections", False)
        return dataclasses.replace(self, causal=is_causal(model_config), marks_globals=marks_globals)

    @abc.abstractmethod
    def read(self, file: Path, is_labelled: bool = True) -> Examples:
        """The examples of a file, in its order. UserError, with file and line, for what is malformed.

        is_labelled: else what is asked may be missing, and an example's `label` then is None.
        """

    def fitted(self, examples: Examples) -> Self:
        """The same task with the sizes of arrays that all of some examples fit."""
        return self

    def labels_of(self, examples: Examples) -> tuple[str, ...]:
        """What the head tells apart, from the examples to train on."""
        return ()

    @abc.abstractmethod
    def encode(self, examples: Examples, made: Made, labels: Sequence[str], length: int) -> Rows:
        """Rows of at most so many tokens. UserError, with file and line, for an example that has no such rows."""

    def scores(self, model: nn.Module, params: Params, batch: Batch, noise: Noise = None) -> dict[str, Array]:
        """What the model says of the rows of a batch: name -> [rows, ...]."""
        raise NotImplementedError

    def terms(self, outputs: Outputs, batch: Batch) -> dict[str, Term]:
        """The loss of that."""
        raise NotImplementedError

    def said(self, model: nn.Module, params: Params, batch: Batch, moment: Moment) -> tuple[Outputs, dict[str, Term]]:
        """Both; a task that has these together has neither of them alone."""
        outputs = self.scores(model, params, batch, moment.noise)
        return outputs, self.terms(outputs, batch)

    def generated(self, model: nn.Module, params: Params, mesh: Mesh, rows: Rows, made: Made) -> Outputs:
        """What a model writes of its own accord: further outputs."""
        return {}

    @abc.abstractmethod
    def answers(self, examples: Examples, rows: Rows, outputs: Outputs, labels: Sequence[str]) -> list[dict[str, Any]]:
        """Of each example what is answered, as JSON has it.

        outputs: name -> of each row an array, see `predict.Said`.
        """

    @abc.abstractmethod
    def figures(
        self, examples: Examples, answers: Sequence[Mapping[str, Any]], labels: Sequence[str]
    ) -> dict[str, float]:
        """How good answers to labelled examples are; by `best.SCORE` models are compared."""

    def chosen(self, figures: Mapping[str, float]) -> Self:
        """The same task with what is chosen by --dev, of the figures there."""
        return self

    def written(self, answers: Sequence[Mapping[str, Any]], suffix: str) -> str:
        """Answers as the content of a file whose name ends so: a JSON object a line."""
        return "".join(f"{json.dumps(answer, ensure_ascii=False)}\n" for answer in answers)

    def rows(self, phase):
        above, length = self.bucket if self.bucket[1] else (0, phase.length)
        return self.layout(above, length)

    def layout(self, above: int, length: int) -> TaskRows:
        """Of rows longer than the first and no longer than the second."""
        return TaskRows(length, above, tuple(self.columns.items()), tuple(self.of_tokens.items()), self.texts)

    def memory(self, model_config, train):
        return 0

    def loss(self, model, params, batch, carry, moment):
        return self.said(model, params, batch, moment)[1], carry, {}


def is_causal(model_config: Any) -> bool:
    """Whether a model of this config reads from left to right."""
    return isinstance(family_of(model_config).module(model_config, Program()), CausalDecoder)


def hidden_states(
    model: nn.Module, params: Params, batch: Batch, noise: Noise = None, slots: Array | None = None
) -> Array:
    """What a trunk says of each token [rows, length, width], or at slots i32[rows, n] alone [rows, n, width]."""
    inputs, variables = inputs_of(model, batch), {"params": params}
    if not isinstance(model, CausalDecoder):
        return model.apply(variables, inputs, noise, slots, method="encode")
    hidden = model.apply(variables, inputs, noise, method="decode")
    return hidden if slots is None else gather_positions(hidden, slots)


def apply_head(model: nn.Module, params: Params, name: str, hidden: Array, noise: Noise = None) -> Array:
    """The scores of a head."""
    return model.apply({"params": params}, name, hidden, site(noise, HEAD), method="apply_head")
