"""Programs that several tests compile alike are compiled once per session, also by the processes that they start."""

import os

import jax
import pytest

from tests.pretrain import tiny


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory):
    folder = os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


@pytest.fixture(scope="session")
def uninterrupted(compilation_cache, corpus_path, tmp_path_factory):
    """The work directory of the run `tiny.run_arguments`, which nothing disturbed. Tests must not change it."""
    workdir = tmp_path_factory.mktemp("uninterrupted") / "run"
    status, _, err = tiny.run_command(*tiny.run_arguments(corpus_path, workdir))
    assert status == 0, err
    return workdir
