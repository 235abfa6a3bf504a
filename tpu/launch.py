"""Launch a run on a TPU slice and stay with it: what is preempted starts again, with the same work directory."""

import dataclasses
import io
import re
import shlex
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from data_pipelines import corpora
from data_pipelines.errors import UserError
from tpu.accelerators import parse_accelerator
from tpu.commit import COMMIT_FILE, commit
from tpu.gcloud import GcloudError, call
from tpu.machine import (
    ALL,
    Machine,
    Wanted,
    copy_command,
    create_command,
    delete_command,
    describe_command,
    ensure_ready,
    is_deleted,
    is_gone,
    patiently,
    ssh_command,
)

ROOT = Path(__file__).parent.parent
ARCHIVE = "pretrain-code.tar.gz"
UNPACK = f"rm -rf run/code && mkdir -p run/code && tar -xzf {ARCHIVE} -C run/code"
WORKER = "bash run/code/tpu/worker.sh"
REPORT = f"if [ -e run/code ]; then {WORKER} report; else echo $(hostname): idle; fi"
DONE, MISTAKE, CHECKPOINTED = 0, 2, 75  # exit statuses of `python -m pretrain run`
FIRST_DELAY, LAST_DELAY = 30, 1800  # seconds before starting again; doubled while it does not work
NOTICE = 60  # seconds in which Google Cloud shows that a VM was preempted
KILL_AFTER = 120  # seconds for the other workers to end by themselves
TAIL = 20  # lines of the log to show on coming back to a run


@dataclasses.dataclass(frozen=True)
class Launch:
    """Run a recipe on a TPU slice. What is not listed here goes to `python -m pretrain run` on the workers.

    Interrupt it whenever you like: the run goes on, and the same command comes back to it.
    """

    recipe: Annotated[Positional[str], arg(metavar="RECIPE")]
    """One of `python -m pretrain recipes`."""
    name: str
    """Of the slice, of its queued resource, and of the work directory."""
    type: str
    """Such as v5litepod-16, v5e-16, v4-32, v5p-8, v6e-64."""
    zone: str
    """Google Cloud zone, such as us-west4-a."""
    bucket: str
    """gs:// path for the work directory and, by default, the corpus; best in the region of the zone."""
    corpus: str = "corpus"
    """Of the run: a gs:// path, or a path in the bucket; several with names, as in en=gs://A,zh=corpora/zh."""
    workdir: str | None = None
    """Of the run: a gs:// path; by default BUCKET/NAME."""
    project: str | None = None
    """Google Cloud project; by default gcloud's."""
    spot: bool = False
    """Cheaper, and taken away when someone pays more: then it starts again by itself."""
    queued: bool = False
    """Wait in line for capacity (a queued resource) instead of failing when there is none."""
    runtime_version: str | None = None
    """Image of the VMs; by default the one for JAX on this generation."""
    restarts: int = 50
    """How often to start again after preemptions."""
    dry_run: bool = False
    """Print every command and run none."""

    def __post_init__(self):
        if not re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", self.name):
            raise UserError(f"--name {self.name}: lower-case letters, digits and '-', beginning with a letter")
        if not re.fullmatch(r"gs://[^/]+(/.*)?", self.bucket):
            raise UserError(f"--bucket {self.bucket}: must be a Cloud Storage path such as gs://my-bucket")
        if self.workdir is not None and not self.workdir.startswith("gs://"):
            raise UserError(f"--workdir {self.workdir}: must be a gs:// path, because the VMs do not last")
        if self.restarts < 0:
            raise UserError(f"--restarts {self.restarts}: must be at least 0")


def corpus_paths(options: Launch) -> dict[str, str]:
    """gs:// paths of the corpora, by name."""
    bucket = options.bucket.rstrip("/")
    whole = lambda path: path if path.startswith("gs://") else f"{bucket}/{path}"
    return {name: whole(path).rstrip("/") for name, path in corpora.named(options.corpus).items()}


def run_arguments(options: Launch, further: Sequence[str]) -> list[str]:
    """The arguments of `python -m pretrain run` on the workers."""
    workdir = options.workdir or f"{options.bucket.rstrip('/')}/{options.name}"
    return [options.recipe, "--corpus", corpora.written(corpus_paths(options)), "--workdir", workdir, *further]


def launch(options: Launch, run: Sequence[str]) -> int:
    """Create, install, start, follow, and start again after preemptions -> the exit status of the run.

    `run`: what `run_arguments` gave.
    """
    machine = Machine(options.name, options.zone, options.project)
    accelerator = parse_accelerator(options.type)
    wanted = Wanted(accelerator, options.runtime_version or accelerator.runtime, options.spot, options.queued)
    if options.dry_run:
        print_plan(machine, wanted, corpus_paths(options), run)
        return 0
    for corpus in corpus_paths(options).values():
        _check_corpus(machine, corpus)
    try:
        return _supervise(machine, wanted, run, options.restarts)
    except KeyboardInterrupt:
        say(f"left {machine.name} as it is. The same command comes back to it; python -m tpu stop ends the run")
        return 130


def say(text: str) -> None:
    print(f"[launch] {text}", flush=True)


def _corpus_command(machine: Machine, corpus: str) -> list[str]:
    project = [f"--project={machine.project}"] if machine.project else []
    return ["gcloud", "storage", "ls", f"{corpus}/manifest.json", *project]


def _check_corpus(machine: Machine, corpus: str) -> None:
    """Before a VM costs anything."""
    try:
        call(_corpus_command(machine, corpus), machine.name, machine.zone)
    except GcloudError as error:
        if error.kind in ("login", "project"):
            raise
        cure = f"copy one there: gcloud storage cp -r corpora/mine/* {corpus}/"
        raise UserError(f"--corpus {corpus}: no corpus can be read there: {cure} ({error})") from None


def _supervise(machine: Machine, wanted: Wanted, run: Sequence[str], restarts: int) -> int:
    delay, created = FIRST_DELAY, False
    for left in range(restarts, -1, -1):
        try:
            new = ensure_ready(machine, wanted, say)
            created = True
            shown = _begin(machine, run, new)
            delay = FIRST_DELAY
            status = _final_status(machine, _follow(machine, shown))
            if status is not None:
                return status
            lacking, why = False, "the run is to go on"
        except GcloudError as error:
            # The first time, a lack of TPUs is for the user to decide about; later it is part of being preempted.
            lacking, why = created and error.kind in ("capacity", "quota"), str(error)
            if error.kind != "gone" and not lacking:
                raise
        if not lacking and is_deleted(machine):
            raise UserError(f"--name {machine.name}: someone deleted it; the same command makes it again and goes on")
        if left:
            say(f"{why}: again in {delay} s ({left} restarts left)")
            time.sleep(delay)
            delay = min(2 * delay, LAST_DELAY)
    raise UserError(f"--restarts {restarts}: all used; the same command goes on from the last checkpoint")


def _begin(machine: Machine, run: Sequence[str], new: bool) -> int:
    """Have the run going on all workers; on a slice that was there it may be already -> lines of the log to skip."""
    before = [] if new else reports(machine)
    going_on = bool(before) and set(before) == {"running"}
    if "running" in before and not going_on:
        say("the run ended on some workers only: ending it on all")
        patiently(machine, ssh_command(machine, ALL, f"{WORKER} kill {KILL_AFTER}"), say)
    if not going_on:
        install(machine)
    start = ssh_command(machine, ALL, f"{WORKER} start {shlex.join(run)}")  # does nothing where just this goes on
    try:
        patiently(machine, start, say)
    except GcloudError as error:
        if error.kind != "remote":
            raise
        raise UserError(f"{error}: python -m tpu stop first, or use another --name") from None
    if not going_on:
        say(f"started on {machine.name}; interrupting this leaves it running")
        return 0
    say(f"the run on {machine.name} is going on")
    return max(0, int(patiently(machine, ssh_command(machine, 0, f"{WORKER} lines"), say)) - TAIL)


def install(machine: Machine) -> None:
    """Copy the code to all workers and install what it needs there."""
    with tempfile.TemporaryDirectory() as folder:
        archive = pack(ROOT, Path(folder) / ARCHIVE)
        say(f"copying the code ({archive.stat().st_size / 1e6:.1f} MB) to all workers of {machine.name}")
        patiently(machine, copy_command(machine, str(archive)), say)
    say("installing Python and JAX: some minutes")
    patiently(machine, ssh_command(machine, ALL, f"{UNPACK} && {WORKER} setup"), say)


def pack(root: Path, archive: Path) -> Path:
    """The files that git tracks, as they are in the working tree, and which commit that is -> a tar, compressed.

    UserError without git.
    """
    done = subprocess.run(["git", "-C", str(root), "ls-files", "-z"], capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{root}: launch copies the files that git tracks, and git says: {done.stderr.strip()}")
    with tarfile.open(archive, "w:gz") as tar:
        for name in filter(None, done.stdout.split("\0")):
            if (root / name).exists():  # a file may be deleted and not yet removed from the index
                tar.add(root / name, name, recursive=False)
        code = (commit(root) or "").encode()
        entry = tarfile.TarInfo(COMMIT_FILE)
        entry.size = len(code)
        tar.addfile(entry, io.BytesIO(code))
    return archive


def reports(machine: Machine, worker: int | str = ALL) -> list[str]:
    """'running', 'ended STATUS', 'stopped STATUS', 'lost' or 'idle' for each worker."""
    return [state for _, state in named_reports(machine, worker)]


def named_reports(machine: Machine, worker: int | str = ALL) -> list[tuple[str, str]]:
    """(host name, report) of each worker."""
    printed = patiently(machine, ssh_command(machine, worker, REPORT), say)
    found = re.findall(r"^(\S+): (running|idle|lost|(?:ended|stopped) \d+)$", printed, re.M)
    if not found:
        raise UserError(f"--name {machine.name}: worker {worker} does not say what it runs: {printed.strip()!r}")
    return sorted(found)


def _follow(machine: Machine, shown: int) -> str:
    """Show worker 0's log after so many lines until the run ends there -> its last report."""

    def show(line: str) -> None:
        nonlocal shown
        shown += 1
        print(line, end="", flush=True)

    while True:
        try:
            try:
                call(ssh_command(machine, 0, f"{WORKER} follow {shown}"), machine.name, machine.zone, show)
            except GcloudError as error:
                if error.kind not in ("ssh", "remote", "missing"):  # these are looked into by what follows
                    raise
            [state] = reports(machine, worker=0)
        except GcloudError as error:
            if error.kind == "gone":
                raise
            raise UserError(f"{error}. The run itself goes on: the same command comes back to it") from None
        if state != "running":
            return state
        say("reconnecting")
        time.sleep(FIRST_DELAY)


def _final_status(machine: Machine, state: str) -> int | None:
    """The exit status to end with, or None when the run is to start again."""
    what, _, number = state.partition(" ")
    status = int(number) if number else None
    costs = f"{machine.name} still runs and costs: python -m tpu delete --name {machine.name} --zone {machine.zone}"
    if what == "stopped":
        say(f"the run was stopped (status {status}); the same command goes on. {costs}")
        return status
    if status == DONE:
        say(f"the run is done. {costs}")
        return status
    if status != MISTAKE:
        time.sleep(NOTICE)
        if status in (None, CHECKPOINTED) or is_gone(machine):
            return None
    workers = ", ".join(f"{name} {report}" for name, report in named_reports(machine))
    say(f"the run failed with status {status}; the log says why ({workers}). {costs}")
    return status


def print_plan(machine: Machine, wanted: Wanted, paths: dict[str, str], run: Sequence[str]) -> None:
    """Every command of an undisturbed launch, and those after a preemption."""
    show_commands(
        *(("the corpus is in the bucket", _corpus_command(machine, corpus)) for corpus in paths.values()),
        ("the slice does not exist yet", describe_command(machine)),
        *([("nor does the request for it", describe_command(machine, queued=True))] if wanted.queued else []),
        ("create it", create_command(machine, wanted)),
        *([("until it is ACTIVE", describe_command(machine, queued=True))] if wanted.queued else []),
        ("until it is READY", describe_command(machine)),
        ("the code: all files that git tracks", copy_command(machine, ARCHIVE)),
        ("install", ssh_command(machine, ALL, f"{UNPACK} && {WORKER} setup")),
        ("start on all workers", ssh_command(machine, ALL, f"{WORKER} start {shlex.join(run)}")),
        ("follow the log", ssh_command(machine, 0, f"{WORKER} follow 0")),
        ("how it ended", ssh_command(machine, 0, REPORT)),
        ("after a preemption: delete, and all again from the first look", delete_command(machine, wanted.queued)),
    )


def show_commands(*commands: tuple[str, list[str]]) -> None:
    """Print (reason, command) pairs as a shell script."""
    for reason, command in commands:
        print(f"# {reason}\n{shlex.join(command)}")
