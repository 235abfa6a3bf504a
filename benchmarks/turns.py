"""Contestants that take turns step by step, so that what else the machine does falls on all alike."""

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

Step = Callable[[], float]  # trains on a batch -> its loss


class Failed(Exception):
    """A contestant cannot go on.   side: who."""

    def __init__(self, side: str, why: str):
        super().__init__(f"{side}: {why}")
        self.side = side


class Contestant:
    """A step in a process of its own, made and warmed up; Failed where it does not get so far."""

    def __init__(self, side: str, make: Callable[[], Step], cores: list[int], warm_up: int):
        context, self._side = multiprocessing.get_context("spawn"), side
        self._end, other = context.Pipe()
        self._process = context.Process(target=_contest, args=(other, make, cores, warm_up), daemon=True)
        self._process.start()
        other.close()  # so that a contestant's death is an EOFError here
        self._answer()

    def step(self) -> tuple[float, float]:
        """(wall, CPU) seconds of a step."""
        return self.ask("step")

    def ask(self, what: str, *arguments) -> Any:
        """What a method of the step answers."""
        self._end.send((what, arguments))
        return self._answer()

    def stop(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._end.send(None)
        self._process.join()

    def _answer(self) -> Any:
        try:
            answer, failure = self._end.recv()
        except EOFError:
            self._process.join()
            raise Failed(self._side, f"its process ended with status {self._process.exitcode}") from None
        if failure:
            self._process.join()
            raise Failed(self._side, failure)
        return answer


@contextlib.contextmanager
def contest(makers: Mapping[str, Callable[[], Step]], cores: list[int], warm_up: int) -> Iterator[dict]:
    """Side -> its `Contestant`, each made while no other one runs; they end with the block."""
    with contextlib.ExitStack() as stack:
        contestants = {}
        for side, make in makers.items():
            contestants[side] = Contestant(side, make, cores, warm_up)
            stack.callback(contestants[side].stop)
        yield contestants


def take_turns(makers: Mapping[str, Callable[[], Step]], cores: list[int], rounds: int, warm_up: int) -> dict:
    """Side -> seconds [rounds, (wall, CPU)] of a step.

    makers: side -> what makes its step, in a process of its own on the given cores; top-level functions or partials.
    warm_up: steps until the heap has settled.
    """
    with contest(makers, cores, warm_up) as contestants:
        return in_turns(contestants, rounds)


def in_turns(contestants: Mapping[str, Contestant], rounds: int) -> dict[str, np.ndarray]:
    """Side -> seconds [rounds, (wall, CPU)] of a step."""
    turns = [{side: contestant.step() for side, contestant in contestants.items()} for _ in range(rounds)]
    return {side: np.array([turn[side] for turn in turns]) for side in contestants}


def _contest(end, make: Callable[[], Step], cores: list[int], warm_up: int) -> None:
    """A contestant's process: sends (nothing, '') when ready, then (answer, '') for each question, and ('', why) before
    it fails."""
    os.sched_setaffinity(0, cores)  # before JAX and torch size their thread pools
    try:
        step = make()
        for _ in range(warm_up):
            step()
        end.send((None, ""))
        while asked := end.recv():
            what, arguments = asked
            end.send((_timed(step) if what == "step" else getattr(step, what)(*arguments), ""))
    except Exception as error:
        end.send((None, f"{type(error).__name__}: {error}"))
        raise


def _timed(step: Step) -> tuple[float, float]:
    step()  # untimed: fills the caches that the contestant before has emptied
    wall, cpu = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - wall, time.process_time() - cpu


def milliseconds(times: np.ndarray) -> str:
    """The median of wall (CPU) time."""
    return "{:.0f} ({:.0f})".format(*np.median(times, 0) * 1e3)


def ratio(slow: np.ndarray, fast: np.ndarray) -> str:
    """The median over rounds of the ratio of wall times."""
    return f"{np.median(slow[:, 0] / fast[:, 0]):.2f}"
