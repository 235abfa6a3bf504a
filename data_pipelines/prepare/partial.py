"""The stored state of an unfinished corpus, from which other processes and later ones continue.

OUT/.partial/state.json           settings, plan and tokenizer, written once, by the first process
OUT/.partial/arrays/              units of work that are not in a part yet
OUT/parts/000000/                 finished parts
OUT/manifest.json                 written last: if it exists, the corpus is finished
"""

import fcntl
import hashlib
import json
import shutil
import tempfile
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from data_pipelines import cloud, durable
from data_pipelines.durable import ours, put_new, sync
from data_pipelines.errors import UserError
from data_pipelines.prepare import plan as plans
from data_pipelines.prepare.plan import Plan
from data_pipelines.store.files import SUMMARY, beside
from data_pipelines.text.steps import check_steps
from data_pipelines.text.words import JIEBA, fields_of

FOLDER = ".partial"
UNITS = "arrays"
LIBRARIES = ("tokenizers", "sentencepiece", "sentencex")  # their versions affect the content


class State(NamedTuple):
    """settings: from the options.   versions: of the libraries.   special: role -> id.   tokenizer: file name -> text.
    base: the fingerprint of the corpus that parts are added to, or None.   enough: the size of a vocabulary that covers
    nearly all of the text, if training has measured it."""

    settings: dict
    versions: dict
    special: dict
    plan: Plan
    tokenizer: dict[str, str]
    base: str | None = None
    enough: int | None = None


def read_state(out: Path) -> State | None:
    """Return the stored state, None if there is none. Raises UserError if it is damaged."""
    file = out / FOLDER / "state.json"
    damaged = UserError(f"{file} is damaged; delete {file.parent} and start the same command again")
    try:
        stored = json.loads(file.read_bytes())
        if stored["sha256"] != digest(stored["state"]):
            raise damaged
        state = State(**stored["state"])
        return state._replace(plan=plans.of_json(state.plan))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        raise damaged from error


def digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def begin(out: Path, state: State) -> State:
    """Store the state, unless another process was faster. Returns the state that is then stored."""
    stored = state._asdict() | {"plan": state.plan._asdict()}
    write_new(out / FOLDER / "state.json", json.dumps({"state": stored, "sha256": digest(stored)}).encode())
    return read_state(out)


def read_texts(folder: Path) -> dict[str, str]:
    """Return name -> text of a folder's files. `write_texts` restores bytes that are not UTF-8."""
    return {file.name: file.read_bytes().decode("utf-8", "surrogateescape") for file in cloud.entries(folder)}


def write_texts(files: dict[str, str], folder: Path) -> None:
    """Write files to a local folder that is complete at any time, since other processes may read it meanwhile."""
    found = read_texts(folder)
    if found == files:
        return
    made = beside(folder)
    for name, text in files.items():
        (made / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    if found:  # damaged
        shutil.rmtree(folder, ignore_errors=True)
    durable.put_folder(made, folder)


def write_new(place: Path, content: bytes) -> None:
    """Write a file atomically, unless it exists."""
    if cloud.in_cloud(place):
        with suppress(FileExistsError):
            cloud.filesystem().pipe_file(str(place), content, mode="create")
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    temporary = place.with_name(f".{place.name}.{ours()}")
    temporary.write_bytes(content)
    put_new(temporary, place)


def put_folder(made: Path, place: Path) -> None:
    """Move a local folder to its place, unless one of the same content is there; in a bucket its summary comes last."""
    if cloud.in_cloud(place):
        cloud.upload(made, place, last=SUMMARY)
    else:
        durable.put_folder(made, place)


def workroom(out: Path) -> tempfile.TemporaryDirectory:
    """Return a temporary folder on the disk of OUT, as a context. Its content is moved to its places in OUT."""
    return tempfile.TemporaryDirectory(prefix="work-", dir=None if cloud.in_cloud(out) else out / FOLDER)


def check(out: Path, state: State, now: State) -> None:
    """Raise UserError if an unfinished corpus was begun with other settings, libraries or sources than now."""
    begun, anew = f"--out {out} is unfinished", f"or delete {out / FOLDER if state.base else out} to start over"
    if differing := changes(state.settings, now.settings):
        raise UserError(f"{begun}, and was begun with other settings: {differing}; use those, {anew}")
    if state.base != now.base:
        how = "with" if state.base else "without"
        raise UserError(f"{begun}, and was begun {how} --append; finish that command, {anew}")
    if differing := differences(state.versions, now.versions):
        begun_with, libraries = state.versions, (*LIBRARIES, JIEBA)
        known = [name for name in libraries if name in begun_with and begun_with[name] != now.versions[name]]
        named = " ".join(f"{name}=={state.versions[name]}" for name in known)
        # Other versions change with Python or with this program
        mend = f"pip install {named}" if named else "use the Python and the commit that began it"
        raise UserError(f"{begun}, and since it began {'; '.join(differing)}: {mend}, {anew}")
    before, plan = state.plan, now.plan
    if (before.hash, before.first) != (plan.hash, plan.first):
        differing = plans.changed(before.files(), plan.files()) or "they are cut differently"
        raise UserError(f"{begun}, and its sources have changed since it began ({differing}): restore them, {anew}")


def changes(old: dict, new: dict) -> str:
    """Return the settings that differ, as text."""
    return "; ".join(f"{name} was {old[name]!r} and is {new[name]!r}" for name in new if old[name] != new[name])


@contextmanager
def alone(out: Path, share: str | None = None) -> Iterator[None]:
    """Hold a lock, so that no other process makes the corpus, or this share of it, during the context. A disk without
    locks is trusted. Raises UserError if another process holds the lock."""
    place = out / FOLDER / f"lock{'-' + share.replace('/', '-of-') if share else ''}"
    try:
        lock = durable.locked(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        what = f"another process is making --part {share}" if share else "another prepare is writing there"
        raise UserError(f"--out {out}: {what}; wait or use another --out") from None
    with lock or nullcontext():
        yield


def open_folder(out: Path) -> None:
    """Make OUT/.partial. Raises UserError if OUT holds files that prepare has not written."""
    others = {path.name for path in cloud.entries(out)}
    if others and not {FOLDER, "manifest.json"} & others:
        raise UserError(f"--out {out} holds files that are not a corpus; use an empty or a new directory")
    if not cloud.in_cloud(out):
        (out / FOLDER).mkdir(parents=True, exist_ok=True)


def parts_from(out: Path, first: int) -> list[Path]:
    """Return the existing parts with this number or a higher one."""
    return [path for path in cloud.entries(out / "parts") if path.name.isdecimal() and int(path.name) >= first]


def remove(out: Path) -> None:
    """Remove OUT/.partial, its state first, so that what a kill leaves does not bind settings."""
    if not cloud.in_cloud(out):
        (out / FOLDER / "state.json").unlink(missing_ok=True)
        if (out / FOLDER).exists():
            sync(out / FOLDER)
    cloud.remove_folder(out / FOLDER)


def versions(steps: Iterable[str] = (), units: Sequence[str] = ()) -> dict[str, str]:
    """Return the versions here: library, or 'step NAME' -> version.   units: of --units."""
    more = [JIEBA] if JIEBA in fields_of(units).values() else []
    found = {name: version(name) for name in (*LIBRARIES, *more)} | {"Unicode": unicodedata.unidata_version}
    return found | {f"step {name}": str(number) for name, number in check_steps(steps)}


def differences(before: dict[str, str], now: dict[str, str], start: str | tuple[str, ...] = "") -> list[str]:
    """Return changed versions, as 'tokenizers was 0.22.1 and is 0.23.3', of names that begin with `start`."""
    changed = [name for name in now if name.startswith(start) and before.get(name) != now[name]]
    return [f"{name} was {before.get(name)} and is {now[name]}" for name in changed]
