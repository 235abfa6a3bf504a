"""Checkpoints of the train state: written while training goes on, checked when read, never silently skipped."""

import errno
import logging
import math
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from data_pipelines.cloud import cloud_errors, in_cloud, remove_folder
from data_pipelines.errors import UserError
from pretrain.state import TrainState
from pretrain.storage.stored_state import Damaged, checksums, load, phase_of, stored_dtype, verified
from tpu.cluster import from_first, gather

log = logging.getLogger(__name__)

Like = Callable[[int], TrainState]  # step -> a state of shapes, dtypes and shardings; NOT_READ for what is not wanted


class Checkpoints:
    """The checkpoints of the run that writes them, `folder`/STEP each. All its processes call the same methods.

    keep: how many of the newest stay.   keep_every: those at multiples of it stay for good; 0 for none.
    """

    def __init__(self, folder: Path, keep: int = 3, keep_every: int = 0):
        self.folder = folder
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            keep_period=keep_every or None,
            create=True,
            async_options=ocp.options.AsyncOptions(barrier_sync_fn=_wait_for_others),
        )
        with cloud_errors(str(folder)):
            self._manager = ocp.CheckpointManager(folder if in_cloud(folder) else folder.absolute(), options=options)

    def steps(self) -> list[int]:
        """The steps of the finished checkpoints, ascending."""
        return from_first("the checkpoints that there are", lambda: sorted(self._manager.all_steps()))

    def phase(self, step: int) -> int | None:
        """The phase that the state of a step was in; None for a checkpoint that does not say."""
        return from_first(f"the phase of checkpoint {step}", lambda: phase_of(self.folder / str(step)))

    def save(self, state: TrainState, phase: int = 0) -> None:
        """Start writing a checkpoint of a state in a phase; returns when the state may be donated.

        OSError without room for it.
        """
        step = int(state.step)
        if step in self.steps():
            return
        self._check_room(sum(leaf.nbytes for leaf in jax.tree.leaves(state)))
        stored = jax.tree.map(lambda leaf: jnp.array(leaf, stored_dtype(leaf), copy=_needs_copy(leaf)), state)
        item = ocp.args.PyTreeSave({"state": stored, "checksums": checksums(stored)})
        self._manager.save(step, args=item, custom_metadata={"phase": phase})

    def wait(self) -> None:
        """Return when everything is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        self._manager.close()

    def restore(self, like: Like, step: int | None = None) -> TrainState | None:
        """The newest state that loads, or that of a step; None when there is no checkpoint at all.

        Newer checkpoints that are damaged for any process are set aside as STEP.damaged, and the log says so.
        UserError when none loads (a run must never start again at 0 by itself), or one cannot be read for now.
        """
        state, damaged = newest_intact(self.folder, self.steps(), step, lambda at: self._read(at, like(at)))
        if damaged and state is not None:
            self._set_aside(damaged, int(state.step))
        return state

    def _check_room(self, needed: int) -> None:
        if in_cloud(self.folder):
            return
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            lacking = f"a checkpoint takes {needed / 1e6:.1f} MB, {free / 1e6:.1f} MB are free"
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {lacking}")

    def _read(self, step: int, like: TrainState) -> TrainState:
        """Each process its part, first alone: one that cannot must not leave the others in a computation."""
        loaded = []

        def alone() -> str | None:
            try:
                loaded.append(load(self.folder / str(step), like))
            except Damaged as error:
                return str(error)
            return None

        reasons = gather(f"reading checkpoint {step}", alone)
        if damage := next((reason for reason in reasons if reason), None):
            raise Damaged(damage)
        return verified(*loaded[0], like)

    def _set_aside(self, damaged: dict[int, str], good: int) -> None:
        def rename() -> None:
            for step, reason in damaged.items():
                target = self.folder / f"{step}.damaged"
                remove_folder(target)  # of an earlier accident
                (self.folder / str(step)).rename(target)
                log.warning(
                    "checkpoint of step %d is damaged (%s): moved to %s, going on from step %d",
                    step,
                    reason,
                    target.name,
                    good,
                )

        from_first("setting damaged checkpoints aside", rename)
        self._manager.reload()


def _wait_for_others(*, key: str, timeout_ms: int) -> None:
    """As Orbax waits for the other processes, but not where a save has failed here: they wait for this one, and both
    would for 20 minutes."""
    if error := sys.exception():
        raise error
    ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)


def newest_intact(
    folder: Path, steps: list[int], step: int | None, read: Callable[[int], TrainState]
) -> tuple[TrainState | None, dict[int, str]]:
    """(the newest of the checkpoints in a folder that is not damaged, or that of a step; step -> damage of newer ones).

    (None, {}) when there is none at all; UserError when all are damaged, or the step's is not there.
    """
    if step is not None:
        if step not in steps:
            raise UserError(f"{folder} has no checkpoint of step {step}: there are {steps or 'none'}")
        steps = [step]
    damaged = {}
    for candidate in reversed(steps):
        try:
            return read(candidate), damaged
        except Damaged as error:
            damaged[candidate] = str(error)
    if step is not None:
        raise UserError(f"checkpoint {folder / str(step)} is damaged ({damaged[step]}): restore it from a copy")
    if damaged:
        reasons = "; ".join(f"step {s}: {reason}" for s, reason in damaged.items())
        raise UserError(
            f"no checkpoint in {folder} loads ({reasons}): restore the folder from a copy, "
            "or start afresh in another --workdir"
        )
    return None, {}


def _needs_copy(leaf) -> bool:
    """On a CPU the writer would read the very buffers that the next step is given to overwrite. From an accelerator
    Orbax has everything in the host's memory when `save` returns (`transfer_arrays_to_host`)."""
    return stored_dtype(leaf) != leaf.dtype or _on_cpu(leaf.sharding)


def _on_cpu(sharding: jax.sharding.Sharding) -> bool:
    return next(iter(sharding.device_set)).platform == "cpu"


def checkpoint_bytes(state: TrainState) -> int:
    """Bytes that saving a state takes on each device beside it; the state as shapes with shardings.

    Copies, and of what several devices hold the part that each of them hands over (Orbax's replica-parallel writing).
    """
    total = 0
    for leaf in jax.tree.leaves(state):
        elements = math.prod(leaf.sharding.shard_shape(leaf.shape))
        replicas = elements * len(leaf.sharding.device_set) // leaf.size
        stored = elements * stored_dtype(leaf).itemsize
        total += stored * _needs_copy(leaf) + (stored // replicas if replicas > 1 else 0)
    return total
