"""Keep a slice there until its run has ended, whoever launched it: all that is known is in Google Cloud."""

import math
import re
from collections.abc import Iterable

from data_pipelines.errors import PassingError, UserError
from tpu.gcloud import Gcloud, GcloudError

# Exit statuses of `python -m pretrain run`: told to end; another host, or what time may heal, was gone.
STOPPED, ABORTED = 75, PassingError.status
REPORT = re.compile(r"(\d+) (.*)\n")
CUT = 1, "error: its report is empty or cut off: its disk is full"
# States of a queued resource or a VM, the first that matches counts; what is none of these is on its way
STAGES = {
    "ending": {"DELETING", "SUSPENDING"},
    "failed": {"FAILED"},
    "ended": {"PREEMPTED", "TERMINATED", "SUSPENDED", "STOPPED"},
    "in line": {"ACCEPTED", "WAITING_FOR_RESOURCES"},
}
# Seconds without news, and what that means: to be made, once out of the line; until the first line; until the next,
# later than a hanging run is killed on its host; until the other hosts have ended, too; until another launcher has
# made again what it removed.
LIMITS = {
    "passing": (3600, "{name} was not made within {limit} s"),
    "silent": (1800, "its hosts wrote nothing to {state}: their account needs roles/storage.objectUser there"),
    "up": (9000, "its hosts printed nothing for {limit} s"),
    "over": (240, ""),
    "missing": (240, ""),
}
POLL = 20  # seconds between two looks
REFUSALS = 15  # tries to delete, one at each look
FIRST_DELAY, LAST_DELAY = 30, 1800  # seconds before it is made again; doubled while it prints nothing


def news(cloud: Gcloud, objects: dict[str, dict], shown: dict[str, int], host: str = "") -> list[str]:
    """The whole lines of a host's log, or the first's, that are not in `shown`: file -> bytes. Files only grow."""
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
    """What the states come to: missing, a key of STAGES, up (silent, where nothing was heard of it), or passing."""
    states = {state for state, _ in found.values()}
    for name, members in STAGES.items():
        if states & members:
            return name
    if "READY" in states and states <= {"READY", "ACTIVE"}:
        return "up" if heard else "silent"
    return "passing" if states else "missing"


def read_reports(cloud: Gcloud, names: Iterable[str]) -> dict[str, tuple[int, str]]:
    """Of the hosts that have ended for good: status, and the line that says why.   names: of objects."""
    ended = sorted(name for name in names if name.startswith("ended/"))
    read = lambda names: REPORT.findall(cloud.read(names).decode(errors="replace"))
    reports = read(ended) if ended else []
    if len(reports) < len(ended):  # which is cut off?
        reports = [(read([name]) or [CUT])[0] for name in ended]
    return {name.removeprefix("ended/"): (int(number), why) for name, (number, why) in zip(ended, reports, strict=True)}


def outcome(reports: dict[str, tuple[int, str]]) -> tuple[int, str]:
    """Status and words of the run: of those that failed, of one that did not fail because of another."""
    order = {0: 1, STOPPED: 2, ABORTED: 3}
    host = min(reports, key=lambda host: (order.get(reports[host][0], 0), "this one with it" in reports[host][1]))
    return reports[host][0], f"{host}: {reports[host][1]}"


def watch(cloud: Gcloud, create: list[str], delete: bool, shown: dict[str, int], left: int) -> int:
    """-> exit status of the run.   create: the command that makes its slice.   delete: the slice when it has ended.
    shown: of the log, see `news`.   left: how often the slice may be made again."""
    delay, waited, before, there, heard = FIRST_DELAY, 0, ({}, "missing"), False, bool(shown)
    while True:
        found = cloud.look()  # before the bucket: a slice that deletes itself has reported by then
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
            raise UserError(f"--name {cloud.where.name}: someone deleted it{silent}; the same command makes it again")
        elif now == "missing" and not there:
            cloud.call(create, fine="exists")  # by another launcher, or by a try that was not answered
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
        cloud.say(f"{why}: made again in {delay} s ({left} restarts left)")
        cloud.sleep(delay)
        delay, before, there = min(2 * delay, LAST_DELAY), ({}, "missing"), False


def no_good(cloud: Gcloud, delete: bool, now: str, found: dict, waited: int, spoke: bool) -> str | None:
    """Why another slice is to be made, None while this one may do.   waited: seconds without news.

    UserError where another would do no better; this one is deleted first, unless it is to be kept.
    """
    name, (limit, why) = cloud.where.name, LIMITS.get(now, (math.inf, ""))
    if now in ("failed", "ended"):
        why = found.get("the request", ("", ""))[1] or ", ".join(state for state, _ in found.values())
        if spoke or now == "ended":
            return f"{name} was taken ({why})"
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


def _end(cloud: Gcloud, status: int, why: str, delete: bool) -> int:
    if delete:  # the command may have come before a launcher's create
        remove(cloud)
    words = {0: "the run is done", STOPPED: "the run was stopped; the same command goes on"}
    said = words.get(status, f"the run failed with status {status}: {why}")
    cloud.say(f"{said}. The slice {'is deleted' if delete else cloud.where.costs}")
    return status
