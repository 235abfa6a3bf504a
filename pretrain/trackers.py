"""Experiment trackers that a run can send its metrics to, chosen by `run --track`.

To add a tracker, write a function and add it to TRACKERS; its package is imported only when chosen.
"""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

SECONDS = 60  # that a tracker may take to send the last metrics when a run ends


class Sink:
    """Receives the messages and metrics of a run; every method does nothing unless overridden."""

    def say(self, line: str) -> None:
        """Show a line to the user."""

    def note(self, line: str) -> None:
        """Write a line to the log only."""

    def figures(self, kind: str, step: int, figures: Mapping[str, float]) -> None:
        """Record metrics of kind 'train' or 'eval' after `step` steps."""

    def doing(self, what: str) -> None:
        """Show what is being done until the next step begins."""

    def progress(self, step: int) -> None:
        """Show how many steps were dispatched; the devices may still be computing earlier ones."""

    def sync(self) -> None:
        """Write everything to storage: called before a checkpoint, and after an evaluation, which is not repeated."""

    def close(self) -> None: ...


def _wandb(project: str, name: str, id: str, config: dict, folder: Path) -> Any:
    """Start a run in Weights & Biases, which reads WANDB_API_KEY, WANDB_MODE and so on."""
    import wandb

    settings = wandb.Settings(console="off", finish_timeout=SECONDS)
    about = {"project": project, "name": name, "id": id, "config": config, "dir": folder}
    return wandb.init(**about, resume="allow", allow_val_change=True, settings=settings)


def _trackio(project: str, name: str, id: str, config: dict, folder: Path) -> Any:
    """Start a run in Hugging Face's Trackio, on this machine or at TRACKIO_SPACE_ID or TRACKIO_SERVER_URL."""
    import trackio

    return trackio.init(project, f"{name}-{id}", config=config, resume="allow")  # it resumes a run by this name


# Package name -> function that starts a run there and returns an object with `log(metrics, step=)` and `finish()`.
# id: constant for a work directory.   config: its recipe as JSON.   folder: for the tracker's files.
TRACKERS: dict[str, Callable[..., Any]] = {"wandb": _wandb, "trackio": _trackio}


class Tracker(Sink):
    """Sends metrics to one of TRACKERS. A failure ends the tracking, not the run.   about: arguments of its
    function.   sent: (kind, step) of metrics that were sent before the run was interrupted."""

    def __init__(self, name: str, about: Mapping, sent: Collection[tuple[str, int]], warn: Callable[[str], None]):
        self.name, self.sent, self.warn = name, sent, warn
        self.run = self._tried(TRACKERS[name], **about)

    def figures(self, kind, step, figures):
        if self.run is not None and (kind, step) not in self.sent:
            self._tried(self.run.log, {f"{kind}/{name}": value for name, value in figures.items()}, step=step)

    def close(self):
        if self.run is not None:
            self._tried(self.run.finish)

    def _tried(self, call: Callable, *arguments, **named):
        try:
            return call(*arguments, **named)
        except Exception as error:  # a package may raise anything
            self.run = None
            self.warn(f"--track {self.name}: failed ({error!r}); the run continues without it")
