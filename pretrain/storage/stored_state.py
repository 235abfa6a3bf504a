"""One checkpoint as it lies on disk: read with patience, and told apart from a damaged one. Nothing here writes."""

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax import Array

from data_pipelines.cloud import in_cloud, is_file
from data_pipelines.errors import PassingError, UserError

log = logging.getLogger(__name__)

NOT_READ = ocp.PLACEHOLDER  # in place of an array that is to stay in the file
PAUSES = (1, 3, 9)  # seconds before what could not be read is read again
ITEM = "default"  # the folder of a checkpoint in which Orbax's manager puts its only item
ABOUT = "_CHECKPOINT_METADATA"  # the file of a checkpoint that says what it was saved with
DESCRIPTION = "_METADATA"  # the file in there that says what is stored


class Damaged(Exception):
    """A checkpoint's files are not what was written: a checksum differs, or their format is broken."""


def load(folder: Path, like) -> tuple[dict, list[int]]:
    """(the state in a checkpoint's folder, its stored checksums); no other process is asked or waited for.

    like: a state of shapes, dtypes and shardings; NOT_READ for what is not wanted.
    Damaged where the format is broken, UserError where it has other parameters. Any other failure may pass: it is tried
    again, then a PassingError.
    """
    return patiently(folder, lambda: _load(folder, like))


def phase_of(folder: Path) -> int | None:
    """The phase that the state in a checkpoint's folder is of; None for a checkpoint that does not say. PassingError
    where it cannot be read now."""

    def read() -> int | None:
        try:
            return json.loads((folder / ABOUT).read_text())["custom_metadata"]["phase"]
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None  # of an older version, or damaged, as reading the rest then says

    return patiently(folder, read)


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
    place = (folder if in_cloud(folder) else folder.absolute()) / ITEM
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
