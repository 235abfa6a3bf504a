"""`prepare` with small units and parts, its arguments; and `prepare --append`."""

import io

from rich.console import Console

from data_pipelines.prepare.command import prepare
from data_pipelines.prepare.options import Prepare

UNIT, MIB = 4_000, 10_000  # bytes: small stand-ins
PROGRAM = f"""
import sys
from data_pipelines.__main__ import main
from data_pipelines.formats import source
from data_pipelines.prepare import plan

if __name__ == "__main__":
    source.SHARD, plan.MIB = {UNIT}, {MIB}
    sys.exit(main(["prepare", *sys.argv[1:]]))
"""


def arguments(text, out) -> list[str]:
    given = ["--source", f"text:{text}", "--out", str(out), "--vocab-size=200", "--part-size=1"]
    return [*given, "--heldout=0.1", "--cased", "--processes=1"]


def append(out, text, **options):
    screen = io.StringIO()
    given = Prepare((f"text:{text}",), out, append=True, part_size=1, processes=1, **options)
    return prepare(given, Console(file=screen, width=300)), screen.getvalue()
