"""Keep a slice there until its run has ended, whoever launched it: all that is known is in Google Cloud."""

from typing import NamedTuple

from data_pipelines.errors import PassingError, UserError
from tpu import gcloud
from tpu.gcloud import Gcloud, GcloudError, Slice

# Exit statuses of `python -m pretrain run`: told to end; another host, or what time may heal, was gone.
STOPPED, ABORTED = 75, PassingError.status
# States of a queued resource or a VM, the first that matches counts; what is none of these is on its way
STAGES = {
    "ending": {"DELETING", "SUSPENDING"},
    "ended": {"PREEMPTED", "TERMINATED", "SUSPENDED", "FAILED", "STOPPED"},
    "in line": {"ACCEPTED", "WAITING_FOR_RESOURCES"},
}
POLL = 20  # seconds between two looks
LAST_WORDS = 240  # seconds for the other hosts to end
STUCK = 3600  # seconds that a slice may take to be made, once out of the line
SILENCE = 1800  # seconds in which hosts must have printed their first line
HANGING = 9000  # and their next one: later than a hanging run is killed on its host
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


def news(cloud: Gcloud, folder: str, host: str, objects: dict[str, dict], shown: dict[str, tuple]) -> list[str]:
    """The whole lines of a host's log that are not in `shown`: file -> its size and lines. Files only grow."""
    lines = []
    for name in sorted(name for name in objects if name.startswith(f"log/{host}/")):
        size, past = shown.get(name, (0, 0))
        if objects[name]["size"] != size:
            text = cloud.call(gcloud.storage("cat", f"{folder}/{name}"))
            whole = text[: text.rfind("\n") + 1].splitlines(keepends=True)
            lines += whole[past:]
            shown[name] = objects[name]["size"], len(whole)
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
    found = {name.removeprefix("ended/"): (1, "error: its report is empty: its disk is full") for name in ended}
    if names := [name for name in ended if int(objects[name]["size"])]:
        lines = cloud.call(gcloud.storage("cat", *(f"{folder}/{name}" for name in names)))
        parts = [line.partition(" ") for line in lines.removesuffix("\n").split("\n")]
        found |= {name.removeprefix("ended/"): (int(one[0]), one[2]) for name, one in zip(names, parts, strict=True)}
    return found


def outcome(reports: dict[str, tuple[int, str]]) -> tuple[int, str]:
    """Status and words of the run: of those that failed, of one that did not fail because of another."""
    order = {0: 1, STOPPED: 2, ABORTED: 3}
    key = lambda host: (order.get(reports[host][0], 0), "this one with it" in reports[host][1])
    host = min(reports, key=key)
    return reports[host][0], f"{host}: {reports[host][1]}"


def watch(cloud: Gcloud, job: Job, shown: dict[str, tuple], left: int, begun: bool) -> int:
    """-> exit status of the run.   left: how often the slice may be made again.   begun: it has been there before."""
    delay, waited, before, heard = FIRST_DELAY, 0, ({}, "missing"), bool(shown)
    while True:
        found = cloud.look()  # before the bucket: a slice that deletes itself has reported by then
        objects = cloud.objects(job.state)
        if lines := news(cloud, job.state, job.hosts[0], objects, shown):
            print("".join(lines), end="", flush=True)
            delay, heard, begun = FIRST_DELAY, True, True
        now = "over" if any(name.startswith("ended/") for name in objects) else stage(found)
        waited = waited + POLL if (found, now) == before and not lines else 0
        if found and found != before[0]:
            cloud.say(", ".join(f"{name} is {state}" for name, (state, _) in found.items()))
        if now == "missing" and before[0]:
            silent = "" if heard else f", or its hosts, which have no roles/storage.objectUser on {job.state}"
            raise UserError(f"--name {job.where.name}: someone deleted it{silent}; the same command makes it again")
        before, why, heard = (found, now), None, heard and now != "missing"
        if now != "over":
            why = _why_again(cloud, job, now, found, waited, heard, begun)
        else:
            reports = read_reports(cloud, job.state, objects)
            if len(reports) >= len(job.hosts) or not found or waited >= LAST_WORDS:
                status, why = outcome(reports)
                if status != ABORTED or not job.delete:
                    return _end(cloud, job, status, why, job.delete or "delete" in reports)
        if why is None:
            cloud.sleep(POLL)
            continue
        if found:
            remove(cloud)
        if now == "over":
            cloud.clear(*(f"{job.state}/ended/{host}" for host in reports))
        if left == 0:
            raise UserError(f"{why}; --restarts: all used; the same command goes on from the last checkpoint")
        left -= 1
        cloud.say(f"{why}: made again in {delay} s ({left} restarts left)")
        cloud.sleep(delay)
        delay, before, heard = min(2 * delay, LAST_DELAY), ({}, "missing"), False


def _why_again(cloud: Gcloud, job: Job, now: str, found: dict, waited: int, heard: bool, begun: bool) -> str | None:
    """Why the slice is to be made again, None while it is not. Makes it where there is none."""
    name = job.where.name
    if now == "missing":
        try:
            cloud.call(job.create, again=False)
        except GcloudError as error:
            if error.kind not in ("transient", "exists"):
                raise
            return str(error)
    if now == "ended":
        failed = next((why for state, why in found.values() if state == "FAILED"), None)
        if failed is not None and not begun:
            remove(cloud)
            raise UserError(f"--name {name}: the request failed and is deleted: {failed or 'no reason given'}")
        return f"{name} was taken ({failed or ', '.join(state for state, _ in found.values())})"
    if now == "passing" and waited >= STUCK:
        return f"{name} was not made within {STUCK} s"
    if now == "up" and heard and waited >= HANGING:
        if not job.delete:
            raise UserError(f"--name {name}: its hosts printed nothing for {HANGING} s. It {job.costs}")
        return f"its hosts printed nothing for {HANGING} s"
    if now == "up" and not heard and waited >= SILENCE:
        if job.delete:
            remove(cloud)
        silent = f"its hosts wrote nothing to {job.state}: their account needs roles/storage.objectUser there"
        raise UserError(f"--name {name}: {silent}. {'It is deleted' if job.delete else f'It {job.costs}'}")
    if wrong := [kind for _, kind in found.values() if kind not in ("", job.accelerator)]:
        raise UserError(f"--type {job.accelerator}: {name} exists and is a {wrong[0]}: use another --name")
    return None


def remove(cloud: Gcloud) -> None:
    """Delete what there is of the slice, and wait until it is gone. UserError where that is refused again and again."""
    refusals = 0
    while found := cloud.look():
        if stage(found) != "ending":
            try:
                cloud.call(gcloud.delete(cloud.where))
                continue
            except GcloudError as error:  # perhaps because it is made just now, or deletes itself
                refusals += 1
                if refusals == REFUSALS:
                    there = ", ".join(f"{name} is {state}" for name, (state, _) in found.items())
                    raise UserError(f"--name {cloud.where.name}: it still costs ({there}): {error}") from None
        cloud.sleep(POLL)


def _end(cloud: Gcloud, job: Job, status: int, why: str, deleted: bool) -> int:
    if job.delete:
        remove(cloud)
    words = {0: "the run is done", STOPPED: "the run was stopped; the same command goes on"}
    said = words.get(status, f"the run failed with status {status}: {why}")
    cloud.say(f"{said}. {'The slice is deleted' if deleted else f'The slice {job.costs}'}")
    return status
