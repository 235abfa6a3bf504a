"""Text to a stored corpus: plan, tokenizer, shards on all cores, joining. A second run continues where the first ended.

OUT/.partial/state.json     the settings and a hash of the plan
OUT/.partial/tokenizer/     done when present; so are
OUT/.partial/unit-000000/   the units of work
OUT/.partial/part-000000/   the units joined
OUT/manifest.json           written last: its presence says that the corpus is finished
"""

import dataclasses
import fcntl
import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from data_pipelines import tokenizers as ours
from data_pipelines.durable import put, sync
from data_pipelines.errors import UserError
from data_pipelines.formats.problems import Problems
from data_pipelines.formats.table import parse, plan
from data_pipelines.prepare.options import Prepare
from data_pipelines.prepare.pool import make_shards, read_tokenizer
from data_pipelines.prepare.report import report
from data_pipelines.prepare.training import train
from data_pipelines.progress import busy
from data_pipelines.store.files import write_json
from data_pipelines.store.finish import finish, write_tables
from data_pipelines.store.job import Job, planned
from data_pipelines.store.parts import part_name, write_part
from data_pipelines.text.encoding import Encoder

LARGEST_VOCABULARY = 10_000_000  # trainers allocate it before they read
ADDED_SETTINGS = {"keep_accents": False}  # what they were before they could be set


def prepare(options: Prepare, console: Console) -> dict:
    """Make the corpus; returns its manifest. One finished with the same settings is left alone. Raises UserError."""
    settings = _settings(options)
    manifest = _finished(options.out, settings)
    if manifest is not None:
        shutil.rmtree(options.out / ".partial", ignore_errors=True)  # left by a kill after the manifest was written
        console.print(f"{options.out} is already finished; nothing to do")
        return manifest
    choices = {name: settings[name] for name in ("documents", "undecodable", "tfds_dir")}
    parsed = [parse(spec, options.language, fields=(options.field,), **choices) for spec in options.source]
    units = plan(parsed, Problems())
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
    tokenizer = read_tokenizer(partial)
    encoder = Encoder(tokenizer)
    size = len(ours.vocabulary(tokenizer))
    job = Job(tuple(parsed), size, planned(parsed, size, encoder.word_starts is not None), options.heldout)
    folders = [partial / f"unit-{number:06}" for number in range(len(units))]
    make_shards(options, units, folders, (job, partial), console)
    console.print("joining the shards")
    out = options.out
    summary = write_part(partial / "part-000000", folders, job)
    if not any(sizes["documents"] for sizes in summary["splits"].values()):
        counts = summary["counts"].items()
        seen = "; ".join(f"{seen['count']} {problem}, first {seen['first']}" for problem, seen in counts)
        shutil.rmtree(partial)
        raise UserError(f"--source {' '.join(options.source)}: no documents with text ({seen or 'nothing in them'})")
    place = out / part_name(0)
    shutil.rmtree(place, ignore_errors=True)  # of a run that was killed after this
    place.parent.mkdir(exist_ok=True)
    put(partial / "part-000000", place)
    _copy(partial / "tokenizer", out / "tokenizer")
    write_tables(out, job, encoder.word_starts)
    described = [_describe(spec, index, units) for index, spec in enumerate(options.source)]
    manifest = finish(out, [summary], job, special, sources=described, settings=settings)
    write_json(out / "manifest.json", manifest)
    shutil.rmtree(partial)
    report(out, manifest, console)
    return manifest


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


def _make_tokenizer(options: Prepare, parsed, units, partial: Path, state: dict, console: Console) -> None:
    """Train or load the tokenizer. What fails here binds no settings: the state is written after it."""
    if options.tokenizer in ours.TRAINED:
        console.print("training a tokenizer")
        with busy("training a tokenizer", console):
            made = train(options, parsed, units)
    else:
        made = ours.load(Path(options.tokenizer).expanduser(), options.cased, options.keep_accents)
    shutil.rmtree(partial / "tokenizer.new", ignore_errors=True)
    ours.save(made, partial / "tokenizer.new")
    write_json(partial / "special.json", made.special)
    write_json(partial / "state.json", state)
    put(partial / "tokenizer.new", partial / "tokenizer")


def _copy(made: Path, place: Path) -> None:
    if place.exists():
        shutil.rmtree(place)
    shutil.copytree(made, place)
    sync(place)
