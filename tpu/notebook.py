"""Helpers of tpu/colab.ipynb: run commands and show their output, redraw training curves, stop with a checkpoint.

This module imports neither JAX nor the other packages: only one process can own the accelerator, the command's, and
that may have its own Python environment.
"""

import contextlib
import datetime
import io
import json
import os
import re
import shlex
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from IPython.display import DisplayHandle, Image, Markdown
from matplotlib.figure import Figure

STOPPED = 75  # exit status of a run that a signal stopped, after it wrote a checkpoint
FIGURES = re.compile(r" *(train|eval) +\d+  ")  # lines of a run whose figures the curves show


def run(*command: object) -> None:
    """Run a command, print its output as it comes, and pass on an interrupt. Raises RuntimeError if it fails."""
    _finish(command, _follow(command))


def train(*command: object, metrics: Path, seconds: float = 10) -> None:
    """Run a training command below curves that are redrawn from its metrics.jsonl every `seconds` seconds.
    An interrupt (the cell's stop button) is passed on, so that the run writes a checkpoint; a second one kills it.
    Raises RuntimeError if the command fails."""
    shown = DisplayHandle()
    shown.display(Markdown("*The curves appear when the first step is compiled.*"))
    drawn = []

    def draw() -> None:
        entries = read(metrics)
        if entries != drawn:
            shown.update(Image(data=picture(entries)))
            drawn[:] = entries

    status = _follow(command, lambda line: not FIGURES.match(line), draw, seconds)
    if status == STOPPED:
        print("Stopped with a checkpoint. Run this cell again to continue, or use the model so far in the cells below.")
    else:
        _finish(command, status)


def _finish(command: Sequence[object], status: int) -> None:
    if status:
        raise RuntimeError(f"{shlex.join(map(str, command))} ended with status {status}")


def _follow(
    command: Sequence[object],
    wanted: Callable[[str], bool] = lambda line: True,
    look: Callable[[], None] = lambda: None,
    seconds: float = 1,
) -> int:
    """Run a command, print its wanted lines, and call `look` every `seconds` seconds -> exit status."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    environment.pop("FORCE_COLOR", None)  # set by Jupyter; with it a run draws a progress bar as in a terminal
    # In its own session: Jupyter interrupts its whole process group, and a run that gets SIGINT twice ends at once.
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen([*map(str, command)], env=environment, start_new_session=True, **pipes)
    reader = threading.Thread(target=_print_lines, args=(process.stdout, wanted))
    reader.start()
    try:
        try:
            _wait(process, look, seconds)
        except KeyboardInterrupt:
            _send(process, signal.SIGINT)
            _wait(process, look, seconds)
    finally:  # a second interrupt
        _send(process, signal.SIGKILL)
        process.wait()
        reader.join()
    look()
    return process.returncode


def _print_lines(output: TextIO, wanted: Callable[[str], bool]) -> None:
    for line in output:
        if wanted(line):
            print(line, end="", flush=True)


def _wait(process: subprocess.Popen, look: Callable[[], None], seconds: float) -> None:
    while process.poll() is None:
        look()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)


def _send(process: subprocess.Popen, number: signal.Signals) -> None:
    """Send a signal to the command and the processes that it started, as a terminal does, unless it has ended."""
    if process.poll() is None:
        os.killpg(process.pid, number)


def read(metrics: Path) -> list[dict]:
    """Read the metrics so far while another process writes them; an incomplete last line is left out."""
    if not metrics.is_file():
        return []
    return [json.loads(line) for line in metrics.read_text().splitlines(keepends=True) if line.endswith("\n")]


def picture(entries: Sequence[dict]) -> bytes:
    """Draw losses and accuracies over steps as a PNG: training as lines, held-out set as dots, speed in the title."""
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    for panel, ending in zip(figure.subplots(1, 2), ("_loss", "_accuracy"), strict=True):
        names = dict.fromkeys(name for entry in entries for name in entry if name.endswith(ending))
        for index, name in enumerate(names):
            for kind, style, label in (("train", "-", name), ("eval", "o", f"{name}, held-out")):
                points = [(entry["step"], entry[name]) for entry in entries if entry["kind"] == kind and name in entry]
                panel.plot(*(zip(*points, strict=True) if points else ([], [])), style, color=f"C{index}", label=label)
        panel.set_xlabel("step")
        panel.grid(alpha=0.3)
        panel.legend(fontsize="small")
    figure.suptitle(title(entries), fontsize="medium")
    written = io.BytesIO()
    figure.savefig(written, format="png", dpi=90)
    return written.getvalue()


def title(entries: Sequence[dict]) -> str:
    """Return a title such as 'step 450, 34,000 tokens/s, 0:01:23 left', as far as known."""
    last = {name: value for entry in entries if entry["kind"] == "train" for name, value in entry.items()}
    parts = [f"step {entries[-1]['step']}"]
    if "tokens_per_s" in last:
        left = datetime.timedelta(seconds=round(last["seconds_left"]))
        parts += [f"{last['tokens_per_s']:,.0f} tokens/s", f"{left} left"]
    return ", ".join(parts)
