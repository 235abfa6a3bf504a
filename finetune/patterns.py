"""Sparse patterns of models on the rows of a task, which may be shorter than those of pretraining."""

import dataclasses
from typing import Any

from data_pipelines.errors import UserError
from finetune.rows import MULTIPLE
from models.attention.patterns.pattern import DENSE
from models.families.bigbird import BigBirdConfig, dense_up_to
from pretrain.recipe import check_pattern


def served(config: Any, longest: int) -> Any:
    """The config with a pattern for rows of at most so many tokens.

    A BigBird's is dense where transformers' is, on rows of few blocks. A Longformer's windows do not depend on its
    blocks, which get no longer than a row.
    """
    if not hasattr(config, "pattern"):
        return config
    pattern, changes = config.pattern, {}
    if pattern.name == "bigbird" and isinstance(config, BigBirdConfig) and longest <= dense_up_to(pattern):
        changes = {"name": DENSE}
    elif pattern.name == "longformer":
        changes = {"block": min(pattern.block, longest)}
    return dataclasses.replace(config, pattern=dataclasses.replace(pattern, **changes))


def shortest(config: Any, longest: int) -> int:
    """The length to which shorter rows are padded, so that they can have the model's pattern; none: `longest`."""
    for length in range(MULTIPLE, longest, MULTIPLE):
        try:
            check_pattern(config, length, "")
        except UserError:
            continue
        return length
    return longest
