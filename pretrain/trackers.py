"""Where a run's figures go beside its work directory, as `run --track` names it.

Another tracker is a function and a line in TRACKERS; its package is imported only when it is asked for.
"""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

SECONDS = 60  # that a tracker may take to send the last figures of a run that ends


class Sink:
    """Takes what a run says of itself, and leaves what it has no use for."""

    def say(self, line: str) -> None:
        """One line for the reader."""

    def note(self, line: str) -> None:
        """One line for the log alone."""

    def figures(self, kind: str, step: int, figures: Mapping[str, float]) -> None:
        """One measurement of kind 'train' or 'eval' after `step` steps."""

    def doing(self, what: str) -> None:
        """What is done until the next step has begun."""

    def progress(self, step: int) -> None:
        """How many steps have been handed to the devices, which may still be at earlier ones."""

    def sync(self) -> None:
        """To be called before a checkpoint is saved, so that what led to it is kept, and after an evaluation, which is
        not repeated."""

    def close(self) -> None: ...


def _wandb(project: str, name: str, id: str, config: dict, folder: Path) -> Any:
    """Weights & Biases, with WANDB_API_KEY, WANDB_MODE and so on from the environment."""
    import wandb

    settings = wandb.Settings(console="off", finish_timeout=SECONDS)
    about = {"project": project, "name": name, "id": id, "config": config, "dir": folder}
    return wandb.init(**about, resume="allow", allow_val_change=True, settings=settings)


def _trackio(project: str, name: str, id: str, config: dict, folder: Path) -> Any:
    """Hugging Face's, on this machine, or where TRACKIO_SPACE_ID or TRACKIO_SERVER_URL say."""
    import trackio

    return trackio.init(project, f"{name}-{id}", config=config, resume="allow")  # by this name it finds a run again


# By the package's name what begins a run there, an object with `log(figures, step=)` and `finish()`.
# id: the same for all that goes on in a work directory.   config: its recipe as JSON.   folder: for its own files.
TRACKERS: dict[str, Callable[..., Any]] = {"wandb": _wandb, "trackio": _trackio}


class Tracker(Sink):
    """Of TRACKERS the one of this name, which never stops a run: when it fails it is said, and no more is sent.

    about: what its function takes.
    sent: (kind, step) of the figures that it has had before the run was interrupted, and that come again.
    """

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
            self.warn(f"--track {self.name}: failed ({error!r}); the run goes on without it")
