"""What torch's implementations compute for the contract's cases: loss and every gradient, one file per family.

The tests read the files, and need no torch. To make them anew, or that of a new family:

    python -m tests.contract.frozen [FAMILY ...]
"""

import sys
from pathlib import Path

import numpy as np

from tests.contract import cases

FOLDER = Path(__file__).parent / "frozen"


def read(name: str) -> tuple[float, dict[str, np.ndarray]]:
    """(loss, parameter path -> gradient) of a family's case."""
    with np.load(FOLDER / f"{name}.npz") as file:
        arrays = dict(file)
    return float(arrays.pop("loss")), arrays


def main(names: list[str]) -> None:
    from tests.contract import torch_reference  # torch is heavy

    for name in names or cases.CASES:
        loss, gradients = torch_reference.REFERENCES[name](cases.CASES[name])
        np.savez_compressed(FOLDER / f"{name}.npz", loss=np.float64(loss), **gradients)
        print(name, loss)


if __name__ == "__main__":
    main(sys.argv[1:])
