"""What a run says of itself: lines and figures, to every sink."""

import contextlib
import json
import logging
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from data_pipelines.cloud import in_cloud, is_file
from data_pipelines.errors import UserError
from pretrain.storage.run_directory import RunDirectory, write_whole
from pretrain.storage.sinks import Files, Mirror, Screen, TensorBoard
from pretrain.trackers import Sink, Tracker


def _to_each(method: str) -> Callable:
    def hand_on(self, *told):
        for sink in self.sinks:
            getattr(sink, method)(*told)

    return hand_on


class Journal(Sink):
    """Hands on to several sinks; of none, it is silent."""

    def __init__(self, sinks: Sequence[Sink] = ()):
        self.sinks = [*sinks]

    say, note, figures, doing, progress = map(_to_each, ("say", "note", "figures", "doing", "progress"))

    def sync(self):
        for sink in self.sinks:
            try:
                sink.sync()
            except UserError as error:
                self.say(f"{error}; tried again at the next checkpoint")

    def close(self):
        with contextlib.ExitStack() as stack:
            for sink in reversed(self.sinks):
                stack.callback(sink.close)


def open_journal(directory: RunDirectory, step: int, total: int, track: Sequence[str] = ()) -> Journal:
    """The journal of a run's first process; what an interrupted run wrote beyond `step`, its last checkpoint, is
    dropped.   track: names of trackers."""
    written_before = _entries(directory)
    if is_file(directory.metrics):
        write_whole(directory.metrics, "".join(line for line, entry in written_before if entry["step"] <= step))
    mirror = Mirror(directory) if in_cloud(directory.path) else None
    local = mirror.local if mirror else directory
    files = Screen(step, total), Files(local), TensorBoard(local.tensorboard, step)
    journal = Journal([*files, mirror] if mirror else files)
    sent = {(entry["kind"], entry["step"]) for _, entry in written_before}
    trackers = json.loads(directory.trackers.read_text()) if is_file(directory.trackers) else {}
    ids = {name: trackers.get(name) or secrets.token_hex(4) for name in track}
    if ids:
        write_whole(directory.trackers, json.dumps(trackers | ids) + "\n")
    for name, known_as in ids.items():
        about = {
            "project": os.environ.get(f"{name.upper()}_PROJECT", "pretrain"),
            "name": directory.path.absolute().name,
            "id": known_as,
            "config": json.loads(directory.recipe.read_text()),
            "folder": Path(tempfile.gettempdir()) if in_cloud(directory.path) else directory.path,
        }
        tracker = Tracker(name, about, sent if name in trackers else (), journal.say)
        journal.sinks.insert(0, tracker)  # closed before the log
    return journal


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
    def going_to(self, journal: Journal) -> Iterator[None]:
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
