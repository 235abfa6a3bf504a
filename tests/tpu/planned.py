"""A recipe's step compiled by XLA:TPU; prints JSON. For test_plan_tpu.py: libtpu needs a process of its own.

Arguments as of `python -m tpu plan`.
"""

import dataclasses
import json
import sys
import tempfile
from pathlib import Path

import jax

from models.attention.kernels.table import costs
from pretrain.commands.options import CACHE
from pretrain.commands.planning import parse_plan, works
from tpu.compiler import prepare
from tpu.plan import plan
from tpu.topologies import parse_topology


def main(arguments):
    recipe, target = parse_plan(arguments)
    topology = parse_topology(target.topology)
    prepare()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) if target.cache == CACHE else target.cache
        for work, _ in works(recipe, target, topology):
            planned = plan(work, topology, costs(), cache)
            again = plan(work, topology, costs(), cache)
            found.append(
                {
                    "devices": work.devices,
                    "mesh": work.mesh,
                    "parts": planned.parts,
                    "report": {**planned.report._asdict(), "hlo": None, "total": planned.report.total},
                    "fits": planned.fits,
                    "cached": [planned.report.cached, again.report.cached],
                    "estimate": planned.estimate and planned.estimate._asdict(),
                    "mfu": planned.mfu,
                    "kernels": [name for name in costs() if name in planned.report.hlo],
                    "cycles": planned.costs and planned.costs.cycles,
                    "collectives": [
                        {
                            **c._asdict(),
                            "arrays": [(a.dtype, a.dims) for a in c.arrays],
                            "bytes": c.bytes,
                            "group": c.group,
                            "seconds": seconds,
                            "exposed": exposed,
                        }
                        for c, seconds, exposed in planned.collectives
                    ],
                    "floats": sum(leaf.size for leaf in jax.tree.leaves(work.arguments[0].params)),
                    "model": dataclasses.asdict(recipe.model),
                    "rows": [work.rows, work.rows // work.rows_multiple],
                    "length": work.length,
                }
            )
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
