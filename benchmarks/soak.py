"""Is anything lost, does anything hang? A run that is interrupted again and again beside one that nothing disturbed.

    python -m benchmarks.soak [--interruptions 100] [--minutes 40] [--seed 0] [--out soak.md]

A tiny BERT of many short steps, in one process and, at the same time, in two (one simulated device each). Each start
is disturbed once, anywhere from its first import to its last checkpoint, by a signal or a fault (`INTERRUPTIONS`); the
number of data workers changes from start to start. When a run has come to its end it is compared with the
uninterrupted one of as many processes, and another begins, until there were enough interruptions. Compared are all
arrays of the last checkpoint, bit for bit, all figures of training and evaluation, and the names of the files in the
work directory. What was faster than its interruption is not counted. The corpus lies in a stand-in for a bucket.
Beside them threads of one process make a corpus, as Apache Beam's workers do, again and again.
All share one cache of compiled programs. Exit status 1 where anything differs, hangs, is left behind, or ends otherwise
than promised.
"""

import dataclasses
import os
import platform
import random
import shutil
import tempfile
import time
from collections import Counter, defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from rich.console import Console

from benchmarks.soak_checks import differences, left_behind, unreadable
from benchmarks.soak_starts import LIMIT, Ending, Lane, interrupted, uninterrupted
from data_pipelines.command_line import end_with, parse
from data_pipelines.errors import UserError
from data_pipelines.prepare.command import prepare
from data_pipelines.prepare.options import Prepare

QUIET = Console(quiet=True)
RESERVE = 150  # of the seconds, to bring the runs to their ends
AT_ONCE = 20  # steps within which a signal is heard
SHARE_OF_ONE = 0.65  # of the interruptions: starts of one process are faster
THREADS, BETWEEN = 4, 30  # that make a corpus of some parts, and seconds until they make it again


@dataclasses.dataclass(frozen=True)
class Options:
    """Interrupt runs and compare them with uninterrupted ones."""

    interruptions: int = 100
    """How many, of runs of one and of two processes together."""
    minutes: float = 40
    """After so many there are no further ones; the table says how many were done."""
    seed: int = 0
    """Of what happens when."""
    out: Path = Path("soak.md")
    """Where the table goes."""
    folder: Path | None = None
    """For the corpus, the runs and what they say; by default a temporary one, which stays where something is odd."""

    def __post_init__(self):
        if self.interruptions < 1:
            raise UserError(f"--interruptions {self.interruptions}: must be at least 1")


@dataclasses.dataclass
class Record:
    """What has happened so far.

    rows: (processes, interruption) -> its endings.   corpora: made by threads.   odd: what should not be.
    """

    rows: dict[tuple[int, str], list[Ending]] = dataclasses.field(default_factory=lambda: defaultdict(list))
    stages: Counter = dataclasses.field(default_factory=Counter)
    rounds: Counter = dataclasses.field(default_factory=Counter)
    corpora: int = 0
    odd: list[str] = dataclasses.field(default_factory=list)

    def oddity(self, what: str, where: Path | str = "") -> None:
        print(f"ODD: {what} {where}", flush=True)
        self.odd.append(what)

    def count(self) -> int:
        return sum(map(len, self.rows.values()))


def main(arguments: list[str]) -> int:
    """Interrupt, compare, write the table -> exit status."""
    options = parse(Options, arguments, "python -m benchmarks.soak")
    began, record = time.monotonic(), Record()
    folder = (options.folder or Path(tempfile.mkdtemp(prefix="soak-"))).absolute()
    shared = set(Path("/dev/shm").glob("*"))
    _prepare(folder)
    wanted = {1: round(options.interruptions * SHARE_OF_ONE)}
    wanted[2] = options.interruptions - wanted[1]
    end = began + 60 * options.minutes - RESERVE
    lanes = [Lane(folder, processes, random.Random(f"{options.seed} {processes}")) for processes in wanted]
    with ThreadPoolExecutor() as pool:
        of_lanes = [pool.submit(_soak, lane, wanted[lane.processes], end, record) for lane in lanes]
        _make_by_threads(folder / "threads", end, of_lanes, record)
    for lane in of_lanes:
        lane.result()
    if more := set(Path("/dev/shm").glob("*")) - shared:
        record.oddity(f"in /dev/shm: {sorted(map(str, more))}")
    table = "\n".join(_report(record, options, time.monotonic() - began)) + "\n"
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(table)
    print(table, end="")
    if options.folder is None and not record.odd:
        shutil.rmtree(folder)
    return int(bool(record.odd))


def _prepare(folder: Path) -> None:
    """The corpus."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    folder.mkdir(parents=True, exist_ok=True)
    words = [f"{a}{b}" for a in ("ba", "de", "ki", "lo", "mu") for b in ("na", "po", "ri")]
    prepare(_text(folder, folder / "corpus", words, 200), QUIET)


def _text(folder: Path, out: Path, words: list[str], documents: int) -> Prepare:
    """How a corpus is made of a text of such words, which this writes."""
    rng, text = random.Random(0), folder / f"{out.name}.txt"
    sentence = lambda: " ".join(rng.choices(words, k=rng.randint(4, 12))).capitalize() + "."
    document = lambda: " ".join(sentence() for _ in range(rng.randint(2, 9)))
    text.write_text("\n\n".join(document() for _ in range(documents)) + "\n")
    how = Prepare((f"text:{text}",), out, documents="blank-line", vocab_size=120, heldout=0.1, processes=1)
    return dataclasses.replace(how, part_size=1)


def _make_by_threads(folder: Path, end: float, lanes: list[Future], record: Record) -> None:
    """As long as runs are interrupted, corpora whose parts threads of this process share out, compared with one that a
    single thread made."""
    folder.mkdir()
    letters = [f"{a}{b}{c}" for a in "abcdefgh" for b in "ijklmnop" for c in "qrstuvwx"]  # words of several tokens
    how = _text(folder, folder / "alone", letters, 30_000)
    alone = prepare(how, QUIET)["fingerprint"]
    while time.monotonic() < end and not all(lane.done() for lane in lanes):
        shutil.rmtree(folder / "shared", ignore_errors=True)
        shared = dataclasses.replace(how, out=folder / "shared")
        parts = [dataclasses.replace(shared, part=f"{index}/{THREADS}") for index in range(THREADS)]
        try:
            with ThreadPoolExecutor(THREADS) as pool:
                list(pool.map(lambda part: prepare(part, QUIET), parts))
            found = prepare(dataclasses.replace(shared, finish=True), QUIET)["fingerprint"]
        except Exception as error:
            found = repr(error)
        record.corpora += 1
        if found != alone:
            record.oddity(f"a corpus that {THREADS} threads made is {found}, not {alone}", folder)
        time.sleep(BETWEEN)


def _soak(lane: Lane, wanted: int, end: float, record: Record) -> None:
    """So many interruptions of runs of a lane, each run compared at its end."""
    reference = lane.folder / "uninterrupted"
    if uninterrupted(lane, reference).status != 0:
        record.oddity(f"{lane.processes}: the uninterrupted run failed")
        return
    done, number = 0, 0
    while done < wanted and time.monotonic() < end:
        number += 1
        workdir, finished = lane.folder / f"run{number}", False
        while not finished and done < wanted and time.monotonic() < end:
            ending = interrupted(lane, workdir)
            finished = ending.status == 0
            _judge(lane, workdir, ending, record)
            if not finished:
                done += 1
                record.rows[lane.processes, ending.name].append(ending)
                record.stages[ending.stage] += 1
        if not finished:
            _judge(lane, workdir, uninterrupted(lane, workdir), record)
        record.rounds[lane.processes] += 1
        for difference in differences(reference, workdir):
            record.oddity(f"{lane.processes}: {workdir.name}: {difference}", workdir)


def _judge(lane: Lane, workdir: Path, ending: Ending, record: Record) -> None:
    """Note whatever is odd about how a start ended."""
    name = f"{lane.processes}: {ending.name} at {ending.stage}"
    print(f"{name}: status {ending.status} after {ending.seconds:.1f} s, steps lost {ending.lost}", flush=True)
    odd = unreadable(ending.said.read_text(errors="replace"), ending.status) + left_behind(lane.temporary, workdir)
    if ending.seconds > LIMIT:
        odd.append(f"took {ending.seconds:.0f} s to end")
    if ending.status == 0 and ending.more > AT_ONCE and "SIGTERM" in ending.name:
        odd.append(f"trained {ending.more} steps after a signal")
    if ending.status not in (0, *ending.allowed):
        odd.append(f"ended with status {ending.status}")
    for what in odd:
        record.oddity(f"{name}: {what}", ending.said)


def _report(record: Record, options: Options, seconds: float) -> list[str]:
    """The table, as Markdown."""
    longest = max((ending.seconds for endings in record.rows.values() for ending in endings), default=0)
    rounds = ", ".join(f"{record.rounds[n]} of {n} process{'es' * (n > 1)}" for n in sorted(record.rounds))
    stages = ", ".join(f"{stage} {count}" for stage, count in record.stages.most_common())
    lines = [
        f"# Interrupted again and again, {time.strftime('%Y-%m-%d')}",
        "",
        f"`python -m benchmarks.soak --interruptions {options.interruptions} --minutes {options.minutes:g} "
        f"--seed {options.seed}`, {record.count()} interruptions in {seconds / 60:.0f} minutes",
        f"({platform.machine()}, Python {platform.python_version()}); runs brought to their ends: {rounds}.",
        f"Interrupted at: {stages}.",
        "",
        "| processes | interruption | times | exit statuses | longest end, s | steps lost at most |",
        "|---|---|---|---|---|---|",
    ]
    for (processes, name), endings in sorted(record.rows.items()):
        statuses = ", ".join(f"{s} ({n})" for s, n in sorted(Counter(one.status for one in endings).items()))
        lost = max((one.lost for one in endings if one.lost is not None), default="")
        slowest = max(one.seconds for one in endings)
        lines.append(f"| {processes} | {name} | {len(endings)} | {statuses} | {slowest:.1f} | {lost} |")
    lines += ["", f"Corpora of several parts made by {THREADS} threads of one process: {record.corpora}."]
    lines += ["", f"Longest end: {longest:.1f} s. Odd: {len(record.odd) or 'nothing'}."]
    return lines + [f"- {what}" for what in record.odd]


if __name__ == "__main__":
    end_with(main)
