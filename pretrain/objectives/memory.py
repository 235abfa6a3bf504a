"""What a model remembers between batches, as an objective's carry."""

from typing import Any

import flax.linen as nn

from models.blocks.memory import Memory

AXES = {"hidden": ("layers", "batch", None, None), "segments": ("batch", None)}


def carried(memory: Memory) -> tuple[dict[str, Any], dict[str, tuple]]:
    """(carry, axes); both are empty for a memory of no positions, which no checkpoint could hold."""
    return (memory._asdict(), AXES) if memory.segments.shape[1] else ({}, {})


def remembered(carry: dict[str, Any], model: nn.Module, batch_size: int) -> Memory:
    """The memory that a carry holds."""
    return Memory(**carry) if carry else model.empty_memory(batch_size, 0)
