"""Launch a run on a TPU slice, whose hosts start it by themselves, and make the slice again when it is taken.

What belongs to a run is in the bucket, in BUCKET/NAME/launch (tpu/vm.sh lists it), so that any machine can go on.
"""

import dataclasses
import json
import re
import shlex
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, UseAppendAction, arg

from data_pipelines import corpora
from data_pipelines.errors import UserError
from tpu import gcloud
from tpu.accelerators import parse_accelerator
from tpu.commit import commit, pack
from tpu.gcloud import Gcloud, GcloudError, Rehearsal, Slice
from tpu.generations import GENERATIONS
from tpu.watch import Job, news, outcome, read_reports, watch

ROOT = Path(__file__).parent.parent
ARCHIVE, SETTINGS, SCRIPT = "code.tar.gz", "settings.sh", "vm.sh"
# What launch itself says to gcloud's create: given twice, a slice would be made where launch does not look for it.
GIVEN = "zone|project|spot|accelerator-type|runtime-version|node-id|node-prefix|metadata-from-file|quiet|format"
FLAG = rf"--(?!({GIVEN}|valid-until-duration)(=|$))[a-z-]+(=.*)?"
STORED = r"gs://[-a-z0-9_.]+(/[^\s*?\[\]#\ud800-\udfff]*)?"  # nor what is no UTF-8
FORMS = {
    "name": (
        r"(?!no-such-slice$)[a-z]([-a-z0-9]{0,61}[a-z0-9])?",  # hosts try to delete that one
        "lower-case letters, digits and '-', beginning with a letter; not no-such-slice",
    ),
    "bucket": (STORED, "must be a Cloud Storage path such as gs://my-bucket"),
    "workdir": (STORED, "must be a gs:// path, because the VMs do not last"),
    "zone": (r"[a-z][-a-z0-9]*", "must be such as us-west4-a"),
    "project": (r"[a-z0-9][-a-z0-9.:]*", "must be such as my-project-1"),
    "valid_until_duration": (r"([0-9]+[smhdw])+", "must be such as 90m, 6h or 2d"),
    "runtime_version": (r"[a-z0-9][-a-z0-9.]*", "must be such as v2-alpha-tpuv6e"),
    "restarts": (r"[0-9]+", "must be at least 0"),
}
RUN = re.compile(r"^RUN=\((.*)\)\nDELETE=", re.M | re.S)  # in the settings
TAIL = 20  # lines of the log to show on coming back to a run


@dataclasses.dataclass(frozen=True)
class Run:
    """A run that `launch` began."""

    name: str
    """Of the run, its slice and its queued resource."""
    bucket: str
    """gs:// path for code, log, work directory and, by default, the corpus; best in the region of the zone."""

    def __post_init__(self):
        for name, (form, cure) in FORMS.items():
            value = getattr(self, name, None)
            if value is not None and not re.fullmatch(form, str(value)):
                raise UserError(f"--{name.replace('_', '-')} {value}: {cure}")

    @property
    def costs(self) -> str:
        """What is said of a slice that stays."""
        return f"costs until you run python -m tpu delete --name {self.name} --bucket {self.bucket}"

    @property
    def state(self) -> str:
        """Its folder for what launcher and hosts tell each other."""
        return f"{self.bucket.rstrip('/')}/{self.name}/launch"


@dataclasses.dataclass(frozen=True)
class Launch(Run):
    """Run a recipe on a TPU slice. What is not listed here goes to `python -m pretrain run` on its hosts.

    Interrupt it whenever you like: the run goes on, and the same command, on any machine, comes back to it.
    """

    recipe: Annotated[Positional[str], arg(metavar="RECIPE")]
    """One of `python -m pretrain recipes`."""
    type: str
    """Such as v4-32, v5litepod-16 or v5e-16, v5p-8, v6e-64, tpu7x-8."""
    zone: str
    """Google Cloud zone, such as us-west4-a."""
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
    runtime_version: str | None = None
    """Image of the VMs; by default the one for JAX on this generation."""
    gcloud_flag: UseAppendAction[tuple[str, ...]] = ()
    """For gcloud's create, as it is: --gcloud-flag=--reserved, =--network=N, =--node-count=2 ...; repeatable."""
    restarts: int = 50
    """How often to make the slice again."""
    dry_run: bool = False
    """Print every command of a launch that nothing disturbs, and run none."""

    def __post_init__(self):
        super().__post_init__()
        for corpus in corpus_paths(self).values():
            if not re.fullmatch(STORED, corpus):
                raise UserError(f"--corpus {corpus}: must be a gs:// path, or a path in the bucket")
        for flag in self.gcloud_flag:
            if not re.fullmatch(FLAG, flag, re.S):
                raise UserError(f"--gcloud-flag={flag}: give one of gcloud's create that launch does not, as --tags=A")
            if flag.startswith("--node-count") and not re.fullmatch(r"--node-count=[1-9][0-9]*", flag):
                raise UserError(f"--gcloud-flag={flag}: must be a number of slices, as --node-count=2")

    @property
    def slices(self) -> int:
        """What one request is for."""
        given = [flag.partition("=")[2] for flag in self.gcloud_flag if flag.startswith("--node-count=")]
        return int(given[-1]) if given else 1


def corpus_paths(options: Launch) -> dict[str, str]:
    """gs:// paths of the corpora, by name."""
    bucket = options.bucket.rstrip("/")
    whole = lambda path: path if path.startswith("/") or "://" in path else f"{bucket}/{path}"
    return {name: whole(path).rstrip("/") for name, path in corpora.named(options.corpus).items()}


def run_arguments(options: Launch, further: Sequence[str]) -> list[str]:
    """The arguments of `python -m pretrain run` on the hosts."""
    workdir = options.workdir or f"{options.bucket.rstrip('/')}/{options.name}"
    if workdir.rstrip("/") in (options.state, *corpus_paths(options).values()):
        raise UserError(f"--workdir {workdir}: is a corpus, or launch's own: give another --workdir, or --name")
    return [options.recipe, "--corpus", corpora.written(corpus_paths(options)), "--workdir", workdir, *further]


def launch(options: Launch, run: Sequence[str]) -> int:
    """Have the run going on, and stay with it to its end -> its exit status.   run: what `run_arguments` gave."""
    where = Slice(options.name, options.zone, options.project or "", options.slices)
    with tempfile.TemporaryDirectory() as folder:
        cloud = Rehearsal(where, folder) if options.dry_run else Gcloud(where, folder)
        try:
            if not options.project:  # from any machine, also after another default was set, the slice is found there
                cloud.where = where._replace(project=cloud.default_project())
            job = make_job(options, cloud.where, run)
            if options.dry_run:
                names = [f"log/{job.hosts[0]}/START.txt", *(f"ended/{host}" for host in job.hosts)]
                cloud.left = [f"{job.state.split('/', 3)[3]}/{name}" for name in names]
            for corpus in corpus_paths(options).values():
                if not cloud.call(gcloud.storage("ls", f"{corpus}/manifest.json"), fine="gone"):
                    cure = f"copy one there: gcloud storage cp -r corpora/mine/* {corpus}/"
                    raise UserError(f"--corpus {corpus}: there is no corpus: {cure}")
            shown = {}
            _begin(cloud, job, run, shown)
            one = parse_accelerator(options.type)
            shape = f" ({one.topology})" if one.topology else ""
            cloud.say(f"{options.slices} x {one.name}, chips {one.chips}{shape}, hosts {one.hosts}, in {options.zone}")
            cloud.say(f"{options.name} {job.costs}; interrupting this changes nothing there")
            if note := GENERATIONS[one.generation].note:
                cloud.say(f"{one.generation} {note}")
            try:
                return watch(cloud, job, shown, options.restarts)
            except GcloudError as error:
                if error.kind != "login":
                    raise
                raise UserError(f"{error}. What is there goes on by itself: {options.name} {job.costs}") from None
        except KeyboardInterrupt:
            cloud.say("left it alone: the same command comes back to it, python -m tpu stop ends the run")
            return 130


def make_job(options: Launch, where: Slice, run: Sequence[str]) -> Job:
    """What the options come to."""
    one, count = parse_accelerator(options.type), where.count
    hosts = tuple(f"{vm}-w-{number}" for vm in where.vms for number in range(one.hosts))
    create = where.create(
        f"--node-id={options.name}" if count == 1 else f"--node-prefix={options.name}",
        f"--accelerator-type={one.name}",
        f"--runtime-version={options.runtime_version or one.runtime}",
        *(["--spot"] if options.spot else []),
        *([f"--valid-until-duration={options.valid_until_duration}"] if options.valid_until_duration else []),
        f"--metadata-from-file=startup-script={SCRIPT},pretrain-settings={SETTINGS}",
        *(flag for flag in options.gcloud_flag if count > 1 or not flag.startswith("--node-count=")),  # has --node-id
    )
    remove = options.delete_when_ended or options.spot
    costs = "is deleted when the run has ended, well or not" if remove else options.costs
    settings = [
        f"# {json.dumps(where._asdict())}",
        f"STATE={shlex.quote(options.state)}",
        f"TYPE={one.name}",  # which no host reads: one that waits in line is none of another type
        f"HOSTS={len(hosts)}",
        f"FIRST={hosts[0]}",
        f"RUN=({shlex.join(run)})",
        f"DELETE=({shlex.join(where.delete()) if remove else ''})",
    ]
    return Job(where, one.name, hosts, options.state, "\n".join(settings) + "\n", create, remove, costs)


def slice_of(settings: str) -> Slice:
    """Where the slice is that the settings of its hosts were written for."""
    return Slice(**json.loads(settings.splitlines()[0].removeprefix("# ")))


def _begin(cloud: Gcloud, job: Job, run: Sequence[str], shown: dict[str, int]) -> None:
    """See that code and settings are in the bucket.   shown: is filled with the log as it was."""
    objects = cloud.objects(job.state)
    Path(cloud.folder, SETTINGS).write_text(job.settings)
    shutil.copy(ROOT / "tpu" / SCRIPT, cloud.folder)
    old = news(cloud, job.state, job.hosts[0], objects, shown)
    past = [f"{job.state}/{name}" for name in objects if name == "stop" or name.startswith("ended/")]
    if SETTINGS in objects:
        theirs = cloud.call(gcloud.storage("cat", f"{job.state}/{SETTINGS}"))
        begun = objects[SETTINGS]["update_time"]  # a launch that was interrupted left reports of the run before
        own = {name: one for name, one in objects.items() if one["update_time"] >= begun}
        reports = read_reports(cloud, job.state, own)
        if theirs == job.settings and (not reports or outcome(reports)[0] == 0):
            cloud.say("this run was launched before:")
            print("".join(old[-TAIL:]), end="", flush=True)
            if past and not reports:  # it is to go on
                cloud.clear(*past)
            return
        _check_free(cloud, job, run, theirs, bool(reports))
    pack(ROOT, Path(cloud.folder, ARCHIVE))
    changed = ", with changes that are not committed" if (commit(ROOT) or "").endswith("-dirty") else ""
    cloud.say(f"copying the code that git tracks here to the bucket{changed}")
    for name in (ARCHIVE, SETTINGS):  # settings alone would be taken for a run
        seen = objects[name]["generation"] if name in objects else 0  # no other launcher's of meanwhile
        cloud.call(gcloud.storage("cp", name, f"{job.state}/", f"--if-generation-match={seen}"))
    if past:
        cloud.clear(*past)


def _check_free(cloud: Gcloud, job: Job, run: Sequence[str], theirs: str, ended: bool) -> None:
    """UserError where another run, of which the settings are given, stands in the way of this one."""
    other, before, wrong = shlex.split(RUN.search(theirs)[1]), slice_of(theirs), ""
    if not ended:
        kept = [line for line in theirs.splitlines() if line not in job.settings.splitlines()]
        words = shlex.join(other) if other != list(run) else "with " + ", ".join(kept)
        wrong = f"another command's run is going on there, {words}: python -m tpu stop or delete it first, or"
    elif other[0] != run[0] and other[4] == run[4]:
        wrong = f"its work directory {run[4]} has a run of {other[0]}: give another --workdir, or"
    else:
        found = Gcloud(before, cloud.folder).look()  # it would take up this run by itself
        if found and (before != job.where or any(kind not in ("", job.accelerator) for _, kind in found.values())):
            wrong = f"another slice of that name is in {before.zone}: python -m tpu delete it first, or"
    if wrong:
        raise UserError(f"--name {job.where.name}: {wrong} use another --name")
