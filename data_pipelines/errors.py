"""The one exception for what a user can put right."""

import difflib
from collections.abc import Iterable

AGAIN = "the same command goes on where this one ended"


class UserError(Exception):
    """One line: the setting, its value and the cure. Programs print it without a traceback and exit with `status`."""

    status = 2


class PassingError(UserError):
    """What the same command started again may not meet, such as another machine that is gone or a storage that does not
    answer. The status is that of a process that JAX aborts because another is gone, so that a supervisor knows one."""

    status = 134


def nearest(name: str, known: Iterable[str]) -> str:
    """The one of some names that is most like another."""
    return difflib.get_close_matches(name, known, n=1, cutoff=0)[0]
