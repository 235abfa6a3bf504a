"""What a run writes to the screen and into its work directory: lines, figures, TensorBoard events."""

import json
import os
import tempfile
import time
from collections.abc import Mapping
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

from data_pipelines.cloud import cloud_errors, is_file, upload_file
from pretrain.storage.run_directory import RunDirectory
from pretrain.trackers import Sink

TRAINING = "training"


def line_of(kind: str, step: int, figures: Mapping[str, float]) -> str:
    """Figures for the reader."""
    return f"{kind:>5} {step:>7}  " + "  ".join(f"{name} {value:.5g}" for name, value in figures.items())


class Screen(Sink):
    """On a terminal with a bar of `total` steps, of which `step` are done."""

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
        self.say(line_of(kind, step, figures))

    def doing(self, what):
        self.bar.update(self.task, description=what)

    def progress(self, step):
        self.bar.update(self.task, completed=step, description=TRAINING)

    def close(self):
        self.bar.stop()


class _Rate(ProgressColumn):
    """Steps per second in the last half minute."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:.3g}/s" if task.speed else "")


class Files(Sink):
    """metrics.jsonl and log.txt: every line is there at once, and after `sync` whatever happens to the machine."""

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
        from tensorboardX import SummaryWriter  # imports torch where there is one, which takes seconds

        # Its files are named by the second; a run that goes on within one has another step.
        self.events = SummaryWriter(str(folder), purge_step=step + 1, filename_suffix=f".{step}")

    def figures(self, kind, step, figures):
        for name, value in figures.items():
            self.events.add_scalar(f"{kind}/{name}", value, step)

    def sync(self):
        self.events.flush()

    def close(self):
        self.events.close()


class Mirror(Sink):
    """Files of a gs:// work directory that grow, which objects cannot: written here, uploaded as a whole.

    local: the work directory that they are written to.
    """

    def __init__(self, directory: RunDirectory):
        self.temporary = tempfile.TemporaryDirectory()
        self.target, self.local = directory, RunDirectory(Path(self.temporary.name))
        self.uploaded: dict[Path, int] = {}  # file -> its size then
        for source, target in ((directory.metrics, self.local.metrics), (directory.log, self.local.log)):
            if is_file(source):
                target.write_bytes(source.read_bytes())
                self.uploaded[target] = target.stat().st_size

    def sync(self):
        """Upload what has grown; UserError where that fails."""
        with cloud_errors(f"--workdir {self.target.path}"):
            for file in self.local.path.rglob("*"):
                size = file.stat().st_size
                if file.is_file() and size != self.uploaded.get(file):
                    upload_file(file, self.target.path / file.relative_to(self.local.path).as_posix())
                    self.uploaded[file] = size

    def close(self):
        with self.temporary:
            self.sync()
