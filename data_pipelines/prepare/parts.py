"""Make parts of a corpus: on all cores of this machine, or one part, which depends only on the plan and its number."""

import itertools
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import NamedTuple

from data_pipelines import cloud
from data_pipelines.errors import UserError
from data_pipelines.formats.problems import printable
from data_pipelines.formats.source import Range, Source
from data_pipelines.formats.table import changed
from data_pipelines.manifest import part_name
from data_pipelines.prepare.options import LEXICONS
from data_pipelines.prepare.partial import FOLDER, UNITS, State, digest, put_folder, write_texts
from data_pipelines.prepare.plan import Plan, size
from data_pipelines.processes import pool
from data_pipelines.store.files import is_whole
from data_pipelines.store.job import Job, planned, word_starts_of
from data_pipelines.store.parts import write_part
from data_pipelines.store.units import write_unit
from data_pipelines.text.encoding import Encoder
from data_pipelines.text.words import fields_of
from data_pipelines.tokenizers import stored
from data_pipelines.tokenizers.made import vocabulary

AHEAD = 2  # tasks in flight per process: units that wait for their part take room on the disk
HELD = threading.local()  # this thread's encoder, and the path of its tokenizer


class Work(NamedTuple):
    """What a process needs to make parts; picklable.   tokenizer: path of tokenizer.json.   scratch: a local folder."""

    job: Job
    plan: Plan
    tokenizer: Path
    out: Path
    scratch: Path


def open_work(out: Path, state: State, sources: tuple[Source, ...]) -> Work:
    """Return the Work of a stored state. Writes the tokenizer's files to a local folder."""
    scratch = out / FOLDER / UNITS
    if cloud.in_cloud(out):
        name = digest([str(out), state])[:16]  # all that units depend on
        scratch = Path(tempfile.gettempdir()) / f"prepare-{os.getuid()}-{name}"
    write_texts(state.tokenizer, scratch / "tokenizer")
    file = scratch / "tokenizer" / "tokenizer.json"
    size = len(vocabulary(stored.load(file.parent).tokenizer))
    steps, units = state.settings["steps"], state.settings["units"]
    fields = planned(sources, size, word_starts_of(read_encoder(file))[0], steps, units)
    cuts = [(field, spec, state.settings[LEXICONS].get(spec)) for field, spec in fields_of(units).items()]
    job = Job(sources, size, fields, state.settings["heldout"], len(state.plan.parts), tuple(steps), tuple(cuts))
    return Work(job, state.plan, file, out, scratch)


def present(out: Path, numbers: Iterable[int]) -> set[int]:
    """Return which of the parts are finished."""
    if cloud.in_cloud(out):
        found = {Path(name).parent.name for name in cloud.filesystem().glob(f"{out}/parts/*/summary.json")}
    else:
        found = {path.parent.name for path in out.glob("parts/*/summary.json") if is_whole(path.parent)}
    return {number for number in numbers if Path(part_name(number)).name in found}


def unit_folders(work: Work, number: int) -> list[Path]:
    folder = work.scratch / f"{number:06}"
    return [folder / f"unit-{index:06}" for index in range(len(work.plan.units(number)))]


def make_parts(work: Work, numbers: list[int], processes: int, advance: Callable[[int], None]) -> None:
    """Make parts on all cores. Units are made part by part, and each part is written as soon as its units exist, so the
    disk holds the units of about two parts at most. advance: called with the bytes of text that are done."""
    units = ((number, unit) for number in numbers for unit in range(len(work.plan.units(number))))
    left = {number: len(work.plan.units(number)) for number in numbers}
    running: dict[Future, tuple[int, int | None]] = {}
    with pool(min(processes, sum(left.values()))) as workers:
        while True:
            for number, unit in itertools.islice(units, max(AHEAD * processes - len(running), 0)):
                running[_submit(workers, work, number, unit)] = number, unit
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                number, unit = running.pop(future)
                future.result()
                if unit is None:
                    continue
                advance(size(work.plan.units(number)[unit]))
                left[number] -= 1
                if not left[number]:
                    running[_submit(workers, work, number)] = number, None


def _submit(workers, work: Work, number: int, unit: int | None = None) -> Future:
    """Submit a unit of a part or, without `unit`, the joining of a part's units."""
    folders = unit_folders(work, number)
    if unit is None:
        return workers.submit(_join, number, folders, work.job, work.out)
    return workers.submit(_unit, folders[unit], work.plan.units(number)[unit], work.job, work.tokenizer)


def _unit(folder: Path, unit: tuple[Range, ...], job: Job, tokenizer: Path) -> None:
    for piece in unit:
        if (path := changed(piece)) is not None:
            raise UserError(f"--source: {printable(path)} has changed since prepare began; restore it, or start over")
    write_unit(folder, unit, job, read_encoder(tokenizer))


def read_encoder(tokenizer: Path) -> Encoder:
    """Return the encoder of a tokenizer's file; it gives exactly the tokens that its Hugging Face class gives. Each
    thread has one, since it learns from what it encodes."""
    if getattr(HELD, "tokenizer", None) != tokenizer:
        HELD.encoder, HELD.tokenizer = Encoder(stored.load(tokenizer.parent).tokenizer), tokenizer
    return HELD.encoder


def _join(number: int, folders: list[Path], job: Job, out: Path) -> None:
    """Join units to a part, put it in its place and remove the units."""
    made = folders[0].parent / "part"
    write_part(made, folders, job)
    place = out / part_name(number)
    if not cloud.in_cloud(out):
        place.parent.mkdir(parents=True, exist_ok=True)
        if not is_whole(place):
            shutil.rmtree(place, ignore_errors=True)
    put_folder(made, place)
    shutil.rmtree(folders[0].parent)


def make_part(work: Work, number: int) -> None:
    """Make one part in this process."""
    folders = unit_folders(work, number)
    for folder, unit in zip(folders, work.plan.units(number), strict=True):
        _unit(folder, unit, work.job, work.tokenizer)
    _join(number, folders, work.job, work.out)
