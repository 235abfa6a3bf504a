import random

import pytest


@pytest.fixture(scope="package")
def text(tmp_path_factory):
    """A folder of 40 files, 60 kB: 6 parts of the small size."""
    folder, chance = tmp_path_factory.mktemp("text"), random.Random(0)
    for number in range(40):
        words = chance.choices(["alpha", "beta", "Gamma", "delta,", "epsilon's", "zeta.", "Eta!"], k=250)
        (folder / f"{number:02}.txt").write_text(f"Document {number}. " + " ".join(words))
    return folder
