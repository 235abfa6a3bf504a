"""What an unfinished corpus knows of itself, so that other processes and later ones go on with it.

OUT/.partial/state.json           written once, by whoever is first: it binds the settings, and names
OUT/.partial/plan-HASH.json       the plan, and
OUT/.partial/tokenizer-HASH/      the tokenizer
OUT/.partial/arrays/              units of work on their way into a part
OUT/parts/000000/                 the parts that are done
OUT/manifest.json                 written last: its presence says that the corpus is finished
"""

import fcntl
import hashlib
import json
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from errno import ENOLCK, ENOSYS, EOPNOTSUPP
from pathlib import Path
from typing import NamedTuple

from data_pipelines import cloud, durable
from data_pipelines.download import say
from data_pipelines.durable import ours, put_new, sync
from data_pipelines.errors import UserError
from data_pipelines.prepare import plan as plans
from data_pipelines.prepare import versions
from data_pipelines.prepare.options import Prepare, settings
from data_pipelines.prepare.plan import Plan
from data_pipelines.store.files import SUMMARY

FOLDER = ".partial"
UNITS = "arrays"  # not "units", where an older version may have left files of another form
NO_LOCKS = (ENOLCK, ENOSYS, EOPNOTSUPP)  # some network file systems


class State(NamedTuple):
    """settings: of the options.   versions: of the libraries.   special: role -> id.   plan, tokenizer: names of what
    lies beside.   base: the fingerprint of the corpus that parts are added to, or None.   enough: the size of a
    vocabulary that knows (nearly) all of the text, where that was seen in training."""

    settings: dict
    versions: dict
    special: dict
    plan: str
    tokenizer: str
    base: str | None = None
    enough: int | None = None


def read_state(out: Path) -> State | None:
    """What is written down, None where nothing is. UserError where it is damaged."""
    file = out / FOLDER / "state.json"
    try:
        said = json.loads(file.read_bytes())
        if said["sha256"] == digest(said["state"]):
            return State(**said["state"])
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        raise _damaged(file) from error
    raise _damaged(file)


def digest(said: object) -> str:
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def read_plan(out: Path, state: State) -> Plan:
    file = out / FOLDER / state.plan
    try:
        found = plans.of_json(file.read_bytes())
    except (FileNotFoundError, ValueError, TypeError, KeyError) as error:
        raise _damaged(file) from error
    if state.plan != plan_name(found):
        raise _damaged(file)
    return found


def check_tokenizer(out: Path, state: State, folder: Path) -> None:
    """UserError where its files are not what was written down. folder: where they are on this machine."""
    if state.tokenizer != tokenizer_name(folder):
        raise _damaged(out / FOLDER / state.tokenizer)


def _damaged(path: Path) -> UserError:
    return UserError(f"{path} is damaged; delete {path.parent} and start the same command again")


def plan_name(plan: Plan) -> str:
    return f"plan-{plan.hash[:16]}.json"


def tokenizer_name(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        digest.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return f"tokenizer-{digest.hexdigest()[:16]}"


def begin(out: Path, state: State, plan: Plan, tokenizer: Path) -> State:
    """Write down what the corpus is to be, unless another process was faster: returns what is then written.

    tokenizer: the folder with its files. Names come from the content, so that what two processes write alike is one.
    """
    state = state._replace(plan=plan_name(plan), tokenizer=tokenizer_name(tokenizer))
    folder = out / FOLDER
    put_folder(tokenizer, folder / state.tokenizer)
    write_new(folder / state.plan, plan.to_json())
    said = {"state": state._asdict(), "sha256": digest(state._asdict())}
    write_new(folder / "state.json", json.dumps(said).encode())
    return read_state(out)


def write_new(place: Path, content: bytes) -> None:
    """Write a file as a whole, unless there is one."""
    if cloud.in_cloud(place):
        with suppress(FileExistsError):
            cloud.filesystem().pipe_file(str(place), content, mode="create")
        return
    temporary = place.with_name(f".{place.name}.{ours()}")
    temporary.write_bytes(content)
    put_new(temporary, place)


def put_folder(made: Path, place: Path) -> None:
    """Give a local folder its place, unless that is taken by one of the same content; in a bucket its summary last."""
    if cloud.in_cloud(place):
        for file in sorted(made.rglob("*"), key=lambda file: (file.name == SUMMARY, file)):
            if file.is_file():
                upload(file, place / file.relative_to(made).as_posix())
    else:
        durable.put_folder(made, place)


def add_files(made: Path, folder: Path) -> None:
    """Add files of a local folder to a folder of the corpus."""
    if not cloud.in_cloud(folder):
        folder.mkdir(exist_ok=True)
    for file in made.iterdir():
        write_new(folder / file.name, file.read_bytes())


def upload(file: Path, to: Path) -> None:
    """Copy a local file to a bucket, however long that is busy."""
    cloud.patiently(lambda: cloud.upload_file(file, to), lambda error: say(f"{to}: {error}; it is tried again"))


def workroom(out: Path) -> tempfile.TemporaryDirectory:
    """A folder that lasts as long as the context, from which things are moved to their places in OUT: on its disk."""
    return tempfile.TemporaryDirectory(prefix="work-", dir=None if cloud.in_cloud(out) else out / FOLDER)


def check(out: Path, state: State, plan: Plan, now: State) -> None:
    """UserError where an unfinished corpus was begun with other settings, libraries or sources than there are now."""
    check_begun(out, state, now)
    before = read_plan(out, state)
    if (before.hash, before.first) != (plan.hash, plan.first):
        said = plans.changed(before.files(), plan.files()) or "they are cut otherwise"
        raise UserError(
            f"--out {out} is unfinished, and its sources have changed since it began ({said}): restore them, "
            f"{_anew(out, state)}"
        )


def check_begun(out: Path, state: State, now: State) -> None:
    """The same of settings and libraries alone."""
    begun, anew = f"--out {out} is unfinished", _anew(out, state)
    if said := changes(state.settings, now.settings):
        raise UserError(f"{begun}, and was begun with other settings: {said}; give those, {anew}")
    if state.base != now.base:
        raise UserError(f"{begun}: {'' if state.base else 'no '}--append began it; run that command to its end, {anew}")
    if said := versions.differences(state.versions, now.versions):
        cure = versions.cure(state.versions, now.versions)
        raise UserError(f"{begun}, and since it began {'; '.join(said)}: {cure}, {anew}")


def _anew(out: Path, state: State) -> str:
    return f"or delete {out if state.base is None else out / FOLDER} to begin anew"


def changes(old: dict, new: dict) -> str:
    """The settings that differ; one that is newer than the corpus was what it is unless told."""
    old = settings(Prepare(("builtin",), Path())) | old
    return "; ".join(f"{name} was {old[name]!r} and is {new[name]!r}" for name in new if old[name] != new[name])


@contextmanager
def alone(out: Path, share: str | None = None) -> Iterator[None]:
    """While the context lasts no other process makes the corpus, or this share of it; on trust where nothing can be
    locked. UserError where one does."""
    with open(out / FOLDER / f"lock{'-' + share.replace('/', '-of-') if share else ''}", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            what = f"--part {share}: another process makes it" if share else "another prepare is writing there"
            raise UserError(f"--out {out}: {what}; wait or use another --out") from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        yield


def open_folder(out: Path) -> None:
    """Make OUT/.partial. UserError where OUT holds what no prepare has written."""
    folder = out / FOLDER
    if cloud.in_cloud(out):
        others = [path.name for path in cloud.entries(out)]
    else:
        others = [path.name for path in out.iterdir()] if out.is_dir() else []
    if others and not {FOLDER, "manifest.json"} & {*others}:
        raise UserError(f"--out {out} holds files that are no corpus; use an empty or a new directory")
    if not cloud.in_cloud(out):
        folder.mkdir(parents=True, exist_ok=True)


def parts_from(out: Path, first: int) -> list[Path]:
    """The parts from a number on that are there."""
    return [path for path in cloud.entries(out / "parts") if path.name.isdecimal() and int(path.name) >= first]


def remove_folders(folders: Iterable[Path]) -> None:
    for folder in folders:
        cloud.remove_folder(folder)


def remove(out: Path) -> None:
    """Remove OUT/.partial: its state first, so that what is left binds nothing."""
    if not cloud.in_cloud(out):
        (out / FOLDER / "state.json").unlink(missing_ok=True)
        if (out / FOLDER).exists():
            sync(out / FOLDER)
    cloud.remove_folder(out / FOLDER)
