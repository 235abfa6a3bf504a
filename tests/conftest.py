"""What tests of several packages share."""

import dataclasses
import functools
import gc
import io
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.interpreters import mlir
from rich.console import Console

from data_pipelines.prepare.command import prepare
from data_pipelines.prepare.options import Prepare
from pretrain.commands.platform import accelerators
from pretrain.options import How
from pretrain.recipe import same_programs
from pretrain.training.placement import Placed, place
from tests.gcs import Storage
from tests.texts import write_texts
from tpu.compiled import keep_programs_whole


def pytest_configure(config):
    """What one process compiled, all others take from one folder, also the next session; `--cache-clear` empties it."""
    settings = {} if accelerators() else {"jax_platforms": "cpu"}  # libtpu, if it is here, would look for its devices
    settings |= {
        "jax_compilation_cache_dir": str(config.cache.mkdir("compiled")),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_enable_xla_caches": "none",  # the others put the folder's name into each program's key
    }
    for name, value in settings.items():
        os.environ[name.upper()] = str(value)
        jax.config.update(name, value)
    # Compiles in a fifth of the time, in one thread, to slower code. `make test-all` sets no flags: there it is fast.
    quick = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
    os.environ.setdefault("XLA_FLAGS", f"{quick} --xla_cpu_parallel_codegen_split_count=1")
    os.fsync = lambda descriptor: None  # nothing that tests write has to outlive a power cut
    gc.set_threshold(100_000, 50, 1000)  # to look through all that was imported and traced takes an eighth of the time
    keep_programs_whole()
    mlir.make_ir_context = functools.cache(mlir.make_ir_context)  # to lower a small program is mostly to make one


def pytest_collection_modifyitems(items):
    """First the files that take longest: else one worker is at the last of them when the other has nothing left."""
    items.sort(key=lambda item: item.get_closest_marker("own_process") is None)


def pytest_runtest_setup(item):
    """A test that patches something traces its programs itself, with that or without."""
    if "monkeypatch" in item.fixturenames:
        PLACED.clear()


pytest_runtest_call = pytest_runtest_setup  # also not those of the runs that its fixtures made


def pytest_runtest_teardown(item, nextitem):
    """After a file, let go of what it compiled: all files' programs together take several GB. And of what complains as
    it goes, such as Orbax's failed reads: not in the output of another's tests."""
    of_another_file = nextitem is None or nextitem.path != item.path
    if of_another_file or "monkeypatch" in item.fixturenames:
        PLACED.clear()
    if of_another_file:
        jax.clear_caches()
        mlir.make_ir_context.cache_clear()
        gc.collect(1)


@pytest.fixture(scope="session", autouse=True)
def without_samples_and_curves():
    """Runs of the tests print none, which would compile one program more each; their exports draw no curves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pretrain.training.loop.sample", lambda *_: None)
        patch.setattr("pretrain.commands.model_card.draw_curves", lambda run, file: file.touch())
        yield


@pytest.fixture(scope="session", autouse=True)
def with_checksums_by_numpy():
    """The same numbers as the program's, which compiles for each structure of a state; `test_checkpoints` compares."""

    def of(leaf):
        array = np.ascontiguousarray(leaf).ravel()
        bits = array.view(np.uint32) if array.itemsize == 4 else array.astype(np.uint32)
        return jnp.asarray((bits * (2 * np.arange(bits.size, dtype=np.uint32) + 1)).sum(dtype=np.uint32))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pretrain.storage.checkpoints._checksums", lambda leaves: [*map(of, leaves)])
        yield


PLACED: dict[tuple, Placed] = {}


@pytest.fixture(scope="session", autouse=True)
def with_programs_of_earlier_runs():
    """What a run has compiled, later ones of its test file take, as runs of a suite do; `test_kills` compiles anew."""

    def placed(recipe, how, *machine):
        options = [getattr(how, field.name) for field in dataclasses.fields(How)]
        key = (same_programs(recipe), *options, *map(str, machine))
        PLACED[key] = PLACED[key].of(recipe) if key in PLACED else place(recipe, how, *machine)
        return PLACED[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pretrain.training.run.place", placed)
        yield


@pytest.fixture(scope="session")
def corpus_path(tmp_path_factory) -> Path:
    """A corpus as `prepare` writes it: 200 small documents, 195 tokens in its vocabulary. Tests must not change it."""
    folder = tmp_path_factory.mktemp("corpus")
    source = write_texts(folder / "texts", documents=200, seed=0)
    options = Prepare((f"text:{source}",), folder / "corpus", vocab_size=300, heldout=0.1, processes=1)
    prepare(options, Console(file=io.StringIO()))
    return folder / "corpus"


@pytest.fixture(scope="module")
def storage_server():
    """One stand-in for Google Cloud Storage, to which this process and those that it starts turn, with a `bucket`."""
    storage = Storage("bucket")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in storage.environment.items():
            patch.setenv(name, value)
        yield storage
    storage.close()


@pytest.fixture
def storage(storage_server, tmp_path, monkeypatch):
    """The same, empty and well-behaved at the beginning of each test, with a cache for corpora of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    storage_server.reset()
    yield storage_server
    storage_server.reset()
