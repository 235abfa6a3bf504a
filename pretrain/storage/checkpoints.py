"""Checkpoints of the train state: written while training continues, verified when read, never silently skipped."""

import errno
import json
import logging
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from jax import Array

from data_pipelines.cloud import cloud_errors, in_cloud, is_file, remove_folder
from data_pipelines.errors import PassingError, UserError
from models.core.parameters import Params
from pretrain.recipe import Recipe, phase_after
from tpu.cluster import from_first, gather

log = logging.getLogger(__name__)

NOT_READ = ocp.PLACEHOLDER  # in place of an array that is not read
PAUSES = (1, 3, 9)  # seconds before each further attempt to read
ITEM = "default"  # folder in a checkpoint for the only item of Orbax's manager
ABOUT = "_CHECKPOINT_METADATA"  # file in a checkpoint with our metadata
DESCRIPTION = "_METADATA"  # file in ITEM that describes the stored tree


class TrainState(NamedTuple):
    """Everything that a step changes, and that a checkpoint stores.   step: i32[], batches seen.   carry: the
    objective's, between batches.   skipped: i32[2], updates skipped for non-finite numbers: in total, and in a row."""

    step: Array
    params: Params
    opt_state: optax.OptState
    carry: Any
    skipped: Array


Like = Callable[[int], TrainState]  # step -> state of shapes, dtypes and shardings, or NOT_READ


class _Staying(NamedTuple):
    """Orbax's policy on which checkpoints to keep when another one is written."""

    keep: int
    keep_every: int
    also: Callable[[list[int]], Collection[int]]

    def should_preserve(self, checkpoints, *, context) -> list[bool]:
        steps = [checkpoint.step for checkpoint in checkpoints]
        kept = {*sorted(steps)[-self.keep :], *self.also(steps)}
        return [step in kept or bool(self.keep_every) and step % self.keep_every == 0 for step in steps]


class Checkpoints:
    """Writes and restores the checkpoints `folder`/STEP of a run, with all its processes.   keep: how many newest ones
    to keep.   keep_every: keep multiples of it for good; 0 for none.   also: existing steps -> others to keep."""

    def __init__(
        self,
        folder: Path,
        keep: int = 3,
        keep_every: int = 0,
        also: Callable[[list[int]], Collection[int]] = lambda steps: (),
    ):
        self.folder = folder
        options = ocp.CheckpointManagerOptions(
            preservation_policy=_Staying(keep, keep_every, also),
            create=True,
            async_options=ocp.options.AsyncOptions(barrier_sync_fn=_wait_for_others),
        )
        with cloud_errors(str(folder)):
            self._manager = ocp.CheckpointManager(_absolute(folder), options=options)

    def steps(self) -> list[int]:
        """List the steps of the finished checkpoints, ascending."""
        return from_first("the list of checkpoints", lambda: sorted(self._manager.all_steps()))

    def save(self, state: TrainState, phase: int = 0) -> None:
        """Start writing a checkpoint of a state, which may then be donated. OSError if there is no space for it."""
        step = int(state.step)
        if step in self.steps():
            return
        self._check_room(sum(leaf.nbytes for leaf in jax.tree.leaves(state)))
        stored = jax.tree.map(lambda leaf: jnp.array(leaf, stored_dtype(leaf), copy=_needs_copy(leaf)), state)
        item = ocp.args.PyTreeSave({"state": stored, "checksums": checksums(stored)})
        self._manager.save(step, args=item, custom_metadata={"phase": phase})

    def wait(self) -> None:
        """Wait until everything is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        self._manager.close()

    def restore(self, like: Like, step: int | None = None) -> TrainState | None:
        """Restore the newest state that loads, or that of a step; None if there is no checkpoint at all. Newer
        checkpoints that are damaged for any process are renamed to STEP.damaged, with a warning. UserError if none
        loads (a run must never silently start again at step 0), or if one cannot be read for now."""
        state, damaged = newest_intact(self.folder, self.steps(), step, lambda at: self._read(at, like(at)))
        if damaged and state is not None:
            self._set_aside(damaged, int(state.step))
        return state

    def _check_room(self, needed: int) -> None:
        if in_cloud(self.folder):
            return
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            lacking = f"a checkpoint takes {needed / 1e6:.1f} MB, but {free / 1e6:.1f} MB are free"
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {lacking}")

    def _read(self, step: int, like: TrainState) -> TrainState:
        """Read each process's part, without joint computations until all have succeeded, in which others would hang."""
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
                remove_folder(target)  # from an earlier accident
                (self.folder / str(step)).rename(target)
                message = "checkpoint of step %d is damaged (%s): renamed to %s, resuming from step %d"
                log.warning(message, step, reason, target.name, good)

        from_first("setting damaged checkpoints aside", rename)
        self._manager.reload()


def _wait_for_others(*, key: str, timeout_ms: int) -> None:
    """Wait for the other processes like Orbax; not after a failed save, when all would wait for 20 minutes."""
    if error := sys.exception():
        raise error
    ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)


def newest_intact(
    folder: Path, steps: list[int], step: int | None, read: Callable[[int], TrainState]
) -> tuple[TrainState | None, dict[int, str]]:
    """Read the newest undamaged checkpoint, or that of a step -> (state, step -> damage of newer ones). (None, {}) if
    there is no checkpoint; UserError if all are damaged, or if that of the step is missing."""
    if step is not None:
        if step not in steps:
            raise UserError(f"{folder}: has no checkpoint of step {step}; give one of {steps or 'another run'}")
        steps = [step]
    damaged = {}
    for candidate in reversed(steps):
        try:
            return read(candidate), damaged
        except Damaged as error:
            damaged[candidate] = str(error)
    if step is not None:
        raise UserError(f"checkpoint {folder / str(step)}: is damaged ({damaged[step]}); restore it from a copy")
    if damaged:
        reasons = "; ".join(f"step {s}: {reason}" for s, reason in damaged.items())
        raise UserError(f"{folder}: no checkpoint loads ({reasons}); restore a copy, or use another --workdir")
    return None, {}


def _needs_copy(leaf) -> bool:
    """Return whether to copy a leaf before saving: on a CPU the writer would read buffers that the next step
    overwrites. From an accelerator, Orbax has copied everything when `save` returns (`transfer_arrays_to_host`)."""
    return stored_dtype(leaf) != leaf.dtype or _on_cpu(leaf.sharding)


def _on_cpu(sharding: jax.sharding.Sharding) -> bool:
    return next(iter(sharding.device_set)).platform == "cpu"


def checkpoint_bytes(state: TrainState) -> int:
    """Compute the extra bytes per device for saving a state, given as shapes with shardings. These are copies, and of
    replicated arrays the part that each device writes (Orbax's replica-parallel writing)."""
    total = 0
    for leaf in jax.tree.leaves(state):
        elements = math.prod(leaf.sharding.shard_shape(leaf.shape))
        replicas = elements * len(leaf.sharding.device_set) // leaf.size
        stored = elements * stored_dtype(leaf).itemsize
        total += stored * _needs_copy(leaf) + (stored // replicas if replicas > 1 else 0)
    return total


class Damaged(Exception):
    """A checkpoint is damaged: a checksum differs, or a file is missing or broken."""


def load(folder: Path, like) -> tuple[dict, list[int]]:
    """Read (state, stored checksums) from a checkpoint's folder, without waiting for other processes.   like: a state
    of shapes, dtypes and shardings, or NOT_READ. Damaged if the format is broken, UserError if it has other parameters.
    Other failures may be temporary: they are retried, then raised as PassingError."""
    return patiently(folder, lambda: _load(folder, like))


def phase_of(folder: Path, recipe: Recipe) -> int:
    """Read the phase of a checkpoint, or infer it from the recipe and the step. PassingError if that fails now."""

    def read() -> int:
        try:
            phase = json.loads((folder / ABOUT).read_text())["custom_metadata"]["phase"]
            return range(len(recipe.phases)).index(phase)
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            # Other phases, or damage, which reading the rest reports
            return phase_after(recipe, int(folder.name))

    return patiently(folder, read)


def save_frozen(folder: Path, frozen: Params) -> None:
    """Write the frozen parameters of a run, once, since checkpoints do not store them."""
    if frozen:
        with ocp.StandardCheckpointer() as writer:
            writer.save(_absolute(folder), frozen, force=True)


def load_frozen(folder: Path, like: Params) -> Params:
    """Read the frozen parameters of a run; {} if there are none."""
    if not like:
        return {}
    with ocp.StandardCheckpointer() as reader:
        try:
            return patiently(folder, lambda: reader.restore(_absolute(folder), like))
        except Damaged as error:
            raise UserError(f"{folder}: is damaged ({error}); restore it from a copy") from error


def _absolute(folder: Path) -> Path:
    return folder if in_cloud(folder) else folder.absolute()


def patiently(folder: Path, read: Callable[[], Any]) -> Any:
    """Call read(), which reads a folder, with retries; errors as in `load`."""
    for pause in (*PAUSES, None):
        try:
            return read()
        except Exception as error:
            causes = _causes(error)
            reason = " ".join(str(causes[-1]).split())[:160] or type(causes[-1]).__name__
            if _is_damage(causes):
                raise Damaged(reason) from error
            if any(_OF_OTHERS in str(cause) for cause in causes):
                raise UserError(
                    f"checkpoint {folder}: has other parameters than the model in this version; resume with the "
                    "version that wrote it (run.json names its commit), or export it there and give --init-from"
                ) from error
            if pause is None:
                raise PassingError(
                    f"checkpoint {folder}: cannot be read now ({reason}); it is unchanged, so start the same command "
                    "again when the storage can be reached"
                ) from error
            log.warning("checkpoint %s cannot be read (%s): trying again in %d s", folder, reason, pause)
            time.sleep(pause)
    raise AssertionError("the last pause is None")


def verified(state, expected: list[int], like):
    """Verify a loaded state, all processes together, and cast it like `like`; Damaged if a checksum differs."""
    read = [(path, leaf) for path, leaf in jax.tree.leaves_with_path(state) if leaf is not NOT_READ]
    for (path, _), before, now in zip(read, expected, checksums([leaf for _, leaf in read]), strict=True):
        if before != int(now):
            raise Damaged(f"the checksum of {jax.tree_util.keystr(path)} differs")

    def cast(leaf, s):
        return leaf if leaf is NOT_READ or leaf.dtype == s.dtype else leaf.astype(s.dtype)

    return jax.tree.map(cast, state, like)


def _load(folder: Path, like):
    one = jax.ShapeDtypeStruct((), jnp.uint32, sharding=like.step.sharding)

    def wanted(tree, get):
        return jax.tree.map(lambda s: s if s is NOT_READ else get(s), tree)

    stored = wanted(like, lambda s: jax.ShapeDtypeStruct(s.shape, stored_dtype(s), sharding=s.sharding))
    item = {"state": stored, "checksums": jax.tree.leaves(wanted(like, lambda _: one))}
    arguments = ocp.args.PyTreeRestore(item, restore_args=ocp.checkpoint_utils.construct_restore_args(item))
    place = _absolute(folder) / ITEM
    if not is_file(place / DESCRIPTION):  # without it Orbax would infer another structure
        raise FileNotFoundError(f"{DESCRIPTION} is missing")
    restored = ocp.PyTreeCheckpointHandler().restore(place, args=arguments)
    return restored["state"], [int(sum_) for sum_ in restored["checksums"] if sum_ is not NOT_READ]


# _BROKEN: starts of messages by TensorStore ('Error ...' for an invalid argument) and Orbax on damaged files; failures
# of a connection, quota or memory have others. _ANSWERED: in refusals of a storage, which may be invalid arguments too,
# for example of expired credentials.
_BROKEN = ("DATA_LOSS", "OUT_OF_RANGE", "NOT_FOUND", "FAILED_PRECONDITION", "Error ", "'dict' object has no attribute")
_OF_OTHERS = "tree structures do not match"
_ANSWERED = "http_response"
_BROKEN_FILES = (FileNotFoundError, json.JSONDecodeError, UnicodeDecodeError, KeyError)


def _is_damage(causes: list[BaseException]) -> bool:
    """Return whether one of the causes means missing or truncated files, or a broken format."""

    def message(error):
        return str(error) if isinstance(error, (ValueError, AttributeError)) else ""

    def broken(error):
        return message(error).startswith(_BROKEN) and _ANSWERED not in message(error)

    return any(isinstance(error, _BROKEN_FILES) or broken(error) for error in causes)


def _causes(error: BaseException) -> list[BaseException]:
    """List an error, its cause, the cause of that, and so on."""
    return [error] if error.__cause__ is None else [error, *_causes(error.__cause__)]


def stored_dtype(leaf) -> jnp.dtype:
    """Return the stored dtype: float32 for all floats, so that a bfloat16 memory can be read by a float32 program."""
    return jnp.dtype(jnp.float32) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.dtype


def checksums(tree) -> list[Array]:
    """Compute a u32[] per array that detects changed, lost and moved elements; the files have none for array data."""
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
