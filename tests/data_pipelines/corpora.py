"""Small corpora for tests, written without `prepare`."""

import hashlib
import json

import numpy as np

SPECIAL = {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}


def write_corpus(path, documents, vocab_size=100, heldout=(), word_starts=lambda token: token % 3 != 0):
    """A finished corpus folder at `path`; returns the path.

    documents, heldout: list of documents, each a list of sentences, each a list of token ids (5 .. vocab_size
    - 1 are ordinary). word_starts: says of a token id whether it begins a word.
    """
    for split, texts in (("train", documents), ("heldout", heldout)):
        folder = path / split
        folder.mkdir(parents=True)
        sentences = [sentence for text in texts for sentence in text]
        tokens = np.array([token for sentence in sentences for token in sentence], np.uint16)
        np.save(folder / "tokens.npy", tokens)
        np.save(folder / "word_starts.npy", np.array([word_starts(int(token)) for token in tokens], bool))
        np.save(folder / "sentences.npy", np.cumsum([0, *map(len, sentences)], dtype=np.int64))
        np.save(folder / "documents.npy", np.cumsum([0, *map(len, texts)], dtype=np.int64))
        if split == "train":
            np.save(folder / "token_counts.npy", np.bincount(tokens, minlength=vocab_size).astype(np.int64))
    finish_corpus(path, vocab_size)
    return path


def finish_corpus(path, vocab_size):
    """Write the manifest of a folder that holds the arrays."""
    files = {}
    for file in sorted(path.glob("*/*.npy")):
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        files[str(file.relative_to(path))] = {"bytes": file.stat().st_size, "sha256": digest}
    lines = "".join(f"{name} {file['sha256']}\n" for name, file in files.items())
    splits = {}
    for split in ("train", "heldout"):
        names = ("documents", "sentences", "tokens")
        sizes = {name: len(np.load(path / split / f"{name}.npy")) for name in names}
        splits[split] = {name: size - (name != "tokens") for name, size in sizes.items()}
    manifest = {
        "version": 1,
        "fingerprint": hashlib.sha256(lines.encode()).hexdigest(),
        "vocab_size": vocab_size,
        "special": SPECIAL,
        "fields": {"tokens": ["uint16", "token"], "word_starts": ["bool", "token"]},
        "splits": splits,
        "files": files,
        "sources": [],
        "settings": {},
        "counts": {},
    }
    (path / "manifest.json").write_text(json.dumps(manifest))
