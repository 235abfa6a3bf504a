"""The one exception for what a user can put right."""


class UserError(Exception):
    """One line: the setting, its value and the cure. Programs print it without a traceback and exit with status 2."""
