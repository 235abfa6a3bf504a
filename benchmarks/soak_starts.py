"""Starts of a run and their interruptions, see `benchmarks.soak`."""

import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.disturbed import BUCKET, FOREVER, Plan

LIMIT = 60  # seconds from a signal, a fault or another process's death until all processes are gone
STALLED = 120  # seconds without a sign from a start that nothing has disturbed yet
STEPS = {1: 200, 2: 100}
RUN = (
    "run", "bert-tiny", "--checkpoint-every", "6", "--log-every", "1", "--eval-every", "4", "--eval-examples", "16",
    "--model.width", "32", "--model.heads", "2", "--model.feed-forward", "64", "--model.positions", "32",
    "--phases.0.length", "32", "--phases.0.batch-size", "8",
)  # fmt: skip
# Where a start may be interrupted: (at which of its entries at most, seconds after it at most)
STAGES = {
    "imports": (1, 4), "joining": (1, 1), "corpus copy": (1, 1.2), "work directory": (1, 0.3), "restore": (1, 0.5),
    "compilation": (1, 1.5), "training": (20, 0.05), "save": (4, 0.15), "evaluation": (5, 0.1),
}  # fmt: skip
ANYWHERE = tuple(STAGES)
LATE = ("training", "save", "evaluation")
KILL, TERM = signal.SIGKILL, signal.SIGTERM


class Interruption(NamedTuple):
    """What is done to a start.

    statuses: processes -> those allowed.   signals: (signal, to whom), one after the other: to "one" of the processes,
    "all", a data "worker" of one, or to the "launcher" of several, which passes it on.   fault: of `disturbed.FAULTS`.
    times: how often it may occur, and calm: how many calls at most go well before it, one less, see `disturbed.Plan`.
    first_process: only that one can have the fault.
    """

    name: str
    statuses: dict[int, tuple[int, ...]]
    signals: tuple = ()
    stages: tuple[str, ...] = ANYWHERE
    fault: str | None = None
    times: tuple[int, ...] = (1, FOREVER)
    calm: int = 1
    first_process: bool = False


# Of several processes the launcher's status is seen: 1 where theirs differ or a signal has ended them.
INTERRUPTIONS = [
    Interruption("kill -9", {1: (-9,), 2: (1,)}, ((KILL, "one"),)),
    Interruption("kill -9 of all", {2: (1,)}, ((KILL, "all"),)),
    Interruption("kill -9 of the launcher", {2: (-9,)}, ((KILL, "launcher"),), stages=LATE),
    Interruption("kill -9 of a data worker", {1: (2,), 2: (2,)}, ((KILL, "worker"),), stages=LATE),
    Interruption("SIGTERM", {1: (75,), 2: (75,)}, ((TERM, "one"),)),
    Interruption("SIGTERM to all", {2: (75,)}, ((TERM, "launcher"),)),
    Interruption("SIGTERM twice", {1: (75, 143, -15), 2: (75, 143, 1)}, ((TERM, "one"), (TERM, "one"))),
    Interruption("SIGTERM, kill -9", {1: (75, -9), 2: (75, 1)}, ((TERM, "one"), (KILL, "all"))),
    Interruption("I/O error, save", {1: (2,), 2: (2,)}, fault="save", calm=4, first_process=True),
    Interruption("I/O error, restore", {1: (134,), 2: (134,)}, fault="restore", times=(FOREVER,)),
    Interruption("passing I/O error; SIGTERM", {1: (75,), 2: (75,)}, ((TERM, "one"),), LATE, "restore", (1, 2)),
    Interruption("I/O error, corpus", {1: (134,), 2: (134,)}, fault="corpus", calm=4),
    Interruption("damaged part", {1: (2,), 2: (2,)}, fault="damaged part"),
    Interruption("I/O error, metrics", {1: (2,), 2: (2,)}, fault="metrics", calm=20, first_process=True),
    Interruption("full disk", {1: (2,), 2: (2,)}, fault="full disk", times=(9_000, 20_000, 40_000, 60_000)),
]


class Ending(NamedTuple):
    """How a start ended.

    name: of the interruption.   stage: at which it came.   allowed: statuses beside 0.
    seconds: from the last signal, or the last stage entered before an error, until no process was left.
    lost: steps whose figures had been written and which no checkpoint holds; None where it did not train.
    more: steps that began after the first signal.   said: file with its output.
    """

    name: str
    stage: str
    status: int
    allowed: tuple[int, ...]
    seconds: float
    lost: int | None
    more: int
    said: Path


@dataclasses.dataclass
class Lane:
    """Where runs of so many processes are started, one after the other."""

    root: Path
    processes: int
    rng: random.Random
    starts: int = 0
    deck: list[Interruption] = dataclasses.field(default_factory=list)

    def __post_init__(self):
        self.folder = self.root / f"processes{self.processes}"
        self.temporary = self.folder / "temporary"
        self.cache = self.folder / "cache"
        self.said = self.folder / "said"
        for folder in (self.temporary, self.cache, self.said):
            folder.mkdir(parents=True, exist_ok=True)

    def deal(self, resumes: bool) -> Interruption:
        """The next of a shuffled deck, which has signals twice and faults once.   resumes: there is a checkpoint."""
        possible = [one for one in INTERRUPTIONS if self.processes in one.statuses]
        if len(self.deck) < len(possible):
            more = possible + [one for one in possible if one.fault is None]
            self.rng.shuffle(more)
            self.deck = more + self.deck
        index = max(i for i, one in enumerate(self.deck) if resumes or one.fault != "restore")
        return self.deck.pop(index)


class Start:
    """A start of a run, and all processes that came of it."""

    def __init__(self, lane: Lane, workdir: Path, plan: dict, workers: int):
        lane.starts += 1
        self.token = f"SOAK={lane.processes}-{lane.starts}-{os.getpid()}"
        self.lane, self.said = lane, lane.said / f"{lane.starts:03}.txt"
        self.marks = lane.said / f"{lane.starts:03}.marks"
        plan = Plan(str(self.marks), str(lane.root / "corpus"), **plan)
        program = [sys.executable, "-m", "benchmarks.disturbed", json.dumps(plan._asdict()), *RUN]
        program += ["--corpus", BUCKET, "--workdir", str(workdir), "--steps", str(STEPS[lane.processes])]
        program += ["--workers", str(workers)]
        if lane.processes > 1:
            local = ["-m", "tpu", "local", "--processes", str(lane.processes), "--devices", "1", "--"]
            program = [sys.executable, *local, *program]
        (name, token), self.began = self.token.split("="), time.time()
        environment = os.environ | {
            name: token, "TMPDIR": str(lane.temporary), "XDG_CACHE_HOME": str(lane.cache), "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(lane.root / "compiled"), "PYTHONUNBUFFERED": "1",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }  # fmt: skip
        # Through a pipe: the limit of a full disk is not for what is said.
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self.process = subprocess.Popen(program, env=environment, start_new_session=True, **pipes)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        with self.said.open("ab", buffering=0) as said, self.process.stdout as pipe:
            for line in pipe:
                said.write(line)

    def alive(self) -> list[int]:
        """All processes that came of this start and are still there."""
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                with contextlib.suppress(OSError):
                    if self.token.encode() in (folder / "environ").read_bytes().split(b"\0"):
                        found.append(int(folder.name))
        return found

    def members(self) -> list[int]:
        """Processes of the run, in order."""
        return [self.process.pid] if self.lane.processes == 1 else _children(self.process.pid)

    def entered(self, stage: str, process: int) -> int:
        """How often a process has entered a stage; the corpus is copied by any of them."""
        files = self.marks.parent.glob(f"{self.marks.name}.{'*' if stage == 'corpus copy' else process}")
        return sum(file.read_text().splitlines().count(stage) for file in files)

    def last_sign(self) -> float:
        """Seconds since any of its processes entered a stage."""
        times = [file.stat().st_mtime for file in self.marks.parent.glob(f"{self.marks.name}.*")]
        return time.time() - max(times, default=self.began)

    def until(self, stage: str, times: int, process: int) -> bool:
        """Wait until a process enters a stage for the so-manieth time -> False where the run has ended or stalls."""
        while self.entered(stage, process) < times:
            if self.process.poll() is not None or self.last_sign() > STALLED:
                return False
            time.sleep(0.01)
        return True

    def send(self, number: int, whom: str, process: int) -> None:
        with contextlib.suppress(OSError, IndexError):  # it has just ended
            for target in self._targets(whom, process):
                os.kill(target, number)

    def _targets(self, whom: str, process: int) -> list[int]:
        if whom == "launcher":
            return [self.process.pid]
        if whom == "all":
            return self.members()
        member = self.members()[process]
        if whom == "one":
            return [member]
        workers = [child for child in _children(member) if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]
        return [self.lane.rng.choice(workers)] if workers else []

    def gone(self, since: float, quiet: float) -> float:
        """Wait until no process is left, or too long -> seconds from a moment on. What hangs is looked into, killed."""
        while self.process.poll() is None or self.alive():
            if time.monotonic() - since > quiet and self.last_sign() > quiet:
                hanging = self.alive()
                _look_into(hanging, self.said)
                for one in hanging:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(one, KILL)
                self.process.wait()
                break
            time.sleep(0.05)
        seconds = time.monotonic() - since
        self._reader.join()
        return seconds


def _children(parent: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def _look_into(processes: list[int], said: Path) -> None:
    """Append to what was said where processes hang, as far as py-spy is there to tell."""
    with said.open("a") as file:
        for one in processes:
            file.write(f"\nHANGS: {one} {Path(f'/proc/{one}/cmdline').read_bytes()[:200]!r}\n")
            file.flush()
            if py_spy := shutil.which("py-spy", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"):
                subprocess.run([py_spy, "dump", "--pid", str(one)], stdout=file, stderr=file, timeout=60)


def uninterrupted(lane: Lane, workdir: Path) -> Ending:
    """Let a run go to its end."""
    start = Start(lane, workdir, {}, workers=0)
    start.gone(time.monotonic(), STALLED)
    return Ending("nothing", "its end", start.process.returncode, (), 0.0, None, 0, start.said)


def interrupted(lane: Lane, workdir: Path) -> Ending:
    """Start a run, disturb it, wait for its end; a run that was faster ends with status 0."""
    rng, interruption = lane.rng, lane.deal(bool(_checkpoints(workdir)))
    stage = rng.choice([one for one in interruption.stages if lane.processes > 1 or one != "joining"])
    process = 0 if interruption.first_process else rng.randrange(lane.processes)
    plan = {"fault": interruption.fault, "process": process, "calm": rng.randrange(interruption.calm)}
    plan["times"] = rng.choice(interruption.times)
    here = interruption.fault in ("corpus", "damaged part")  # which workers would not have
    workers = 0 if here else rng.randint(int("worker" in interruption.name), 3)
    if stage == "corpus copy":
        shutil.rmtree(lane.cache, ignore_errors=True)
    start = Start(lane, workdir, plan, workers)
    if interruption.signals:
        seconds, more = _signalled(start, interruption, stage, process)
    else:
        stage, more = f"fault in {interruption.fault}", 0
        start.gone(time.monotonic(), STALLED)
        seconds = start.last_sign()
    if interruption.fault == "damaged part":
        shutil.rmtree(lane.cache, ignore_errors=True)  # as its error says
    status, lost = start.process.returncode, None
    if start.entered("training", 0) and status != 0:
        lost = _last_figure(workdir) - max(_checkpoints(workdir), default=0)
    allowed = interruption.statuses[lane.processes]
    if stage == "imports":
        allowed += (-TERM,) if lane.processes == 1 else (1,)  # before signals are handled
    return Ending(interruption.name, stage, status, allowed, seconds, lost, more, start.said)


def _signalled(start: Start, interruption: Interruption, stage: str, process: int) -> tuple[float, int]:
    """(seconds that a start took to end when it was sent the signals, steps that it began after them)."""
    rng, since = start.lane.rng, time.monotonic()
    entry, delay = STAGES[stage]
    if start.until(stage, rng.randint(1, entry), process):
        time.sleep(rng.uniform(0, delay))
    steps = start.entered("training", process)
    for index, (number, whom) in enumerate(interruption.signals):
        time.sleep(rng.uniform(0.05, 3) if index else 0)
        if start.process.poll() is None:
            start.send(number, whom, process)
            since = time.monotonic()
    return start.gone(since, LIMIT), start.entered("training", process) - steps


def _checkpoints(workdir: Path) -> list[int]:
    return [int(folder.name) for folder in workdir.glob("checkpoints/*") if folder.name.isdigit()]


def _last_figure(workdir: Path) -> int:
    """The last step whose figures were written."""
    lines = (workdir / "metrics.jsonl").read_text().splitlines(keepends=True)
    return max((json.loads(line)["step"] for line in lines if line.endswith("\n")), default=0)
