"""Calls of the user's gcloud, and what its failures mean."""

import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence

from data_pipelines.errors import UserError


class GcloudError(UserError):
    """A failed command: its one line for the user, and `kind`, the first column of FAILURES, 'remote' or 'other'."""

    def __init__(self, kind: str, said: str):
        super().__init__(said)
        self.kind = kind


# kind, what gcloud prints, what to tell the user. The first that matches counts.
FAILURES = (
    (
        "login",
        r"active account selected|refreshing (your current )?auth tokens|reauthentication|invalid_grant",
        "gcloud has no valid login: run gcloud auth login",
    ),
    ("project", r"required property \[project\]", "--project is missing: give it, or gcloud config set project ID"),
    (
        "service",
        r"has not been used in project|SERVICE_DISABLED|API \[\S+\] not enabled",
        "the Cloud TPU API is off in this project: gcloud services enable tpu.googleapis.com",
    ),
    (
        "bucket",
        r"gs://\S* not found|matched no objects|bucket does not exist|storage\.objects|storage\.buckets",
        "cannot be read in Cloud Storage",
    ),
    ("gone", r"terminal state", "--name {name}: the VM was preempted or ended"),
    (
        "quota",
        r"quota",
        "--type, --zone {zone}: more than your project's quota: ask for more (console: IAM, Quotas, Cloud TPU API), "
        "or use a smaller --type, another --zone, or --spot, whose quota is its own",
    ),
    (
        "capacity",
        r"no more capacity|insufficient (reserved )?capacity|pool_exhausted|stockout|enough resources available",
        "--zone {zone}: has none of these TPUs free now: try another --zone, or wait in line with --queued",
    ),
    (
        "exists",
        r"ALREADY_EXISTS|already exists",
        "--name {name}: exists already in {zone}: use another --name, or python -m tpu delete first",
    ),
    (
        "type",
        r"accelerator .*(not found|not available|not supported)",
        "--type: not offered in --zone {zone}: gcloud compute tpus accelerator-types list --zone={zone}",
    ),
    (
        "runtime",
        r"runtime.?version|version .* not found",
        "--runtime-version: not offered in --zone {zone}: gcloud compute tpus tpu-vm versions list --zone={zone}",
    ),
    (
        "zone",
        r"permission denied on 'locations/|location \S+ (is )?(not found|unauthorized)|invalid (value for )?zone",
        "--zone {zone}: no such zone, or none with TPUs: gcloud compute tpus locations list",
    ),
    (
        "denied",
        r"PERMISSION_DENIED|does not have permission|permission .* denied",
        "your account lacks a role in this project: ask for roles/tpu.admin and roles/iam.serviceAccountUser",
    ),
    ("missing", r"NOT_FOUND|was not found", "--name {name}: nothing of that name in --zone {zone}"),
    (
        "agent",
        r"not present in the SSH agent",
        "several workers need your key in the ssh agent: "
        "eval $(ssh-agent); ssh-add ~/.ssh/google_compute_engine; then the same command again",
    ),
    (
        "ssh",
        r"\[255\]|connection (refused|timed out|closed|reset)|cannot be currently connected",
        "--name {name}: ssh does not get through: is port 22 open (gcloud compute firewall-rules create allow-ssh "
        "--allow=tcp:22)? then the same command again",
    ),
)


def call(command: Sequence[str], name: str, zone: str, show: Callable[[str], None] | None = None) -> str:
    """Run a gcloud command -> what it printed; `show` takes each line as it comes instead. Raises GcloudError.

    `name` and `zone` are for the messages. Input is closed, so that nothing waits for an answer that no one sees.
    """
    if shutil.which("gcloud") is None:
        raise UserError("gcloud is not installed: https://cloud.google.com/sdk/docs/install, then gcloud init")
    printed = []
    keep = printed.append if show is None else show
    with tempfile.TemporaryFile("w+", errors="replace") as complaints:
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=complaints, text=True, errors="replace"
        ) as process:
            for line in process.stdout:
                keep(line)
        if process.returncode:
            complaints.seek(0)
            raise failure(process.returncode, complaints.read(), name, zone)
    return "".join(printed)


def failure(status: int, complaints: str, name: str, zone: str) -> GcloudError:
    """What an exit status and the text on stderr mean.

    Only what gcloud says itself is searched: the command that ran on a worker writes there too. ssh's own failures
    have the status 255.
    """
    said = complaints[match.start() :] if (match := re.search(r"^ERROR: \(gcloud", complaints, re.M)) else ""
    line = " ".join(re.sub(r"^ERROR: \(\S+\)", "", said).split())[:300]
    for kind, pattern, meaning in FAILURES:
        if re.search(pattern, f"{said} [{status}]", re.I | re.S):
            gcloud_says = f" (gcloud: {line})" if line else ""
            return GcloudError(kind, meaning.format(name=name, zone=zone) + gcloud_says)
    if said:
        return GcloudError("other", f"gcloud: {line}")
    last = (complaints.strip() or "no message").splitlines()[-1]
    return GcloudError("remote", f"--name {name}: the command on a worker ended with status {status}: {last}")
