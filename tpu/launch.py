"""Launch a run on a TPU slice, whose hosts start it by themselves, and recreate the slice when it is preempted.

The state of a launch is in the bucket, in BUCKET/NAME/launch (tpu/vm.sh lists the files), so that any machine can take
over.
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

from data_pipelines import corpus as corpora
from data_pipelines.errors import UserError
from tpu.commit import commit, pack
from tpu.gcloud import Gcloud, Rehearsal, Slice
from tpu.topologies import parse_accelerator
from tpu.watch import news, outcome, read_reports, remove, watch

ROOT = Path(__file__).parent.parent
ARCHIVE, SETTINGS, SCRIPT = "code.tar.gz", "settings.sh", "vm.sh"
# Flags of gcloud's create that launch sets itself; given twice, the slice could be created where launch does not look.
GIVEN = "zone|project|spot|accelerator-type|runtime-version|node-(id|prefix|count)|metadata-from-file|valid-until-.*"
FLAG = rf"--(node-count=[1-9][0-9]*|(?!({GIVEN})(=|$))[a-z-]+(=.*)?)"
STORED = r"gs://[-a-z0-9_.]+(/[^\s*?\[\]#\ud800-\udfff]*)?"  # surrogates stand for bytes that are not UTF-8
FORMS = {
    # Hosts test whether they may delete slices by trying to delete no-such-slice.
    "name": (r"(?!no-such-slice$)[a-z]([-a-z0-9]{0,61}[a-z0-9])?", "lower-case letters, digits, -; not no-such-slice"),
    "bucket": (STORED, "must be a Cloud Storage path such as gs://my-bucket"),
    "workdir": (STORED, "must be a gs:// path, because the VMs do not last"),
    "zone": (r"[a-z][-a-z0-9]*", "must be a zone such as us-west4-a"),
    "project": (r"[a-z0-9][-a-z0-9.:]*", "must be a project such as my-project-1"),
    "valid_until_duration": (r"([0-9]+[smhdw])+", "must be a duration such as 90m, 6h or 2d"),
    "runtime_version": (r"[a-z0-9][-a-z0-9.]*", "must be an image such as v2-alpha-tpuv6e"),
    "gcloud_flag": (FLAG, "must be a flag of gcloud's create that launch does not set, as --tags=A or --node-count=2"),
    "restarts": (r"[0-9]+", "must be at least 0"),
}
RUN = re.compile(r"^RUN=\((.*)\)\nDELETE=", re.M | re.S)  # in the settings
TAIL = 20  # lines of the log to show when a launch resumes watching a run


@dataclasses.dataclass(frozen=True)
class Run:
    """A run that `launch` started."""

    name: str
    """Name of the run, of its slice and of its queued resource."""
    bucket: str
    """gs:// path for code, logs, work directory and, by default, the corpus; best in the region of the zone."""

    def __post_init__(self):
        for name, (form, cure) in FORMS.items():
            values = getattr(self, name, None)
            for value in values if isinstance(values, tuple) else [values]:
                if value is not None and not re.fullmatch(form, str(value), re.S):
                    raise UserError(f"--{name.replace('_', '-')} {value}: {cure}")


@dataclasses.dataclass(frozen=True)
class Launch(Run):
    """Run a recipe on a TPU slice. Options not listed here go to `python -m pretrain run` on its hosts.
    You may interrupt launch at any time: the run goes on, and the same command, on any machine, watches it again."""

    recipe: Annotated[Positional[str], arg(metavar="RECIPE")]
    """One of `python -m pretrain recipes`."""
    type: str
    """Accelerator type, such as v4-32, v5litepod-16 or v5e-16, v5p-8, v6e-64, tpu7x-8."""
    zone: str
    """Google Cloud zone, such as us-west4-a."""
    corpus: str = "corpus"
    """Corpus of the run: a gs:// path, or a path in the bucket; several by name, as in en=gs://A,zh=corpora/zh."""
    workdir: str | None = None
    """Work directory of the run: a gs:// path; by default BUCKET/NAME."""
    project: str | None = None
    """Google Cloud project; by default the one configured in gcloud."""
    spot: bool = False
    """Use spot VMs, which are cheaper but may be preempted; the slice is then recreated and the run continues."""
    valid_until_duration: str | None = None
    """How long to wait in the queue for the slice, such as 6h; by default without limit."""
    delete_when_ended: bool = False
    """Delete the slice when the run ends, successfully or not; files in the bucket stay. Implied by --spot."""
    runtime_version: str | None = None
    """Image of the VMs; by default the one for JAX on this TPU generation."""
    gcloud_flag: UseAppendAction[tuple[str, ...]] = ()
    """Flag to pass to gcloud's create, as in --gcloud-flag=--reserved or --gcloud-flag=--node-count=2; repeatable."""
    restarts: int = 50
    """How often to recreate the slice at most."""
    dry_run: bool = False
    """Print all gcloud commands of an undisturbed launch without running them."""

    def __post_init__(self):
        super().__post_init__()
        for corpus in corpus_paths(self).values():
            if not re.fullmatch(STORED, corpus):
                raise UserError(f"--corpus {corpus}: must be a gs:// path, or a path in the bucket")

    @property
    def slices(self) -> int:
        """The number of slices that one request asks for."""
        counts = [flag.partition("=")[2] for flag in self.gcloud_flag if flag.startswith("--node-count=")]
        return int(counts[-1]) if counts else 1


def corpus_paths(options: Launch) -> dict[str, str]:
    """Return the gs:// paths of the corpora, by name."""
    bucket = options.bucket.rstrip("/")

    def whole(path):
        return path if path.startswith("/") or "://" in path else f"{bucket}/{path}"

    return {name: whole(path).rstrip("/") for name, path in corpora.named(options.corpus).items()}


def run_arguments(options: Launch, further: Sequence[str]) -> list[str]:
    """Return the arguments of `python -m pretrain run` on the hosts."""
    bucket = options.bucket.rstrip("/")
    workdir = options.workdir or f"{bucket}/{options.name}"
    if workdir.rstrip("/") in (Slice(options.name, bucket).state, *corpus_paths(options).values()):
        raise UserError(f"--workdir {workdir}: is a corpus or launch's own folder: give another --workdir, or --name")
    return [options.recipe, "--corpus", corpora.written(corpus_paths(options)), "--workdir", workdir, *further]


def launch(options: Launch, run: Sequence[str]) -> int:
    """Start the run, or resume watching it, and return its exit status when it ends.   run: from `run_arguments`."""
    accelerator, bucket = parse_accelerator(options.type), options.bucket.rstrip("/")
    where = Slice(options.name, bucket, options.zone, options.project or "", accelerator.name, options.slices)
    delete = options.delete_when_ended or options.spot
    with tempfile.TemporaryDirectory() as folder:
        cloud = (Rehearsal if options.dry_run else Gcloud)(where, folder)
        cloud.settle(where)  # the project is stored, so that any machine finds the slice, whatever its gcloud default
        for corpus in corpus_paths(options).values():
            if not cloud.storage("ls", f"{corpus}/manifest.json", fine="gone"):
                cure = f"copy one there: gcloud storage cp -r corpora/mine/* {corpus}/"
                raise UserError(f"--corpus {corpus}: there is no corpus: {cure}")
        shown = begin(cloud, settings_of(cloud.where, run, delete))
        cloud.say(f"in {options.zone}: {options.slices} x {accelerator.description}")
        cloud.say(f"{options.name} {'is deleted when the run ends, successfully or not' if delete else where.costs}")
        cloud.say("if you interrupt this, the run goes on: the same command watches it, python -m tpu stop ends it")
        return watch(cloud, create(options, cloud.where), delete, shown, options.restarts)


def create(options: Launch, where: Slice) -> list[str]:
    """Return the gcloud command that requests the slice."""
    single = where.count == 1
    return where.tpus(
        "queued-resources",
        f"create {where.name}",
        f"--node-id={where.name}" if single else f"--node-prefix={where.name}",
        f"--accelerator-type={where.type}",
        f"--runtime-version={options.runtime_version or parse_accelerator(where.type).runtime}",
        *(["--spot"] if options.spot else []),
        *([f"--valid-until-duration={options.valid_until_duration}"] if options.valid_until_duration else []),
        f"--metadata-from-file=startup-script={SCRIPT},pretrain-settings={SETTINGS}",
        *(flag for flag in options.gcloud_flag if not (single and flag.startswith("--node-count="))),
    )


def settings_of(where: Slice, run: Sequence[str], delete: bool) -> str:
    """Return the settings for the hosts, as shell code."""
    return f"""# {json.dumps(where._asdict())}
STATE={shlex.quote(where.state)}
HOSTS={len(where.hosts)}
FIRST={where.hosts[0]}
RUN=({shlex.join(run)})
DELETE=({shlex.join(where.delete()) if delete else ""})
"""


def begin(cloud: Gcloud, settings: str) -> dict[str, int]:
    """Put code and settings into the bucket, unless this run is there already -> how much of the log was shown, see
    `news`."""
    objects, shown = cloud.objects(), {}
    Path(cloud.folder, SETTINGS).write_text(settings)
    shutil.copy(ROOT / "tpu" / SCRIPT, cloud.folder)
    old = news(cloud, objects, shown)
    past = [name for name in objects if name == "stop" or name.startswith("ended/")]
    if SETTINGS in objects:
        theirs, begun = cloud.read([SETTINGS]).decode(), objects[SETTINGS]["update_time"]
        # An interrupted launch may have left reports of the run before it.
        reports = read_reports(cloud, [name for name in past if objects[name]["update_time"] >= begun])
        if theirs == settings and (not reports or outcome(reports)[0] == 0):
            cloud.say("this run was launched before:")
            print("".join(old[-TAIL:]), end="", flush=True)
            if past and not reports:  # the run is to continue
                cloud.clear(past)
            return shown
        check_free(cloud, settings, theirs, bool(reports))
        if not theirs.endswith("\nDELETE=()\n"):  # or its hosts would delete it later, under the new run
            remove(cloud)
    pack(ROOT, Path(cloud.folder, ARCHIVE))
    changed = ", with changes that are not committed" if (commit(ROOT) or "").endswith("-dirty") else ""
    cloud.say(f"copying the code that git tracks here to the bucket{changed}")
    for name in (ARCHIVE, SETTINGS):  # settings come last: their presence marks a run
        seen = objects[name]["generation"] if name in objects else 0  # fails if another launcher wrote meanwhile
        cloud.storage("cp", name, f"{cloud.where.state}/", f"--if-generation-match={seen}")
    if past:
        cloud.clear(past)
    return shown


def check_free(cloud: Gcloud, settings: str, theirs: str, ended: bool) -> None:
    """Raise UserError if another run, with the settings `theirs`, is in the way.   ended: whether it has ended."""
    before, now = (shlex.split(RUN.search(text)[1]) for text in (theirs, settings))
    there, wrong = cloud.where.as_in(theirs), ""
    if not ended:
        kept = ", ".join(line for line in theirs.splitlines() if line not in settings.splitlines())
        wrong = f"another command's run is going on there, with {kept}: python -m tpu stop or delete it first, or"
    elif before[0] != now[0] and before[4] == now[4]:
        wrong = f"its work directory {now[4]} has a run of {before[0]}: give another --workdir, or"
    elif there != cloud.where and Gcloud(there, cloud.folder).look():  # its hosts would start this run by themselves
        wrong = f"another slice of that name is in {there.zone}: python -m tpu delete it first, or"
    if wrong:
        raise UserError(f"--name {there.name}: {wrong} use another --name")
