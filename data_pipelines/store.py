"""Join shards into the flat files of a corpus, each document in its split, and describe them in a manifest."""

import hashlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_pipelines.durable import put
from data_pipelines.shards import DOCUMENT

SPLITS = ("train", "heldout")
ENOUGH_HELD_OUT = 50_000  # tokens; below that the held-out split may take up to MOST_HELD_OUT of the documents
MOST_HELD_OUT = 0.05
CHUNK = 1 << 22  # tokens that are copied at a time
HEADER = 128  # bytes of an .npy header; room for any one-dimensional shape


class Shard(NamedTuple):
    tokens: np.ndarray  # [tokens], mapped
    word_starts: np.ndarray  # bool [tokens], mapped
    sentences: np.ndarray  # i64 [sentences + 1], token offsets in the shard
    documents: np.ndarray  # DOCUMENT [documents]


def open_shard(folder: Path, dtype) -> Shard:
    lengths = np.fromfile(folder / "sentences.bin", np.uint32)
    return Shard(
        _mapped(folder / "tokens.bin", dtype),
        _mapped(folder / "word_starts.bin", bool),
        np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]),
        np.fromfile(folder / "documents.bin", DOCUMENT),
    )


def _mapped(path: Path, dtype) -> np.ndarray:
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.zeros(0, dtype)


def heldout_limit(shards: Iterator[Shard], fraction: float) -> int:
    """Documents whose hash is below this are held out: `fraction` of them, more where that is too little."""
    limit, held, total, hashes, tokens = int(fraction * 2**64), 0, 0, [], []
    for shard in shards:
        ends = np.append(shard.documents["start"][1:], len(shard.sentences) - 1)
        size = shard.sentences[ends] - shard.sentences[shard.documents["start"]] if len(shard.documents) else []
        held += int(np.sum(size, where=shard.documents["hash"] < limit, initial=0))
        total += len(shard.documents)
        if held < ENOUGH_HELD_OUT:
            hashes.append(shard.documents["hash"])
            tokens.append(np.asarray(size, np.int64))
    if held >= ENOUGH_HELD_OUT or not fraction or total < 2:
        return limit if total > 1 else 0
    order = np.argsort(np.concatenate(hashes), kind="stable")
    hashes, tokens = np.concatenate(hashes)[order], np.concatenate(tokens)[order]
    wanted = min(int(np.searchsorted(np.cumsum(tokens), ENOUGH_HELD_OUT)) + 1, max(int(MOST_HELD_OUT * total), 1))
    limit = max(limit, int(hashes[wanted - 1]) + 1)
    return limit if hashes[-1] >= limit else 0  # never all of them


class _Split:
    """The four files of a split, written from front to back."""

    def __init__(self, folder: Path, dtype, vocab_size: int | None):
        folder.mkdir(parents=True, exist_ok=True)
        dtypes = {"tokens": dtype, "word_starts": bool, "sentences": np.int64, "documents": np.int64}
        self.files = {name: NpyFile(folder / f"{name}.npy", kind) for name, kind in dtypes.items()}
        self.counts = None if vocab_size is None else np.zeros(vocab_size, np.int64)
        self.folder = folder

    def add(self, shard: Shard, first: int, last: int, starts: np.ndarray) -> None:
        """Sentences [first, last) of a shard, and the sentences among them where documents begin."""
        files = self.files
        begin, end = shard.sentences[first], shard.sentences[last]
        files["documents"].write(starts - first + files["sentences"].length)
        files["sentences"].write(shard.sentences[first:last] - begin + files["tokens"].length)
        for at in range(begin, end, CHUNK):
            tokens = shard.tokens[at : min(end, at + CHUNK)]
            files["tokens"].write(tokens)
            files["word_starts"].write(shard.word_starts[at : at + len(tokens)])
            if self.counts is not None:
                self.counts += np.bincount(tokens, minlength=len(self.counts))

    def finish(self) -> dict[str, int]:
        sizes = {name: self.files[name].length for name in ("documents", "sentences", "tokens")}
        self.files["documents"].write(np.array([sizes["sentences"]]))
        self.files["sentences"].write(np.array([sizes["tokens"]]))
        for file in self.files.values():
            file.close()
        if self.counts is not None:
            np.save(self.folder / "token_counts.npy", self.counts)
        return sizes


class NpyFile:
    """A one-dimensional .npy file whose length is known at the end only."""

    def __init__(self, path: Path, dtype):
        self.file, self.dtype, self.length = open(path, "wb"), np.dtype(dtype), 0  # noqa: SIM115
        self.file.write(bytes(HEADER))

    def write(self, array: np.ndarray) -> None:
        self.file.write(np.ascontiguousarray(array, self.dtype).data)
        self.length += len(array)

    def close(self) -> None:
        header = io.BytesIO()
        description = {"descr": self.dtype.str, "fortran_order": False, "shape": (self.length,)}
        np.lib.format.write_array_header_1_0(header, description)
        self.file.seek(0)
        self.file.write(header.getvalue())
        self.file.close()


def join(folders: list[Path], to: Path, dtype, vocab_size: int, heldout: float) -> dict[str, dict[str, int]]:
    """Write the files of both splits below `to`; returns {split: {documents, sentences, tokens}}."""
    limit = heldout_limit((open_shard(folder, dtype) for folder in folders), heldout)
    splits = [_Split(to / name, dtype, vocab_size if name == "train" else None) for name in SPLITS]
    held = False  # of the document that the shard before ended in
    for folder in folders:
        shard = open_shard(folder, dtype)
        starts = shard.documents["start"]
        bounds = np.concatenate([[0], starts, [len(shard.sentences) - 1]])
        split = np.concatenate([[held], shard.documents["hash"] < limit])
        begins = np.flatnonzero(np.diff(split, prepend=~split[0]))  # runs of documents that go the same way
        for run, following in zip(begins, np.append(begins[1:], len(split)), strict=True):
            inside = starts[max(run - 1, 0) : following - 1]
            splits[int(split[run])].add(shard, bounds[run], bounds[following], inside)
        held = bool(split[-1])
    return {name: split.finish() for name, split in zip(SPLITS, splits, strict=True)}


def describe_files(corpus: Path, pattern: str = "*/*.npy") -> dict[str, dict]:
    """{name: {bytes, sha256}} of the arrays below a corpus, or of other files in it."""
    found = {}
    for path in sorted(corpus.glob(pattern)):
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        found[path.relative_to(corpus).as_posix()] = {"bytes": path.stat().st_size, "sha256": digest}
    return found


def fingerprint(files: dict[str, dict], tokens: list[str]) -> str:
    """sha256 over the content of the arrays and the vocabulary; no path, time or setting."""
    vocabulary = hashlib.sha256("\n".join(tokens).encode()).hexdigest()
    entries = sorted([(name, file["sha256"]) for name, file in files.items()] + [("tokenizer/vocab", vocabulary)])
    return hashlib.sha256("".join(f"{name} {digest}\n" for name, digest in entries).encode()).hexdigest()


def write_json(path: Path, content: dict) -> None:
    """Atomically."""
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")
    put(temporary, path)
