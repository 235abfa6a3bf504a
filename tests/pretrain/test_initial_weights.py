"""Weights to start from reach the devices in parts: a model that a chip cannot hold whole can be gone on with."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
ON_FOUR_DEVICES = """
import sys
from pathlib import Path
import jax
from pretrain import initial_weights
from pretrain import run as runs
from tests.pretrain import tiny

corpus, source, workdir = map(Path, sys.argv[1:])
given, jit, read, restore = [], jax.jit, [], initial_weights.restore

def recorded(function, **more):
    def call(*arguments):
        given.append(arguments)
        return jitted(*arguments)
    jitted = jit(function, **more)
    return call if "_first_state" in function.__qualname__ else jitted

jax.jit = recorded
initial_weights.restore = lambda *of, **more: read.append(restore(*of, **more)) or read[-1]
runs.train = lambda run, state: (state, 0)
runs.run(tiny.bert(), tiny.options(corpus, workdir, mesh="fsdp=4", init_from=str(source)))
assert [restored.mesh.size for restored in read] == [1]
((weights,),) = given
held = {device: 0 for device in jax.devices()}
for leaf in jax.tree.leaves(weights):
    for shard in leaf.addressable_shards:
        held[shard.device] += shard.data.nbytes
share = max(held.values()) / sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
assert 1 / 4 < share < 1 / 3, share  # vectors, positions and types are whole everywhere
assert tiny.equal(weights, read[0].params)
"""


def test_a_device_is_given_its_part_of_the_weights_alone(uninterrupted, corpus_path, tmp_path):
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", ON_FOUR_DEVICES, corpus_path, uninterrupted, tmp_path / "run"]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
