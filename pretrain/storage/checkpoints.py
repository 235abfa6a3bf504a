"""Checkpoints of the train state: written while training goes on, checked when read, never silently skipped."""

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

NOT_READ = ocp.PLACEHOLDER  # in place of an array that is to stay in the file
PAUSES = (1, 3, 9)  # seconds before what could not be read is read again
ITEM = "default"  # the folder of a checkpoint in which Orbax's manager puts its only item
ABOUT = "_CHECKPOINT_METADATA"  # the file of a checkpoint that says what it was saved with
DESCRIPTION = "_METADATA"  # the file in there that says what is stored


class TrainState(NamedTuple):
    """Everything that a step changes; checkpoints hold exactly this.

    step: i32[] batches seen.   carry: the objective's state between batches.
    skipped: i32[2], updates skipped for a non-finite loss or gradient: in all, and in a row up to now.
    """

    step: Array
    params: Params
    opt_state: optax.OptState
    carry: Any
    skipped: Array


Like = Callable[[int], TrainState]  # step -> a state of shapes, dtypes and shardings; NOT_READ for what is not wanted


class _Staying(NamedTuple):
    """What Orbax asks which checkpoints stay when another one is written."""

    keep: int
    keep_every: int
    also: Callable[[list[int]], Collection[int]]

    def should_preserve(self, checkpoints, *, context) -> list[bool]:
        steps = [checkpoint.step for checkpoint in checkpoints]
        kept = {*sorted(steps)[-self.keep :], *self.also(steps)}
        return [step in kept or bool(self.keep_every) and step % self.keep_every == 0 for step in steps]


class Checkpoints:
    """The checkpoints of the run that writes them, `folder`/STEP each. All its processes call the same methods.

    keep: how many of the newest stay.   keep_every: those at multiples of it stay for good; 0 for none.
    also: of the steps that there are, which else stay.
    """

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
        """The steps of the finished checkpoints, ascending."""
        return from_first("the checkpoints that there are", lambda: sorted(self._manager.all_steps()))

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


class Damaged(Exception):
    """A checkpoint's files are not what was written: a checksum differs, or their format is broken."""


def load(folder: Path, like) -> tuple[dict, list[int]]:
    """(the state in a checkpoint's folder, its stored checksums); no other process is asked or waited for.

    like: a state of shapes, dtypes and shardings; NOT_READ for what is not wanted.
    Damaged where the format is broken, UserError where it has other parameters. Any other failure may pass: it is tried
    again, then a PassingError.
    """
    return patiently(folder, lambda: _load(folder, like))


def phase_of(folder: Path, recipe: Recipe) -> int:
    """The phase that the state in a checkpoint's folder is of; by the recipe where that does not say.

    PassingError where it cannot be read now.
    """

    def read() -> int:
        try:
            phase = json.loads((folder / ABOUT).read_text())["custom_metadata"]["phase"]
            return range(len(recipe.phases)).index(phase)
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            # Of an older version or other phases, or damaged, as reading the rest then says
            return phase_after(recipe, int(folder.name))

    return patiently(folder, read)


def save_frozen(folder: Path, frozen: Params) -> None:
    """Write the frozen parameters of a run, once: they are in no checkpoint."""
    if frozen:
        with ocp.StandardCheckpointer() as writer:
            writer.save(_absolute(folder), frozen, force=True)


def load_frozen(folder: Path, like: Params) -> Params:
    """The frozen parameters of a run, mostly {}."""
    if not like:
        return {}
    with ocp.StandardCheckpointer() as reader:
        try:
            return patiently(folder, lambda: reader.restore(_absolute(folder), like))
        except Damaged as error:
            raise UserError(f"{folder} is damaged ({error}): restore it from a copy") from error


def _absolute(folder: Path) -> Path:
    return folder if in_cloud(folder) else folder.absolute()


def patiently(folder: Path, read: Callable[[], Any]) -> Any:
    """read() of a folder; errors as of `load`."""
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
                    f"checkpoint {folder} has other parameters than this version gives the model: go on with the "
                    "version that wrote it (run.json names its commit), or export it there and give --init-from"
                ) from error
            if pause is None:
                raise PassingError(
                    f"checkpoint {folder} cannot be read now ({reason}); it is left as it is: "
                    "start the same command again when what it lies on can be reached"
                ) from error
            log.warning("checkpoint %s cannot be read (%s): tried again in %d s", folder, reason, pause)
            time.sleep(pause)
    raise AssertionError("the last pause is None")


def verified(state, expected: list[int], like):
    """A loaded state in the dtypes of `like`; Damaged where a checksum differs. All processes ask together."""
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
    if not is_file(place / DESCRIPTION):  # which Orbax would do without, and find another structure
        raise FileNotFoundError(f"{DESCRIPTION} is missing")
    restored = ocp.PyTreeCheckpointHandler().restore(place, args=arguments)
    return restored["state"], [int(sum_) for sum_ in restored["checksums"] if sum_ is not NOT_READ]


# What TensorStore says of bytes that cannot be right ('Error ...' of an invalid argument), and Orbax of its own files'
# content, or of one that has other parameters; of a connection, a quota or memory they say other things. _ANSWERED is
# in what a storage refuses, which may be an invalid argument, too: as of credentials that are no longer good.
_BROKEN = ("DATA_LOSS", "OUT_OF_RANGE", "NOT_FOUND", "FAILED_PRECONDITION", "Error ", "'dict' object has no attribute")
_OF_OTHERS = "tree structures do not match"
_ANSWERED = "http_response"
_BROKEN_FILES = (FileNotFoundError, json.JSONDecodeError, UnicodeDecodeError, KeyError)


def _is_damage(causes: list[BaseException]) -> bool:
    """Whether one of the causes tells of files that are lost or cut, or of a format that is broken."""

    def said(error):
        return str(error) if isinstance(error, (ValueError, AttributeError)) else ""

    def broken(error):
        return said(error).startswith(_BROKEN) and _ANSWERED not in said(error)

    return any(isinstance(error, _BROKEN_FILES) or broken(error) for error in causes)


def _causes(error: BaseException) -> list[BaseException]:
    """The error, what caused it, and so on."""
    return [error] if error.__cause__ is None else [error, *_causes(error.__cause__)]


def stored_dtype(leaf) -> jnp.dtype:
    """Floats are stored as float32, so that a memory in bfloat16 can be read where the program has another dtype."""
    return jnp.dtype(jnp.float32) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.dtype


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
