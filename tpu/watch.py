"""Watch a launched run and recreate its slice until the run ends; all state is in Google Cloud, so anyone can watch."""

import math
import re
from collections.abc import Iterable

from data_pipelines.errors import PassingError, UserError
from tpu.gcloud import Gcloud, GcloudError

# Exit statuses of `python -m pretrain run`: stopped on request; aborted because of another host or a passing failure.
STOPPED, ABORTED = 75, PassingError.status
REPORT = re.compile(r"(\d+) (.*)\n")
CUT = 1, "error: its report is empty or cut off: its disk is full"
# States of a queued resource or a VM; the first match counts. All other states are transitions.
STAGES = {
    "ending": {"DELETING", "SUSPENDING"},
    "failed": {"FAILED"},
    "ended": {"PREEMPTED", "TERMINATED", "SUSPENDED", "STOPPED"},
    "in line": {"ACCEPTED", "WAITING_FOR_RESOURCES"},
}
# Seconds without news, and what that means. passing: the slice left the queue but is not created; silent: no line yet;
# up: no new line (a hanging run is killed on its host sooner); over: other hosts have not ended; missing: another
# launcher has not recreated the slice that it removed.
LIMITS = {
    "passing": (3600, "{name} was not created within {limit} s"),
    "silent": (1800, "its hosts wrote nothing to {state}: their account needs roles/storage.objectUser there"),
    "up": (9000, "its hosts printed nothing for {limit} s"),
    "over": (240, ""),
    "missing": (240, ""),
}
POLL = 20  # seconds between two polls
REFUSALS = 15  # tries to delete, one at each poll
FIRST_DELAY, LAST_DELAY = 30, 1800  # seconds before the slice is recreated; doubled while it prints nothing


def news(cloud: Gcloud, objects: dict[str, dict], shown: dict[str, int], host: str = "") -> list[str]:
    """Return the new whole lines of a host's log, by default the first host's, and update `shown`.
    shown: file -> bytes shown so far; files only grow."""
    lines = []
    for name in sorted(name for name in objects if name.startswith(f"log/{host or cloud.where.hosts[0]}/")):
        past = shown.get(name, 0)
        if int(objects[name]["size"]) > past:
            text = cloud.read([name], *([f"--range={past}-"] if past else []))
            whole = text[: text.rfind(b"\n") + 1]
            shown[name] = past + len(whole)
            lines += whole.decode(errors="replace").splitlines(keepends=True)
    return lines


def stage(found: dict[str, tuple[str, str]], heard: bool = True) -> str:
    """Summarise the states: missing, a key of STAGES, up (silent, if its hosts wrote nothing yet), or passing."""
    states = {state for state, _ in found.values()}
    for name, members in STAGES.items():
        if states & members:
            return name
    if "READY" in states and states <= {"READY", "ACTIVE"}:
        return "up" if heard else "silent"
    return "passing" if states else "missing"


def read_reports(cloud: Gcloud, names: Iterable[str]) -> dict[str, tuple[int, str]]:
    """Return the reports of hosts that have ended for good: host -> (exit status, reason).   names: of objects."""
    ended = sorted(name for name in names if name.startswith("ended/"))
    read = lambda names: REPORT.findall(cloud.read(names).decode(errors="replace"))
    reports = read(ended) if ended else []
    if len(reports) < len(ended):  # find the report that is cut off
        reports = [(read([name]) or [CUT])[0] for name in ended]
    return {name.removeprefix("ended/"): (int(number), why) for name, (number, why) in zip(ended, reports, strict=True)}


def outcome(reports: dict[str, tuple[int, str]]) -> tuple[int, str]:
    """Return the run's exit status and reason: of a host that failed, if possible not because of another host."""
    order = {0: 1, STOPPED: 2, ABORTED: 3}
    host = min(reports, key=lambda host: (order.get(reports[host][0], 0), "this one with it" in reports[host][1]))
    return reports[host][0], f"{host}: {reports[host][1]}"


def watch(cloud: Gcloud, create: list[str], delete: bool, shown: dict[str, int], left: int) -> int:
    """Watch a run to its end and return its exit status.   create: the command that requests its slice.
    delete: whether to delete the slice at the end.   shown: see `news`.   left: restarts left."""
    delay, waited, before, there, heard = FIRST_DELAY, 0, ({}, "missing"), False, bool(shown)
    while True:
        found = cloud.look()  # before the bucket: a slice that deletes itself reports first
        objects = cloud.objects()
        if lines := news(cloud, objects, shown):
            print("".join(lines), end="", flush=True)
            delay, heard = FIRST_DELAY, True
        now = "over" if any(name.startswith("ended/") for name in objects) else stage(found, heard)
        waited = waited + POLL if (found, now) == before and not lines else 0
        if found and found != before[0]:
            cloud.say(", ".join(f"{name} is {state}" for name, (state, _) in found.items()))
        why = None
        if now == "over":
            reports = read_reports(cloud, objects)
            whole = [host for host in reports if reports[host] != CUT]
            if len(whole) >= len(cloud.where.hosts) or not found or waited >= LIMITS[now][0]:
                status, why = outcome(reports)
                if status != ABORTED or not delete:
                    return _end(cloud, status, why, delete or "delete" in reports)
        elif now == "missing" and there and waited >= LIMITS[now][0]:
            silent = "" if heard else f", or its hosts, which have no roles/storage.objectUser on {cloud.where.state}"
            raise UserError(f"--name {cloud.where.name}: someone deleted it{silent}; the same command recreates it")
        elif now == "missing" and not there:
            cloud.call(create, fine="exists")  # another launcher, or an earlier try without an answer, created it
            heard = False
        else:
            why = no_good(cloud, delete, now, found, waited, bool(shown))
        before, there = (found, now), there or bool(found)
        if why is None:
            cloud.sleep(POLL)
            continue
        remove(cloud)
        if now == "over":
            cloud.clear(f"ended/{host}" for host in reports)
        if left == 0:
            raise UserError(f"{why}; --restarts: all used; the same command goes on from the last checkpoint")
        left -= 1
        cloud.say(f"{why}: recreating the slice in {delay} s ({left} restarts left)")
        cloud.sleep(delay)
        delay, before, there = min(2 * delay, LAST_DELAY), ({}, "missing"), False


def no_good(cloud: Gcloud, delete: bool, now: str, found: dict, waited: int, spoke: bool) -> str | None:
    """Return why the slice must be recreated, None while it is fine.   waited: seconds without news.
    Raises UserError if a new slice would not help; this one is deleted first, unless it is to be kept."""
    name, (limit, why) = cloud.where.name, LIMITS.get(now, (math.inf, ""))
    if now in ("failed", "ended"):
        why = found.get("the request", ("", ""))[1] or ", ".join(state for state, _ in found.values())
        if spoke or now == "ended":
            return f"{name} was preempted ({why})"
        remove(cloud)
        raise UserError(f"--name {name}: the request failed and is deleted: {why}")
    if wrong := [kind for _, kind in found.values() if kind not in ("", cloud.where.type)]:
        raise UserError(f"--type {cloud.where.type}: {name} exists and is a {wrong[0]}: use another --name")
    if waited < limit:
        return None
    why = why.format(name=name, limit=limit, state=cloud.where.state)
    if now == "passing" or (now == "up" and delete):
        return why
    if delete:
        remove(cloud)
    raise UserError(f"--name {name}: {why}. It {'is deleted' if delete else cloud.where.costs}")


def remove(cloud: Gcloud) -> None:
    """Delete the slice and its request, and wait until they are gone. UserError if that is refused again and again."""
    name, refusals = cloud.where.name, 0
    while found := cloud.look():
        if stage(found) != "ending":
            try:
                cloud.call(cloud.where.delete())
                continue
            except GcloudError as error:  # perhaps because it is being created, or deletes itself
                refusals += 1
                if refusals == REFUSALS:
                    there = ", ".join(f"{part} is {state}" for part, (state, _) in found.items())
                    raise UserError(f"--name {name}: it still exists and costs money ({there}): {error}") from None
        cloud.sleep(POLL)


def _end(cloud: Gcloud, status: int, why: str, delete: bool) -> int:
    if delete:  # delete may have run before a launcher's create
        remove(cloud)
    words = {0: "the run is done", STOPPED: "the run was stopped; the same command goes on"}
    said = words.get(status, f"the run failed with status {status}: {why}")
    cloud.say(f"{said}. The slice {'is deleted' if delete else cloud.where.costs}")
    return status
