"""The gcloud commands of a launch, how to run them, and what their failures mean."""

import json
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from data_pipelines.errors import UserError
from tpu.topologies import parse_accelerator

LIMIT = 900  # seconds that a command may take
BYTES = "surrogateescape"  # bytes that are not UTF-8 keep their value and length
FIRST_PAUSE, LAST_PAUSE = 5, 300  # seconds between tries while Google Cloud does not answer; doubled each time
TRANSIENT = (
    r"gcloud crashed \((Connect|Read|Remote|\w*Timeout|SSL|Proxy|Transport|Protocol|Chunked|ServerNotFound|OSError)"
    r"|Max retries exceeded|Failed to resolve|'status': 5\d\d|HTTPError 5\d\d|UNAVAILABLE|INTERNAL:|per minute"
    r"|DEADLINE_EXCEEDED|rateLimitExceeded|Too Many Requests|connection (reset|aborted|refused)|timed out"
)
OFFER = (
    r"accelerator .*(not found|not available|not supported)|runtime.?version|version .* not found"
    r"|permission denied on 'locations/|location \S+ (is )?(not found|unauthorized)|invalid (value for )?zone"
)
# kind, what gcloud prints, what to tell the user. The first match counts.
FAILURES = (
    ("transient", TRANSIENT, "Google Cloud does not answer"),
    ("login", r"active account|auth tokens|reauthentication|invalid_grant", "no valid login: run gcloud auth login; "
     "runs that were launched before go on"),
    ("quota", r"quota", "--type: exceeds your project's quota: ask for more, or use another --zone, or --spot"),
    ("gone", r"matched no objects|not found: 404", "--bucket: nothing is there; gcloud storage ls lists your buckets"),
    ("exists", r"already.exists", "--name: someone else is creating it now"),
    ("raced", r"HTTPError 412", "--name: someone else is launching it now, or gcloud tried twice: run the same command "
     "again to watch the run"),
    ("offer", OFFER, "--type, --zone, --runtime-version: this combination is not offered: see gcloud compute tpus "
     "locations list, then gcloud compute tpus tpu-vm accelerator-types (or versions) list --zone={zone}"),
    ("denied", r"denied|SERVICE_DISABLED|not enabled", "the API is off (gcloud services enable tpu.googleapis.com) or "
     "your account lacks a role: ask for roles/tpu.admin and roles/iam.serviceAccountUser, or, on the bucket, for "
     "roles/storage.objectUser"),
    ("other", "", ""),
)  # fmt: skip


class GcloudError(UserError):
    """A failed gcloud command, as one line for the user.   kind: as in FAILURES."""

    def __init__(self, complaints: str, zone: str):
        line = " ".join(re.sub(r"^(.*\n)*?ERROR: (\(\S+\))?", "", complaints).split())[:300]
        self.kind, _, meaning = next(entry for entry in FAILURES if re.search(entry[1], complaints, re.I | re.S))
        gcloud = f"gcloud: {line or 'it failed without a message'}"
        super().__init__(f"{meaning.format(zone=zone)} ({gcloud})" if meaning else gcloud)


class Slice(NamedTuple):
    """The name, place and type of a slice. The queued resource that requests it has the same name."""

    name: str
    bucket: str
    zone: str = ""
    project: str = ""
    type: str = ""
    count: int = 1  # slices in one request

    @property
    def state(self) -> str:
        """The folder in the bucket through which launcher and hosts communicate."""
        return f"{self.bucket}/{self.name}/launch"

    @property
    def vms(self) -> list[str]:
        """Google's names of the VMs."""
        return [self.name] if self.count == 1 else [f"{self.name}-{number}" for number in range(self.count)]

    @property
    def hosts(self) -> list[str]:
        """The hosts' own names; launch shows the log of the first one."""
        return [f"{vm}-w-{number}" for vm in self.vms for number in range(parse_accelerator(self.type).hosts)]

    def tpus(self, kind: str, verb: str, *flags: str) -> list[str]:
        """Return a gcloud command about the slice."""
        place = f"--zone={self.zone}", f"--project={self.project}"
        return ["gcloud", "compute", "tpus", kind, *verb.split(), *place, *flags, "--quiet"]

    def listing(self, kind: str, folder: str, names: Sequence[str]) -> list[str]:
        """Return the command that lists exactly these names, not run-2 for run; gcloud reserves parentheses."""
        named = " OR ".join(f"name~/{folder}/{name}$" for name in names)
        return self.tpus(kind, "list", f"--filter={named}", "--format=json(name,state,acceleratorType,metadata)")

    def delete(self) -> list[str]:
        return self.tpus("queued-resources", f"delete {self.name}", "--force")

    @property
    def costs(self) -> str:
        """The warning for a slice that is not deleted."""
        return f"costs until you run python -m tpu delete --name {self.name} --bucket {self.bucket}"

    def as_in(self, settings: str) -> "Slice":
        """Return the slice of this name that the settings of hosts were written for."""
        place = json.loads(settings.splitlines()[0].removeprefix("# "))
        return self._replace(**place | {"name": self.name, "bucket": self.bucket})  # the folder may be a copy


class Gcloud:
    """Runs gcloud commands about a slice, in a folder with the files to upload."""

    mark = "[launch]"

    def __init__(self, where: Slice, folder: str):
        self.where, self.folder = where, folder

    def execute(self, command: Sequence[str]) -> tuple[int, str, str]:
        """Run a command -> (exit status, stdout, stderr). Its input is closed, so that no hidden prompt waits."""
        if shutil.which("gcloud") is None:
            raise UserError("gcloud is not installed: https://cloud.google.com/sdk/docs/install, then gcloud init")
        options = {"stdin": subprocess.DEVNULL, "capture_output": True}
        try:
            done = subprocess.run(command, cwd=self.folder, timeout=LIMIT, **options)
        except subprocess.TimeoutExpired:
            return 1, "", f"ERROR: timed out after {LIMIT} s"
        return done.returncode, done.stdout.decode(errors=BYTES), done.stderr.decode(errors="replace")

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def say(self, text: str) -> None:
        print(f"{self.mark} {text}", flush=True)

    def call(self, command: Sequence[str], fine: str | None = None, form: str = "") -> str:
        """Return what a command printed; '' if it failed with the kind `fine`. Retries while Google does not answer, or
        the output does not match `form`. Raises GcloudError for any other failure."""
        delay = FIRST_PAUSE
        while True:
            status, printed, complaints = self.execute(command)
            if status == 0 and re.match(form, printed):
                return printed
            error = GcloudError(complaints if status else f"UNAVAILABLE: it printed {printed[:60]!r}", self.where.zone)
            if error.kind == fine:
                return ""
            if error.kind != "transient":
                raise error
            self.say(f"{error}: again in {delay} s")
            self.sleep(delay)
            delay = min(2 * delay, LAST_PAUSE)

    def listed(self, command: Sequence[str]) -> list[dict]:
        return json.loads(self.call(command, form=r"(?s)\s*\[.*\]\s*$"))

    def storage(self, verb: str, *words: str, fine: str | None = None) -> str:
        """Return what a gcloud storage command printed, see `call`."""
        return self.call(["gcloud", "storage", verb, *words, "--quiet"], fine)

    def read(self, names: Iterable[str], *flags: str) -> bytes:
        """Return the contents of objects in the run's folder, joined."""
        return self.storage("cat", *(f"{self.where.state}/{name}" for name in names), *flags).encode(errors=BYTES)

    def clear(self, names: Iterable[str]) -> None:
        """Remove objects from the run's folder; some may already be gone."""
        self.storage("rm", *(f"{self.where.state}/{name}" for name in names), "--continue-on-error", fine="gone")

    def settle(self, where: Slice) -> None:
        """Set the slice; its project is by default gcloud's current one. UserError without a project."""
        project = where.project or self.call(["gcloud", "config", "get-value", "project", "--quiet"]).strip()
        if not project:
            raise UserError("--project is missing: give it, or run gcloud config set project ID")
        self.where = where._replace(project=project)

    def look(self) -> dict[str, tuple[str, str]]:
        """Return what exists: 'the request' -> (state, why it failed), each VM's name -> (state, accelerator type).
        Raises UserError if the VMs report to another folder."""
        found, mine = {}, f"STATE={shlex.quote(self.where.state)}\n"
        for request in self.listed(self.where.listing("queued-resources", "queuedResources", [self.where.name])):
            why = request["state"].get("failedData", {}).get("error", {}).get("message", "")
            found["the request"] = request["state"]["state"], why
        for vm in self.listed(self.where.listing("tpu-vm", "nodes", self.where.vms)):
            theirs = vm.get("metadata", {}).get("pretrain-settings", mine)
            if mine not in theirs:
                name, place = self.where.name, f"{self.where.zone} of {self.where.project}"
                raise UserError(f"--name {name}: belongs to another bucket's run in {place}: use another --name")
            found[vm["name"].rpartition("/")[2]] = vm["state"], vm.get("acceleratorType", "")
        return found

    def objects(self) -> dict[str, dict]:
        """Return the objects in the run's folder: name in the folder -> 'size', 'update_time', 'generation'.
        In a bucket with versioning, gcloud also lists removed or replaced objects, which have a noncurrent_time."""
        wanted = ["--filter=-noncurrent_time>1970", "--format=json(name,size,update_time,generation)", "--quiet"]
        listed = self.listed(["gcloud", "storage", "objects", "list", f"{self.where.state}/**", *wanted])
        return {one["name"].removeprefix(self.where.state.split("/", 3)[3] + "/"): one for one in listed}


class Rehearsal(Gcloud):
    """Prints the commands without running them, and answers as in an undisturbed launch."""

    made, mark = False, "#"

    def execute(self, command: Sequence[str]) -> tuple[int, str, str]:
        print(shlex.join(command))
        self.made = "create" in command or (self.made and "delete" not in command)
        if "config" in command:
            return 0, "PROJECT", ""
        if "list" not in command:
            return 0, "0 done\n" * sum("/ended/" in word or word == "ls" for word in command), ""
        hosts = self.where.hosts
        names = [f"log/{hosts[0]}/START.txt", *(f"ended/{host}" for host in hosts)]
        found = {
            "objects": [{"name": name, "size": 1} for name in names],
            "queued-resources": [{"name": self.where.name, "state": {"state": "ACTIVE"}}],
            "tpu-vm": [{"name": self.where.name, "state": "READY"}],
        }
        return 0, json.dumps(found[command[command.index("list") - 1]] if self.made else []), ""

    def sleep(self, seconds: float) -> None:
        pass
