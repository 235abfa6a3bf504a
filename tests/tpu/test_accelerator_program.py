"""The program that accelerators run, on simulated devices: bfloat16, scan, remat 'dots' and the TPU's kernels."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
MESH = "data=2,fsdp=2,tensor=2"


@pytest.mark.parametrize("name", ["bert", "xlnet"])
def test_its_loss_and_gradients_are_those_of_one_device_and_near_float32(name):
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.tpu.accelerator", name, "one", MESH]
    environment = {**os.environ, **environment, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    one, mesh, plain = found["one"], found[MESH], found["plain"]
    assert mesh["loss"] == pytest.approx(one["loss"], rel=1e-3) and mesh["cosine"] > 0.999
    assert plain["loss"] == pytest.approx(one["loss"], rel=1e-2) and plain["cosine"] > 0.99
