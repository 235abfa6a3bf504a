"""Devices add weight gradients up in float32, whatever the products are computed in."""

import json
import os
import sys
from pathlib import Path
from subprocess import run

import pytest

pytestmark = pytest.mark.second_tier(starts=["tests.tpu.partitioned"])

ROOT = Path(__file__).parent.parent.parent
OTHERS = (
    "bert:data=2", "electra:data=2", "xlnet:data=2", "adaptive:data=2", "adaptive:fsdp=2", "transformer-xl:fsdp=2",
)  # fmt: skip


@pytest.fixture(
    scope="module",
    params=[("bert:fsdp=2",), pytest.param(OTHERS, marks=pytest.mark.slow)],
    ids=["bert", "others"],
)
def exchanged(request):
    """{recipe and mesh: [kind, dtype, dims, source] of what devices exchange} in programs of bfloat16."""
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.tpu.partitioned", *request.param]
    environment |= {"PYTHONPATH": str(ROOT), "JAX_ENABLE_COMPILATION_CACHE": "0"}  # what is compiled is dumped
    done = run(command, env={**os.environ, **environment}, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_gradients_are_summed_in_float32(exchanged):
    for program, found in exchanged.items():
        sums = [(dtype, source) for kind, dtype, _, source in found if kind in ("all-reduce", "reduce-scatter")]
        assert any("feed_forward/up/dot_general" in source for _, source in sums), program
        assert {dtype for dtype, _ in sums} <= {"f32", "s32"}, program


def test_kernels_are_still_gathered_in_bfloat16(exchanged):
    for program, found in exchanged.items():
        gathers = [(dtype, source) for kind, dtype, _, source in found if kind == "all-gather"]
        kernels = {dtype for dtype, source in gathers if "Layer" in source and "dot_general" in source}
        assert kernels == ({"bf16"} if "fsdp" in program else set()), program
