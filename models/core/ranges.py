"""Ranges of numbers in configs, and fields with a choice of values."""

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple


class Range(NamedTuple):
    """words: description for error messages.   holds: whether a number lies in the range; NaN lies in none."""

    words: str
    holds: Callable[[float], bool]


# Sizes and steps are int32 on devices.
COUNT = Range("at least 1 and below 2**31", lambda x: 1 <= x < 2**31)
COUNT_OR_NONE = Range("at least 0 and below 2**31", lambda x: 0 <= x < 2**31)
SEED = Range("at least 0 and below 2**32", lambda x: 0 <= x < 2**32)
# Larger values become infinite in float32, the dtype of the computation.
LARGEST = 3.4e38
POSITIVE = Range(f"above 0 and below {LARGEST:g}", lambda x: 0 < x < LARGEST)
NOT_NEGATIVE = Range(f"at least 0 and below {LARGEST:g}", lambda x: 0 <= x < LARGEST)
SHARE = Range("in [0, 1]", lambda x: 0 <= x <= 1)
RATE = Range("in [0, 1)", lambda x: 0 <= x < 1)


def check_ranges(config, ranges: Mapping[str, Range], prefix: str) -> None:
    """Raise ValueError for the first field that is out of its range.   prefix: of its name in the message, 'model.'."""
    for field, allowed in ranges.items():
        value = getattr(config, field)
        if not allowed.holds(value):
            raise ValueError(f"{prefix}{field}={value}: must be {allowed.words}")


def check_choices(config, choices: Mapping[str, Collection[str]], prefix: str) -> None:
    """Raise ValueError for the first field that has none of its values.   prefix: as in `check_ranges`."""
    for field, allowed in choices.items():
        value = getattr(config, field)
        if value not in allowed:
            raise ValueError(f"{prefix}{field}={value!r}: use one of {', '.join(allowed)}")
