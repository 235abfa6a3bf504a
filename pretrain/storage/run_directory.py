"""A work directory: everything that a run was and did, so that resuming, plotting and exporting need nothing else.

    recipe.json     what is trained (only `steps` may change, and with --extend a further phase comes)
    run.json        what identifies the run, the corpora's paths and fingerprints, --init-from, --init-heads-anew, the
                    last start's versions, commit and platform
    tokenizer/      a copy of the corpus's
    checkpoints/    STEP/ each
    frozen/         the parameters that no phase trains
    examples.json   how many examples the parts of corpora have, where they were counted
    metrics.jsonl   one JSON object per line: {"kind": "train" | "eval", "step": ..., figures}
    tensorboard/    the same for TensorBoard
    log.txt         what was printed
    trackers.json   by which id each of --track knows the run
    lock            held while a run trains there
    compiled/       in the cloud: programs for the next start, see commands/platform.py

It may be a gs:// path: then every file is written as a whole object, and what grows (figures, log, events) is written
on this machine and uploaded before each checkpoint, see `journal.Mirror`.
"""

import contextlib
import dataclasses
import datetime
import errno
import fcntl
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
# Not in requirements.txt, but installed with its packages or for an accelerator or gs://
MORE = "jaxlib", "libtpu", "jax-cuda12-plugin", "tensorstore", "gcsfs"
SHARED_SECONDS = 30  # until a file that one host has written shows on all, over a network that keeps old answers
COMMITTED = "commit_success.txt"  # what Orbax writes last into a checkpoint in the cloud; elsewhere it renames


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
        """UserError when this is no work directory."""
        if not is_file(self.recipe):
            raise UserError(f"{self.path} is no run: it has no recipe.json; make one with `python -m pretrain run`")
        return read_recipe(self.recipe)

    def checkpoint_steps(self) -> list[int]:
        """Steps of the finished checkpoints, ascending."""
        folders = [folder for folder in entries(self.checkpoints) if folder.name.isdigit()]
        if in_cloud(self.path):
            folders = [folder for folder in folders if is_file(folder / COMMITTED)]
        return sorted(int(folder.name) for folder in folders)

    def read_run(self) -> dict:
        """UserError when run.json is missing or damaged."""
        try:
            about = json.loads(self.run.read_text())
        except (OSError, ValueError) as error:
            raise UserError(f"{self.run} cannot be read ({error}); restore it from a copy") from None
        named = about if isinstance(about, dict) else {}
        if not all(isinstance(named.get(name), str) for name in ("corpus", "fingerprint")):
            raise UserError(f"{self.run} does not name the run's corpus; restore it from a copy")
        return about

    def identity(self) -> str:
        """Of what is trained on what, as it was when the run began, however long it is: runs that have the same are the
        same run."""
        recipe, run = self.read_recipe(), self.read_run()
        return run.get("identity") or _identity(recipe, run["fingerprint"], run["init_from"])

    def check_there(self) -> None:
        """UserError when what a run has written at its start is gone: a checkpoint alone could not be gone on from."""
        if not is_file(self.recipe):
            raise UserError(f"--workdir {self.path}: was removed while the run went on; start again in a new --workdir")

    def open_corpora(self, text: str | None = None) -> dict[str, Corpus]:
        """The run's corpora by name, as they were when it began, from where they were or from what `--corpus` says now;
        UserError when one is another one."""
        run = self.read_run()
        paths, states = corpora.named(run["corpus"]), corpora.named(run["fingerprint"])
        gone = [path for path in paths.values() if not is_remote(path) and not Path(path).exists()]
        if text is None and gone:
            raise UserError(f"the corpus of {self.path} is no longer at {gone[0]}: pass --corpus")
        opened = corpora.open_corpora(run["corpus"] if text is None else text, states)
        self.check_corpora(opened)
        return {name: opened[name] for name in states}  # in the order that numbers them

    def check_corpora(self, opened: Mapping[str, Corpus]) -> None:
        """UserError unless these are the run's, as they were when it began."""
        states = corpora.named(self.read_run()["fingerprint"])
        if opened.keys() != states.keys():
            names = ", ".join(states) if all(states) else "one without a name"
            given = corpora.written({name: corpus.source for name, corpus in opened.items()})
            raise UserError(f"--corpus {given}: {self.path} was started with other corpora ({names}); give these names")
        for name, corpus in opened.items():
            if corpus.fingerprint != states[name]:
                raise UserError(
                    f"{corpus.path} is not the corpus of {self.path}: its fingerprint is {corpus.fingerprint[:12]}, "
                    f"the run's {states[name][:12]}; pass --corpus with the one it was trained on, "
                    "or start in another --workdir"
                )


def states(path: Path) -> dict[str, str]:
    """The fingerprints of the corpora that the run at `path` began with, by name; {} where none has begun."""
    directory = RunDirectory(path)
    began = is_file(directory.recipe) and is_file(directory.run)
    return corpora.named(directory.read_run()["fingerprint"]) if began else {}


def start(recipe: Recipe, of: Mapping[str, Corpus], options: Options) -> tuple[RunDirectory, Recipe | None]:
    """Create a work directory, or check that this recipe may go on in it -> (directory, the recipe that it had).

    The first process decides for all. UserError when it holds another recipe, another corpus or another start, listing
    what differs, or when not all hosts see it.
    """
    directory = RunDirectory(options.workdir)
    before, about = from_first("--workdir", lambda: _start(directory, recipe, of, options))
    gather("whether all hosts see --workdir", lambda: _check_shared(directory, about))
    return directory, from_json(before) if before else None


def check_writable(path: Path) -> None:
    """Before anything else costs time: whether a run may do in a bucket what it does there. UserError names the role
    that is missing. A folder on a disk is tried as it is made."""
    if in_cloud(path):
        from_first("--workdir", lambda: check_rights(place(path), f"--workdir {path}"))


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """While the context lasts, no other run on this machine trains in a work directory; a killed one lets go.

    In a bucket, and where the file system has no locks, nothing keeps another one out.
    """
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
    directory: RunDirectory, recipe: Recipe, of: Mapping[str, Corpus], options: Options
) -> tuple[str | None, str]:
    """(recipe.json as it was, run.json as it is now)."""
    path, before, about = directory.path, None, {}
    init_from, heads_anew = options.init_from, options.init_heads_anew
    sources = corpora.written({name: corpus.source for name, corpus in of.items()})
    _make(path)
    if is_file(directory.recipe) and is_file(directory.run):
        before = directory.read_recipe()
        _check_same(directory, before, recipe, options.extend is not None)
        _check_steps(directory, recipe)
        if not in_cloud(path) and is_file(directory.metrics) and not directory.checkpoints.is_dir():
            raise UserError(f"--workdir {path}: its checkpoints/ was removed; restore it, or use another --workdir")
        directory.check_corpora(of)
        about = directory.read_run()
        old_init = about["init_from"]
        if init_from is not None and init_from != old_init:
            raise UserError(
                f"--init-from {init_from}: {path} was started from {old_init or 'random weights'}; "
                "leave --init-from out to resume, or use another --workdir"
            )
        init_from, heads_anew = old_init, about.get("init_heads_anew", False)
    elif entries(directory.checkpoints):
        raise UserError(f"{path} has checkpoints but no recipe.json: it is damaged; use another --workdir")
    else:
        copy_folder(next(iter(of.values())).tokenizer_path, directory.tokenizer)
    fingerprint = corpora.written({name: corpus.fingerprint for name, corpus in of.items()})
    about = {
        "identity": about.get("identity") or _identity(before or recipe, fingerprint, init_from),
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
    """UserError unless this host comes to see the run.json that the first process has just written."""
    end = time.monotonic() + SHARED_SECONDS
    while not is_file(directory.run) or directory.run.read_text() != about:
        if time.monotonic() > end:
            raise UserError(
                f"--workdir {directory.path}: this host does not see what the first one writes there; "
                "give a folder that all hosts share, or a gs:// path"
            )
        time.sleep(0.5)


def longer(options: Options, recipe: Recipe) -> Recipe:
    """The recipe of a run that --extend makes longer, or has made so before: `recipe.extended`.

    UserError where there is nothing to go on from.
    """
    directory, setting = RunDirectory(options.workdir), f"--extend {options.extend}"
    done = max(directory.checkpoint_steps(), default=0)
    if not done:
        raise UserError(
            f"{setting}: {directory.path} has no checkpoint to go on from: leave this out until you give a run more "
            "--steps"
        )
    before, run = directory.read_recipe(), directory.read_run()
    if _identity(recipe, run["fingerprint"], run["init_from"]) != directory.identity():  # nor is it what it became
        _check_same(directory, before, dataclasses.replace(recipe, steps=before.steps))
    if before.steps != recipe.steps:
        _check_steps(directory, recipe)
        before = extended(before, done, recipe.steps, options.extend)
    elif (was := run.get("extended")) != options.extend:
        how = f", by --extend {was}" if was else ""
        raise UserError(f"{setting}: {directory.path} has {before.steps} steps already{how}; give more with --steps")
    return dataclasses.replace(recipe, phases=before.phases, schedule=before.schedule)


@contextlib.contextmanager
def disk_errors(directory: RunDirectory) -> Iterator[None]:
    """Where the disk or cloud fails while the work directory is written: UserError says what is safe."""
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
            f"--workdir {directory.path}: cannot write there ({reason}). Checkpoints that are safe: {safe}. "
            "Free space or lower --keep, then run the same command again"
        ) from error


def _disk_failure(error: Exception) -> str | None:
    """What the disk refused, None for another kind of error."""
    numbers = (*FULL, errno.EIO, errno.EROFS)
    if getattr(error, "errno", None) in numbers:
        return error.strerror
    texts = map(os.strerror, numbers)  # Orbax's errors have no errno
    return next((text for text in texts if text in str(error)), None)


def copy_folder(source: Path, target: Path) -> None:
    """Copy the files of a local folder into another, local or gs://."""
    if in_cloud(target):
        upload(source, target)
    else:
        shutil.copytree(source, target, dirs_exist_ok=True)
        sync(target)


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is never seen half-written."""
    if in_cloud(path):
        path.write_text(text)
        return
    temporary = path.with_name(path.name + ".partial")
    try:
        temporary.write_text(text)
        put(temporary, path)
    except OSError:  # as of a full disk, which what is half-written would keep full
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def read_object(path: Path) -> dict | None:
    """The JSON object in a file, {} where there is no file; None where it is damaged."""
    try:
        found = json.loads(path.read_text()) if is_file(path) else {}
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _make(path: Path) -> None:
    probe = path / ".writable"
    if is_file(path):
        raise UserError(f"--workdir {path}: is a file; give a folder")
    if is_file(path / "manifest.json"):
        raise UserError(f"--workdir {path}: is a corpus; give a folder of the run's own")
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"--workdir {path}: cannot write there ({error.strerror}); choose another folder") from None


def _identity(recipe: Recipe, fingerprint: str, init_from: str | None) -> str:
    fixed = {name: value for name, value in flat(json.loads(to_json(recipe))).items() if not name.startswith("steps")}
    said = json.dumps([fixed, fingerprint, init_from], sort_keys=True)
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def _check_same(directory: RunDirectory, before: Recipe, recipe: Recipe, extending: bool = False) -> None:
    """extending: whether the phases are those of `before` with a further one."""
    old, new = (flat(json.loads(to_json(one))) for one in (before, recipe))
    may_change = ("steps", *(("phases.", "schedule.steps") if extending else ()))
    changed = [name for name in sorted(old | new) if old.get(name) != new.get(name) and not name.startswith(may_change)]
    if changed and not extending and (was := directory.read_run().get("extended")):
        changed = [name for name in changed if not name.startswith(("phases.", "schedule.steps"))]
        if not changed:
            raise UserError(
                f"{directory.path} was made longer by --extend {was}, which added a phase: give --extend again, or "
                f"--recipe {directory.recipe}"
            )
    if changed:
        listed = "; ".join(f"{name}: {old.get(name)} -> {new.get(name)}" for name in changed)
        raise UserError(
            f"{directory.path} was started with another recipe ({listed}): give the old values to resume, "
            f"as --recipe {directory.recipe} does, or use another --workdir"
        )


def _check_steps(directory: RunDirectory, recipe: Recipe) -> None:
    done = max(directory.checkpoint_steps(), default=0)
    if recipe.steps < done:
        raise UserError(
            f"--steps {recipe.steps}: {directory.path} has done {done} already: give {done} or more, "
            "or use another --workdir"
        )


def flat(tree, prefix: str = "") -> dict:
    """{'a': {'b': 1}, 'c': [2]} -> {'a.b': 1, 'c.0': 2}."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    flattened = {}
    for key, value in items:
        name = f"{prefix}{key}"
        flattened |= flat(value, f"{name}.") if isinstance(value, dict | list) else {name: value}
    return flattened


def versions() -> dict[str, str | None]:
    """Of Python, of every package that requirements.txt names and is installed, and of this code, which is a commit."""
    found = {"code": commit(ROOT), "python": platform.python_version()}
    for name in (*_required(), *MORE):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def changed(before: dict[str, str | None], now: dict[str, str | None]) -> str | None:
    """One line: what has another version than at the last start."""
    differ = [name for name in sorted(before | now) if before.get(name) != now.get(name)]
    changes = ", ".join(f"{name} {before.get(name)} -> {now.get(name)}" for name in differ)
    return f"since the last start: {changes}; from here on not bit for bit as before" if differ else None


def _required() -> list[str]:
    """Names of the packages that this one needs at run time."""
    file = ROOT / "requirements.txt"  # of the source folder; where this is installed, of its metadata
    lines = file.read_text().splitlines() if file.exists() else metadata.requires("pretrain")
    names = [re.match(r"[\w.-]+", line) for line in lines if "extra ==" not in line]
    return list(dict.fromkeys(name[0] for name in names if name))
