"""What a run says of itself: lines on the screen and in log.txt, metrics.jsonl, TensorBoard events."""

import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
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
from pretrain.storage.run_directory import RunDirectory, write_whole

TRAINING = "training"


class Journal:
    """Writes one run's figures; what an interrupted run wrote beyond `step`, its last checkpoint, is dropped."""

    def __init__(self, directory: RunDirectory, step: int, total: int):
        from tensorboardX import SummaryWriter  # imports torch where there is one, which takes seconds

        _forget_after(directory, step)
        self._mirror = _Mirror(directory) if in_cloud(directory.path) else None
        written = self._mirror.local if self._mirror else directory
        self._metrics = written.metrics.open("a")
        self._log = written.log.open("a")
        # Its files are named by the second; a run that goes on within one has another step.
        self._events = SummaryWriter(str(written.tensorboard), purge_step=step + 1, filename_suffix=f".{step}")
        self.console = Console(highlight=False)
        self._bar = Progress(
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
        self._task = self._bar.add_task(TRAINING, total=total, completed=step)
        self._bar.start()

    def say(self, line: str) -> None:
        """One line for the reader."""
        self.console.print(line, markup=False, soft_wrap=True)
        self.note(line)

    def note(self, line: str) -> None:
        """The same in the log alone."""
        self._log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")
        self._log.flush()

    def figures(self, kind: str, step: int, figures: Mapping[str, float]) -> None:
        """One measurement of kind 'train' or 'eval' after `step` steps."""
        self._metrics.write(json.dumps({"kind": kind, "step": step, **figures}) + "\n")
        self._metrics.flush()
        for name, value in figures.items():
            self._events.add_scalar(f"{kind}/{name}", value, step)
        self.say(f"{kind:>5} {step:>7}  " + "  ".join(f"{name} {value:.5g}" for name, value in figures.items()))

    def doing(self, what: str) -> None:
        """On a terminal, what is done until the next step has begun."""
        self._bar.update(self._task, description=what)

    def progress(self, step: int) -> None:
        """On a terminal, how many steps have been handed to the devices, which may still be at earlier ones."""
        self._bar.update(self._task, completed=step, description=TRAINING)

    def sync(self) -> None:
        """To be called before a checkpoint is saved, so that what led to it is in the work directory, and after an
        evaluation, which is not repeated."""
        self._events.flush()
        if self._mirror is None:
            for file in (self._metrics, self._log):
                os.fsync(file.fileno())
            return
        try:
            self._mirror.upload()
        except UserError as error:
            self.say(f"{error}; tried again at the next checkpoint")

    def close(self) -> None:
        self._bar.stop()
        self._metrics.close()
        self._events.close()
        self._log.close()
        if self._mirror is not None:
            self._mirror.close()


class _Rate(ProgressColumn):
    """Steps per second in the last half minute."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:.3g}/s" if task.speed else "")


class _Mirror:
    """Files of a gs:// work directory that grow, which objects cannot: written here, uploaded as a whole.

    local: the work directory that they are written to.
    """

    def __init__(self, directory: RunDirectory):
        self._temporary = tempfile.TemporaryDirectory()
        self._target, self.local = directory, RunDirectory(Path(self._temporary.name))
        self._uploaded: dict[Path, int] = {}  # file -> its size then
        for source, target in ((directory.metrics, self.local.metrics), (directory.log, self.local.log)):
            if is_file(source):
                target.write_bytes(source.read_bytes())
                self._uploaded[target] = target.stat().st_size

    def upload(self) -> None:
        """Upload what has grown; UserError where that fails."""
        with cloud_errors(f"--workdir {self._target.path}"):
            for file in self.local.path.rglob("*"):
                size = file.stat().st_size
                if file.is_file() and size != self._uploaded.get(file):
                    upload_file(file, self._target.path / file.relative_to(self.local.path).as_posix())
                    self._uploaded[file] = size

    def close(self) -> None:
        with self._temporary:
            self.upload()


class Silence:
    """The journal of every process but the first."""

    def say(self, line: str) -> None: ...

    def note(self, line: str) -> None: ...

    def figures(self, kind: str, step: int, figures: Mapping[str, float]) -> None: ...

    def doing(self, what: str) -> None: ...

    def progress(self, step: int) -> None: ...

    def sync(self) -> None: ...

    def close(self) -> None: ...


class Warnings(logging.Handler):
    """A context in which warnings, shown as without it, also go to the log of the run that begins."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self._loggers = [logging.getLogger(package) for package in ("pretrain", "models", "data_pipelines", "tpu")]
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
    def going_to(self, journal: Journal | Silence) -> Iterator[None]:
        """What there was so far, and what there is in this context."""
        self._note = journal.note
        for line in self._waiting:
            journal.note(line)
        try:
            yield
        finally:
            self._note = self._waiting.append

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            logging.lastResort.handle(record)  # as without this one
        self._note(record.getMessage())


def read_metrics(directory: RunDirectory, kind: str) -> list[dict]:
    """The measurements of one kind, in order of step."""
    return [entry for _, entry in _entries(directory) if entry["kind"] == kind]


def _entries(directory: RunDirectory) -> list[tuple[str, dict]]:
    """(line, measurement) in order; a killed run may leave half a line at the end. UserError where one is none."""
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
            raise UserError(f"{directory.metrics}: line {number} is no measurement; take it out") from None
    return found


def _forget_after(directory: RunDirectory, step: int) -> None:
    if is_file(directory.metrics):
        kept = [line for line, entry in _entries(directory) if entry["step"] <= step]
        write_whole(directory.metrics, "".join(kept))
