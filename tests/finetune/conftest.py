"""A model to finetune, and files of a task."""

import numpy as np
import pytest

from tests.pretrain import tiny

FILES = {"train": 40, "dev": 24}


def write(path, rows):
    path.write_text("first\tsecond\tlabel\n" + "".join("\t".join(row) + "\n" for row in rows), "utf-8")


@pytest.fixture(scope="session")
def begun(corpus_path, tmp_path_factory):
    """A run to begin with, files of pairs of which the label is whether both begin alike, and options of a run."""
    folder = tmp_path_factory.mktemp("begun")
    assert tiny.begun(tiny.bert(), tiny.options(corpus_path, folder / "from")) is not None
    rng = np.random.default_rng(0)
    words = ["Kilo", "mu", "nade", "po", "risu", "te", "voza"]
    for name, rows in FILES.items():
        texts = [[" ".join(rng.choice(words, rng.integers(1, 9))) for _ in range(2)] for _ in range(rows)]
        write(folder / f"{name}.tsv", [(a, b, "yes" if a[0] == b[0] else "no") for a, b in texts])
    return folder


def arguments(begun, workdir, *more):
    files = ["--from", begun / "from", "--train", begun / "train.tsv", "--dev", begun / "dev.tsv"]
    size = ["--text", "first", "second", "--batch-size", 8, "--length", 16, "--epochs", 2, "--peak", 1e-2]
    return [*map(str, ("run", "classify", *files, *size, "--workdir", workdir, "--log-every", 1, *more))]
