"""The exception for what a user can put right."""

import difflib
from collections.abc import Iterable

AGAIN = "start the same command again to continue"


class UserError(Exception):
    """One line: the setting, its value and the cure. Programs print it without a traceback and exit with `status`."""

    status = 2


class PassingError(UserError):
    """A failure that the same command may not meet again, such as a lost machine or a silent storage. A process that
    JAX aborts because another one is lost ends with the same status."""

    status = 134


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name that is most similar to a name."""
    return difflib.get_close_matches(name, known, n=1, cutoff=0)[0]
