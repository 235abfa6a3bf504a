"""The log of a run: sends messages and metrics to the screen, files of the work directory and trackers."""

import contextlib
import datetime
import json
import logging
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from data_pipelines.cloud import cloud_errors, in_cloud, is_file, upload_file
from data_pipelines.errors import UserError
from pretrain.storage.run_directory import RunDirectory, read_object, write_whole
from pretrain.trackers import Sink, Tracker

TRAINING = "training"
HIDDEN = "gradient_norm", "learning_rate", "step_ms", "model_tflops_per_s"  # only in the files, not on the screen


def line_of(kind: str, step: int, figures: Mapping[str, float]) -> str:
    """Format all metrics as a line of the log."""
    return f"{kind:>5} {step:>7}  " + "  ".join(f"{name} {value:.5g}" for name, value in figures.items())


def short_line(kind: str, step: int, figures: Mapping[str, float], width: int | None = None) -> str:
    """Format metrics for the screen, without HIDDEN ones and without a loss term that equals the total loss.

    width: columns of the terminal; longer lines are broken between metrics.
    """
    losses = [name for name in figures if name.endswith("_loss")]
    redundant = losses if [figures[name] for name in losses] == [figures.get("loss")] else ()
    shown = [_shown(name, value) for name, value in figures.items() if name not in (*HIDDEN, *redundant)]
    lines, indent = [f"{kind:>5} {step:>7}"], " " * 13
    for text in shown:
        if width and len(lines[-1]) + len(text) + 2 > width:
            lines.append(indent)
        lines[-1] += f"  {text}"
    return "\n".join(lines)


def _shown(name: str, value: float) -> str:
    if name == "seconds_left":
        return f"{datetime.timedelta(seconds=round(value))} left"
    return f"{value:,.0f} tokens/s" if name == "tokens_per_s" else f"{name} {value:.4g}"


class Screen(Sink):
    """Prints to the screen; on a terminal with a progress bar of `total` steps, of which `step` are done."""

    def __init__(self, step: int, total: int):
        self.console = Console(highlight=False)
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(16),
            TextColumn("step"),
            MofNCompleteColumn(),
            _Rate(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self.task = self.bar.add_task(TRAINING, total=total, completed=step)
        self.bar.start()

    def say(self, line):
        self.console.print(line, markup=False, soft_wrap=True)

    def figures(self, kind, step, figures):
        self.say(short_line(kind, step, figures, self.console.width if self.console.is_terminal else None))

    def doing(self, what):
        self.bar.update(self.task, description=what)

    def progress(self, step):
        self.bar.update(self.task, completed=step, description=TRAINING)

    def close(self):
        self.bar.stop()


class _Rate(ProgressColumn):
    """Shows steps per second over the last half minute."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:.3g}/s" if task.speed else "")


class Files(Sink):
    """Writes metrics.jsonl and log.txt, line by line; after `sync` the lines survive a crash of the machine."""

    def __init__(self, directory: RunDirectory):
        self.metrics, self.log = (path.open("a", buffering=1) for path in (directory.metrics, directory.log))

    def note(self, line):
        self.log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")

    say = note

    def figures(self, kind, step, figures):
        self.metrics.write(json.dumps({"kind": kind, "step": step, **figures}) + "\n")
        self.note(line_of(kind, step, figures))

    def sync(self):
        for file in (self.metrics, self.log):
            os.fsync(file.fileno())

    def close(self):
        with self.log:
            self.metrics.close()


class TensorBoard(Sink):
    def __init__(self, folder: Path, step: int):
        from tensorboardX import SummaryWriter  # imports torch if installed, which takes seconds

        # File names contain the time in seconds; the step tells apart runs that resume within a second.
        self.events = SummaryWriter(str(folder), purge_step=step + 1, filename_suffix=f".{step}")

    def figures(self, kind, step, figures):
        for name, value in figures.items():
            self.events.add_scalar(f"{kind}/{name}", value, step)

    def sync(self):
        self.events.flush()

    def close(self):
        self.events.close()


class Mirror(Sink):
    """Growing files of a gs:// work directory, where objects cannot grow: written in `local` and uploaded whole."""

    def __init__(self, directory: RunDirectory):
        self.temporary = tempfile.TemporaryDirectory()
        self.target, self.local = directory, RunDirectory(Path(self.temporary.name))
        self.uploaded: dict[Path, int] = {}  # file -> its size when uploaded
        for source, target in ((directory.metrics, self.local.metrics), (directory.log, self.local.log)):
            if is_file(source):
                target.write_bytes(source.read_bytes())
                self.uploaded[target] = target.stat().st_size

    def sync(self):
        """Upload the files that have grown; UserError if that fails."""
        with cloud_errors(f"--workdir {self.target.path}"):
            for file in self.local.path.rglob("*"):
                size = file.stat().st_size
                if file.is_file() and size != self.uploaded.get(file):
                    upload_file(file, self.target.path / file.relative_to(self.local.path).as_posix())
                    self.uploaded[file] = size

    def close(self):
        with self.temporary:
            self.sync()


def _to_each(method: str) -> Callable:
    def forward(self, *arguments):
        for sink in self.sinks:
            getattr(sink, method)(*arguments)

    return forward


class Journal(Sink):
    """Forwards to several sinks; silent without sinks."""

    def __init__(self, sinks: Sequence[Sink] = ()):
        self.sinks = [*sinks]

    say, note, figures, doing, progress = map(_to_each, ("say", "note", "figures", "doing", "progress"))

    def sync(self):
        for sink in self.sinks:
            try:
                sink.sync()
            except UserError as error:
                self.say(f"{error}; will retry at the next checkpoint")

    def close(self):
        with contextlib.ExitStack() as stack:
            for sink in reversed(self.sinks):
                stack.callback(sink.close)


def open_journal(directory: RunDirectory, step: int, total: int, track: Sequence[str] = ()) -> Journal:
    """Open the journal of a run's first process. Metrics that an interrupted run wrote after `step`, its last
    checkpoint, are dropped.   track: names of trackers."""
    written_before = _entries(directory)
    if is_file(directory.metrics):
        write_whole(directory.metrics, "".join(line for line, entry in written_before if entry["step"] <= step))
    mirror = Mirror(directory) if in_cloud(directory.path) else None
    local = mirror.local if mirror else directory
    files = Screen(step, total), Files(local), TensorBoard(local.tensorboard, step)
    journal = Journal([*files, mirror] if mirror else files)
    sent = {(entry["kind"], entry["step"]) for _, entry in written_before}
    trackers = read_object(directory.trackers)
    if track and trackers is None:
        journal.say(f"{directory.trackers}: is damaged; --track {' '.join(track)} starts a new run")
    trackers = trackers or {}
    ids = {name: trackers.get(name) or secrets.token_hex(4) for name in track}
    if ids:
        write_whole(directory.trackers, json.dumps(trackers | ids) + "\n")
    for name, run_id in ids.items():
        about = {
            "project": os.environ.get(f"{name.upper()}_PROJECT", "pretrain"),
            "name": directory.path.absolute().name,
            "id": run_id,
            "config": json.loads(directory.recipe.read_text()),
            "folder": Path(tempfile.gettempdir()) if in_cloud(directory.path) else directory.path,
        }
        tracker = Tracker(name, about, sent if name in trackers else (), journal.say)
        journal.sinks.insert(0, tracker)  # closed before the log
    return journal


class Warnings(logging.Handler):
    """A context in which warnings are shown as usual and also go to the log of the run."""

    def __init__(self):
        super().__init__(logging.WARNING)
        packages = "pretrain", "finetune", "models", "data_pipelines", "tpu"
        self._loggers = [logging.getLogger(package) for package in packages]
        self._waiting: list[str] = []
        self._note = self._waiting.append

    def __enter__(self) -> "Warnings":
        for logger in self._loggers:
            logger.addHandler(self)
        return self

    def __exit__(self, *error) -> None:
        for logger in self._loggers:
            logger.removeHandler(self)

    @contextmanager
    def going_to(self, journal: Journal) -> Iterator[None]:
        """Write the warnings so far, and those inside this context, to a journal."""
        self._note = journal.note
        for line in self._waiting:
            journal.note(line)
        try:
            yield
        finally:
            self._note = self._waiting.append

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            logging.lastResort.handle(record)  # as without this handler
        self._note(record.getMessage())


def read_metrics(directory: RunDirectory, kind: str) -> list[dict]:
    """Return the metrics of one kind, in order of step."""
    return [entry for _, entry in _entries(directory) if entry["kind"] == kind]


def _entries(directory: RunDirectory) -> list[tuple[str, dict]]:
    """Return (line, metrics) in order, without an unfinished last line. UserError if a line is malformed."""
    if not is_file(directory.metrics):
        return []
    found = []
    for number, line in enumerate(directory.metrics.read_text().splitlines(keepends=True), 1):
        if not line.endswith("\n"):
            break
        try:
            entry = json.loads(line)
            found.append((line, {"kind": entry["kind"], "step": int(entry["step"]), **entry}))
        except (ValueError, TypeError, KeyError):
            raise UserError(f"{directory.metrics}: line {number} is not a metrics entry; remove it") from None
    return found
