"""What a screen shows when a corpus is finished."""

from pathlib import Path

from rich.console import Console

from data_pipelines.manifest import total
from data_pipelines.show import show_problems


def report(out: Path, manifest: dict, console: Console) -> None:
    splits = total(part["splits"] for part in manifest["parts"])
    for split, sizes in splits.items():
        listed = ", ".join(f"{count:,} {name}" for name, count in sizes.items())
        console.print(f"{out}/{split}: {listed}", markup=False, soft_wrap=True)
    show_problems(manifest["counts"], console)
    if not splits["heldout"]["documents"] and manifest["settings"]["heldout"]:
        console.print("nothing could be held out for evaluation: one document; see --documents", style="yellow")
