"""Keep a slice there until its run has ended, whoever launched it: all that is known is in Google Cloud."""

import math
import re
from typing import NamedTuple

from data_pipelines.errors import PassingError, UserError
from tpu import gcloud
from tpu.gcloud import Gcloud, GcloudError, Slice

# Exit statuses of `python -m pretrain run`: told to end; another host, or what time may heal, was gone.
STOPPED, ABORTED = 75, PassingError.status
REPORT = re.compile(r"(\d+) (.*)\n")
CUT = 1, "error: its report is empty or cut off: its disk is full"
# States of a queued resource or a VM, the first that matches counts; what is none of these is on its way
STAGES = {
    "ending": {"DELETING", "SUSPENDING"},
    "ended": {"PREEMPTED", "TERMINATED", "SUSPENDED", "FAILED", "STOPPED"},
    "in line": {"ACCEPTED", "WAITING_FOR_RESOURCES"},
}
# Seconds without news: to be made, once out of the line; until the first line; until the next, later than a hanging run
# is killed on its host; until the other hosts have ended, too.
LIMITS = {"passing": 3600, "silent": 1800, "up": 9000, "over": 240}
POLL = 20  # seconds between two looks
REFUSALS = 15  # tries to delete, one at each look
FIRST_DELAY, LAST_DELAY = 30, 1800  # seconds before it is made again; doubled while it prints nothing


class Job(NamedTuple):
    """One run.   state: its folder in the bucket.   settings: for the hosts, in shell.   create: the command."""

    where: Slice
    accelerator: str
    hosts: tuple[str, ...]
    state: str
    settings: str
    create: list[str]
    delete: bool
    costs: str


def news(cloud: Gcloud, folder: str, host: str, objects: dict[str, dict], shown: dict[str, int]) -> list[str]:
    """The whole lines of a host's log that are not in `shown`: file -> bytes. Files only grow."""
    lines = []
    for name in sorted(name for name in objects if name.startswith(f"log/{host}/")):
        past = shown.get(name, 0)
        if int(objects[name]["size"]) > past:
            further = [f"--range={past}-"] if past else []
            text = cloud.call(gcloud.storage("cat", f"{folder}/{name}", *further)).encode(errors=gcloud.BYTES)
            whole = text[: text.rfind(b"\n") + 1]
            shown[name] = past + len(whole)
            lines += whole.decode(errors="replace").splitlines(keepends=True)
    return lines


def stage(found: dict[str, tuple[str, str]]) -> str:
    """What the states come to: missing, a key of STAGES, up, or passing."""
    states = {state for state, _ in found.values()}
    for name, members in STAGES.items():
        if states & members:
            return name
    if not states:
        return "missing"
    return "up" if "READY" in states and states <= {"READY", "ACTIVE"} else "passing"


def read_reports(cloud: Gcloud, folder: str, objects: dict[str, dict]) -> dict[str, tuple[int, str]]:
    """Of the hosts that have ended for good: status, and the line that says why."""
    ended = sorted(name for name in objects if name.startswith("ended/"))
    cat = lambda names: cloud.call(gcloud.storage("cat", *(f"{folder}/{name}" for name in names)))
    read = lambda *names: REPORT.findall(cat(names).encode(errors=gcloud.BYTES).decode(errors="replace"))
    reports = read(*ended) if ended else []
    if len(reports) < len(ended):  # which is cut off?
        reports = [(read(name) or [CUT])[0] for name in ended]
    return {name.removeprefix("ended/"): (int(number), why) for name, (number, why) in zip(ended, reports, strict=True)}


def outcome(reports: dict[str, tuple[int, str]]) -> tuple[int, str]:
    """Status and words of the run: of those that failed, of one that did not fail because of another."""
    order = {0: 1, STOPPED: 2, ABORTED: 3}
    key = lambda host: (order.get(reports[host][0], 0), "this one with it" in reports[host][1])
    host = min(reports, key=key)
    return reports[host][0], f"{host}: {reports[host][1]}"


def watch(cloud: Gcloud, job: Job, shown: dict[str, int], left: int) -> int:
    """-> exit status of the run.   shown: of its log, see `news`.   left: how often the slice may be made again."""
    delay, waited, before, heard = FIRST_DELAY, 0, ({}, "missing"), bool(shown)
    while True:
        found = cloud.look()  # before the bucket: a slice that deletes itself has reported by then
        objects = cloud.objects(job.state)
        if lines := news(cloud, job.state, job.hosts[0], objects, shown):
            print("".join(lines), end="", flush=True)
            delay, heard = FIRST_DELAY, True
        now = "over" if any(name.startswith("ended/") for name in objects) else stage(found)
        now = "silent" if now == "up" and not heard else now
        waited = waited + POLL if (found, now) == before and not lines else 0
        if found and found != before[0]:
            cloud.say(", ".join(f"{name} is {state}" for name, (state, _) in found.items()))
        why = None
        if now == "over":
            reports = read_reports(cloud, job.state, objects)
            whole = [host for host in reports if reports[host] != CUT]
            if len(whole) >= len(job.hosts) or not found or waited >= LIMITS[now]:
                status, why = outcome(reports)
                if status != ABORTED or not job.delete:
                    return _end(cloud, job, status, why, "delete" in reports)
        elif now == "missing" and before[0]:
            silent = "" if heard else f", or its hosts, which have no roles/storage.objectUser on {job.state}"
            raise UserError(f"--name {job.where.name}: someone deleted it{silent}; the same command makes it again")
        elif now == "missing":
            cloud.call(job.create, fine="exists")  # by another launcher, or by a try that was not answered
            heard = False
        else:
            why = no_good(cloud, job, now, found, waited, bool(shown))
        before = found, now
        if why is None:
            cloud.sleep(POLL)
            continue
        remove(cloud)
        if now == "over":
            cloud.clear(*(f"{job.state}/ended/{host}" for host in reports))
        if left == 0:
            raise UserError(f"{why}; --restarts: all used; the same command goes on from the last checkpoint")
        left -= 1
        cloud.say(f"{why}: made again in {delay} s ({left} restarts left)")
        cloud.sleep(delay)
        delay, before = min(2 * delay, LAST_DELAY), ({}, "missing")


def no_good(cloud: Gcloud, job: Job, now: str, found: dict, waited: int, spoke: bool) -> str | None:
    """Why another slice is to be made, None while this one may do.   waited: seconds without news.

    UserError where another would do no better; this one is deleted first, unless it is to be kept.
    """
    name, limit = job.where.name, LIMITS.get(now, math.inf)
    if now == "ended":
        failed = next((why or "no reason given" for state, why in found.values() if state == "FAILED"), None)
        if spoke or failed is None:
            return f"{name} was taken ({failed or ', '.join(state for state, _ in found.values())})"
        remove(cloud)
        raise UserError(f"--name {name}: the request failed and is deleted: {failed}")
    if wrong := [kind for _, kind in found.values() if kind not in ("", job.accelerator)]:
        raise UserError(f"--type {job.accelerator}: {name} exists and is a {wrong[0]}: use another --name")
    if waited < limit:
        return None
    if now == "passing":
        return f"{name} was not made within {limit} s"
    silent = f"its hosts printed nothing for {limit} s"
    if now == "silent":
        silent = f"its hosts wrote nothing to {job.state}: their account needs roles/storage.objectUser there"
    elif job.delete:
        return silent
    if job.delete:
        remove(cloud)
    raise UserError(f"--name {name}: {silent}. It {'is deleted' if job.delete else job.costs}")


def remove(cloud: Gcloud) -> None:
    """Delete what there is of the slice, and wait until it is gone. UserError where that is refused again and again."""
    refusals = 0
    while found := cloud.look():
        if stage(found) != "ending":
            try:
                cloud.call(cloud.where.delete())
                continue
            except GcloudError as error:  # perhaps because it is made just now, or deletes itself
                refusals += 1
                if refusals == REFUSALS:
                    there = ", ".join(f"{name} is {state}" for name, (state, _) in found.items())
                    raise UserError(f"--name {cloud.where.name}: it still costs ({there}): {error}") from None
        cloud.sleep(POLL)


def _end(cloud: Gcloud, job: Job, status: int, why: str, deleted: bool) -> int:
    if job.delete or deleted:  # the command may have come before a launcher's create
        remove(cloud)
    words = {0: "the run is done", STOPPED: "the run was stopped; the same command goes on"}
    said = words.get(status, f"the run failed with status {status}: {why}")
    cloud.say(f"{said}. The slice {'is deleted' if deleted or job.delete else job.costs}")
    return status
