"""All gcloud commands of a launch, how they are run, and what their failures mean."""

import itertools
import json
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Sequence
from typing import NamedTuple

from data_pipelines.errors import UserError

LIMIT = 900  # seconds that a command may take
BYTES = "surrogateescape"  # what is no UTF-8 stays as it is, and as long
PATIENCE = (5, 10, 20, 40, 80, 160, 300)  # seconds between tries while Google Cloud does not answer; the last for ever
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
    ("login", r"active account|auth tokens|reauthentication|invalid_grant", "no valid login: run gcloud auth login"),
    ("project", r"\[project\]", "--project is missing: give it, or gcloud config set project ID"),
    ("quota", r"quota", "--type: more than your project's quota: ask for more, or use another --zone, or --spot"),
    ("gone", r"matched no objects|not found: 404", "nothing is there"),
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
    """Where a slice is. The queued resource that brings it, which all generations have, has the same name."""

    name: str
    zone: str
    project: str
    count: int = 1  # slices that one request is for

    @property
    def vms(self) -> list[str]:
        """As Google names them."""
        return [self.name] if self.count == 1 else [f"{self.name}-{number}" for number in range(self.count)]

    def tpus(self, kind: str, verb: str, *flags: str) -> list[str]:
        """A command about it."""
        place = f"--zone={self.zone}", f"--project={self.project}"
        return ["gcloud", "compute", "tpus", kind, *verb.split(), *place, *flags, "--quiet"]

    def list_vms(self) -> list[str]:
        """No others, such as run-2's where this is run. Parentheses in a pattern would be gcloud's: nothing matches."""
        named = " OR ".join(f"name~/nodes/{vm}$" for vm in self.vms)
        return self.tpus("tpu-vm", "list", f"--filter={named}", "--format=json(name,state,acceleratorType)")

    def create(self, *flags: str) -> list[str]:
        return self.tpus("queued-resources", f"create {self.name}", *flags)

    def delete(self) -> list[str]:
        return self.tpus("queued-resources", f"delete {self.name}", "--force")


def storage(verb: str, *words: str) -> list[str]:
    return ["gcloud", "storage", *verb.split(), *words, "--quiet"]


class Gcloud:
    """Runs commands about a slice, in a folder that has the files to upload."""

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
        print(f"[launch] {text}", flush=True)

    def call(self, command: Sequence[str], fine: str | None = None) -> str:
        """What a command printed, nothing after a failure of the kind `fine`. Raises GcloudError for any other, but
        where Google does not answer: it asks until it does."""
        delays = itertools.chain(PATIENCE, itertools.repeat(PATIENCE[-1]))
        while (done := self.execute(command))[0]:
            error = GcloudError(done[2], self.where.zone)
            if error.kind == fine:
                return ""
            if error.kind != "transient":
                raise error
            delay = next(delays)
            self.say(f"{error}: again in {delay} s")
            self.sleep(delay)
        return done[1]

    def listed(self, command: Sequence[str]) -> list[dict]:
        """What a listing found. What is none, though gcloud ended well, is as good as no answer."""
        while True:
            text = self.call(command)
            try:
                if isinstance(found := json.loads(text), list):
                    return found
            except ValueError:
                pass
            self.say(f"gcloud listed {text[:60]!r}: again in {PATIENCE[-1]} s")
            self.sleep(PATIENCE[-1])

    def clear(self, *urls: str) -> None:
        """Remove objects, those that somebody else has not removed meanwhile."""
        self.call(storage("rm", *urls, "--continue-on-error"), fine="gone")

    def default_project(self) -> str:
        """gcloud's own of now. UserError without one."""
        if found := self.call(["gcloud", "config", "get-value", "project", "--quiet"]).strip():
            return found
        raise GcloudError("ERROR: [project] is not set", self.where.zone)

    def look(self) -> dict[str, tuple[str, str]]:
        """What there is: 'the request': state and why it failed; each VM's name: state and accelerator type."""
        found = {}
        named = [f"--filter=name~/queuedResources/{self.where.name}$", "--format=json(name,state)"]
        for one in self.listed(self.where.tpus("queued-resources", "list", *named)):
            why = one["state"].get("failedData", {}).get("error", {}).get("message", "")
            found["the request"] = one["state"]["state"], why
        for one in self.listed(self.where.list_vms()):
            found[one["name"].rpartition("/")[2]] = one["state"], one.get("acceleratorType", "")
        return found

    def objects(self, folder: str) -> dict[str, dict]:
        """What there is below gs://BUCKET/..., by the rest of its name: 'size', 'update_time', 'generation'.

        Where the bucket keeps versions, gcloud lists also what was removed or replaced, which has a noncurrent_time.
        """
        start = folder.split("/", 3)[3] + "/"
        wanted = ["--filter=-noncurrent_time>1970", "--format=json(name,size,update_time,generation)"]
        listed = self.listed(storage("objects list", f"{folder}/**", *wanted))
        return {one["name"].removeprefix(start): one for one in listed}


class Rehearsal(Gcloud):
    """Prints the commands, runs none, and answers as for a launch that nothing disturbs."""

    left: Sequence[str] = ()  # objects in the bucket when the run has ended
    made = False

    def execute(self, command: Sequence[str]) -> tuple[int, str, str]:
        print(shlex.join(command))
        self.made = "create" in command or (self.made and "delete" not in command)
        if "config" in command:
            return 0, "PROJECT", ""
        if "list" not in command:
            return 0, "0 done\n" * sum("/ended/" in word or word == "ls" for word in command), ""
        found = {
            "objects": [{"name": name, "size": 1} for name in self.left],
            "queued-resources": [{"name": self.where.name, "state": {"state": "ACTIVE"}}],
            "tpu-vm": [{"name": self.where.name, "state": "READY"}],
        }
        return 0, json.dumps(found[command[command.index("list") - 1]] if self.made else []), ""

    def sleep(self, seconds: float) -> None:
        pass

    def say(self, text: str) -> None:
        print(f"# {text}")
