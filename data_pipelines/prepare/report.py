"""What a screen shows when a corpus is finished."""

from pathlib import Path

from rich.console import Console

from data_pipelines.manifest import total
from data_pipelines.prepare.unknown import MOST, share
from data_pipelines.show import show_problems


def report(out: Path, manifest: dict, before: dict | None, enough: int | None, console: Console) -> None:
    """Sizes, what could not be read, and what should be mended. before: the corpus that parts were added to. enough:
    the size of a vocabulary that would know the text."""

    def say(line, **style):
        console.print(line, markup=False, soft_wrap=True, **style)

    splits = total(part["splits"] for part in manifest["parts"])
    for split, sizes in splits.items():
        say(f"{out}/{split}: " + ", ".join(f"{count:,} {name}" for name, count in sizes.items()))
    show_problems(manifest["counts"], console)
    if before:
        added = len(manifest["parts"]) - len(before["parts"])
        parts = "1 part was" if added == 1 else f"{added} parts were"
        say(f"{parts} added: the fingerprint was {before['fingerprint']} and is {manifest['fingerprint']}")
    unknown = share(out, manifest)
    if unknown is not None:
        line, much = f"{unknown:.3%} of the tokens are unknown to the tokenizer", unknown > MOST
        if much and enough and enough > manifest["vocab_size"]:
            line += f"; --vocab-size {enough} would know nearly all"
        elif much:
            line += "; look whether it is one for this language, and at --steps and --cased"
        say(line, style="yellow" if much else None)
    if not splits["heldout"]["documents"] and manifest["settings"]["heldout"]:
        say("nothing could be held out for evaluation: one document; see --documents", style="yellow")
