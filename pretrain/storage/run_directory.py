"""The work directory of a run, which is all that resuming, plotting and exporting need.

    recipe.json     the recipe (only `steps` may change, and --extend adds a phase)
    run.json        the run's identity, the corpora's paths and fingerprints, --init-from, --init-heads-anew, and the
                    versions, commit and platform of the last start
    tokenizer/      a copy of the corpus's tokenizer
    checkpoints/    one folder per checkpoint, named by its step
    frozen/         parameters that no phase trains
    examples.json   numbers of examples in the parts of corpora, once counted
    metrics.jsonl   one JSON object per line: {"kind": "train" | "eval", "step": ..., metrics}
    tensorboard/    the same for TensorBoard
    log.txt         what was printed
    trackers.json   the run's id in each tracker of --track
    lock            held while a run trains there
    compiled/       in the cloud: compiled programs for the next start, see commands/platform.py

It may be a gs:// path: then every file is written as a whole object, and files that grow (metrics, log, events) are
written on this machine and uploaded before each checkpoint, see `journal.Mirror`.
"""

import contextlib
import dataclasses
import datetime
import errno
import fcntl
import functools
import hashlib
import json
import os
import platform
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

import jax

from data_pipelines import corpus as corpora
from data_pipelines.cloud import check_rights, entries, in_cloud, is_file, is_remote, may_pass, place, refusal, upload
from data_pipelines.corpus import Corpus
from data_pipelines.durable import FULL, locked, put, sync
from data_pipelines.errors import PassingError, UserError
from pretrain.options import Options
from pretrain.recipe import Recipe, extended, from_json, read_recipe, to_json
from tpu.cluster import from_first, gather
from tpu.commit import commit

ROOT = Path(__file__).parents[2]
LISTED = 6  # differences of two recipes in a message
# Packages missing from requirements.txt, which are installed with its packages, for an accelerator or for gs://
MORE = "jaxlib", "libtpu", "jax-cuda12-plugin", "tensorstore", "gcsfs"
SHARED_SECONDS = 30  # longest time until all hosts see a file that one has written, over a network that caches
ABOUT = dict.fromkeys(("identity", "corpus", "fingerprint"), str) | {"init_heads_anew": bool, "versions": dict}
COMMITTED = "commit_success.txt"  # Orbax writes it last into a checkpoint in the cloud; elsewhere it renames the folder


class RunDirectory:
    """Paths of a work directory, local or gs://."""

    def __init__(self, path: Path):
        self.path = place(path)
        self.recipe = self.path / "recipe.json"
        self.run = self.path / "run.json"
        self.tokenizer = self.path / "tokenizer"
        self.checkpoints = self.path / "checkpoints"
        self.frozen = self.path / "frozen"
        self.examples = self.path / "examples.json"
        self.metrics = self.path / "metrics.jsonl"
        self.tensorboard = self.path / "tensorboard"
        self.log = self.path / "log.txt"
        self.trackers = self.path / "trackers.json"

    def read_recipe(self) -> Recipe:
        """Read the recipe; UserError if this is not a work directory."""
        if not is_file(self.recipe):
            raise UserError(f"{self.path}: is not a run (no recipe.json); make one with `python -m pretrain run`")
        return read_recipe(self.recipe)

    def checkpoint_steps(self) -> list[int]:
        """List the steps of the finished checkpoints, ascending."""
        folders = [folder for folder in entries(self.checkpoints) if folder.name.isdigit()]
        if in_cloud(self.path):
            folders = [folder for folder in folders if is_file(folder / COMMITTED)]
        return sorted(int(folder.name) for folder in folders)

    def read_run(self) -> dict:
        """Read run.json; UserError if it is missing or damaged."""
        try:
            about = json.loads(self.run.read_text())
        except (OSError, ValueError) as error:
            raise UserError(f"{self.run}: cannot be read ({error}); restore it from a copy") from None
        if not isinstance(about, dict) or not all(isinstance(about.get(name), kind) for name, kind in ABOUT.items()):
            raise UserError(f"{self.run}: is not as `run` writes it; restore it from a copy, or take a new --workdir")
        return about

    def identity(self) -> str:
        """Return a string that identifies the run by its recipe and corpora when it began, not by its steps."""
        return self.read_run()["identity"]

    def check_there(self) -> None:
        """Raise UserError if the files written at the start are gone, without which a checkpoint cannot be resumed."""
        if not is_file(self.recipe):
            raise UserError(f"--workdir {self.path}: was removed during the run; start again in a new --workdir")

    def open_corpora(self, text: str | None = None) -> dict[str, Corpus]:
        """Open the run's corpora by name, as when it began, at their paths or those in `text` (--corpus)."""
        run = self.read_run()
        paths, states = corpora.named(run["corpus"]), corpora.named(run["fingerprint"])
        gone = [path for path in paths.values() if not is_remote(path) and not Path(path).exists()]
        if text is None and gone:
            raise UserError(f"{self.path}: its corpus is no longer at {gone[0]}; give its path with --corpus")
        opened = corpora.open_corpora(run["corpus"] if text is None else text, states)
        self.check_corpora(opened)
        return {name: opened[name] for name in states}  # in the order of the run, by which corpora are numbered

    def check_corpora(self, opened: Mapping[str, Corpus]) -> None:
        """Raise UserError unless these are the run's corpora, as they were when it began."""
        states = corpora.named(self.read_run()["fingerprint"])
        if opened.keys() != states.keys():
            names = ", ".join(states) if all(states) else "one without a name"
            text = corpora.written({name: corpus.source for name, corpus in opened.items()})
            raise UserError(f"--corpus {text}: {self.path} was started with other corpora ({names}); use these names")
        for name, corpus in opened.items():
            if corpus.fingerprint != states[name]:
                raise UserError(
                    f"--corpus {corpus.path}: has the fingerprint {corpus.fingerprint[:12]}, but {self.path} was "
                    f"trained on {states[name][:12]}; give that corpus, or start in another --workdir"
                )


def states(path: Path) -> dict[str, str]:
    """Return the fingerprints of the corpora that the run at `path` began with, by name; {} if there is no run."""
    directory = RunDirectory(path)
    exists = is_file(directory.recipe) and is_file(directory.run)
    return corpora.named(directory.read_run()["fingerprint"]) if exists else {}


def start(recipe: Recipe, opened: Mapping[str, Corpus], options: Options) -> tuple[RunDirectory, Recipe | None]:
    """Create a work directory, or check that this recipe may resume in it -> (directory, its former recipe or None).
    The first process decides for all. UserError that lists what differs, or if not all hosts see the directory."""
    directory = RunDirectory(options.workdir)
    before, about = from_first("--workdir", lambda: _start(directory, recipe, opened, options))
    gather("whether all hosts see --workdir", lambda: _check_shared(directory, about))
    return directory, from_json(before) if before else None


def check_writable(path: Path) -> None:
    """Check early that a run may read and write in a bucket; UserError names a missing role."""
    if in_cloud(path):
        from_first("--workdir", lambda: check_rights(place(path), f"--workdir {path}"))


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Lock a work directory against other runs on this machine; a killed run releases the lock. In a bucket, and on a
    file system without locks, nothing keeps another run out."""
    held = contextlib.ExitStack()

    def lock() -> None:
        folder = place(path)
        _make(folder)
        try:
            held.enter_context(locked(folder / "lock", fcntl.LOCK_EX | fcntl.LOCK_NB) or contextlib.nullcontext())
        except BlockingIOError:
            another = "another run is training there; stop it, or use another --workdir"
            raise UserError(f"--workdir {folder}: {another}") from None

    with held:
        if not in_cloud(path):
            from_first("--workdir", lock)
        yield


def _start(
    directory: RunDirectory, recipe: Recipe, opened: Mapping[str, Corpus], options: Options
) -> tuple[str | None, str]:
    """Write recipe.json and run.json -> (the former recipe.json, the new run.json)."""
    path, before, about = directory.path, None, {}
    init_from, heads_anew = options.init_from, options.init_heads_anew
    sources = corpora.written({name: corpus.source for name, corpus in opened.items()})
    _make(path)
    if is_file(directory.recipe) and is_file(directory.run):
        before = directory.read_recipe()
        _check_same(directory, before, recipe, options.extend is not None)
        _check_steps(directory, recipe)
        if not in_cloud(path) and is_file(directory.metrics) and not directory.checkpoints.is_dir():
            raise UserError(f"--workdir {path}: its checkpoints/ was removed; restore it, or use another --workdir")
        directory.check_corpora(opened)
        about = directory.read_run()
        old_init = about["init_from"]
        if init_from is not None and init_from != old_init:
            raise UserError(
                f"--init-from {init_from}: {path} was started from {old_init or 'random weights'}; "
                "leave --init-from out to resume, or use another --workdir"
            )
        init_from, heads_anew = old_init, about["init_heads_anew"]
    elif entries(directory.checkpoints):
        raise UserError(f"--workdir {path}: is damaged (checkpoints but no recipe.json); use another --workdir")
    else:
        copy_folder(next(iter(opened.values())).tokenizer_path, directory.tokenizer)
    fingerprint = corpora.written({name: corpus.fingerprint for name, corpus in opened.items()})
    about = {
        "identity": about.get("identity") or _identity(recipe, fingerprint, init_from),
        "corpus": sources,
        "fingerprint": fingerprint,
        "init_from": init_from,
        "init_heads_anew": heads_anew,
        "extended": options.extend or about.get("extended"),
        "versions": versions(),
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "started": datetime.datetime.now(datetime.UTC).isoformat(),
    }
    text = json.dumps(about, indent=2) + "\n"
    write_whole(directory.run, text)
    write_whole(directory.recipe, to_json(recipe))
    return before and to_json(before), text


def _check_shared(directory: RunDirectory, about: str) -> None:
    """Wait until this host sees the run.json that the first process has just written; UserError if it never does."""
    end = time.monotonic() + SHARED_SECONDS
    while not is_file(directory.run) or directory.run.read_text() != about:
        if time.monotonic() > end:
            raise UserError(
                f"--workdir {directory.path}: this host does not see files that the first host writes; "
                "use a folder that all hosts share, or a gs:// path"
            )
        time.sleep(0.5)


def longer(options: Options, recipe: Recipe) -> Recipe:
    """Return the recipe of a run that --extend makes longer, now or earlier. UserError without a checkpoint."""
    directory, setting = RunDirectory(options.workdir), f"--extend {options.extend}"
    done = max(directory.checkpoint_steps(), default=0)
    if not done:
        raise UserError(f"{setting}: {directory.path} has no checkpoint to resume; leave this out")
    before, run = directory.read_recipe(), directory.read_run()
    if _identity(recipe, run["fingerprint"], run["init_from"]) != directory.identity():  # nor the extended recipe
        _check_same(directory, before, dataclasses.replace(recipe, steps=before.steps))
    if before.steps != recipe.steps:
        _check_steps(directory, recipe)
        before = extended(before, done, recipe.steps, options.extend)
    elif (was := run.get("extended")) != options.extend:
        how = f", by --extend {was}" if was else ""
        raise UserError(f"{setting}: {directory.path} already has {before.steps} steps{how}; give more with --steps")
    return dataclasses.replace(recipe, phases=before.phases, schedule=before.schedule)


@contextlib.contextmanager
def disk_errors(directory: RunDirectory) -> Iterator[None]:
    """Turn failures of the disk or cloud in this context into a UserError that lists the safe checkpoints."""
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError):
            raise
        if in_cloud(directory.path) and not isinstance(error, FileNotFoundError) and (reason := refusal(error)):
            kind = PassingError if may_pass(error) else UserError
            raise kind(f"--workdir {directory.path}: {reason}") from error
        reason = _disk_failure(error)
        if reason is None:
            raise
        safe = ", ".join(map(str, directory.checkpoint_steps())) or "none"
        raise UserError(
            f"--workdir {directory.path}: cannot write there ({reason}); free space or keep fewer checkpoints, then "
            f"run the same command again (safe checkpoints: {safe})"
        ) from error


def _disk_failure(error: Exception) -> str | None:
    """Return the message of a disk failure; None for another kind of error."""
    numbers = (*FULL, errno.EIO, errno.EROFS)
    if getattr(error, "errno", None) in numbers:
        return error.strerror
    texts = map(os.strerror, numbers)  # errors of Orbax have no errno
    return next((text for text in texts if text in str(error)), None)


def copy_folder(source: Path, target: Path) -> None:
    """Copy the files of a local folder into another, local or gs://."""
    if in_cloud(target):
        upload(source, target)
    else:
        shutil.copytree(source, target, dirs_exist_ok=True)
        sync(target)


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically."""
    if in_cloud(path):
        path.write_text(text)
        return
    temporary = path.with_name(path.name + ".partial")
    try:
        temporary.write_text(text)
        put(temporary, path)
    except OSError:  # of a full disk, for example, which a partial file would keep full
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def read_object(path: Path) -> dict | None:
    """Read the JSON object in a file; {} if there is no file, None if it is damaged."""
    try:
        value = json.loads(path.read_text()) if is_file(path) else {}
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _make(path: Path) -> None:
    probe = path / ".writable"
    if is_file(path):
        raise UserError(f"--workdir {path}: is a file; give a folder")
    if is_file(path / "manifest.json"):
        raise UserError(f"--workdir {path}: is a corpus; give another folder")
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"--workdir {path}: cannot write there ({error.strerror}); choose another folder") from None


def _identity(recipe: Recipe, fingerprint: str, init_from: str | None) -> str:
    fixed = {name: value for name, value in flat(json.loads(to_json(recipe))).items() if not name.startswith("steps")}
    text = json.dumps([fixed, fingerprint, init_from], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _check_same(directory: RunDirectory, before: Recipe, recipe: Recipe, extending: bool = False) -> None:
    """Raise UserError if two recipes differ in more than `steps`.   extending: the new one may have a further phase."""
    old, new = (flat(json.loads(to_json(either))) for either in (before, recipe))
    may_change = ("steps", *(("phases.", "schedule.steps") if extending else ()))
    changed = [name for name in sorted(old | new) if old.get(name) != new.get(name) and not name.startswith(may_change)]
    if changed and not extending and (was := directory.read_run().get("extended")):
        changed = [name for name in changed if not name.startswith(("phases.", "schedule.steps"))]
        if not changed:
            raise UserError(
                f"--workdir {directory.path}: --extend {was} has added a phase to this run; give --extend again, or "
                f"--recipe {directory.recipe}"
            )
    if changed:
        listed = "; ".join(f"{name}: {old.get(name)} -> {new.get(name)}" for name in changed[:LISTED])
        listed += f"; and {len(changed) - LISTED} more" * (len(changed) > LISTED)
        raise UserError(
            f"--workdir {directory.path}: was started with another recipe ({listed}); give the old values to resume, "
            f"as --recipe {directory.recipe} does, or use another --workdir"
        )


def _check_steps(directory: RunDirectory, recipe: Recipe) -> None:
    done = max(directory.checkpoint_steps(), default=0)
    if recipe.steps < done:
        raise UserError(f"--steps {recipe.steps}: {directory.path} has already done {done}; give {done} or more")


def flat(tree, prefix: str = "") -> dict:
    """Flatten a tree: {'a': {'b': 1}, 'c': [2]} -> {'a.b': 1, 'c.0': 2}."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    flattened = {}
    for key, value in items:
        name = f"{prefix}{key}"
        flattened |= flat(value, f"{name}.") if isinstance(value, dict | list) else {name: value}
    return flattened


@functools.cache
def versions() -> dict[str, str | None]:
    """Collect the versions of Python, of installed packages that are required, and of this code (its commit)."""
    current = {"code": commit(ROOT), "python": platform.python_version()}
    for name in (*_required(), *MORE):
        try:
            current[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return current


def changed(before: dict[str, str | None], now: dict[str, str | None]) -> str | None:
    """Describe in one line which versions differ from the last start; None if none does."""
    differ = [name for name in sorted(before | now) if before.get(name) != now.get(name)]
    changes = ", ".join(f"{name} {before.get(name)} -> {now.get(name)}" for name in differ)
    return f"versions since the last start: {changes}; results may no longer match bit for bit" if differ else None


def _required() -> list[str]:
    """List the packages that this one needs at run time."""
    file = ROOT / "requirements.txt"  # in the source tree; an installed package has metadata instead
    lines = file.read_text().splitlines() if file.exists() else metadata.requires("pretrain")
    names = [re.match(r"[\w.-]+", line) for line in lines if "extra ==" not in line]
    return list(dict.fromkeys(name[0] for name in names if name))
