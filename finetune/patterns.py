"""Adapts sparse attention patterns to the rows of a task, which may be shorter than those of pretraining."""

import dataclasses
from typing import Any

from data_pipelines.errors import UserError
from finetune.rows import MULTIPLE
from models.attention.patterns.pattern import DENSE
from models.families.bigbird import BigBirdConfig, dense_up_to
from pretrain.recipe import check_pattern


def served(config: Any, longest: int) -> Any:
    """Return the config with a pattern for rows of at most `longest` tokens.
    BigBird's attention is dense on rows of few blocks, as in transformers. Longformer's blocks are limited to the row,
    which does not change its windows."""
    if not hasattr(config, "pattern"):
        return config
    pattern, changes = config.pattern, {}
    if pattern.name == "bigbird" and isinstance(config, BigBirdConfig) and longest <= dense_up_to(pattern):
        changes = {"name": DENSE}
    elif pattern.name == "longformer":
        changes = {"block": min(pattern.block, longest)}
    return dataclasses.replace(config, pattern=dataclasses.replace(pattern, **changes))


def shortest(config: Any, longest: int) -> int:
    """Return the smallest row length that the model's attention pattern allows; `longest` if there is none."""
    for length in range(MULTIPLE, longest, MULTIPLE):
        try:
            check_pattern(config, length, "")
        except UserError:
            continue
        return length
    return longest
