"""All gcloud commands of a launch, how they are run, and what their failures mean."""

import json
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from data_pipelines.errors import UserError
from tpu.accelerators import parse_accelerator

LIMIT = 900  # seconds that a command may take
BYTES = "surrogateescape"  # what is no UTF-8 stays as it is, and as long
FIRST_PAUSE, LAST_PAUSE = 5, 300  # seconds between tries while Google Cloud does not answer, twice as many each time
TRANSIENT = (
    r"gcloud crashed \((Connect|Read|Remote|\w*Timeout|SSL|Proxy|Transport|Protocol|Chunked|ServerNotFound|OSError)"
    r"|Max retries exceeded|Failed to resolve|'status': 5\d\d|HTTPError 5\d\d|UNAVAILABLE|INTERNAL:|per minute"
    r"|DEADLINE_EXCEEDED|rateLimitExceeded|Too Many Requests|connection (reset|aborted|refused)|timed out"
)
OFFER = (
    r"accelerator .*(not found|not available|not supported)|runtime.?version|version .* not found"
    r"|permission denied on 'locations/|location \S+ (is )?(not found|unauthorized)|invalid (value for )?zone"
)
# kind, what gcloud prints, what to tell the user. The first that matches counts.
FAILURES = (
    ("transient", TRANSIENT, "Google Cloud does not answer"),
    ("login", r"active account|auth tokens|reauthentication|invalid_grant", "no valid login: run gcloud auth login; a "
     "run that was launched goes on by itself"),
    ("quota", r"quota", "--type: more than your project's quota: ask for more, or use another --zone, or --spot"),
    ("gone", r"matched no objects|not found: 404", "--bucket: nothing is there; gcloud storage ls lists yours"),
    ("exists", r"already.exists", "--name: somebody else makes it now"),
    ("raced", r"HTTPError 412", "--name: somebody else launches it now, or gcloud tried twice: the same command again "
     "comes back to it"),
    ("offer", OFFER, "--type, --zone, --runtime-version: not offered so: gcloud compute tpus locations list, then "
     "gcloud compute tpus tpu-vm accelerator-types (or versions) list --zone={zone}"),
    ("denied", r"denied|SERVICE_DISABLED|not enabled", "the API is off (gcloud services enable tpu.googleapis.com) or "
     "your account lacks a role: ask for roles/tpu.admin and roles/iam.serviceAccountUser, or, on the bucket, for "
     "roles/storage.objectUser"),
    ("other", "", ""),
)  # fmt: skip


class GcloudError(UserError):
    """A failed command: its one line for the user, and `kind`, as in FAILURES."""

    def __init__(self, complaints: str, zone: str):
        line = " ".join(re.sub(r"^(.*\n)*?ERROR: (\(\S+\))?", "", complaints).split())[:300]
        self.kind, _, meaning = next(one for one in FAILURES if re.search(one[1], complaints, re.I | re.S))
        gcloud = f"gcloud: {line or 'it failed without a word'}"
        super().__init__(f"{meaning.format(zone=zone)} ({gcloud})" if meaning else gcloud)


class Slice(NamedTuple):
    """What a slice is, and where. The queued resource that brings it, which all generations have, has the same name."""

    name: str
    bucket: str
    zone: str = ""
    project: str = ""
    type: str = ""
    count: int = 1  # slices that one request is for

    @property
    def state(self) -> str:
        """The folder for what launcher and hosts tell each other."""
        return f"{self.bucket}/{self.name}/launch"

    @property
    def vms(self) -> list[str]:
        """As Google names them."""
        return [self.name] if self.count == 1 else [f"{self.name}-{number}" for number in range(self.count)]

    @property
    def hosts(self) -> list[str]:
        """As they name themselves. The log of the first is shown."""
        return [f"{vm}-w-{number}" for vm in self.vms for number in range(parse_accelerator(self.type).hosts)]

    def tpus(self, kind: str, verb: str, *flags: str) -> list[str]:
        """A command about it."""
        place = f"--zone={self.zone}", f"--project={self.project}"
        return ["gcloud", "compute", "tpus", kind, *verb.split(), *place, *flags, "--quiet"]

    def listing(self, kind: str, folder: str, names: Sequence[str]) -> list[str]:
        """Of these names alone, not of run-2 where this is run. Parentheses in a pattern would be gcloud's own."""
        named = " OR ".join(f"name~/{folder}/{name}$" for name in names)
        return self.tpus(kind, "list", f"--filter={named}", "--format=json(name,state,acceleratorType,metadata)")

    def delete(self) -> list[str]:
        return self.tpus("queued-resources", f"delete {self.name}", "--force")

    @property
    def costs(self) -> str:
        """What is said of one that stays."""
        return f"costs until you run python -m tpu delete --name {self.name} --bucket {self.bucket}"

    def as_in(self, settings: str) -> "Slice":
        """Its namesake that the settings of hosts were written for."""
        place = json.loads(settings.splitlines()[0].removeprefix("# "))
        return self._replace(**place | {"name": self.name, "bucket": self.bucket})  # a folder may have been copied


class Gcloud:
    """Runs commands about a slice, in a folder that has the files to upload."""

    mark = "[launch]"

    def __init__(self, where: Slice, folder: str):
        self.where, self.folder = where, folder

    def execute(self, command: Sequence[str]) -> tuple[int, str, str]:
        """-> (exit status, stdout, stderr). Input is closed, so that nothing waits for an answer that no one sees."""
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
        """What a command printed, nothing after a failure of the kind `fine`. Asked again until Google answers, with
        what begins with the pattern `form`. Raises GcloudError for any other failure."""
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
        """What a command about objects printed, see `call`."""
        return self.call(["gcloud", "storage", verb, *words, "--quiet"], fine)

    def read(self, names: Iterable[str], *flags: str) -> bytes:
        """What is in objects of the run's folder, one after the other."""
        return self.storage("cat", *(f"{self.where.state}/{name}" for name in names), *flags).encode(errors=BYTES)

    def clear(self, names: Iterable[str]) -> None:
        """Remove them, those that somebody else has not removed meanwhile."""
        self.storage("rm", *(f"{self.where.state}/{name}" for name in names), "--continue-on-error", fine="gone")

    def settle(self, where: Slice) -> None:
        """That is the slice; in gcloud's own project of now where it is in none. UserError without one."""
        project = where.project or self.call(["gcloud", "config", "get-value", "project", "--quiet"]).strip()
        if not project:
            raise UserError("--project is missing: give it, or gcloud config set project ID")
        self.where = where._replace(project=project)

    def look(self) -> dict[str, tuple[str, str]]:
        """What there is: 'the request': state and why it failed; each VM's name: state and accelerator type.

        UserError where its VMs report to another folder.
        """
        found, mine = {}, f"STATE={shlex.quote(self.where.state)}\n"
        for one in self.listed(self.where.listing("queued-resources", "queuedResources", [self.where.name])):
            why = one["state"].get("failedData", {}).get("error", {}).get("message", "")
            found["the request"] = one["state"]["state"], why
        for one in self.listed(self.where.listing("tpu-vm", "nodes", self.where.vms)):
            theirs = one.get("metadata", {}).get("pretrain-settings", mine)
            if mine not in theirs:
                place = f"{self.where.zone} of {self.where.project}"
                raise UserError(f"--name {self.where.name}: is of another bucket's run in {place}: use another --name")
            found[one["name"].rpartition("/")[2]] = one["state"], one.get("acceleratorType", "")
        return found

    def objects(self) -> dict[str, dict]:
        """What there is in the run's folder, by the rest of its name: 'size', 'update_time', 'generation'.

        Where the bucket keeps versions, gcloud lists also what was removed or replaced, which has a noncurrent_time.
        """
        wanted = ["--filter=-noncurrent_time>1970", "--format=json(name,size,update_time,generation)", "--quiet"]
        listed = self.listed(["gcloud", "storage", "objects", "list", f"{self.where.state}/**", *wanted])
        return {one["name"].removeprefix(self.where.state.split("/", 3)[3] + "/"): one for one in listed}


class Rehearsal(Gcloud):
    """Prints the commands, runs none, and answers as for a launch that nothing disturbs."""

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
