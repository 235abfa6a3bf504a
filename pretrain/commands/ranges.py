"""Numbers and texts of a command's options, looked at before anything is read."""

import dataclasses
from collections.abc import Mapping

from data_pipelines.errors import UserError
from models.core.ranges import Range, check_ranges


def check_options(options, ranges: Mapping[str, Range]) -> None:
    """UserError for an option that is out of its range, and for a text that is not UTF-8, which no tokenizer reads."""
    try:
        check_ranges(options, ranges, "--")
    except ValueError as error:
        raise UserError(str(error)) from None
    _check_texts(options)


def _check_texts(options) -> None:
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if dataclasses.is_dataclass(value):
            _check_texts(value)
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str) and text != text.encode("utf-8", "ignore").decode():
                raise UserError(f"--{field.name.replace('_', '-')} {text!r}: is not UTF-8; write it so")
