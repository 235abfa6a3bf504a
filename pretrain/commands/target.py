"""What `python -m tpu plan` is given: a recipe and a slice."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pretrain.commands.arguments import parse_recipe

if TYPE_CHECKING:
    from pretrain.recipe import Recipe

CACHE = Path.home() / ".cache" / "pretrain-plans"


@dataclasses.dataclass(frozen=True)
class Target:
    """What a recipe is planned for; the fields that `pretrain run` has too mean the same."""

    topology: str
    """A slice: GENERATION:SHAPE like v5e:4x4, or Google Cloud's name like v5litepod-16."""
    mesh: str | None = None
    """How the devices share the work, like data=4,fsdp=4; slice=2 for two slices. By default what suits the model."""
    microbatches: int = 1
    """Cut each batch into so many parts whose gradients add up."""
    dtype: str | None = None
    """float32 or bfloat16 for activations and products."""
    depth: str | None = None
    """scan or unroll the layers."""
    attention: str | None = None
    """xla, splash, pattern or relative; as of `pretrain run`."""
    remat: str | None = None
    """What the backward pass computes again instead of keeping: none, dots or full."""
    batch_size: int | None = None
    """Rows of every phase's batch, over all devices."""
    sequence_length: int | None = None
    """Tokens per row, in every phase."""
    largest: bool = True
    """Also find the largest batch that fits: two or three more compilations for each phase."""
    cache: Path = CACHE
    """Where the compiler's answers are kept."""


def parse_target(arguments: Sequence[str]) -> tuple["Recipe", Target]:
    """`RECIPE --topology v5e:4x4` -> the recipe with its changes, and what to plan it for."""
    usage = "python -m tpu plan bert-base --topology v5e:4x4"
    purpose = "Compile the train step of {} for a slice of TPUs, on this machine, and say what it will do."
    return parse_recipe(arguments, Target, usage, purpose)
