"""Read a stored corpus: a list of parts, each of flat NumPy arrays on disk, with a manifest beside them.

A corpus is a folder written by `python -m data_pipelines prepare`:

    manifest.json                       version, fingerprint, vocabulary, special tokens, fields, the parts' summaries
    tokenizer/                          Hugging Face tokenizer files
    tables/FIELD.npy                    [vocab], a field that is looked up by token; `similar_words.py` has others
    plans/                              for `prepare` alone: the files whose text the corpus has
    parts/000000/                       no document crosses parts
        summary.json                    sizes, hashes
        {train,heldout}/tokens.npy      uint16 or uint32 [tokens], no special tokens stored
        {train,heldout}/sentences.npy   int64 [sentences + 1], token offset where each sentence starts, then the total
        {train,heldout}/documents.npy   int64 [documents + 1], sentence index where each document starts, then the total
        {train,heldout}/FIELD.npy       [tokens, sentences or documents, ...], any other field; texts of documents are
                                        joined, uint8 [bytes], with offsets in FIELD.starts.npy, int64 [documents + 1]
        train/token_counts.npy          int64 [vocab], unigram counts of the train split
"""

import errno
import hashlib
import itertools
import json
import re
import resource
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from tokenizers import Tokenizer

from data_pipelines import manifest as manifests
from data_pipelines.cloud import is_remote
from data_pipelines.errors import PassingError, UserError
from data_pipelines.fetch import Copy, cache, open_copy
from data_pipelines.manifest import PartEntry
from data_pipelines.processes import over_parts
from data_pipelines.similar_words import TABLES
from data_pipelines.store.fields import BY_TOKEN_BEFORE, STORED, TEXT

OPEN_FILES, FILES_OF_A_PART = 1024, 4  # open files besides the parts'; maps of a part
NAMED = re.compile(r"([\w.-]+)=(.*)", re.ASCII | re.DOTALL)  # an entry of several corpora: en=gs://A,zh=DIR
Key = tuple[int, str]  # a part's number, and the name of a file in it
AFTER_AN_ERROR = 5  # seconds to wait for unfinished checks: other processes wait to hear of the error


class Corpus:
    """A finished corpus folder, local or in a bucket; files in a bucket are copied to this host as they are read.
    Opening reads the manifest and, of a local corpus, the file sizes; arrays are mapped at first use.

    fingerprint: of the corpus, or of an earlier state, before parts were added; then it has the parts of that state.
    Pickles as its path, so a worker process opens its own maps; this process checks the files that the worker reads.

    Attributes: `source` (the given path, absolute), `path` (the local folder), `manifest` (the JSON as a dict),
    `fingerprint` (hex digest of the content), `vocab_size`, `special` (role -> token id; every role is optional),
    `fields` (name -> Field), `tokenizer_path`, `parts`, `checks` (hashes the files that are read).

    Raises UserError if the folder is missing, not a corpus, unfinished or of another version, if a file's size is not
    the manifest's, or if the corpus never had the fingerprint.
    """

    def __init__(self, path: str | Path, fingerprint: str | None = None, copy: Copy | None = None):
        self.copy = copy or (open_copy(str(path)) if is_remote(path) else None)
        self.source = str(path) if self.copy else str(Path(path).absolute())
        self.path = self.copy.folder if self.copy else Path(path)
        self.manifest = manifests.read_manifest(self.path)
        self.fingerprint = fingerprint or self.manifest["fingerprint"]
        self.vocab_size = self.manifest["vocab_size"]
        self.special = dict(self.manifest["special"])
        self.fields = manifests.fields_of(self.manifest)
        self.tokenizer_path = self.path / "tokenizer"
        entries = manifests.parts_of(self.manifest)[: self._number_of_parts()]
        self.parts = tuple(Part(self, index, entry) for index, entry in enumerate(entries))
        self.checks = Checks(self._check_read)
        self._tables = {}
        self.soft_targets = None  # `SoftTargets` of its rows, if a run reads any
        if self.copy is None:
            manifests.check_sizes(self.path, self.manifest["tables"])
            for part in self.parts:
                manifests.check_sizes(self.path / part.entry.path, part.entry.files)
        _allow_files(OPEN_FILES + FILES_OF_A_PART * len(self.parts))

    def __reduce__(self):
        state = {"checks": self.checks, "soft_targets": self.soft_targets}
        return Corpus, (self.source if self.copy else self.path, self.fingerprint, self.copy), state

    def size(self, split: str) -> dict[str, int]:
        """Return {documents, sentences, tokens} of all parts."""
        return manifests.total(part.sizes for part in self.parts)[split]

    def token_counts(self) -> np.ndarray:
        """Return int64 [vocab]: how often each token occurs in the train split."""
        return over_parts(Part.token_counts, sum, self.parts)

    def require(self, *roles: str) -> tuple[int, ...]:
        """Return the special tokens of these roles. Raises UserError that names those that the tokenizer lacks."""
        missing = [role for role in roles if role not in self.special]
        if missing:
            raise UserError(
                f"corpus {self.path} has no {' or '.join(missing)} token, which these rows need; prepare it with a "
                'tokenizer that has them: README\'s "What can be trained" names one for each recipe'
            )
        return tuple(self.special[role] for role in roles)

    def want(self, split: str, parts: Sequence[int]) -> None:
        """Copy parts that will be read soon to this host, in the background and in this order."""
        if self.copy:
            self.copy.want(split, parts)

    def release(self, split: str, parts: Sequence[int]) -> None:
        """Mark parts as done: close their maps and let their copies be dropped. Parts that are read later come back."""
        for index in parts:
            self.parts[index].close(split)
        if self.copy:
            self.copy.release(split, parts)

    def verify(self) -> None:
        """Hash every file and recompute the fingerprints. Raises UserError at the first that has changed."""
        for part in self.parts:
            found = manifests.part_fingerprint(part.entry.files, part.entry.values)
            self._check_digest(f"the summary of {part.entry.path}", found, part.entry.fingerprint, copied=False)
        found = manifests.fingerprint(self.manifest, [part.entry.fingerprint for part in self.parts])
        self._check_digest("what the manifest says of the tokens", found, self.fingerprint, copied=False)
        for name, file in manifests.files_of(self.manifest).items():
            self._check(name, self.path / name, file)
        for part in self.parts:
            for name, file in part.entry.files.items():
                with part.file(name) as path:
                    self._check((Path(part.entry.path) / name).as_posix(), path, file)
            self.release("train", [part.index])
            self.release("heldout", [part.index])

    def _check(self, name: str, path: Path, file: dict) -> None:
        try:
            with open(path, "rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            raise self._unreadable(path, error) from error
        self._check_digest(f"the content of {name}", digest, file["sha256"])

    def _check_read(self, number: int, name: str) -> None:
        """Check a part's file that was read. Raises FileNotFoundError if its copy has been dropped since."""
        if number < 0:  # a folder of soft targets
            self.soft_targets.read_summary(Path(name), hashed=True)
            return
        part = self.parts[number]
        path = self.copy.path(number, name) if self.copy else self.path / part.entry.path / name
        try:
            self._check((Path(part.entry.path) / name).as_posix(), path, part.entry.files[name])
        except UserError as error:
            if self.copy and isinstance(error.__cause__, FileNotFoundError):
                raise error.__cause__ from None
            raise

    def _check_digest(self, what: str, found: str, wanted: str, copied: bool = True) -> None:
        if found != wanted:
            raise self.damaged(what, copied)

    def damaged(self, what: str, copied: bool = True) -> UserError:
        """Return the error that something is not what `prepare` wrote.   copied: whether it was read from a copy."""
        cure = "copy the corpus again or rerun prepare into an empty folder"
        if self.copy and copied:
            cure = f"delete {cache()}, and the same command copies it again"
        return UserError(f"corpus {self.source}: {what} has changed since it was prepared; {cure}")

    def table(self, field: str) -> np.ndarray:
        """Return the values of a field that is looked up by token, [vocab, ...], or another table."""
        if field not in self._tables:
            name = f"tables/{field}.npy"
            self._check(name, self.path / name, manifests.files_of(self.manifest)[name])
            self._tables[field] = np.array(self.load(self.path / name))
        return self._tables[field]

    def load(self, path: Path) -> np.ndarray:
        """Return an array of the corpus, mapped."""
        try:
            # An ndarray over the map: np.memmap's own indexing is slower
            return np.asarray(np.load(path, mmap_mode="r"))
        except OSError as error:
            raise self._unreadable(path, error) from error

    def _unreadable(self, path: Path, error: OSError) -> UserError:
        kind, cure = PassingError, "start the same command again when its disk can be reached"
        if error.errno == errno.EMFILE:  # each part that is read keeps files open
            kind, cure = UserError, "allow more with `ulimit -n`, or take fewer order.lanes or a smaller order.window"
        return kind(f"corpus {self.source}: {path} cannot be read ({error.strerror or error}); {cure}")

    def _number_of_parts(self) -> int | None:
        """Return how many parts the state with this fingerprint has; None for all."""
        if self.fingerprint == self.manifest["fingerprint"]:
            return None
        for state in self.manifest["history"]:
            if state["fingerprint"] == self.fingerprint:
                return state["parts"]
        raise UserError(
            f"corpus {self.path}: its fingerprint is {self.manifest['fingerprint'][:12]} and was never "
            f"{self.fingerprint[:12]}; give the corpus that the run was started with"
        )


class Part:
    """A part of a corpus, of whole documents. Arrays are mapped when they are first read. Pickles as corpus and index.
    Attributes: `corpus`, `index`, `sizes` ({split: {documents, sentences, tokens}}), `entry` (of the manifest)."""

    def __init__(self, corpus: Corpus, index: int, entry: PartEntry):
        self.corpus, self.index, self.entry, self.sizes = corpus, index, entry, entry.splits
        self._arrays = {}
        self._windows = {}
        self._numbers = {}  # field -> the corpus's number of each value of the part

    def __reduce__(self):
        return _part, (self.corpus, self.index)

    def documents(self, split: str) -> np.ndarray:
        """Return int64 [documents + 1]: the sentence index where each document starts, then the number of sentences.
        Its map is closed with the last reference to it, as of all arrays that are read once, to plan."""
        return self._load(split, "documents")

    def sentences(self, split: str) -> np.ndarray:
        """Return int64 [sentences + 1]: the token offset where each sentence starts, then the number of tokens."""
        return self._load(split, "sentences")

    def lengths(self, split: str) -> np.ndarray:
        """Return int64 [documents]: tokens per document."""
        return np.diff(self.sentences(split)[self.documents(split)])

    def token_counts(self) -> np.ndarray:
        """Return int64 [vocab]: how often each token occurs in the train split."""
        return self._load("train", "token_counts")

    def column(self, split: str, field: str) -> np.ndarray:
        """Return the values of a field by document or sentence: [documents or sentences, ...]; texts as str."""
        found = self._load(split, field)
        if self.corpus.fields[field].kept == TEXT:
            data, places = found.tobytes(), self._load(split, f"{field}.starts").tolist()
            return np.array([data[begin:end].decode() for begin, end in itertools.pairwise(places)], object)
        return self._of_all_parts(field, found)

    def read(self, split: str, field: str, starts: np.ndarray, length: int) -> np.ndarray:
        """Return `length` consecutive values of a field by token from each start; of a field by sentence or document,
        the value for each of these tokens: [n, length, ...].

        starts: int64 [n], token offsets; a stretch may begin before 0 or reach past the end. Values outside the split
        are arbitrary, never an error: the caller covers them with padding.
        """
        kept, per = self.corpus.fields[field].kept, self.corpus.fields[field].per
        if per != "token":
            begins = self.array(split, "sentences")
            row = np.searchsorted(begins[1:-1], starts[:, None] + np.arange(length), "right")
            if per == "document":
                row = np.searchsorted(self.array(split, "documents")[1:-1], row, "right")
            return self._of_all_parts(field, self.array(split, field)[row])
        if kept != STORED:
            tokens = self.read(split, "tokens", starts - (kept == BY_TOKEN_BEFORE), length)
            values = self.corpus.table(field).take(tokens, axis=0)  # three times as fast as indexing
            if kept == BY_TOKEN_BEFORE:
                values[-starts[:, None] == np.arange(length)] = True
            return values
        windows = self._windows.get((split, field, length))
        if windows is None:
            array = self.array(split, field)
            if len(array) < length:
                array = np.pad(array, [(0, length - len(array)), *[(0, 0)] * (array.ndim - 1)])
            windows = np.moveaxis(sliding_window_view(array, length, axis=0), -1, 1)
            self._windows[split, field, length] = windows
        inside = np.minimum(np.maximum(starts, 0), len(windows) - 1)
        rows = windows[inside]
        for row in np.flatnonzero(inside != starts):  # few: only rows at either end of the split
            rows[row] = np.roll(rows[row], inside[row] - starts[row], axis=0)
        if field == "tokens" and rows.size and (highest := rows.max()) >= self.corpus.vocab_size:
            what = f"{self.entry.path}/{split}/tokens.npy, with token {highest} of {self.corpus.vocab_size},"
            raise self.corpus.damaged(what)
        return self._of_all_parts(field, rows)

    def array(self, split: str, name: str) -> np.ndarray:
        """Return one of the part's files, mapped."""
        key = split, name
        array = self._arrays.get(key)  # another thread may be closing it
        if array is None:
            array = self._arrays[key] = self._load(split, name)
        return array

    def _load(self, split: str, name: str) -> np.ndarray:
        with self.file(f"{split}/{name}.npy") as path:
            self.corpus.checks.add((self.index, f"{split}/{name}.npy"))
            return self.corpus.load(path)

    def file(self, name: str) -> AbstractContextManager[Path]:
        """Yield the local path of one of the part's files, which stays during the context."""
        copy = self.corpus.copy
        return copy.file(self.index, name) if copy else nullcontext(self.corpus.path / self.entry.path / name)

    def close(self, split: str) -> None:
        """Close the maps of a split. An array that is read again is mapped again."""
        for kept in (self._arrays, self._windows):
            for key in [key for key in list(kept) if key[0] == split]:
                kept.pop(key, None)

    def _of_all_parts(self, field: str, numbers: np.ndarray) -> np.ndarray:
        """Translate the part's own numbers of a field's values to the corpus's numbers."""
        values = self.corpus.fields[field].values
        if values is None:
            return numbers
        if field not in self._numbers:
            place = {value: number for number, value in enumerate(values)}
            # All parts together may have more values than the numbers of one can tell apart
            wide = np.promote_types(numbers.dtype, np.min_scalar_type(len(values)))
            self._numbers[field] = np.array([place[value] for value in self.entry.values[field]], wide)
        return self._numbers[field][numbers]


def _allow_files(number: int) -> None:
    """Let this process open so many files, as far as it may: the usual limit of 1,024 is too low for many maps."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = number if hard == resource.RLIM_INFINITY else min(number, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _part(corpus: Corpus, index: int) -> Part:
    return corpus.parts[index]


def named(text: str) -> dict[str, str]:
    """Return {name: path}, in order; {"": path} for a path without a name. Raises UserError for another form."""
    if not NAMED.match(text):
        return {"": text}
    found = {}
    for entry in text.split(","):
        form = NAMED.fullmatch(entry)
        if not form or not form[2]:
            raise UserError(f"--corpus {text}: {entry!r} is not NAME=PATH; give one path, or en=DIR,zh=DIR")
        if form[1] in found:
            raise UserError(f"--corpus {text}: {form[1]} is given twice; give each corpus a name of its own")
        found[form[1]] = form[2]
    return found


def written(paths: dict[str, str]) -> str:
    """Return the text that `named` parses into these paths."""
    return ",".join(f"{name}={path}" if name else path for name, path in paths.items())


def open_corpora(text: str, states: Mapping[str, str]) -> dict[str, Corpus]:
    """Open the corpora that `--corpus` names. states: name -> the fingerprint to open a corpus with, if it ever had it.
    Raises UserError for a path that is not a corpus, and as `check_alike` does."""
    opened = {name: Corpus(path) for name, path in named(text).items()}
    for name, corpus in opened.items():
        if states.get(name) in [state["fingerprint"] for state in corpus.manifest["history"]]:
            opened[name] = Corpus(corpus.source, states[name])
    check_alike(opened)
    return opened


def check_alike(corpora: Mapping[str, Corpus]) -> None:
    """Raise UserError unless all corpora have the same special tokens and tokenizers that give the same tokens."""
    (first, reference), *others = corpora.items()
    for name, other in others:
        wanted, found = _meaning(reference), _meaning(other)
        if differing := [what for what in wanted if wanted[what] != found[what]]:
            raise UserError(
                f"--corpus {first}={reference.source},{name}={other.source}: {name} has other {differing[0]} than "
                f"{first}; prepare all corpora with one tokenizer, --tokenizer with the first one's tokenizer/ folder, "
                "and with the same codes and --similar-words"
            )


def _meaning(corpus: Corpus) -> dict[str, Any]:
    """Return what decides which tokens a text has, and what they mean."""
    file = corpus.tokenizer_path / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file)) if file.exists() else None
    written = json.loads(tokenizer.to_str()) if tokenizer else {}
    return {
        "vocabulary": (corpus.vocab_size, tokenizer and tokenizer.get_vocab()),
        "special tokens": corpus.special,
        "normalisation (case, accents, white space)": written.get("normalizer"),
        "splitting into words": written.get("pre_tokenizer"),
        "merges or scores": written.get("model"),
        "added tokens": written.get("added_tokens"),
        "similar words": [corpus.manifest["tables"].get(f"tables/{table}.npy") for table in TABLES],
    }


class Checks:
    """Check that files that are read are what `prepare` wrote: a thread hashes each once. Safe from several threads.
    check: of a file; raises UserError if it is damaged, FileNotFoundError if it has been dropped since, and then it is
    checked when it is read again. None, also after pickling: files are only noted, for another process to check."""

    def __init__(self, check: Callable[[int, str], None] | None):
        self._check, self._changed = check, threading.Condition()
        self._seen: set[Key] = set()
        self._waiting: dict[Key, None] = {}  # ordered by first read
        self._thread, self._fault = None, None

    def __reduce__(self):
        return Checks, (None,)

    def add(self, *files: Key) -> None:
        """Note that these files are read."""
        if self._seen.issuperset(files):
            return
        with self._changed:
            self._waiting |= dict.fromkeys(file for file in files if file not in self._seen)
            self._seen.update(files)
            if self._check and self._thread is None and self._fault is None:
                self._thread = threading.Thread(target=self._work, name="checks", daemon=True)
                self._thread.start()

    def take(self) -> list[Key]:
        """Return the files that were noted and not yet taken; [] if this process checks them."""
        if self._check:
            return []
        with self._changed:
            taken, self._waiting = list(self._waiting), {}
        return taken

    def raise_fault(self) -> None:
        """Raise the error that was found, if any."""
        if self._fault:
            raise self._fault

    def wait(self, split: str = "", seconds: float | None = None) -> None:
        """Wait, at most `seconds`, until all files (of a split) that were read are checked. Raises the error found."""
        with self._changed:

            def left():
                return self._check and any(name.startswith(split) for _, name in self._waiting)

            self._changed.wait_for(lambda: self._fault or not left(), seconds)
        self.raise_fault()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.notify_all()
                if not self._waiting or self._fault:
                    self._thread = None
                    return
                # An evaluation waits for its few files before it says anything
                file = next((key for key in self._waiting if key[1].startswith("heldout")), next(iter(self._waiting)))
            dropped = False
            try:
                self._check(*file)
            except FileNotFoundError:
                dropped = True
            except Exception as error:
                self._fault = error
            with self._changed:
                del self._waiting[file]
                self._seen -= {file} if dropped else set()


@contextmanager
def sound(corpora: Iterable, split: str = "") -> Iterator[None]:
    """Raise UserError at the end of the context if a file (of a split) that it read is damaged, also after an error."""
    wait = lambda seconds: [corpus.checks.wait(split, seconds) for corpus in corpora]
    try:
        yield
    except Exception:
        wait(AFTER_AN_ERROR)
        raise
    wait(None)
