"""Checkpoints: which stay, what happens to damaged ones, what a full disk does."""

import errno
import os
import shutil
import threading
import time
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint._src.multihost import multihost

from data_pipelines.errors import UserError
from pretrain.storage import checkpoints as module
from pretrain.storage.checkpoints import Checkpoints, TrainState, _checksums, checksums
from pretrain.storage.run_directory import RunDirectory, disk_errors
from pretrain.training.run import run
from tests.pretrain import tiny, toys

# Orbax leaves coroutines behind where a file does not load.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


pytestmark = pytest.mark.usefixtures("registered")


def state_at(step, size=5000):
    """A state whose numbers do not compress and depend on the step."""
    rng = np.random.default_rng(step)
    params = {"a": {"kernel": jnp.asarray(rng.standard_normal((size, 2)), jnp.float32)}, "b": jnp.float32(step)}
    return TrainState(jnp.int32(step), params, optax.scale_by_adam().init(params), {}, jnp.zeros(2, jnp.int32))


def shapes(state):
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), state)


def like(step=0):
    return shapes(state_at(0))


def saved(folder, steps, **options):
    checkpoints = Checkpoints(folder, **options)
    for step in steps:
        checkpoints.save(state_at(step))
    checkpoints.wait()
    checkpoints.close()


def reopened(folder):
    return Checkpoints(folder)


@pytest.fixture(scope="module")
def first_three(tmp_path_factory):
    """A folder of the steps 1, 2 and 3. Tests must not change it."""
    folder = tmp_path_factory.mktemp("three")
    saved(folder, [1, 2, 3])
    return folder


@pytest.fixture
def three(first_three, tmp_path):
    """A copy of it."""
    return shutil.copytree(first_three, tmp_path / "three")


def data_files(folder):
    """The files with the arrays, the largest first."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    return sorted(files, key=lambda file: -file.stat().st_size)


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x10
    file.write_bytes(content)


DAMAGES = {
    "a flipped bit": lambda folder: flip(data_files(folder)[0]),
    "a truncated file": lambda folder: os.truncate(data_files(folder)[0], data_files(folder)[0].stat().st_size // 2),
    "a lost file": lambda folder: data_files(folder)[0].unlink(),
    "no description": lambda folder: (folder / "default/_METADATA").unlink(),
    "empty folders": lambda folder: [file.unlink() for file in folder.rglob("*") if file.is_file()],
    "all files empty": lambda folder: [os.truncate(file, 0) for file in data_files(folder)],
}


def test_a_state_comes_back_bit_for_bit_from_the_step_that_is_asked_for_or_not_at_all(first_three):
    checkpoints = reopened(first_three)
    assert tiny.equal(checkpoints.restore(like), state_at(3))
    assert tiny.equal(checkpoints.restore(like, 2), state_at(2))
    with pytest.raises(UserError, match=r"no checkpoint of step 5; give one of \[1, 2, 3\]"):
        checkpoints.restore(like, 5)


def test_the_last_n_every_mth_and_those_that_are_named_stay(tmp_path):
    saved(tmp_path, range(1, 8), keep=2, keep_every=3, also=lambda steps: [max(step for step in steps if step < 3)])
    assert reopened(tmp_path).steps() == [2, 3, 6, 7]
    assert tiny.equal(reopened(tmp_path).restore(like, 3), state_at(3))


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before_which_is_said(damage, three, caplog):
    DAMAGES[damage](three / "3")
    checkpoints = reopened(three)
    assert tiny.equal(checkpoints.restore(like), state_at(2))
    assert "checkpoint of step 3 is damaged" in caplog.text and "resuming from step 2" in caplog.text
    assert (three / "3.damaged").is_dir() and checkpoints.steps() == [1, 2]


def test_two_damaged_checkpoints_are_passed_over(three):
    for step in ("3", "2"):
        flip(data_files(three / step)[0])
    checkpoints = reopened(three)
    assert tiny.equal(checkpoints.restore(like), state_at(1)) and checkpoints.steps() == [1]


def test_a_half_written_checkpoint_does_not_count(three):
    for name in ("4.orbax-checkpoint-tmp", "4.orbax-checkpoint-tmp-1234567"):
        (three / name / "default").mkdir(parents=True)
    checkpoints = reopened(three)
    assert checkpoints.steps() == [1, 2, 3] and tiny.equal(checkpoints.restore(like), state_at(3))
    checkpoints.save(state_at(4))
    checkpoints.wait()
    assert tiny.equal(reopened(three).restore(like), state_at(4))


def test_a_run_logs_what_is_damaged_and_does_not_begin_again_when_all_are(corpus_path, tmp_path):
    workdir, damage = tmp_path / "run", DAMAGES["all files empty"]
    go = lambda steps: run(toys.recipe(steps=steps), tiny.options(corpus_path, workdir))
    go(10)
    damage(workdir / "checkpoints" / "10")
    go(10)
    assert (workdir / "log.txt").read_text().count("checkpoint of step 10 is damaged") == 1
    for step in (5, 10):
        damage(workdir / "checkpoints" / str(step))
    for _ in range(2):  # nor at a second try
        with pytest.raises(UserError, match="no checkpoint loads .*--workdir") as caught:
            go(20)
        assert "\n" not in str(caught.value)
    assert RunDirectory(workdir).checkpoint_steps() == [5, 10]


def test_a_state_given_away_right_after_saving_is_saved_as_it_was(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=3)
    overwrite = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    size = 500_000
    for step in (1, 2, 3):
        state = jax.tree.map(jnp.copy, state_at(step, size))
        checkpoints.save(state)
        for _ in range(20):
            state = overwrite(state)
    checkpoints.wait()
    for step in (1, 2, 3):
        assert tiny.equal(reopened(tmp_path).restore(lambda _: shapes(state), step), state_at(step, size))


def test_a_checksum_sees_changed_and_swapped_elements():
    def one(values):
        state = state_at(1, 3)._replace(params={"x": jnp.asarray(values, jnp.float32)})
        found = [*map(int, _checksums(jax.tree.leaves(state)))]
        assert found == [*map(int, checksums(state))]  # those that other tests store
        return found[1]

    sums = {one([[1.0, 2.0], [3.0, 4.0]]), one([[1.0, 2.0], [3.0, 4.5]]), one([[2.0, 1.0], [3.0, 4.0]])}
    assert len(sums | {one([[3.0, 4.0], [1.0, 2.0]])}) == 4


def test_bfloat16_is_read_as_it_was_and_as_float32(tmp_path):
    half = lambda dtype: state_at(1, 30)._replace(
        params={"x": jnp.asarray([0.25, -0.5, 3e-3], jnp.bfloat16).astype(dtype)}
    )
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(half(jnp.bfloat16))
    checkpoints.wait()
    for dtype in (jnp.bfloat16, jnp.float32):
        assert tiny.equal(reopened(tmp_path).restore(lambda _, dtype=dtype: shapes(half(dtype))), half(dtype))


def test_any_error_of_the_disk_is_one_line_and_no_other_error_is(tmp_path):
    directory = RunDirectory(tmp_path)
    for step in "1", "2":
        (directory.checkpoints / step).mkdir(parents=True)
    said = r"--workdir .*cannot write.*free space.*safe checkpoints: 1, 2\)"
    for error in (OSError(errno.ENOSPC, "full"), OSError(errno.EDQUOT, "quota"), ValueError("No space left on device")):
        with pytest.raises(UserError, match=said), disk_errors(directory):
            raise error
    for error in (UserError("as it was"), RuntimeError("RESOURCE_EXHAUSTED: out of memory"), KeyError("x")):
        with pytest.raises(type(error), match=str(error.args[0])), disk_errors(directory):
            raise error


def test_a_process_whose_save_fails_does_not_wait_for_those_that_wait_for_it(tmp_path, monkeypatch):
    failed, never = threading.Event(), threading.Event()
    barrier = lambda processes=None: lambda key, timeout_ms: failed.is_set() and never.wait(120)
    for where in (ocp.multihost, multihost):
        monkeypatch.setattr(where, "get_barrier_sync_fn", barrier)

    def rename(*_):
        failed.set()
        raise OSError(errno.EIO, "Input/output error")

    checkpoints = Checkpoints(tmp_path)
    monkeypatch.setattr(os, "rename", rename)
    checkpoints.save(state_at(1))
    begin = time.monotonic()
    with pytest.raises(OSError, match="Input/output error"):
        checkpoints.wait()
    checkpoints.close()
    assert failed.is_set() and time.monotonic() - begin < 100


def test_a_run_that_cannot_write_its_checkpoint_keeps_the_one_before(corpus_path, tmp_path, monkeypatch):
    workdir = tmp_path / "run"
    run(toys.recipe(steps=4), tiny.options(corpus_path, workdir))
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(free=10_000))
        said = (
            "No space left on device: a checkpoint takes 0.0 MB, but 0.0 MB are free.*free space.*safe checkpoints: 4"
        )
        with pytest.raises(UserError, match=said):
            run(toys.recipe(steps=8), tiny.options(corpus_path, workdir))
    assert [folder.name for folder in (workdir / "checkpoints").iterdir()] == ["4"]  # it is not even begun
    with monkeypatch.context() as patch:
        full = mock.Mock(side_effect=OSError(errno.EFBIG, "File too large"))
        patch.setattr(os, "rename", full)  # Orbax's last step
        with pytest.raises(UserError, match="cannot write there .*File too large.*safe checkpoints: 4") as refused:
            run(toys.recipe(steps=8), tiny.options(corpus_path, workdir))
    assert refused.value.status == 2
    assert tiny.final_state(workdir).step == 4


def test_only_what_changes_its_dtype_is_copied_but_on_a_cpu(tmp_path, monkeypatch):
    """Whose writer reads the buffers that the next step overwrites."""
    state, handed = state_at(1)._replace(carry=jnp.ones((2, 4), jnp.bfloat16)), []
    checkpoints = Checkpoints(tmp_path)
    monkeypatch.setattr(checkpoints._manager, "save", lambda step, args, **_: handed.append(args.item["state"]))
    for on_cpu in (True, False):
        monkeypatch.setattr(module, "_on_cpu", lambda sharding, on_cpu=on_cpu: on_cpu)
        checkpoints.save(state)
    place = lambda leaf: leaf.unsafe_buffer_pointer()
    copied, kept = (jax.tree.map(lambda a, b: place(a) != place(b), stored, state) for stored in handed)
    assert all(jax.tree.leaves(copied))
    assert kept.carry and sum(jax.tree.leaves(kept)) == 1 and handed[1].carry.dtype == jnp.float32
