"""Gradients as an accelerator's program has them, on simulated devices; prints JSON. For test_accelerator_program.py.

Arguments: 'bert' or 'xlnet', meshes ('one' for a single device). The program is bfloat16, scanned, rematerialised, with
the TPU's kernels interpreted. Found: the loss on each mesh and on one device in float32 with plain attention
('plain'), and the cosine of each gradient to that on one device, the smallest of all parameters.
"""

import functools
import json
import sys

import jax
import numpy as np

from models.attention.kernels import table
from models.core.parameters import leaves
from models.core.program import Program
from pretrain.objectives.objective import Moment
from pretrain.recipe import Phase
from pretrain.training import placement
from pretrain.training.assembly import assemble, initial_params
from tests.pretrain import tiny
from tests.pretrain.test_options import replaced
from tests.tpu import simulated
from tpu.batches import host_rows, place_rows
from tpu.mesh import MeshShape, make_mesh, parse_mesh
from tpu.xla import compiler_options

ROWS, LENGTH = 16, 128
KERNELS = {"bert": "splash", "xlnet": "relative"}
SETTINGS = {"positions": LENGTH, "width": 256, "heads": 4, "feed_forward": 256, "memory": LENGTH}
SETTINGS |= {"attention_dropout": 0.0}


def recipe(name):
    """Of a size that fills the kernels' lanes also where heads are cut in two."""
    found = getattr(tiny, name)(phases=(Phase(1.0, LENGTH, ROWS),))
    for field, value in SETTINGS.items():
        if hasattr(found.model, field):
            found = replaced(found, f"model.{field}", value)
    return found


def gradients(name, text, program):
    """(loss, parameter path -> gradient) of the first batch."""
    devices = jax.devices() if text != "one" else jax.devices()[:1]
    mesh = make_mesh(parse_mesh(text, len(devices)) if text != "one" else MeshShape(), devices)
    assembly = assemble(recipe(name), program)
    (stage,) = placement.stages(assembly, mesh)
    objective, noise = assembly.recipe.objective, np.arange(2 * ROWS, dtype=np.uint32).reshape(-1, 2)

    def loss(params, batch, carry):
        sums, _, _ = objective.loss(assembly.model, params, batch, carry, Moment(noise, True))
        weights = objective.weights(batch)
        return sum(c * sums[term] / weights[term] for term, c in objective.coefficients(0).items())

    params = placement.place_parameters(jax.tree.map(np.asarray, initial_params(assembly)), stage)
    batch = place_rows(simulated.rows_of(assembly.recipe, 0), host_rows(mesh, ROWS), ROWS, mesh)
    step = placement.jit_on(mesh, assembly, jax.value_and_grad(loss), compiler_options(mesh))
    step = step.lower(params, batch, stage.first_carry()).compile(compiler_options=simulated.QUICK)
    value, found = step(params, batch, stage.first_carry())
    return float(value), dict(leaves(jax.device_get(found)))


def smallest_cosine(ours, theirs):
    """Of all parameters but key biases, whose gradient is 0 but for rounding."""
    return min(cosine(ours[path], theirs[path]) for path in ours if not path.endswith("key/bias"))


def cosine(one, other):
    one, other = (np.asarray(x, np.float64).ravel() for x in (one, other))
    return float(one @ other / max(np.linalg.norm(one) * np.linalg.norm(other), 1e-30))


def main(name, *meshes):
    kernel = table.KERNELS[KERNELS[name]]
    table.KERNELS[kernel.name] = kernel._replace(attend=functools.partial(kernel.attend, interpret=True))
    fast = Program(dtype="bfloat16", depth="scan", remat="dots", attention=kernel.name)
    found, reference = {}, None
    for text in meshes:
        loss, ours = gradients(name, text, fast)
        reference = reference or ours
        found[text] = {"loss": loss, "cosine": smallest_cosine(ours, reference)}
    loss, plain = gradients(name, "one", Program())
    found["plain"] = {"loss": loss, "cosine": smallest_cosine(plain, reference)}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
