"""Checkpoints of the train state: written while training goes on, checked when read, never silently skipped."""

import errno
import logging
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax import Array

from data_pipelines.cloud import cloud_errors, in_cloud, remove_folder
from data_pipelines.errors import UserError
from pretrain.step import TrainState
from tpu.cluster import barrier, is_first

log = logging.getLogger(__name__)

NOT_READ = ocp.PLACEHOLDER  # in place of an array that is to stay in the file


class Checkpoints:
    """The checkpoints of one run, `folder`/STEP each.

    keep: how many of the newest stay.   keep_every: those at multiples of it stay for good; 0 for none.
    """

    def __init__(self, folder: Path, keep: int = 3, keep_every: int = 0):
        self.folder = folder
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, keep_period=keep_every or None, create=True)
        with cloud_errors(str(folder)):
            self._manager = ocp.CheckpointManager(folder if in_cloud(folder) else folder.absolute(), options=options)

    def steps(self) -> list[int]:
        """The steps of the finished checkpoints, ascending."""
        return sorted(self._manager.all_steps())

    def save(self, state: TrainState) -> None:
        """Start writing a checkpoint of a state; returns when the state may be donated. OSError without room for it."""
        step = int(state.step)
        if step in self._manager.all_steps():
            return
        self._check_room(sum(leaf.nbytes for leaf in jax.tree.leaves(state)))
        stored = jax.tree.map(lambda leaf: jnp.array(leaf, _stored_dtype(leaf), copy=_needs_copy(leaf)), state)
        self._manager.save(step, args=ocp.args.PyTreeSave({"state": stored, "checksums": checksums(stored)}))

    def wait(self) -> None:
        """Return when everything is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        self._manager.close()

    def restore(self, like: Callable[[int], TrainState], step: int | None = None) -> TrainState | None:
        """The newest state that loads, or that of a step; None when there is no checkpoint at all.

        like: step -> a state of shapes, dtypes and shardings; NOT_READ for what is not wanted.
        Newer checkpoints that do not load are set aside as STEP.damaged, and the log says so.
        UserError when none loads: a run must never start again at 0 by itself.
        """
        steps = self.steps()
        if step is not None:
            if step not in steps:
                raise UserError(f"{self.folder} has no checkpoint of step {step}: there are {steps or 'none'}")
            steps = [step]
        damaged = {}
        for candidate in reversed(steps):
            try:
                state = self._read(candidate, like(candidate))
            except Exception as error:  # whatever a damaged file makes the readers raise
                damaged[candidate] = " ".join(str(error).split())[:160] or type(error).__name__
                continue
            self._set_aside(damaged, candidate)
            return state
        if damaged:
            reasons = "; ".join(f"step {s}: {reason}" for s, reason in damaged.items())
            raise UserError(
                f"no checkpoint in {self.folder} loads ({reasons}): restore the folder from a copy, "
                "or start afresh in another --workdir"
            )
        return None

    def _check_room(self, needed: int) -> None:
        if in_cloud(self.folder):
            return
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            lacking = f"a checkpoint takes {needed / 1e6:.1f} MB, {free / 1e6:.1f} MB are free"
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {lacking}")

    def _read(self, step: int, like: TrainState) -> TrainState:
        one = jax.ShapeDtypeStruct((), jnp.uint32, sharding=like.step.sharding)
        wanted = lambda tree, get: jax.tree.map(lambda s: s if s is NOT_READ else get(s), tree)
        stored = wanted(like, lambda s: jax.ShapeDtypeStruct(s.shape, _stored_dtype(s), sharding=s.sharding))
        sums = jax.tree.leaves(wanted(like, lambda _: one))
        item = {"state": stored, "checksums": sums}
        arguments = ocp.checkpoint_utils.construct_restore_args(item)
        restored = self._manager.restore(step, args=ocp.args.PyTreeRestore(item, restore_args=arguments))
        read = [(path, leaf) for path, leaf in jax.tree.leaves_with_path(restored["state"]) if leaf is not NOT_READ]
        expected = [int(one) for one in restored["checksums"] if one is not NOT_READ]
        for (path, _), before, now in zip(read, expected, checksums([leaf for _, leaf in read]), strict=True):
            if before != int(now):
                raise ValueError(f"the checksum of {jax.tree_util.keystr(path)} differs")
        cast = lambda leaf, s: leaf if leaf is NOT_READ or leaf.dtype == s.dtype else leaf.astype(s.dtype)
        return jax.tree.map(cast, restored["state"], like)

    def _set_aside(self, damaged: dict[int, str], good: int) -> None:
        for step, reason in damaged.items():
            if not is_first():
                break
            target = self.folder / f"{step}.damaged"
            remove_folder(target)  # of an earlier accident
            (self.folder / str(step)).rename(target)
            log.warning("checkpoint of step %d does not load (%s): moved to %s, going on from step %d",
                        step, reason, target.name, good)  # fmt: skip
        if damaged:
            barrier("damaged checkpoints are set aside")
            self._manager.reload()


def _stored_dtype(leaf) -> jnp.dtype:
    """Floats are stored as float32, so that a memory in bfloat16 can be read where the program has another dtype."""
    return jnp.dtype(jnp.float32) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.dtype


def _needs_copy(leaf) -> bool:
    """On a CPU the writer would read the very buffers that the next step is given to overwrite. From an accelerator
    Orbax has everything in the host's memory when `save` returns (`transfer_arrays_to_host`)."""
    return _stored_dtype(leaf) != leaf.dtype or _on_cpu(leaf.sharding)


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
        stored = elements * _stored_dtype(leaf).itemsize
        total += stored * _needs_copy(leaf) + (stored // replicas if replicas > 1 else 0)
    return total


def checksums(tree) -> list[Array]:
    """A u32[] per array, which a changed, lost or moved element changes; the files have none for array data."""
    return _checksums(jax.tree.leaves(tree))


@jax.jit
def _checksums(leaves: list[Array]) -> list[Array]:
    def one(leaf: Array) -> Array:
        bits = jax.lax.bitcast_convert_type(leaf, jnp.uint32) if leaf.dtype.itemsize == 4 else leaf.astype(jnp.uint32)
        weight = jnp.zeros(leaf.shape, jnp.uint32)
        for axis in range(leaf.ndim):
            weight = weight * jnp.uint32(leaf.shape[axis]) + jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
        return jnp.sum(bits * (2 * weight + 1), dtype=jnp.uint32)

    return [one(leaf) for leaf in leaves]
