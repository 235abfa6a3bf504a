"""Numbers of a command's options, looked at before anything is read."""

from collections.abc import Mapping

from data_pipelines.errors import UserError
from models.core.ranges import Range, check_ranges


def check_options(options, ranges: Mapping[str, Range]) -> None:
    """UserError for the first option that is out of its range."""
    try:
        check_ranges(options, ranges, "--")
    except ValueError as error:
        raise UserError(str(error)) from None
