"""Whether a corpus may grow: memory, time and bytes of `prepare`, planning and loading, at several sizes of text.

    python -m benchmarks.corpus_scale --gigabytes 0.1 --gigabytes 0.3 --gigabytes 1 --folder /big/disk

The text is `zipf_text`'s. For each size `prepare` runs as a user starts it, then another process opens the corpus,
plans every part and reads through `Loader`, in several lanes; so too a corpus of --copied gigabytes whose parts are
copies of a measured one, and one of a single part of 256 million tokens. Memory is the kernel's high-water mark
(VmHWM) of each process, and the most anonymous memory of all together, looked at every 50 ms; pages of mapped files,
which the kernel may take back, are in the first and not in the second.

Then what hosts fetch: the lanes of an epoch, dealt by the same code as in training, over many parts of the
sizes that were measured; and arithmetic for a corpus of --tokens.
"""

import itertools
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.repeated import repeated
from benchmarks.zipf_text import write
from data_pipelines.batches import make_examples
from data_pipelines.command_line import parse
from data_pipelines.corpus import Corpus
from data_pipelines.examples.packed_sentences import PackedSentences
from data_pipelines.loader import Loader
from data_pipelines.order import Order, deal

LENGTH, BATCH, LANES, WINDOW = 128, 64, 2, 2
READ = 2_000_000  # rows at most
OF_PART = 256e6  # tokens of a part as `prepare` makes it unless told otherwise
LOOK_EVERY = 0.05  # seconds
MB = 1e6


@dataclass(frozen=True)
class Options:
    """Measure a corpus at several sizes."""

    gigabytes: tuple[float, ...] = (0.1, 0.3, 1.0)
    """Of text."""
    copied: float = 10.0
    """Gigabytes of text that a corpus of copied parts stands for."""
    part_size: int = 16
    """MiB of text in a part."""
    tokenizer: str = "wordpiece"
    """To train, as prepare's option; with 8,192 tokens."""
    processes: int = 2
    """Of prepare."""
    folder: Path | None = None
    """Where text and corpora are while they are measured; a temporary one by default."""
    hosts: int = 64
    """For what each of them fetches; as many lanes."""
    parts: int = 938
    """Of the corpus that they fetch from."""
    tokens: float = 240e9
    """Of the corpus that is worked out by arithmetic."""


class Usage(NamedTuple):
    """Seconds; bytes."""

    seconds: float
    main: int  # high-water mark of the process
    worker: int  # of the largest of those that it started
    anonymous: int  # the most that all had at once


def main(options: Options) -> None:
    console = Console(width=120)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        rows, corpus = [], None
        for gigabytes in options.gigabytes:
            text, corpus = Path(folder) / f"text-{gigabytes}", Path(folder) / f"corpus-{gigabytes}"
            write(text, int(gigabytes * 1e9))
            rows.append((gigabytes, *measured(text, corpus, options)))
            print_prepared(rows, console)
            print_walked([(size, walk) for size, _, walk in rows], console)
        parts = round(options.copied / gigabytes * rows[-1][2]["parts"])
        many = walked(repeated(Corpus(corpus), Path(folder) / "many", 1, parts).path)
        whole = walked(repeated(Corpus(corpus), Path(folder) / "part", int(OF_PART)).path)
        print_walked([(options.copied, many), (gigabytes, whole)], console)
        print_disk(corpus, console)
        print_fetched(corpus, options, console)
        print_arithmetic(corpus, rows, whole, options, console)


def measured(text: Path, corpus: Path, options: Options) -> tuple[Usage, dict]:
    """What prepare used, and a walk through the corpus."""
    prepare = [
        *("prepare", "--source", f"text:{text}", "--documents", "blank-line", "--out", str(corpus)),
        *("--tokenizer", options.tokenizer, "--vocab-size", "8192", "--part-size", str(options.part_size)),
        *("--processes", str(options.processes)),
    ]
    used, _ = watched([sys.executable, "-m", "data_pipelines", *prepare])
    return used, walked(corpus)


def walked(corpus: Path) -> dict:
    """What a walk through a corpus, in a process of its own, says and used."""
    used, said = watched([sys.executable, "-m", "benchmarks.corpus_scale", "walk", str(corpus)])
    return {**json.loads(said), "anonymous": used.anonymous}


def watched(command: list[str]) -> tuple[Usage, str]:
    """Run a command and look at its memory while it runs -> what it used, and what it printed."""
    begin, peaks, most = time.perf_counter(), {}, 0
    with tempfile.TemporaryFile("w+") as printed:
        process = subprocess.Popen(command, stdout=printed, stderr=subprocess.DEVNULL)
        while process.poll() is None:
            now = {pid: _status(pid) for pid in (process.pid, *_descendants(process.pid))}
            for pid, status in now.items():
                peaks[pid] = max(peaks.get(pid, 0), status.get("VmHWM", 0))
            most = max(most, sum(status.get("RssAnon", 0) for status in now.values()))
            time.sleep(LOOK_EVERY)
        printed.seek(0)
        said = printed.read()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with status {process.returncode}")
    workers = [peak for pid, peak in peaks.items() if pid != process.pid]
    return Usage(time.perf_counter() - begin, peaks[process.pid], max(workers, default=0), most), said


def _descendants(pid: int) -> list[int]:
    children = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children += map(int, task.read_text().split())
        except OSError:  # it ended
            continue
    return children + [below for child in children for below in _descendants(child)]


def _status(pid: int) -> dict[str, int]:
    """Sizes of a process's memory in bytes; {} when it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    fields = (line.split(":", 1) for line in lines)
    return {name: int(value.split()[0]) * 1024 for name, value in fields if value.endswith(" kB")}


def walk(corpus_path: Path) -> None:
    """Open, plan and read a corpus, and print what that took as JSON: seconds, bytes, tokens."""
    said = {"imports": _high_water()}
    begin = time.perf_counter()
    corpus = Corpus(corpus_path)
    layout, order = PackedSentences(LENGTH), Order(LANES, WINDOW)
    examples = make_examples(layout, corpus, "train", BATCH, 0, order)
    opened = time.perf_counter()
    said |= {"open": opened - begin, "parts": len(corpus.parts), "opened": _high_water()}
    number = sum(examples.sizes)
    planned = time.perf_counter()
    said |= {"plan": planned - opened, "planned": _high_water()}
    tokens = 0
    with Loader(examples, 0, min(number, READ) // BATCH, np.arange(BATCH), threads=0) as loader:
        for _, batch in loader:
            tokens += int(np.count_nonzero(batch["segments"]))
    said |= {"load": time.perf_counter() - planned, "loaded": _high_water(), "read": tokens}
    print(json.dumps(said | {"tokens": corpus.size("train")["tokens"]}))


def _high_water() -> int:
    """The process's largest resident size since the last call, in bytes."""
    found = _status("self")["VmHWM"]
    Path("/proc/self/clear_refs").write_text("5")
    return found


def print_prepared(rows: list[tuple[float, Usage, dict]], console: Console) -> None:
    """Memory in MB: of its process, its largest worker, and anonymous of all at once."""
    found = Table("GB", "parts", "M tokens", "prepare s", "process", "worker", "all, anonymous")
    for gigabytes, used, walk in rows:
        sizes = (used.main, used.worker, used.anonymous)
        found.add_row(*_name(gigabytes, walk), f"{used.seconds:.0f}", *(f"{size / MB:.0f}" for size in sizes))
    console.print(found)


def print_walked(rows: list[tuple[float, dict]], console: Console) -> None:
    """Memory in MB: at most while it opened, planned and loaded, and anonymous."""
    found = Table("GB", "parts", "M tokens", "open s", "plan s", "load s", "M tokens/s")
    for heading in ("opened", "planned", "loaded", "anonymous"):
        found.add_column(heading)
    for gigabytes, walk in rows:
        seconds = (f"{walk[name]:.2f}" for name in ("open", "plan", "load"))
        memory = (f"{walk[name] / MB:.0f}" for name in ("opened", "planned", "loaded", "anonymous"))
        found.add_row(*_name(gigabytes, walk), *seconds, f"{walk['read'] / walk['load'] / 1e6:.1f}", *memory)
    console.print(found)


def _name(gigabytes: float, walk: dict) -> tuple[str, str, str]:
    return f"{gigabytes:g}", str(walk["parts"]), f"{walk['tokens'] / 1e6:.1f}"


def print_disk(path: Path, console: Console) -> None:
    """Bytes by kind of file, per token."""
    corpus, bytes_ = Corpus(path), {}
    for part in corpus.parts:
        for name, file in part.entry.files.items():
            kind = name.rpartition("/")[2]
            bytes_[kind] = bytes_.get(kind, 0) + file["bytes"]
    tokens = sum(corpus.size(split)["tokens"] for split in ("train", "heldout"))
    found = Table("on disk", "bytes per token")
    for kind, size in (bytes_ | {"all": sum(bytes_.values())}).items():
        found.add_row(kind, f"{size / tokens:.3f}")
    manifest = (path / "manifest.json").stat().st_size
    found.add_row("manifest.json, per part", f"{manifest / len(corpus.parts):,.0f} bytes")
    console.print(found)


def print_fetched(path: Path, options: Options, console: Console) -> None:
    """What each of many hosts, with a lane each, fetches in an epoch: over the bytes of the corpus."""
    tokens, sizes = many_parts(Corpus(path), options.parts)
    order, total = Order(options.hosts, 4), sum(sizes)
    found = Table("epoch", "least", "mean", "most", f"of 1 / {options.hosts}", "at once, of the corpus")
    for epoch in range(3):
        windows = [deal(0, epoch, tokens, order, lane) for lane in range(options.hosts)]
        each = np.array([sum(sizes[one.parts].sum() for one in of_host) for of_host in windows]) / total
        pairs = (pair for of_host in windows for pair in itertools.pairwise(of_host))
        at_once = max(sizes[np.union1d(one.parts, other.parts)].sum() for one, other in pairs) / total
        shown = (f"{value:.3%}" for value in (each.min(), each.mean(), each.max()))
        found.add_row(str(epoch), *shown, f"{each.mean() * options.hosts:.2f}", f"{at_once:.3%}")
    console.print(found)


def many_parts(corpus: Corpus, number: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, bytes), int64 [number], of the train splits of parts as those of the corpus, one after the other."""
    tokens = [part.sizes["train"]["tokens"] for part in corpus.parts]
    fetched = lambda name: name.startswith("train/") and not name.endswith("token_counts.npy")
    bytes_ = [sum(f["bytes"] for name, f in part.entry.files.items() if fetched(name)) for part in corpus.parts]
    return np.resize(tokens, number), np.resize(bytes_, number)


def print_arithmetic(path: Path, rows: list, whole: dict, options: Options, console: Console) -> None:
    """A corpus of --tokens in parts of OF_PART, from what was measured of the largest, and of a whole part."""
    corpus, tokens, seconds = Corpus(path), rows[-1][2]["tokens"], rows[-1][1].seconds
    if len(rows) > 1:  # training the tokenizer takes as long for all
        seconds = (seconds - rows[-2][1].seconds) / (tokens - rows[-2][2]["tokens"]) * tokens
    parts, hosts, entries = options.tokens / OF_PART, options.hosts, [part.entry for part in corpus.parts]
    size, manifest = corpus.size("train"), (path / "manifest.json").stat().st_size / len(entries)
    index = 8 * (size["sentences"] + size["documents"]) / size["tokens"]
    bytes_ = sum(file["bytes"] for part in entries for file in part.files.values()) / tokens
    found = Table(f"{options.tokens:,.0f} tokens in parts of {OF_PART:,.0f}", "")
    for name, value in {
        "parts": f"{parts:,.0f}",
        "files": f"{parts * (1 + len(entries[0].files)):,.0f}",
        "manifest.json, MB": f"{parts * manifest / MB:.1f}",
        "on disk, GB": f"{options.tokens * bytes_ / 1e9:,.0f}",
        "of a part, MB": f"{OF_PART * bytes_ / MB:,.0f}",
        "offsets of a part, MB": f"{OF_PART * index / MB:,.0f}",
        "memory of planning a part, MB (measured)": f"{(whole['planned'] - whole['opened']) / MB:,.0f}",
        "seconds of planning a part (measured)": f"{whole['plan']:.1f}",
        f"seconds of planning all, on each of {hosts} hosts": f"{whole['plan'] * parts / hosts:,.0f}",
        f"GB an epoch fetched by each of {hosts} hosts": f"{options.tokens * bytes_ / hosts / 1e9:,.1f}",
        "core hours of prepare": f"{seconds * options.processes / tokens * options.tokens / 3600:,.0f}",
    }.items():
        found.add_row(name, value)
    console.print(found)


if __name__ == "__main__":
    if sys.argv[1:2] == ["walk"]:
        walk(Path(sys.argv[2]))
    else:
        main(parse(Options, sys.argv[1:], "python -m benchmarks.corpus_scale"))
