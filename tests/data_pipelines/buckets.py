"""A corpus of parts in a storage that is kept in memory and may be made to fail."""

import hashlib
import json
import types
from collections import Counter

from data_pipelines import cloud, fetch
from data_pipelines.manifest import SIZES, SPLITS, VERSION
from data_pipelines.store.fields import Field

SOURCE = "s3://bucket/corpus"


class Bucket:
    """As much of an fsspec file system as `data_pipelines.fetch` asks for.

    objects: name -> content.   reads: how often content of each was read.   faults: name -> errors to be raised, or
    functions of the content that is read, one after the other, before it behaves.
    """

    def __init__(self):
        self.objects, self.reads, self.faults = {}, Counter(), {}

    def cat_file(self, path, start=None, end=None):
        name = path.removeprefix(f"{SOURCE}/")
        self.reads[name] += 1
        content = self._content(name)[start:end]
        fault = next(iter(self.faults.get(name, ())), None)
        if fault is None:
            return content
        self.faults[name] = self.faults[name][1:]
        if isinstance(fault, Exception):
            raise fault
        return fault(content)

    def info(self, path):
        return {"size": len(self._content(path.removeprefix(f"{SOURCE}/")))}

    def _content(self, name):
        if name not in self.objects:
            raise FileNotFoundError(name)
        return self.objects[name]

    def write(self, parts, tokenizer=b"{}"):
        """A corpus of these parts: one after the other {name in the part: content}."""
        described = []
        for number, files in enumerate(parts):
            self.objects |= {f"parts/{number:06}/{name}": content for name, content in files.items()}
            digests = {name: _described(content) for name, content in files.items()}
            splits = {split: dict.fromkeys(SIZES, 0) for split in SPLITS}
            part = {"fingerprint": _sha(json.dumps(digests).encode()), "files": digests, "splits": splits}
            described.append(part | {"characters": 0, "values": {}})
        self.objects["tokenizer/tokenizer.json"] = tokenizer
        manifest = {
            "version": VERSION,
            "fingerprint": _sha(json.dumps(described).encode()),
            "vocab_size": 100,
            "special": {},
            "fields": {"tokens": Field("uint16").to_json()},
            "counts": {},
            "parts": described,
            "tokenizer": {"tokenizer/tokenizer.json": _described(tokenizer)},
            "tables": {},
        }
        self.objects["manifest.json"] = json.dumps(manifest).encode()


def arrays_of_part(number, size=1000):
    """{name: content} of a part; all files of all parts differ."""
    names = ("train/tokens.npy", "train/sentences.npy", "train/token_counts.npy", "heldout/tokens.npy")
    return {name: f"{number} {name} ".encode().ljust(size, b".") for name in names}


def use(bucket, monkeypatch, tmp_path):
    """Have this process read the bucket, with a cache of the test's own, and never pause."""
    paused = []
    monkeypatch.setattr(fetch, "filesystem", lambda path: bucket)
    monkeypatch.setattr(cloud, "time", types.SimpleNamespace(sleep=paused.append))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return paused


def _described(content):
    return {"bytes": len(content), "sha256": _sha(content)}


def _sha(content):
    return hashlib.sha256(content).hexdigest()
