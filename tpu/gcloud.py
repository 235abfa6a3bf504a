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
    ("exists", r"already.exists", "--name: somebody else makes it now"),
    ("offer", OFFER, "--type, --zone, --runtime-version: not offered so: gcloud compute tpus locations list, then "
     "gcloud compute tpus tpu-vm accelerator-types (or versions) list --zone={zone}"),
    ("denied", r"denied|SERVICE_DISABLED|not enabled", "the API is off (gcloud services enable tpu.googleapis.com) or "
     "your account lacks a role: ask for roles/tpu.admin and roles/iam.serviceAccountUser"),
)  # fmt: skip


class GcloudError(UserError):
    """A failed command: its one line for the user, and `kind`, the first column of FAILURES or 'other'."""

    def __init__(self, kind: str, said: str):
        super().__init__(said)
        self.kind = kind


class Slice(NamedTuple):
    """Where a slice is. The queued resource that brings it, which all generations have, has the same name."""

    name: str
    zone: str
    project: str | None
    count: int = 1  # slices that one request is for

    @property
    def vms(self) -> list[str]:
        """As Google names them."""
        return [self.name] if self.count == 1 else [f"{self.name}-{number}" for number in range(self.count)]


def _tpus(where: Slice, kind: str, verb: str, *flags: str) -> list[str]:
    project = [f"--project={where.project}"] if where.project else []
    return ["gcloud", "compute", "tpus", kind, *verb.split(), f"--zone={where.zone}", *project, *flags, "--quiet"]


def list_requests(where: Slice) -> list[str]:
    wanted = [f"--filter=name~/queuedResources/{where.name}$", "--format=json(name,state)"]
    return _tpus(where, "queued-resources", "list", *wanted)


def list_vms(where: Slice) -> list[str]:
    """No others, such as run-2's where this is run. Parentheses in a pattern would be gcloud's: nothing matches."""
    named = " OR ".join(f"name~/nodes/{vm}$" for vm in where.vms)
    return _tpus(where, "tpu-vm", "list", f"--filter={named}", "--format=json(name,state,acceleratorType)")


def create(where: Slice, *flags: str) -> list[str]:
    return _tpus(where, "queued-resources", f"create {where.name}", *flags)


def delete(where: Slice) -> list[str]:
    return _tpus(where, "queued-resources", f"delete {where.name}", "--force")


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
        options = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "errors": "replace"}
        try:
            done = subprocess.run(command, cwd=self.folder, timeout=LIMIT, **options)
        except subprocess.TimeoutExpired:
            return 1, "", f"ERROR: timed out after {LIMIT} s"
        return done.returncode, done.stdout, done.stderr

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def say(self, text: str) -> None:
        print(f"[launch] {text}", flush=True)

    def call(self, command: Sequence[str], again: bool = True) -> str:
        """What a command printed. Raises GcloudError; with `again` not where Google does not answer: until it does."""
        for delay in itertools.chain(PATIENCE, itertools.repeat(PATIENCE[-1])):
            status, printed, complaints = self.execute(command)
            if not status:
                break
            error = failure(complaints, self.where)
            if error.kind != "transient" or not again:
                raise error
            self.say(f"{error}: again in {delay} s")
            self.sleep(delay)
        return printed

    def clear(self, *urls: str) -> None:
        """Remove objects; one that somebody else removed meanwhile is removed."""
        try:
            self.call(storage("rm", *urls, "--continue-on-error"))
        except GcloudError as error:
            if not re.search("matched no objects|not found: 404", str(error)):
                raise

    def look(self) -> dict[str, tuple[str, str]]:
        """What there is: 'the request': state and why it failed; each VM's name: state and accelerator type."""
        found = {}
        for one in json.loads(self.call(list_requests(self.where))):
            why = one["state"].get("failedData", {}).get("error", {}).get("message", "")
            found["the request"] = one["state"]["state"], why
        for one in json.loads(self.call(list_vms(self.where))):
            found[one["name"].rpartition("/")[2]] = one["state"], one.get("acceleratorType", "")
        return found

    def objects(self, folder: str) -> dict[str, dict]:
        """What there is below gs://BUCKET/..., by the rest of its name: 'size', 'update_time'.

        Where the bucket keeps versions, gcloud lists also what was removed or replaced, which has a noncurrent_time.
        """
        start = folder.split("/", 3)[3] + "/"
        wanted = ["--filter=-noncurrent_time>1970", "--format=json(name,size,update_time)"]
        listed = self.call(storage("objects list", f"{folder}/**", *wanted))
        return {one["name"].removeprefix(start): one for one in json.loads(listed)}


class Rehearsal(Gcloud):
    """Prints the commands, runs none, and answers as for a launch that nothing disturbs."""

    def __init__(self, where: Slice, folder: str, left: Sequence[str]):
        """left: objects in the bucket when the run has ended."""
        super().__init__(where, folder)
        self.left, self.made = left, False

    def execute(self, command: Sequence[str]) -> tuple[int, str, str]:
        print(shlex.join(command))
        self.made = "create" in command or (self.made and "delete" not in command)
        if "list" not in command:
            return 0, "0 done\n" * sum("/ended/" in word for word in command) * ("cat" in command), ""
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


def failure(complaints: str, where: Slice) -> GcloudError:
    """What the text on stderr means."""
    line = " ".join(re.sub(r"^(.*\n)*?ERROR: (\(\S+\))?", "", complaints).split())[:300]
    for kind, pattern, meaning in FAILURES:
        if re.search(pattern, complaints, re.I | re.S):
            return GcloudError(kind, f"{meaning.format(zone=where.zone)} (gcloud: {line})")
    return GcloudError("other", f"gcloud: {line or 'it failed without a word'}")
