"""What devices read of each other's rows where a mesh cuts them."""

import json
import os
import sys
from pathlib import Path
from subprocess import run

import pytest

from tests.tpu import exchanged

pytestmark = pytest.mark.second_tier("bert", starts=["tests.tpu.exchanged"])
ROOT = Path(__file__).parent.parent.parent
MESHES = ("data=8", "sequence=8", "tensor=8", "data=2,sequence=2,tensor=2", "slice=2,fsdp=2,tensor=2")


@pytest.fixture(scope="module")
def positions():
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.tpu.exchanged", *MESHES]
    environment = {**os.environ, **environment, "PYTHONPATH": str(ROOT)}
    done = run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_chosen_positions_are_those_of_one_device_and_devices_exchange_no_more_than_them(positions):
    chosen = exchanged.ROWS * exchanged.READ * exchanged.WIDTH
    for mesh, figures in positions.items():
        assert max(figures["errors"]) <= 1e-6, mesh
        assert max(figures["moved"], default=0) <= chosen, mesh
    assert positions["data=8"]["moved"] == []
