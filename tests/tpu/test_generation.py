"""A mesh writes what one device writes, its cache cut like the model."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SAME = """
import dataclasses
import jax
from models.core.program import Program
from models.families.gpt2 import FAMILY
from pretrain.generation.decoding import generate
from pretrain.generation.settings import Decoding
from tests.contract import cases
from tests.pretrain.test_generation import eloquent, prompts
from tpu.mesh import make_mesh, parse_mesh
from tpu.rules import parameter_shardings

mesh = make_mesh(parse_mesh("data=2,tensor=2", 4), jax.devices())
params = eloquent("gpt2")[1]
config = cases.CASES["gpt2"].model
placed = jax.device_put(params, parameter_shardings(FAMILY.parameters(config), params, mesh))
given, greedy = prompts(5), Decoding(max_tokens=6)
drawn, beams = dataclasses.replace(greedy, temperature=0.8), dataclasses.replace(greedy, beams=2)
for depth, decoding in ("scan", drawn), ("unroll", beams):
    model = FAMILY.module(config, Program(depth=depth))
    one, cut = generate(model, params, given, decoding), generate(model, placed, given, decoding, mesh=mesh)
    assert one == cut, (one, cut)
assert generate(model, placed, given[:1], greedy, mesh=mesh) == generate(model, params, given[:1], greedy)
"""


def test_a_mesh_writes_the_tokens_of_one_device():
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"}
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", SAME], env={**os.environ, **environment}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
