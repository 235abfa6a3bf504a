"""A corpus that is larger than the text that it is made of, for measurements."""

import json
import shutil
from pathlib import Path

import numpy as np

from data_pipelines.corpus import Corpus
from data_pipelines.store.fields import STORED
from data_pipelines.store.files import describe_files


def repeated(corpus: Corpus, folder: Path, tokens: int, parts: int = 1) -> Corpus:
    """A corpus of so many parts, each of copies of the first one's train split, of at least so many tokens in all."""
    part, first = corpus.parts[0], folder / "parts" / "000000"
    copies = -(-tokens // (parts * part.sizes["train"]["tokens"]))
    (first / "train").mkdir(parents=True)
    save = lambda name, array: np.save(first / "train" / f"{name}.npy", array)
    for name, field in corpus.fields.items():
        if field.kept == STORED:
            save(name, np.tile(part.array("train", name), copies))
    for name, offsets in (("sentences", part.sentences("train")), ("documents", part.documents("train"))):
        begins = offsets[:-1] + offsets[-1] * np.arange(copies)[:, None]
        save(name, np.append(begins.ravel(), offsets[-1] * copies))
    for number in range(1, parts):
        shutil.copytree(first, folder / "parts" / f"{number:06}")
    for name in ("tokenizer", "tables"):
        (folder / name).symlink_to((corpus.path / name).absolute())
    entry = corpus.manifest["parts"][0]
    sizes = {name: size * copies for name, size in part.sizes["train"].items()}
    described = entry | {"files": describe_files(first, "*/*.npy"), "splits": entry["splits"] | {"train": sizes}}
    (folder / "manifest.json").write_text(json.dumps(corpus.manifest | {"parts": [described] * parts}))
    return Corpus(folder)
