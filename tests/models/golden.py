"""Golden parameter tables: what every published size consists of, one JSON file per family, and all their configs.

A change here changes checkpoints, sharding, weight decay or Hugging Face exports. After a change that is meant:

    python -m tests.models.golden
"""

import json
from dataclasses import asdict
from pathlib import Path

from models.core.parameters import Slot, leaves
from models.families.registry import FAMILIES
from tests.models.shapes import parameter_shapes

FOLDER = Path(__file__).parent / "golden"
CONFIGS = FOLDER.with_suffix(".json")


def table(family, config):
    """Rows of (path, shape, axes, places in Hugging Face's checkpoints)."""
    shapes = dict(leaves(parameter_shapes(config, tuple(head.name for head in family.heads))))
    return [
        {
            "path": p.path,
            "shape": list(shapes[p.path].shape),
            "axes": list(p.axes),
            "hf": {part: _plain(slot) for part, slot in p.hf.items()},
        }
        for p in family.every_parameter(config)
    ]


def configs():
    """Family and size -> its config, as JSON has it."""
    sizes = {f"{name}-{size}": config for name, family in FAMILIES.items() for size, config in family.sizes.items()}
    return {name: json.loads(json.dumps(asdict(config))) for name, config in sizes.items()}


def _plain(slot):
    """What of a slot is not as by default, as JSON has it."""
    by_default = Slot("")._asdict()
    return json.loads(json.dumps({name: value for name, value in slot._asdict().items() if value != by_default[name]}))


def write(name, family):
    """Write a family's tables, one row per line, so that a change shows as a change of lines."""
    sizes = []
    for size, config in family.sizes.items():
        lines = ",\n".join(f"  {json.dumps(row)}" for row in table(family, config))
        sizes.append(f'"{size}": [\n{lines}\n]')
    (FOLDER / f"{name}.json").write_text("{\n" + ",\n".join(sizes) + "\n}\n", "utf-8")


if __name__ == "__main__":
    for name, family in FAMILIES.items():
        write(name, family)
    lines = ",\n".join(f'"{name}": {json.dumps(config)}' for name, config in configs().items())
    CONFIGS.write_text("{\n" + lines + "\n}\n", "utf-8")
