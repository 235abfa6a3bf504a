"""Contestants that take turns step by step, so that what else the machine does falls on all alike."""

import multiprocessing
import os
import time
from collections.abc import Callable, Mapping

import numpy as np

Step = Callable[[], float]  # trains on a batch -> its loss


def take_turns(makers: Mapping[str, Callable[[], Step]], cores: list[int], rounds: int, warm_up: int) -> dict:
    """Side -> seconds [rounds, (wall, CPU)] of a step.

    makers: side -> what makes its step, in a process of its own on the given cores; top-level functions or partials.
    warm_up: steps until the heap has settled.
    """
    context, contestants = multiprocessing.get_context("spawn"), {}
    for side, make in makers.items():
        ends = context.Pipe()
        process = context.Process(target=_contest, args=(ends[1], make, cores, warm_up), daemon=True)
        process.start()
        ends[1].close()  # so that a contestant's death is an EOFError here
        ends[0].recv()  # it has compiled and warmed up, while nothing else runs
        contestants[side] = ends[0], process
    times = {side: [] for side in makers}
    for _ in range(rounds):
        for side, (end, _) in contestants.items():
            end.send("step")
            times[side].append(end.recv())
    for end, process in contestants.values():
        end.send("stop")
        process.join()
    return {side: np.array(seconds) for side, seconds in times.items()}


def _contest(end, make: Callable[[], Step], cores: list[int], warm_up: int) -> None:
    """A contestant's process: sends a sign when ready, then (wall, CPU) seconds for each request of a step."""
    os.sched_setaffinity(0, cores)  # before JAX and torch size their thread pools
    step = make()
    for _ in range(warm_up):
        step()
    end.send("ready")
    while end.recv() == "step":
        step()  # untimed: fills the caches that the contestant before has emptied
        wall, cpu = time.perf_counter(), time.process_time()
        step()
        end.send((time.perf_counter() - wall, time.process_time() - cpu))


def milliseconds(times: np.ndarray) -> str:
    """The median of wall (CPU) time."""
    return "{:.0f} ({:.0f})".format(*np.median(times, 0) * 1e3)


def ratio(slow: np.ndarray, fast: np.ndarray) -> str:
    """The median over rounds of the ratio of wall times."""
    return f"{np.median(slow[:, 0] / fast[:, 0]):.2f}"
