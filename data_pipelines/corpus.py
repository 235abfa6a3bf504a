"""Read a stored corpus: flat NumPy arrays on disk, opened by memory map, with a manifest beside them.

A corpus is a folder written by `python -m data_pipelines prepare`:

    manifest.json                       version, fingerprint, vocabulary, special tokens, fields, sizes and hashes
    tokenizer/                          Hugging Face tokenizer files
    {train,heldout}/tokens.npy          uint16 or uint32 [tokens], no special tokens stored
    {train,heldout}/word_starts.npy     bool [tokens], True where a token begins a word
    {train,heldout}/sentences.npy       int64 [sentences + 1], token offset where each sentence starts, then the total
    {train,heldout}/documents.npy       int64 [documents + 1], sentence index where each document starts, then the total
    train/token_counts.npy              int64 [vocab], unigram counts of the train split
"""

import hashlib
from contextlib import nullcontext
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from data_pipelines.cloud import is_remote
from data_pipelines.errors import UserError
from data_pipelines.fetch import Copy, open_copy
from data_pipelines.manifest import check_size, read_manifest


class Corpus:
    """A finished corpus folder, local or gs://, which is copied to this host first. Opening reads the manifest
    and the file sizes; arrays are mapped at first use.

    Pickles as its local path, so a worker process opens its own maps.

    Attributes: `source` (the path as given, absolute), `path` (the local folder), `manifest` (the JSON as a dict),
    `fingerprint` (hex digest of the content), `vocab_size`, `special` (role -> token id; roles are pad, unk, cls,
    sep, mask, and eod, the end of a document, where the tokenizer has one), `fields` (name -> (dtype, 'token')),
    `tokenizer_path`.

    Raises UserError when the folder is missing, is no corpus, is unfinished, has another version, or has a
    file whose size is not the manifest's.
    """

    def __init__(self, path: str | Path, copy: Copy | None = None):
        self._copy = copy or (open_copy(str(path)) if is_remote(path) else None)
        self.source = str(path) if self._copy else str(Path(path).absolute())
        self.path = self._copy.folder if self._copy else Path(path)
        self.manifest = read_manifest(self.path)
        self.fingerprint = self.manifest["fingerprint"]
        self.vocab_size = self.manifest["vocab_size"]
        self.special = dict(self.manifest["special"])
        self.fields = {name: tuple(field) for name, field in self.manifest["fields"].items()}
        self.tokenizer_path = self.path / "tokenizer"
        self._arrays = {}
        self._windows = {}
        for name, file in self.manifest["files"].items() if self._copy is None else ():
            check_size(self.path, name, file["bytes"])

    def __reduce__(self):
        return Corpus, (self.source if self._copy else self.path, self._copy)

    def _file(self, name: str):
        """The local path of a file, as a context in which it stays."""
        return self._copy.file(0, name) if self._copy else nullcontext(self.path / name)

    @property
    def parts(self):
        return (self,)

    @property
    def corpus(self):
        return self

    @property
    def sizes(self):
        return self.manifest["splits"]

    def documents(self, split: str) -> np.ndarray:
        """int64 [documents + 1]: the sentence index where each document starts, then the number of
        sentences."""
        return self._array(split, "documents")

    def sentences(self, split: str) -> np.ndarray:
        """int64 [sentences + 1]: the token offset where each sentence starts, then the number of tokens."""
        return self._array(split, "sentences")

    def lengths(self, split: str) -> np.ndarray:
        """int64 [documents]: tokens per document."""
        return np.diff(self.sentences(split)[self.documents(split)])

    def token_counts(self) -> np.ndarray:
        """int64 [vocab]: how often each token occurs in the train split."""
        return np.array(self._array("train", "token_counts"))

    def read(self, split: str, field: str, starts: np.ndarray, length: int) -> np.ndarray:
        """`length` consecutive values of a field ('tokens' or 'word_starts') from each start: [n, length].

        starts: int64 [n], token offsets; one may lie before 0 or reach past the end. Values outside the split
        are whatever is cheap to fill in, never an error: the caller covers them with padding.
        """
        windows = self._windows.get((split, field, length))
        if windows is None:
            array = self._array(split, field)
            if len(array) < length:
                array = np.pad(array, (0, length - len(array)))
            windows = self._windows[split, field, length] = sliding_window_view(array, length)
        inside = np.minimum(np.maximum(starts, 0), len(windows) - 1)
        rows = windows[inside]
        for row in np.flatnonzero(inside != starts):  # few: only rows at either end of the split
            rows[row] = np.roll(rows[row], inside[row] - starts[row])
        return rows

    def verify(self) -> None:
        """Hash every file. Raises UserError at the first whose content is not what `prepare` wrote."""
        for name, file in self.manifest["files"].items():
            with self._file(name) as path, open(path, "rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
            if digest != file["sha256"]:
                raise UserError(
                    f"corpus {self.path}: the content of {name} has changed since it was prepared; "
                    "copy the corpus again or rerun prepare into an empty folder"
                )

    def _array(self, split, name):
        key = split, name
        if key not in self._arrays:
            try:
                with self._file(f"{split}/{name}.npy") as file:
                    # An ndarray over the map: np.memmap's own indexing is slower
                    self._arrays[key] = np.asarray(np.load(file, mmap_mode="r"))
            except OSError as error:
                raise UserError(
                    f"corpus {self.path}: {name}.npy of {split} cannot be read ({error.strerror or error}); "
                    "start the same command again when what it lies on can be reached"
                ) from error
        return self._arrays[key]
