"""How fast `prepare` turns text into a stored corpus, beside the tokenizer's own `encode_batch_fast`.

    python -m benchmarks.prepare_speed [TEXT_FILE_OR_DIR] [--tokenizer wordpiece] [--language en]
        [--megabytes 40] [--repeats 3]

Both sides use all cores and the same tokenizer, trained before on the text (not timed). One side is `prepare` from
starting its processes to the finished manifest: reading, decoding, splitting sentences, tokens, word starts, hashes,
files. The other is `encode_batch_fast` alone, over the same documents in memory, 1,000 at a time; its ids are not even
fetched; another is `encode_batch`, with the offsets that tell where sentences start inside words. The sides take turns;
the medians are compared. Text shorter than --megabytes is repeated. Repeats favour `prepare`, which looks words up that
it has seen: give a long text, or --megabytes 0 for no repeats, to be strict. Memory is the high-water mark of the
largest process that `prepare` started: with more --megabytes it should stay as it is.
"""

import io
import os
import resource
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from data_pipelines.command_line import end_with, parse
from data_pipelines.formats import table
from data_pipelines.formats.problems import Problems
from data_pipelines.prepare.command import prepare
from data_pipelines.prepare.options import Prepare

WHOLE, FAST, WITH_OFFSETS = "prepare, end to end", "encode_batch_fast alone", "encode_batch alone, which has offsets"


@dataclass(frozen=True)
class Options:
    """Compare the rates of prepare and of the tokenizer alone."""

    text: Annotated[str | None, tyro.conf.Positional] = None
    """A text file or directory; the built-in corpus by default."""
    tokenizer: str = "wordpiece"
    """To train, as prepare's option."""
    language: str = "en"
    """Of the text."""
    megabytes: int = 40
    """Repeat the text up to this size."""
    repeats: int = 3
    """Of both sides."""


def main(arguments: list[str]) -> int:
    """Measure and print the table -> exit status."""
    options = parse(Options, arguments, "python -m benchmarks.prepare_speed")
    source = table.parse(f"text:{options.text}" if options.text else "builtin")
    parts = [part for unit in table.plan([source], Problems()) for part in unit]
    documents = [found.segments[0].text for part in parts for found in table.read(source, part, Problems())]
    copies = max(1, options.megabytes * 1_000_000 // sum(map(len, documents)))
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), documents, copies, options)
    return 0


def measure(folder: Path, documents: list[str], copies: int, options: Options) -> None:
    """Take turns, and print the table."""
    (folder / "text").mkdir()
    for copy in range(copies):
        for number in range(0, len(documents), 1000):
            text = "\n\n".join(documents[number : number + 1000])
            (folder / "text" / f"{copy:04}-{number:08}.txt").write_text(text)
    source, quiet = (f"text:{folder / 'text'}",), Console(file=io.StringIO())
    prepare(Prepare(source, folder / "trained", options.tokenizer, vocab_size=8192), quiet)
    tokenizer = Tokenizer.from_file(str(folder / "trained" / "tokenizer" / "tokenizer.json"))
    found = documents * copies
    characters = sum(map(len, found))
    sides = {FAST: tokenizer.encode_batch_fast, WITH_OFFSETS: tokenizer.encode_batch}
    seconds: dict[str, list[float]] = {name: [] for name in (WHOLE, *sides)}
    for repeat in range(options.repeats):
        start = time.perf_counter()
        made = str(folder / "trained" / "tokenizer")
        prepare(Prepare(source, folder / f"corpus-{repeat}", made, language=(options.language,)), quiet)
        seconds[WHOLE].append(time.perf_counter() - start)
        for name, encode in sides.items():
            start = time.perf_counter()
            for first in range(0, len(found), 1000):
                encode(found[first : first + 1000])
            seconds[name].append(time.perf_counter() - start)
    rates = {name: characters / 1e6 / statistics.median(taken) for name, taken in seconds.items()}
    cores = len(os.sched_getaffinity(0))
    title = f"{options.tokenizer}, {characters / 1e6:.1f} million characters, {cores} cores"
    shown = Table("", "million characters/s", title=title)
    for name, rate in rates.items():
        shown.add_row(name, f"{rate:.2f}")
    for name in sides:
        shown.add_row(f"prepare / {name}", f"{rates[WHOLE] / rates[name]:.2f}")
    shown.add_row("largest process, MB", f"{resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e6:.0f}")
    Console().print(shown)


if __name__ == "__main__":
    end_with(main)
