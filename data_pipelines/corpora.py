"""Which corpora `--corpus` names: one path, or several with names, as in en=gs://A,zh=DIR."""

import re

from data_pipelines.errors import UserError

NAMED = re.compile(r"([\w.-]+)=(.*)", re.ASCII | re.DOTALL)


def named(text: str) -> dict[str, str]:
    """{name: path}, in the order given; {"": path} for a single path without a name. UserError for another form."""
    if not NAMED.match(text):
        return {"": text}
    found = {}
    for entry in text.split(","):
        form = NAMED.fullmatch(entry)
        if not form or not form[2]:
            raise UserError(f"--corpus {text}: {entry!r} is no NAME=PATH; give one path, or en=DIR,zh=DIR")
        if form[1] in found:
            raise UserError(f"--corpus {text}: {form[1]} is given twice; give each corpus a name of its own")
        found[form[1]] = form[2]
    return found


def written(paths: dict[str, str]) -> str:
    """What `named` reads so."""
    return ",".join(f"{name}={path}" if name else path for name, path in paths.items())
