"""A model that an objective learns from: its parameters come from elsewhere and are never trained."""

import dataclasses
from typing import Any, NamedTuple

import flax.linen as nn
import jax

from models.core.parameters import Params

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
