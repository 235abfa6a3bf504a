"""Which devices hold what: one device here, two simulated ones in a process of their own."""

import json
import os
import sys
from pathlib import Path
from subprocess import run

import jax
import numpy as np
import pytest

from tpu.mesh import carry_shardings, data_mesh, replicated, rows

ROOT = Path(__file__).parent.parent.parent


def test_the_mesh_has_all_devices_in_one_axis():
    mesh = data_mesh()
    assert mesh.axis_names == ("data",) and mesh.size == jax.device_count()


# A train step and what it left on the devices, as JSON: losses, compiled programs, shapes of the shards.
PROGRAM = """
import json, jax, numpy as np
from models.families import FAMILIES
from models.program import Program
from pretrain.assembly import assemble, initial_carry, initial_params, initial_state
from pretrain.step import train_step
from tests.pretrain import tiny, toys
from tests.pretrain.reference import random_batch
from tpu.mesh import carry_shardings, data_mesh, replicated, rows

FAMILIES["bag"] = toys.FAMILY
quick = {"xla_backend_optimization_level": 0}  # to compile
mesh, losses = data_mesh(), {}
for recipe in (tiny.electra(), toys.recipe()):
    assembly = assemble(recipe, Program())
    carry, axes = initial_carry(assembly, 0)
    state, frozen = jax.device_put(initial_state(assembly, initial_params(assembly), 0), replicated(mesh))
    state = state._replace(carry=jax.device_put(carry, carry_shardings(axes, mesh)))
    for parts in (4,) if recipe.name == "electra" else (1, 4):
        step = train_step(recipe, assembly.model, assembly.optimizer, axes, parts)
        step, after = jax.jit(step, compiler_options=quick), state
        found = losses[f"{recipe.name} in {parts}"] = []
        for number in range(3):
            batch = random_batch(tiny.BERT, number, rows=8)
            if recipe.name == "toy":
                batch = {"tokens": batch["tokens"]}
            after, metrics = step(after, frozen, jax.device_put(batch, rows(mesh)))
            found.append(float(metrics.loss))
        assert axes or step._cache_size() == 1, "compiled again"
shape = lambda x: [list(shard.data.shape) for shard in x.addressable_shards]
shards = {"rows": shape(jax.device_put(np.zeros((8, 3)), rows(mesh))), "bias": shape(after.params["bias"]),
          "memory": shape(state.carry["memory"]), "seen": shape(after.carry["seen"])}
print(json.dumps({"devices": mesh.size, "losses": losses, "shards": shards}))
"""


def measured(devices):
    environment = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}", "PYTHONPATH": str(ROOT)}
    done = run([sys.executable, "-c", PROGRAM], env={**os.environ, **environment}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def one_and_two():
    return measured(1), measured(2)


def test_two_devices_give_the_losses_of_one(one_and_two):
    one, two = one_and_two
    assert (one["devices"], two["devices"]) == (1, 2)
    assert set(one["losses"]) == {"electra in 4", "toy in 1", "toy in 4"}
    for name, losses in one["losses"].items():
        np.testing.assert_allclose(two["losses"][name], losses, rtol=2e-6, err_msg=name)


def test_rows_are_cut_over_the_devices_and_parameters_are_whole_on_each(one_and_two):
    shards = one_and_two[1]["shards"]
    assert shards["rows"] == [[4, 3]] * 2
    assert shards["bias"] == [[195]] * 2
    assert shards["memory"] == [[8, 4]] * 2  # its second axis has the rows
    assert shards["seen"] == [[2]] * 2


def test_shardings_follow_the_names_of_the_axes():
    mesh = data_mesh()
    found = carry_shardings({"a": (None, "batch"), "b": ("batch",), "c": ()}, mesh)
    assert [tuple(found[name].spec) for name in "abc"] == [(None, "data"), ("data",), ()]
    assert tuple(rows(mesh).spec) == ("data",) and tuple(replicated(mesh).spec) == ()
