"""The process settings for CPUs: they reach XLA, give way to the user's, and stop the page faults."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pretrain.commands import platform

ROOT = Path(__file__).parents[2]
FLAG = "--xla_cpu_experimental_ynn_fusion_type"

STEPS = """
import resource, sys
from pretrain.commands.platform import prepare_cpu
if sys.argv[1] == "prepared":
    prepare_cpu()
import jax, jax.numpy as jnp
def large(x):
    y = jnp.tanh(x[:, None] * x)  # a temporary of 64 MB
    return (y @ y[:, :8]).sum()
step, x, faults = jax.jit(large), jnp.ones(4096), []
for _ in range(40):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step(x).block_until_ready()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(faults))  # a small allocation may split a freed block: the heap takes some steps to settle
"""


def run(code, *arguments, flags=""):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "XLA_FLAGS": flags}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
def test_a_step_reuses_the_memory_of_the_one_before():
    assert int(run(STEPS, "plain")) > 10_000
    assert int(run(STEPS, "prepared")) < 1_000


PRODUCT = """
from pretrain.commands.platform import prepare_cpu
prepare_cpu()
import jax, jax.numpy as jnp
x = jnp.ones((256, 256))
print("ynn" in jax.jit(jnp.matmul).lower(x, x).compile().as_text())
"""


def test_ynnpack_computes_no_single_product():
    assert run(PRODUCT) == "False"


def test_flags_of_the_user_are_kept_and_win():
    code = "import os; from pretrain.commands import platform; platform.prepare_cpu(); print(os.environ['XLA_FLAGS'])"
    mine = f"--xla_dump_hlo_as_text=false {FLAG}=individual_dot"
    assert run(code, flags=mine) == mine
    assert run(PRODUCT, flags=mine) == "True"


def test_jax_looks_for_devices_only_where_there_are_some(monkeypatch):
    monkeypatch.setattr(platform, "prepare_cpu", lambda: None)
    monkeypatch.setattr(platform, "keep_compiled", lambda: None)
    gpu, cases = ["/dev/nvidia0"], [([], None, (), "cpu"), ([], "", (), "cpu"), ([], "tpu,cpu", (), "tpu,cpu")]
    cases += [(tpu, None, ("libtpu",), None) for tpu in (["/dev/accel0"], ["/dev/vfio/0", *gpu])]
    cases += [(gpu, None, ("jax_cuda12_plugin",), None), (gpu, None, ("libtpu", "jax_cuda12_plugin"), "cuda,cpu")]
    cases += [(["/dev/kfd"], None, ("libtpu",), "cpu"), (gpu, "tpu", ("libtpu",), "tpu")]
    for found, given, installed, kept in cases:
        monkeypatch.setattr(platform, "find_spec", lambda name, installed=installed: name in installed or None)
        monkeypatch.delenv("JAX_PLATFORMS", raising=False)
        if given is not None:
            monkeypatch.setenv("JAX_PLATFORMS", given)
        monkeypatch.setattr(platform, "accelerators", lambda found=found: found)
        platform.prepare()
        assert os.environ.get("JAX_PLATFORMS") == kept


def test_compiled_programs_are_kept_on_accelerators_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for found, kept in (([], None), (["/dev/nvidia0"], str(tmp_path / "pretrain" / "xla"))):
        monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
        monkeypatch.setattr(platform, "accelerators", lambda found=found: found)
        monkeypatch.setattr(platform, "prepare_cpu", lambda: None)
        platform.prepare()
        assert os.environ.get("JAX_COMPILATION_CACHE_DIR") == kept
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "mine")
    platform.prepare()
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == "mine"


def test_programs_that_nobody_read_for_long_are_forgotten(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    cache = tmp_path / "pretrain" / "xla"
    cache.mkdir(parents=True)
    for name, age in (("old", 1.1), ("new", 0.9)):
        (cache / f"jit_{name}-cache").touch()
        then = time.time() - age * platform.KEPT_SECONDS
        os.utime(cache / f"jit_{name}-cache", (then, then))
    platform.keep_compiled()
    assert [file.name for file in cache.iterdir()] == ["jit_new-cache"]
