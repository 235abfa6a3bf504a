"""What a screen shows when a corpus is finished."""

from pathlib import Path

from rich.console import Console

from data_pipelines.manifest import total
from data_pipelines.show import show_problems


def report(out: Path, manifest: dict, before: dict | None, console: Console) -> None:
    """Sizes, what could not be read, and what should be mended. before: the corpus that parts were added to."""
    say = lambda line, **style: console.print(line, markup=False, soft_wrap=True, **style)
    splits = total(part["splits"] for part in manifest["parts"])
    for split, sizes in splits.items():
        say(f"{out}/{split}: " + ", ".join(f"{count:,} {name}" for name, count in sizes.items()))
    show_problems(manifest["counts"], console)
    if before:
        added = len(manifest["parts"]) - len(before["parts"])
        say(f"{added} parts were added: the fingerprint was {before['fingerprint']} and is {manifest['fingerprint']}")
    if not splits["heldout"]["documents"] and manifest["settings"]["heldout"]:
        say("nothing could be held out for evaluation: one document; see --documents", style="yellow")
