"""Turn text into a stored corpus: plan, tokenizer, parts, manifest. A second run continues an unfinished one.

`partial.py` describes an unfinished corpus. A part depends only on the plan and on its number, so any number of
processes may make parts: this one all of them, each process its share with --part, or Apache Beam's workers with
--runner.
"""

import contextlib
import dataclasses
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from data_pipelines import cloud, similar_words
from data_pipelines.durable import FULL
from data_pipelines.errors import AGAIN, PassingError, UserError
from data_pipelines.formats import table
from data_pipelines.formats.problems import OWN, Problems, printable
from data_pipelines.formats.source import Source
from data_pipelines.formats.values import CODE
from data_pipelines.manifest import fields_of, parse_manifest
from data_pipelines.prepare import ending, partial, plan, training
from data_pipelines.prepare.options import MIB, Prepare, check_taken, inherit, settings, share, sources_of
from data_pipelines.prepare.parts import Work, make_parts, open_work, present, unit_folders
from data_pipelines.prepare.plan import Plan
from data_pipelines.processes import cores
from data_pipelines.progress import busy
from data_pipelines.store.files import is_whole
from data_pipelines.store.job import check_added, planned
from data_pipelines.text.encoding import Encoder
from data_pipelines.text.words import JIEBA
from data_pipelines.tokenizers import prefixes, stored
from data_pipelines.tokenizers.made import with_end, with_sentinels
from data_pipelines.tokenizers.table import KINDS

REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ENOENT)
GONE = (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST)


def prepare(options: Prepare, console: Console, runner_options: Sequence[str] = ()) -> dict | None:
    """Make the corpus and return its manifest, or None if it is not finished (--part). Raises UserError. A finished
    corpus with the same settings is left alone.   runner_options: for Beam's runner."""
    if options.similar_words:
        sha256 = similar_words.digest(options.similar_words)
        options = dataclasses.replace(options, similar_words_sha256=sha256)
    settings(options)
    refusals = cloud.cloud_errors(f"--out {options.out}") if cloud.in_cloud(options.out) else contextlib.nullcontext()
    with faults(options.out, options.processes or cores()), refusals:
        before = read_finished(options.out)
        if options.append:
            if before is None:
                raise UserError(f"--append: {options.out} is not a finished corpus; finish its prepare command first")
            options = inherit(options, before["settings"])
            then, now = before["stages"][0]["versions"], partial.versions(options.steps, options.units)
            if said := partial.differences(then, now, ("step ", JIEBA)):
                cure = "use the package or the commit that made the corpus, or another --out"
                raise UserError(f"--append: {'; '.join(said)}: {cure}")
        elif before is not None:
            if said := partial.changes(before["settings"], settings(options)):
                raise UserError(f"--out {options.out} holds a corpus with other settings: {said}; use another --out")
            return _leave(options.out, before, console, 0 if options.part else _come_since(options, before))
        sources, found = _plan(options, before)
        if before and not found.parts:
            return _leave(options.out, before, console)
        if before:
            word_starts = fields_of(before)["word_starts"].kept
            check_added(before, planned(sources, before["vocab_size"], word_starts, options.steps, options.units))
        partial.open_folder(options.out)
        several = options.finish or options.runner or cloud.in_cloud(options.out)
        with contextlib.nullcontext() if several else partial.alone(options.out, options.part):
            state = _begin(options, sources, found, before, runner_options, console)
            work = open_work(options.out, state, sources)
            return _make(options, work, state, before, runner_options, console)


def read_finished(out: Path) -> dict | None:
    """Return the manifest of a finished corpus, else None. Raises UserError for one that `prepare` has not made."""
    if not cloud.is_file(out / "manifest.json"):
        return None
    manifest = parse_manifest(out, (out / "manifest.json").read_bytes())
    if "stages" not in manifest:
        raise UserError(f"--out {out} holds a corpus that was not made by prepare; use another --out")
    return manifest


def _come_since(options: Prepare, before: dict) -> int:
    """Return how many files the sources have gained since the corpus was finished; 0 if they cannot be listed."""
    try:
        units = _units(options, sources_of(settings(options)), before, Problems())
        return len({piece.path for unit in units for piece in unit})
    except (UserError, OSError):
        return 0


def _leave(out: Path, manifest: dict, console: Console, come_since: int = 0) -> dict:
    """Say that the corpus is finished, and remove what a kill right after the manifest was written has left."""
    state = partial.read_state(out)
    if state is None or state.base != manifest["fingerprint"]:
        partial.remove(out)
    status = "nothing to do"
    if come_since:
        status = f"source files that are not in it: {come_since}; add them with --append"
    console.print(f"{printable(str(out))} is already finished; {status}", markup=False, soft_wrap=True)
    return manifest


def _plan(options: Prepare, before: dict | None) -> tuple[tuple[Source, ...], Plan]:
    """Return the sources and the plan of their text; for --part the stored plan, if there is one."""
    sources, problems = sources_of(settings(options)), Problems()
    check_taken(options, sources)
    for source in sources:
        if source.location and os.path.realpath(source.location) == os.path.realpath(options.out):
            raise UserError(f"--out {options.out}: --source {source} reads it; use another directory")
    if options.part and (state := partial.read_state(options.out)):  # --finish checks for changes
        return sources, state.plan
    units = _units(options, sources, before, problems)
    return sources, plan.cut(units, options.part_size, len(before["parts"]) if before else 0, problems)


def _units(options: Prepare, sources: tuple[Source, ...], before: dict | None, problems: Problems) -> list:
    """Return the text of the sources that is not in the corpus yet, as units of work."""
    units = table.plan(list(sources), problems, (str(options.out),))
    plan.check_once(units, sources)
    problems.pop(OWN, None)  # the output grows, so this count would change the plan
    return plan.new(units, sources, options.out, before, problems) if before else units


def _begin(options: Prepare, sources, found: Plan, before, runner_options, console: Console) -> partial.State:
    """Return the stored state of the unfinished corpus. Write it first if no process has."""
    base = before and before["fingerprint"]
    out, versions = options.out, partial.versions(options.steps, options.units)
    now = partial.State(settings(options), versions, {}, found, {}, base)
    given_up = partial.parts_from(out, found.first)  # if there is still no state when it is read below
    state = partial.read_state(out)
    if state is None:
        if options.finish:
            raise UserError(f"--finish: {out} has no parts yet; run the command with --part I/N first")
        if read_finished(out) != before:
            raise UserError(f"--out {out}: another process has finished it in the meantime; there is nothing to do")
        for part in given_up:
            cloud.remove_folder(part)
        files, special, size = _make_tokenizer(options, sources, found, before, runner_options, console)
        state = partial.begin(out, now._replace(tokenizer=files, special=special, enough=size))
    partial.check(out, state, now)
    return state


def _make_tokenizer(options, sources, found, before, runner_options, console: Console):
    """Train or load the tokenizer, or take the corpus's own. Returns (file name -> text, role -> id, `State.enough`).
    The settings are not stored yet, so after an error here they may still change."""
    name, values = CODE, options.code  # the values whose tokens stand before documents
    if options.prefix is not None:
        name, values = options.prefix, training.values(options, found, sources, runner_options)
    if before:
        prefixes.check(before["special"], name, values, f"the corpus {options.out}")
        return partial.read_texts(options.out / "tokenizer"), before["special"], None
    if options.tokenizer in KINDS:
        console.print("training a tokenizer")
        with busy("training a tokenizer", console):
            made, size = training.trained(options, found, sources, runner_options)
        made = prefixes.added(made, name, values)
    else:
        made = stored.load(Path(options.tokenizer).expanduser(), options.cased, options.keep_accents)
        made = with_end(made) if options.end_of_text else made
        made, size = with_sentinels(made, options.sentinels) if options.sentinels else made, None
        made = prefixes.found(made, values) if name == CODE else prefixes.added(made, name, values)
    if options.similar_words:
        similar_words.usable(options.similar_words, Encoder(made.tokenizer), made.special.get("unk"))
    with tempfile.TemporaryDirectory() as folder:
        stored.save(made, Path(folder))
        return partial.read_texts(Path(folder)), made.special, size


def _make(options: Prepare, work: Work, state, before, runner_options, console: Console) -> dict | None:
    """Make the missing parts of this process's share, and the manifest unless other processes make parts too."""
    i, n = share(options) or (0, 1)
    wanted = [] if options.finish else [number for number in work.plan.numbers if number % n == i]
    done = present(work.out, wanted)
    missing = [number for number in wanted if number not in done]
    for number in done:
        shutil.rmtree(work.scratch / f"{number:06}", ignore_errors=True)
    if options.runner and missing:
        from data_pipelines.prepare import beam

        console.print(f"making {len(missing)} of {len(wanted)} parts")
        beam.make_parts(work.out, missing, options.runner, runner_options)
    elif missing:
        _make_here(work, missing, len(done), options.processes or cores(), console)
    largest = max(map(work.plan.size, work.plan.numbers))
    if largest > 2 * options.part_size * MIB:
        line = f"a part has {largest / MIB:,.0f} MiB of text, because a file, such as a compressed one, cannot be cut"
        console.print(f"{line}; smaller files give smaller parts", style="yellow", markup=False, soft_wrap=True)
    if options.part:
        console.print(f"this process made its {len(wanted)} of {len(work.plan.parts)} parts; run --finish after all")
        return None
    return ending.finish(work, state, before, console)


def _make_here(work: Work, missing: list[int], done: int, processes: int, console: Console) -> None:
    """Make parts on all cores, and show progress in bytes of source."""
    there = sum(is_whole(folder) for number in missing for folder in unit_folders(work, number))
    if done or there:
        units = sum(len(work.plan.units(number)) for number in missing)
        console.print(f"continuing: {done} parts are done, and {there} of {units} units of the others")
    columns = TextColumn("tokenising"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=sum(map(work.plan.size, missing)))
        make_parts(work, missing, processes, lambda size: progress.advance(task, size))


@contextlib.contextmanager
def faults(out: PurePath, processes: int) -> Iterator[None]:
    """Turn an OSError or a lack of memory inside the context into a UserError."""
    try:
        yield
    except OSError as error:
        raise _explained(error, out) from error
    except MemoryError as error:
        raise UserError(f"--processes {processes}: memory ran out; use fewer; {AGAIN}") from error


def _explained(error: OSError, out: PurePath) -> UserError:
    """Return the error for a full disk, a place that refuses access, or a fault that may pass, each with its cure."""
    text = (error.strerror or str(error) or type(error).__name__).strip()
    where = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else ""
    if (reason := cloud.refusal(error)) is not None and not error.errno:
        return (PassingError if cloud.may_pass(error) else UserError)(f"{where or out}: {reason}")
    if error.errno in FULL:
        return UserError(f"--out {out}: cannot write there ({text}); free space or choose another directory; {AGAIN}")
    ours = not os.path.dirname(where) or _inside(where, out)  # a bare name: in a folder that is being removed
    if error.errno in GONE and ours:
        return PassingError(f"{where or out}: {text}; if another process makes the same corpus, wait for it; {AGAIN}")
    if error.errno in REFUSED and not ours:
        return UserError(f"--source: cannot read {where} ({text}); make it readable or leave it out")
    if error.errno in REFUSED:
        cure = f"make it writable or choose another directory; {AGAIN}"
        return UserError(f"--out {out}: cannot write there ({text}); {cure}")
    return PassingError(f"{where or out}: reading or writing failed ({text}), which may pass; {AGAIN}")


def _inside(path: str, out: PurePath) -> bool:
    """Return whether a path is the corpus, something inside it, or a folder that contains it."""
    path, out = os.path.abspath(path), os.path.abspath(out)
    return os.path.commonpath((path, out)) in (path, out)
