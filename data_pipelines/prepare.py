"""Text to a stored corpus: plan, tokenizer, shards on all cores, joining. A second run continues where the first ended.

    OUT/.partial/state.json     the settings and a hash of the plan
    OUT/.partial/tokenizer/     done when present; so are
    OUT/.partial/shard-000000/  the units of work
    OUT/manifest.json           written last: its presence says that the corpus is finished
"""

import dataclasses
import fcntl
import hashlib
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import tokenizers
import tyro
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from data_pipelines import pieces, records, shards, sources, store, wordlevel
from data_pipelines import tokenizers as ours
from data_pipelines.durable import put, sync
from data_pipelines.encoding import Encoder
from data_pipelines.errors import UserError
from data_pipelines.progress import busy
from data_pipelines.show import show_problems

SAMPLE = 32_000_000  # characters that a tokenizer is trained on, taken from the whole corpus
SAMPLE_PLACES = 64
LARGEST_VOCABULARY = 10_000_000  # trainers allocate it before they read
ADDED_SETTINGS = {"keep_accents": False}  # what they were before they could be set


@dataclasses.dataclass(frozen=True)
class Prepare:
    """Split text into sentences, tokenise it and store it as a corpus. After a kill, the same command continues."""

    source: Annotated[tuple[str, ...], tyro.conf.UseAppendAction]
    """Repeatable. text:DIR_OR_PATTERN, jsonl:PATTERN, parquet:PATTERN, wikiextractor:DIR_OR_PATTERN (files may be .gz
    .zst .bz2 .xz), tfds:NAME:SPLIT, or builtin (documentation that comes with Python)."""
    out: Path
    """The corpus to make: a directory."""
    tokenizer: str = "wordpiece"
    """wordpiece, sentencepiece-unigram, sentencepiece-bpe or wordlevel (whole words by frequency) to train one; or a
    vocab.txt, a tokenizer.json, a spiece.model or a Hugging Face folder to use."""
    vocab_size: int = 30_522
    """Tokens of a trained tokenizer, at most; with SentencePiece exactly."""
    cased: bool = False
    """Keep case and accents, with a trained tokenizer, a vocab.txt or a spiece.model. XLNet's loses accents all the
    same, as its Hugging Face class does."""
    keep_accents: bool = False
    """Keep accents though case is not kept, or with XLNet's special tokens."""
    specials: Literal["xlnet", "albert"] | None = None
    """Whose special tokens a trained SentencePiece has, and where they go; xlnet unless told."""
    language: str = "en"
    """Of the text, for splitting sentences."""
    documents: Literal["file", "blank-line"] = "file"
    """What is a document in a text source: each file, or what blank lines separate."""
    field: str = "text"
    """The field, column or feature with the text in jsonl, parquet and tfds sources."""
    undecodable: Literal["replace", "skip"] = "replace"
    """What to do with a document that is not UTF-8: replace the bad bytes by U+FFFD, or skip the document."""
    heldout: float = 0.01
    """Share of documents, chosen by hash, to keep for evaluation; raised up to 0.05 to reach 50,000 tokens. 0: none."""
    processes: int | None = None
    """How many to use; all cores by default. The result does not depend on it."""
    tfds_dir: str | None = None
    """Where TFDS data sets are, or are downloaded to."""


def prepare(options: Prepare, console: Console) -> dict:
    """Make the corpus; returns its manifest. One finished with the same settings is left alone. Raises UserError."""
    settings = _settings(options)
    manifest = _finished(options.out, settings)
    if manifest is not None:
        shutil.rmtree(options.out / ".partial", ignore_errors=True)  # left by a kill after the manifest was written
        console.print(f"{options.out} is already finished; nothing to do")
        return manifest
    choices = {name: settings[name] for name in ("field", "documents", "undecodable", "tfds_dir")}
    parsed = [sources.parse(spec, **choices) for spec in options.source]
    units = sources.plan(parsed)
    try:
        with _locked(options.out) as partial:
            return _make(options, settings, parsed, units, partial, console)
    except OSError as error:
        raise UserError(
            f"--out {options.out}: cannot write there ({error.strerror or error}); free space or choose another "
            "directory; the same command continues where this one ended"
        ) from error


def _settings(options: Prepare) -> dict:
    """What the result depends on, as JSON has it."""
    if not 0 <= options.heldout <= 0.5:
        raise UserError(f"--heldout {options.heldout}: give a share from 0 to 0.5")
    if options.vocab_size > LARGEST_VOCABULARY:
        raise UserError(f"--vocab-size {options.vocab_size}: use at most {LARGEST_VOCABULARY}")
    if options.processes is not None and options.processes < 1:
        raise UserError(f"--processes {options.processes}: give at least 1, or leave it out for all cores")
    if not options.source:
        raise UserError("--source is missing; give at least one, such as text:DIR or builtin")
    if options.specials and not options.tokenizer.startswith("sentencepiece-"):
        raise UserError(
            f"--specials {options.specials}: only sentencepiece-unigram and sentencepiece-bpe choose them; leave it out"
        )
    settings = dataclasses.asdict(options) | {"source": list(options.source)}
    return {name: value for name, value in settings.items() if name not in ("out", "processes")}


def _finished(out: Path, settings: dict) -> dict | None:
    if not (out / "manifest.json").exists():
        return None
    manifest = json.loads((out / "manifest.json").read_text("utf-8"))
    _compare(out, manifest["settings"], settings)
    return manifest


def _compare(out: Path, old: dict, new: dict) -> None:
    before = {name: old.get(name, ADDED_SETTINGS.get(name)) for name in new}
    changes = [f"{name} was {before[name]!r} and is {new[name]!r}" for name in new if before[name] != new[name]]
    if changes:
        raise UserError(f"--out {out} holds a corpus of other settings: {'; '.join(changes)}; use another --out")


@contextmanager
def _locked(out: Path) -> Iterator[Path]:
    partial = out / ".partial"
    if out.is_dir() and not partial.exists() and any(out.iterdir()):
        raise UserError(f"--out {out} holds files that are no corpus; use an empty or a new directory")
    partial.mkdir(parents=True, exist_ok=True)
    with open(partial / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"--out {out}: another prepare is writing there; wait or use another --out") from None
        yield partial


def _make(options: Prepare, settings: dict, parsed, units, partial: Path, console: Console) -> dict:
    state = {"settings": settings, "plan": hashlib.sha256(json.dumps(units).encode()).hexdigest()}
    _check_state(options.out, partial, state)
    if not (partial / "tokenizer").exists():
        _make_tokenizer(options, parsed, units, partial, state, console)
    special = json.loads((partial / "special.json").read_text())
    tokens = ours.vocabulary(_tokenizer(partial))
    dtype = shards.token_dtype(len(tokens))
    folders = [partial / f"shard-{number:06}" for number in range(len(units))]
    _make_shards(options, units, folders, (parsed, partial, options.language, dtype), console)
    problems, characters = records.Problems(), 0
    for folder in folders:
        summary = json.loads((folder / "summary.json").read_text())
        problems.merge(summary["problems"])
        characters += summary["characters"]
    console.print("joining the shards")
    joined = partial / "joined"
    shutil.rmtree(joined, ignore_errors=True)
    splits = store.join(folders, joined, dtype, len(tokens), options.heldout)
    if not any(split["documents"] for split in splits.values()):
        seen = "; ".join(f"{seen['count']} {problem}, first {seen['first']}" for problem, seen in problems.items())
        shutil.rmtree(partial)
        raise UserError(f"--source {' '.join(options.source)}: no documents with text ({seen or 'nothing in them'})")
    files = store.describe_files(joined)
    manifest = {
        "version": 1,
        "fingerprint": store.fingerprint(files, tokens),
        "vocab_size": len(tokens),
        "special": special,
        "fields": {"tokens": [dtype.name, "token"], "word_starts": ["bool", "token"]},
        "splits": splits,
        "characters": characters,
        "files": files,
        "tokenizer": store.describe_files(partial, "tokenizer/*"),
        "sources": [_describe(spec, index, units) for index, spec in enumerate(options.source)],
        "settings": settings,
        "counts": problems,
    }
    _publish(options.out, partial, manifest)
    _report(options.out, manifest, console)
    return manifest


def _report(out: Path, manifest: dict, console: Console) -> None:
    for split, sizes in manifest["splits"].items():
        listed = ", ".join(f"{count:,} {name}" for name, count in sizes.items())
        console.print(f"{out}/{split}: {listed}", markup=False, soft_wrap=True)
    show_problems(manifest["counts"], console)
    if not manifest["splits"]["heldout"]["documents"] and manifest["settings"]["heldout"]:
        console.print("nothing could be held out for evaluation: one document; see --documents", style="yellow")


def _describe(spec: str, index: int, units) -> dict:
    parts = [part for unit in units for part in unit if part.source == index]
    return {"source": spec, "files": len({part.path for part in parts}), "bytes": sum(part.size for part in parts)}


def _check_state(out: Path, partial: Path, state: dict) -> None:
    """UserError where an unfinished corpus was begun with other settings or other sources."""
    if (partial / "state.json").exists():
        old = json.loads((partial / "state.json").read_text())
        _compare(out, old["settings"], state["settings"])
        if old["plan"] != state["plan"]:
            raise UserError(
                f"--out {out} is unfinished and its sources have changed since it began; delete it or use another --out"
            )


def _tokenizer(partial: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(partial / "tokenizer" / "tokenizer.json"))


def _make_tokenizer(options: Prepare, parsed, units, partial: Path, state: dict, console: Console) -> None:
    """Train or load the tokenizer. What fails here binds no settings: the state is written after it."""
    if options.tokenizer in ours.TRAINED:
        console.print("training a tokenizer")
        with busy("training a tokenizer", console):
            made = _train(options, parsed, units)
    else:
        made = ours.load(Path(options.tokenizer).expanduser(), options.cased, options.keep_accents)
    shutil.rmtree(partial / "tokenizer.new", ignore_errors=True)
    ours.save(made, partial / "tokenizer.new")
    store.write_json(partial / "special.json", made.special)
    store.write_json(partial / "state.json", state)
    put(partial / "tokenizer.new", partial / "tokenizer")


def _train(options: Prepare, parsed, units) -> ours.Made:
    size, keep = options.vocab_size, (options.cased, options.keep_accents)
    if options.tokenizer == "wordlevel":
        trained = wordlevel.train(_texts(parsed, units), size, *keep), {}
    elif options.tokenizer == "wordpiece":
        trained = ours.train(_sample(parsed, units), size, *keep), {}
    else:
        kind, flavour = options.tokenizer.removeprefix("sentencepiece-"), pieces.FLAVOURS[options.specials or "xlnet"]
        trained = pieces.train(_sample(parsed, units), kind, size, flavour, *keep)
    tokenizer, config = trained
    return ours.Made(tokenizer, ours.special_ids(tokenizer, {}, options.out), config)


def _texts(parsed, units) -> Iterator[str]:
    """All of the corpus, piece by piece."""
    for part in itertools.chain.from_iterable(units):
        for piece in records.read(parsed[part.source], part, records.Problems()):
            yield piece.text


def _sample(parsed, units) -> list[str]:
    """At most SAMPLE characters, from the beginnings of evenly spaced units."""
    chosen = [units[index * len(units) // SAMPLE_PLACES] for index in range(SAMPLE_PLACES)]
    chosen = units if len(units) <= SAMPLE_PLACES else chosen
    texts = []
    for unit in chosen:
        left = SAMPLE // len(chosen)
        for part in unit:
            for piece in records.read(parsed[part.source], part, records.Problems()):
                texts.append(piece.text[:left])
                left -= len(texts[-1])
                if not left:
                    break
            if not left:
                break
    return texts


_worker = ()  # in a worker process: what its tasks share


def _start_worker(parsed, partial, language, dtype) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are as many as the cores
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's to handle
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker = (parsed, Encoder(_tokenizer(partial)), language, dtype)


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()  # a killed run leaves no workers behind
    os._exit(1)


def _work(folder: Path, unit) -> None:
    shards.write(folder, unit, *_worker)


def _make_shards(options: Prepare, units, folders, shared, console: Console) -> None:
    """Write the shards that are missing, showing progress by bytes of source."""
    missing = [(folder, unit) for folder, unit in zip(folders, units, strict=True) if not folder.exists()]
    if len(missing) < len(units):
        console.print(f"continuing: {len(units) - len(missing)} of {len(units)} shards are there")
    weight = {folder: sum(part.size for part in unit) for folder, unit in missing}
    columns = TextColumn("tokenising"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    processes = min(options.processes or cores, len(missing))
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=sum(weight.values()))
        for folder in _run(missing, shared, processes):
            progress.advance(task, weight[folder])


def _run(missing, shared, processes: int) -> Iterator[Path]:
    """Do the work, yielding each folder when it is there."""
    if processes <= 1:
        parsed, partial, language, dtype = shared
        encoder = Encoder(_tokenizer(partial))
        for folder, unit in missing:
            shards.write(folder, unit, parsed, encoder, language, dtype)
            yield folder
        return
    spawn = multiprocessing.get_context("spawn")  # threads of the tokenizers do not survive a fork
    with ProcessPoolExecutor(processes, spawn, _start_worker, shared) as pool:
        try:
            submitted = {pool.submit(_work, folder, unit): folder for folder, unit in missing}
            for future in as_completed(submitted):
                future.result()
                yield submitted[future]
        except BrokenProcessPool as error:
            raise UserError("--processes: a worker was killed, perhaps for memory; use fewer and run again") from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _publish(out: Path, partial: Path, manifest: dict) -> None:
    """Move everything into place, the manifest last, and remove the rest."""
    places = [(partial / "joined" / split, out / split) for split in store.SPLITS]
    for made, place in [*places, (partial / "tokenizer", out / "tokenizer")]:
        if place.exists():
            shutil.rmtree(place)
        if made.name == "tokenizer":
            shutil.copytree(made, place)
            sync(place)
        else:
            put(made, place)
    store.write_json(out / "manifest.json", manifest)
    shutil.rmtree(partial)
