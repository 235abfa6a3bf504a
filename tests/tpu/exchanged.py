"""What devices exchange for chosen positions, in a process with 8 simulated devices; prints JSON. For test_exchange.py.

Arguments: meshes. Found for each: the largest error of the positions read and of their gradient, and the elements of
the arrays that devices exchange.
"""

import functools
import json
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from models.blocks.positions import gather_positions
from models.core.sharding import placed_by
from tests.tpu.simulated import QUICK
from tpu import hlo
from tpu.mesh import make_mesh, parse_mesh
from tpu.rules import activation_rules

ROWS, LENGTH, WIDTH, READ = 8, 64, 16, 10
AXES = ("batch", "length", "heads")


def read(rules, x, positions, weights):
    """(the positions' values, their weighted sum's gradient)"""
    with placed_by(rules):
        values, pull = jax.vjp(lambda x: gather_positions(x, positions), x)
        return values, pull(weights)[0]


def main(*meshes):
    rng, found = np.random.default_rng(0), {}
    x, weights = (jnp.asarray(rng.normal(size=(ROWS, n, WIDTH)), jnp.float32) for n in (LENGTH, READ))
    positions = jnp.asarray(rng.integers(0, LENGTH, (ROWS, READ)))
    expected = read(None, x, positions, weights)
    for text in meshes:
        mesh = make_mesh(parse_mesh(text, 8), jax.devices())
        rules = activation_rules(mesh)
        placed = jax.device_put(x, NamedSharding(mesh, rules.spec(AXES, x.shape)))
        lowered = jax.jit(functools.partial(read, rules)).lower(placed, positions, weights)
        program = lowered.compile(compiler_options=QUICK)
        errors = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), program(placed, positions, weights), expected)
        moved = [a for c in hlo.collectives(hlo.parse(program.as_text())) if c.group > 1 for a in c.arrays]
        found[text] = {"errors": errors, "moved": [math.prod(array.dims) for array in moved]}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
