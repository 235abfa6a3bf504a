"""Launch a run on a TPU slice, whose hosts start it by themselves, and make the slice again when it is taken.

What belongs to a run is in the bucket, in BUCKET/NAME/launch (tpu/vm.sh lists it), so that any machine can go on.
"""

import dataclasses
import io
import json
import re
import shlex
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, UseAppendAction, arg

from data_pipelines import corpora
from data_pipelines.errors import UserError
from tpu import gcloud
from tpu.accelerators import parse_accelerator
from tpu.commit import COMMIT_FILE, commit
from tpu.gcloud import Gcloud, GcloudError, Rehearsal, Slice
from tpu.generations import GENERATIONS
from tpu.watch import Job, news, outcome, read_reports, watch

ROOT = Path(__file__).parent.parent
ARCHIVE, SETTINGS, SCRIPT = "code.tar.gz", "settings.sh", "vm.sh"
# What launch itself says to gcloud's create: given twice, a slice would be made where launch does not look for it.
GIVEN = {f"--{name}" for name in ("zone", "project", "spot", "accelerator-type", "runtime-version", "node-id")}
GIVEN |= {"--node-prefix", "--metadata-from-file", "--valid-until-duration", "--quiet", "--format"}
STORED = r"gs://[-a-z0-9_.]+(/[^\s*?\[\]#]*)?"
FORMS = {
    "zone": (r"[a-z][-a-z0-9]*", "us-west4-a"),
    "project": (r"[a-z0-9][-a-z0-9.:]*", "my-project-1"),
    "valid_until_duration": (r"([0-9]+[smhdw])+", "90m, 6h or 2d"),
}
TAIL = 20  # lines of the log to show on coming back to a run


@dataclasses.dataclass(frozen=True)
class Launch:
    """Run a recipe on a TPU slice. What is not listed here goes to `python -m pretrain run` on its hosts.

    Interrupt it whenever you like: the run goes on, and the same command, on any machine, comes back to it.
    """

    recipe: Annotated[Positional[str], arg(metavar="RECIPE")]
    """One of `python -m pretrain recipes`."""
    name: str
    """Of the slice, of its queued resource, and of the work directory."""
    type: str
    """Such as v4-32, v5litepod-16 or v5e-16, v5p-8, v6e-64, tpu7x-8."""
    zone: str
    """Google Cloud zone, such as us-west4-a."""
    bucket: str
    """gs:// path for code, log, work directory and, by default, the corpus; best in the region of the zone."""
    corpus: str = "corpus"
    """Of the run: a gs:// path, or a path in the bucket; several with names, as in en=gs://A,zh=corpora/zh."""
    workdir: str | None = None
    """Of the run: a gs:// path; by default BUCKET/NAME."""
    project: str | None = None
    """Google Cloud project; by default gcloud's."""
    spot: bool = False
    """Cheaper, and taken away when someone pays more: then it is made again and the run goes on."""
    valid_until_duration: str | None = None
    """How long to wait in line, such as 6h; by default without end."""
    delete_when_ended: bool = False
    """Delete the slice when the run has ended, well or not; what is in the bucket stays. With --spot it is so."""
    keep_slice: bool = False
    """With --spot: do not."""
    runtime_version: str | None = None
    """Image of the VMs; by default the one for JAX on this generation."""
    gcloud_flag: UseAppendAction[tuple[str, ...]] = ()
    """For gcloud's create, as it is: --gcloud-flag=--reserved, =--network=N, =--node-count=2 ...; repeatable."""
    restarts: int = 50
    """How often to make the slice again."""
    dry_run: bool = False
    """Print every command of a launch that nothing disturbs, and run none."""

    def __post_init__(self):
        check_names(self.name, self.bucket)
        if self.workdir is not None and not re.fullmatch(STORED, self.workdir):
            raise UserError(f"--workdir {self.workdir}: must be a gs:// path, because the VMs do not last")
        for corpus in corpus_paths(self).values():
            if not re.fullmatch(STORED, corpus):
                raise UserError(f"--corpus {corpus}: must be a gs:// path, or a path in the bucket")
        for name, (form, such) in FORMS.items():
            value = getattr(self, name)
            if value is not None and not re.fullmatch(form, value):
                raise UserError(f"--{name.replace('_', '-')} {value}: must be such as {such}")
        if self.restarts < 0:
            raise UserError(f"--restarts {self.restarts}: must be at least 0")
        for flag in self.gcloud_flag:
            name, _, value = flag.partition("=")
            if name in GIVEN or not re.fullmatch(r"--[a-z-]+", name):
                raise UserError(f"--gcloud-flag={flag}: give one of gcloud's create that launch does not, as --tags=A")
            if name == "--node-count" and not re.fullmatch(r"[1-9][0-9]*", value):
                raise UserError(f"--gcloud-flag={flag}: must be a number of slices, as --node-count=2")

    @property
    def slices(self) -> int:
        """What one request is for."""
        given = [flag.partition("=")[2] for flag in self.gcloud_flag if flag.startswith("--node-count=")]
        return int(given[-1]) if given else 1


def check_names(name: str, bucket: str) -> None:
    """UserError for what no run can be called, or no bucket."""
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", name):
        raise UserError(f"--name {name}: lower-case letters, digits and '-', beginning with a letter")
    if not re.fullmatch(STORED, bucket):
        raise UserError(f"--bucket {bucket}: must be a Cloud Storage path such as gs://my-bucket")


def state_folder(bucket: str, name: str) -> str:
    return f"{bucket.rstrip('/')}/{name}/launch"


def slice_of(settings: str) -> Slice:
    """Where the slice is that the settings of its hosts were written for, see `make_job`."""
    return Slice(**json.loads(settings.splitlines()[0].removeprefix("# ")))


def corpus_paths(options: Launch) -> dict[str, str]:
    """gs:// paths of the corpora, by name."""
    bucket = options.bucket.rstrip("/")
    whole = lambda path: path if path.startswith("/") or "://" in path else f"{bucket}/{path}"
    return {name: whole(path).rstrip("/") for name, path in corpora.named(options.corpus).items()}


def run_arguments(options: Launch, further: Sequence[str]) -> list[str]:
    """The arguments of `python -m pretrain run` on the hosts."""
    workdir = options.workdir or f"{options.bucket.rstrip('/')}/{options.name}"
    return [options.recipe, "--corpus", corpora.written(corpus_paths(options)), "--workdir", workdir, *further]


def launch(options: Launch, run: Sequence[str]) -> int:
    """Have the run going on, and stay with it to its end -> its exit status.   run: what `run_arguments` gave."""
    job = make_job(options, run)
    with tempfile.TemporaryDirectory() as folder:
        cloud = Gcloud(job.where, folder)
        if options.dry_run:
            names = [f"log/{job.hosts[0]}/START.txt", *(f"ended/{host}" for host in job.hosts)]
            cloud = Rehearsal(job.where, folder, [f"{job.state.split('/', 3)[3]}/{name}" for name in names])
        try:
            for corpus in corpus_paths(options).values():
                _check_corpus(cloud, corpus)
            shown = {}
            begun = _begin(cloud, job, shown)
            one = parse_accelerator(options.type)
            shape = f" ({one.topology})" if one.topology else ""
            cloud.say(f"{options.slices} x {one.name}, chips {one.chips}{shape}, hosts {one.hosts}, in {options.zone}")
            cloud.say(f"{options.name} {job.costs}; interrupting this changes nothing there")
            if not GENERATIONS[one.generation].kernels:
                cloud.say(f"{one.generation} has no fused attention: --attention xla is what it takes")
            if GENERATIONS[one.generation].admitted:
                cloud.say(f"{one.generation} is for projects that Google admits to it; others: tpu/gke.md")
            return watch(cloud, job, shown, options.restarts, begun)
        except KeyboardInterrupt:
            cloud.say("left it alone: the same command comes back to it, python -m tpu stop ends the run")
            return 130


def make_job(options: Launch, run: Sequence[str]) -> Job:
    """What the options come to."""
    one, count = parse_accelerator(options.type), options.slices
    where, state = Slice(options.name, options.zone, options.project, count), state_folder(options.bucket, options.name)
    hosts = tuple(f"{vm}-w-{number}" for vm in where.vms for number in range(one.hosts))
    create = gcloud.create(
        where,
        f"--node-id={options.name}" if count == 1 else f"--node-prefix={options.name}",
        f"--accelerator-type={one.name}",
        f"--runtime-version={options.runtime_version or one.runtime}",
        *(["--spot"] if options.spot else []),
        *([f"--valid-until-duration={options.valid_until_duration}"] if options.valid_until_duration else []),
        f"--metadata-from-file=startup-script={SCRIPT},pretrain-settings={SETTINGS}",
        *(flag for flag in options.gcloud_flag if count > 1 or not flag.startswith("--node-count=")),  # has --node-id
    )
    remove = options.delete_when_ended or (options.spot and not options.keep_slice)
    by_hand = f"python -m tpu delete --name {options.name} --bucket {options.bucket}"
    costs = "is deleted when the run has ended, well or not" if remove else f"costs until you run {by_hand}"
    words = {
        "RUN": run,
        "DELETE": gcloud.delete(where) if remove else [],
        "PROBE": gcloud.delete(where._replace(name="no-such-slice")),
    }
    lines = [f"# {json.dumps(where._asdict())}", f"STATE={shlex.quote(state)}", f"HOSTS={len(hosts)}"]
    lines.append(f"FIRST={hosts[0]}")
    lines += [f"{name}=({shlex.join(value)})" for name, value in words.items()]
    return Job(where, one.name, hosts, state, "\n".join(lines) + "\n", create, remove, costs)


def _check_corpus(cloud: Gcloud, corpus: str) -> None:
    """Before a VM costs anything."""
    try:
        cloud.call(gcloud.storage("ls", f"{corpus}/manifest.json"))
    except GcloudError as error:
        if error.kind == "login":
            raise
        cure = f"copy one there: gcloud storage cp -r corpora/mine/* {corpus}/"
        raise UserError(f"--corpus {corpus}: no corpus can be read there: {cure} ({error})") from None


def _begin(cloud: Gcloud, job: Job, shown: dict[str, tuple]) -> bool:
    """See that code and settings are in the bucket -> whether they were: the run was launched before.

    shown: is filled with the log as it was.
    """
    objects = cloud.objects(job.state)
    Path(cloud.folder, SETTINGS).write_text(job.settings)
    shutil.copy(ROOT / "tpu" / SCRIPT, cloud.folder)
    old = news(cloud, job.state, job.hosts[0], objects, shown)
    if SETTINGS in objects:
        theirs = cloud.call(gcloud.storage("cat", f"{job.state}/{SETTINGS}"))
        reports = read_reports(cloud, job.state, objects)
        if theirs == job.settings and (not reports or outcome(reports)[0] == 0):
            cloud.say("this run was launched before:")
            print("".join(old[-TAIL:]), end="", flush=True)
            if "stop" in objects:  # and is to go on
                cloud.clear(f"{job.state}/stop")
            return True
        if not reports:
            theirs = " ".join(re.search(r"^RUN=\((.*)\)\nDELETE=", theirs, re.M | re.S)[1].split("\n"))
            cure = "python -m tpu stop or delete it first, or use another --name"
            raise UserError(f"--name {job.where.name}: another command's run is going on there, {theirs}: {cure}")
        before = slice_of(theirs)
        found = Gcloud(before, cloud.folder).look()  # it would take up this run by itself
        if found and (before != job.where or any(kind not in ("", job.accelerator) for _, kind in found.values())):
            raise UserError(f"--name {job.where.name}: another slice of that name is in {before.zone}: python -m tpu "
                            "delete it first, or use another --name")  # fmt: skip
    pack(ROOT, Path(cloud.folder, ARCHIVE))
    cloud.say("copying the code that git tracks here to the bucket")
    cloud.call(gcloud.storage("cp", ARCHIVE, SETTINGS, f"{job.state}/"))
    if past := [f"{job.state}/{name}" for name in objects if name == "stop" or name.startswith("ended/")]:
        cloud.clear(*past)
    return False


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
