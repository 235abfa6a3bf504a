"""Recipes' steps in bfloat16, as XLA partitions them for 2 or 4 simulated devices; prints JSON. For
test_gradient_sums.py.

Arguments: names as `simulated.py` takes them, each with a mesh: 'bert:data=2'. Found: what devices exchange, as
[kind, dtype, dims, source, times], before the CPU's compiler widens what it cannot add in bfloat16; the scalars of all
parameters, of the matrices and of the table of tokens; rows, length and predictions of the batch.
"""

import json
import math
import re
import sys
import tempfile
from pathlib import Path

import jax

from models.core.parameters import decays, leaves
from models.core.program import Program
from pretrain.training import placement
from pretrain.training.assembly import assemble
from tests.tpu import simulated
from tpu import hlo
from tpu.collectives import collectives
from tpu.mesh import make_mesh, parse_mesh


def exchanged(name, text):
    devices = math.prod(int(size) for size in re.findall(r"=(\d+)", text))
    mesh = make_mesh(parse_mesh(text, devices), jax.devices()[:devices])
    assembly = assemble(simulated.recipe(name), Program(dtype="bfloat16"))
    step = placement.stages(assembly, mesh)[0].train
    lowered = step.run.lower(*step.arguments)
    with tempfile.TemporaryDirectory() as folder:
        dump = {"xla_dump_to": folder, "xla_dump_hlo_pass_re": "spmd-partitioning"}
        lowered.compile(compiler_options={**simulated.QUICK, **dump})
        (file,) = Path(folder).glob("*placed*.after_spmd-partitioning*.txt")
        module = hlo.parse(file.read_text())
    found = [collective for collective in collectives(module) if collective.group > 1]
    phase = assembly.recipe.phases[0]
    size = {path: shape.size for path, shape in leaves(step.arguments[0].params)}
    return {
        "moved": [[c.kind, array.dtype, array.dims, c.source, c.times] for c in found for array in c.arrays],
        "parameters": sum(size.values()),
        "matrices": sum(size[parameter.path] for parameter in assembly.table if decays(parameter)),
        "table": size.get("embeddings/tokens", 0),
        "batch": [phase.batch_size, phase.length, assembly.recipe.objective.predictions(phase)],
    }


if __name__ == "__main__":
    print(json.dumps({which: exchanged(*which.split(":")) for which in sys.argv[1:]}))
