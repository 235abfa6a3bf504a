"""Keep a slice there until its run has ended, whoever launched it: all that is known is in Google Cloud."""

from typing import NamedTuple

from data_pipelines.errors import UserError
from tpu import gcloud
from tpu.gcloud import Gcloud, GcloudError, Slice, State

STOPPED, ABORTED = 75, 134  # exit statuses of `python -m pretrain run`: told to end; another host was gone
# States of a queued resource or a VM, the first that matches counts; what is none of these is on its way
STAGES = {
    "ending": {"DELETING", "SUSPENDING"},
    "ended": {"PREEMPTED", "TERMINATED", "SUSPENDED", "FAILED"},
    "odd": {"STOPPED", "STOPPING", "HIDDEN", "HIDING", "UNKNOWN"},
    "in line": {"ACCEPTED", "WAITING_FOR_RESOURCES"},
}
POLL = 20  # seconds between two looks
LAST_WORDS = 240  # seconds for the other hosts to end
SILENCE = 1800  # seconds in which hosts that are READY must have printed something
STUCK = 3600  # seconds that a slice may take to be made, once out of the line
HANGING = 7200  # seconds without a line after which a slice is no longer waited for
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


class Report(NamedTuple):
    """How a host ended, and the line of its log that says why."""

    status: int
    why: str


class Log:
    """A host's log: a file for each start, which only grows. Each line is shown once."""

    def __init__(self, cloud: Gcloud, state: str, host: str):
        self.cloud, self.state, self.folder = cloud, state, f"log/{host}/"
        self.sizes, self.shown = {}, {}

    def news(self, objects: dict[str, dict]) -> list[str]:
        """The whole lines that it has not given yet."""
        lines = []
        for name in sorted(name for name in objects if name.startswith(self.folder)):
            if objects[name]["size"] != self.sizes.get(name):
                text = self.cloud.call(gcloud.storage("cat", f"{self.state}/{name}"))
                whole = text[: text.rfind("\n") + 1].splitlines(keepends=True)
                lines += whole[self.shown.get(name, 0) :]
                self.sizes[name], self.shown[name] = objects[name]["size"], len(whole)
        return lines


def stage(found: dict[str, State]) -> str:
    """What the states come to: missing, a key of STAGES, up, or passing."""
    states = {one.name for one in found.values()}
    for name, members in STAGES.items():
        if states & members:
            return name
    if not states:
        return "missing"
    return "up" if "READY" in states and states <= {"READY", "ACTIVE"} else "passing"


def read_reports(cloud: Gcloud, state: str, objects: dict[str, dict]) -> dict[str, Report]:
    """Of the hosts that have ended for good: of each a line."""
    names = sorted(name for name in objects if name.startswith("ended/"))
    if not names:
        return {}
    lines = cloud.call(gcloud.storage("cat", *(f"{state}/{name}" for name in names))).splitlines()
    parts = [line.partition(" ") for line in lines]
    return {name[len("ended/") :]: Report(int(one[0]), one[2]) for name, one in zip(names, parts, strict=True)}


def outcome(reports: dict[str, Report]) -> str:
    """The host whose report is the run's: of those that failed, one that did not fail because of another."""
    order = {0: 1, STOPPED: 2, ABORTED: 3}
    return min(reports, key=lambda host: (order.get(reports[host].status, 0), "this one with it" in reports[host].why))


def watch(cloud: Gcloud, job: Job, log: Log, left: int, begun: bool) -> int:
    """-> exit status of the run.   left: how often the slice may be made again.   begun: it has been there before."""
    delay, waited, before, heard = FIRST_DELAY, 0, ({}, "missing"), False
    while True:
        found = cloud.look()  # before the bucket: a slice that deletes itself has reported by then
        objects = cloud.objects(job.state)
        if lines := log.news(objects):
            print("".join(lines), end="", flush=True)
            delay, heard, begun = FIRST_DELAY, True, True
        now = "over" if any(name.startswith("ended/") for name in objects) else stage(found)
        waited = waited + POLL if (found, now) == before and not lines else 0
        if found and found != before[0]:
            cloud.say(", ".join(f"{name} is {one.name}" for name, one in found.items()))
        if now == "over":
            reports = read_reports(cloud, job.state, objects)
            if len(reports) >= len(job.hosts) or not found or waited >= LAST_WORDS:
                host = outcome(reports)
                if reports[host].status != ABORTED:
                    return _end(cloud, job, host, reports[host])
                now = "given up"
        elif now == "missing" and before[0]:
            silent = "" if heard else f", or its hosts, which have no roles/storage.objectUser on {job.state}"
            raise UserError(f"--name {job.where.name}: someone deleted it{silent}; the same command makes it again")
        why = _why_again(cloud, job, now, found, waited, heard, begun)
        before, begun = (found, now), begun or now == "up"
        if why is None:
            cloud.sleep(POLL)
            continue
        if found:
            remove(cloud)
        if now == "given up":
            cloud.call(gcloud.storage("rm", *(f"{job.state}/ended/{host}" for host in reports)))
        if left == 0:
            raise UserError(f"{why}; --restarts: all used; the same command goes on from the last checkpoint")
        left -= 1
        cloud.say(f"{why}: made again in {delay} s ({left} restarts left)")
        cloud.sleep(delay)
        delay, before, heard = min(2 * delay, LAST_DELAY), ({}, "missing"), False


def _why_again(cloud, job: Job, now: str, found: dict[str, State], waited: int, heard: bool, begun: bool) -> str | None:
    """Why the slice is to be made again, None while it is not. Makes it where there is none."""
    name, problem = job.where.name, None
    if now == "missing":
        return _create(cloud, job, begun)
    if now == "given up":
        return "its hosts lost each other again and again"
    if now == "ended":
        failed = next((one.more for one in found.values() if one.name == "FAILED"), None)
        if failed is None or begun:
            return f"{name} was taken ({failed or ', '.join(one.name for one in found.values())})"
        problem = f"the request failed: {failed or 'no reason given'}"
    if now == "passing" and waited >= STUCK:
        return f"{name} was not made within {STUCK} s"
    if now == "up" and heard and waited >= HANGING:
        return f"its hosts printed nothing for {HANGING} s"
    if now == "odd":
        raise UserError(f"--name {name}: it is neither running nor gone: python -m tpu delete it, then launch again")
    if now == "up" and not heard and waited >= SILENCE:
        problem = f"its hosts wrote nothing to {job.state}: their service account needs roles/storage.objectUser there"
    if problem and (job.delete or now == "ended"):
        remove(cloud)
    if problem:
        raise UserError(f"--name {name}: {problem}. {'It is deleted' if job.delete else job.costs}")
    wrong = [one.more for one in found.values() if one.more not in ("", job.accelerator)]
    if wrong:
        raise UserError(f"--type {job.accelerator}: {name} exists and is a {wrong[0]}: use another --name")
    return None


def _create(cloud: Gcloud, job: Job, begun: bool) -> str | None:
    """-> why it cannot be made now. A lack is for the user to decide about the first time, later to be waited for."""
    try:
        cloud.call(job.create, again=False)
    except GcloudError as error:
        if error.kind not in ("transient", "exists") and not (begun and error.kind in ("capacity", "quota")):
            raise
        return str(error)
    return None


def remove(cloud: Gcloud) -> None:
    """Delete what there is of the slice, and wait until it is gone."""
    while found := cloud.look():
        if stage(found) != "ending":
            try:
                cloud.call(gcloud.delete(cloud.where))
                continue
            except GcloudError as error:  # perhaps because it deletes itself
                if stage(cloud.look()) not in ("ending", "missing"):
                    raise UserError(f"--name {cloud.where.name}: it still costs, and: {error}") from None
        cloud.sleep(POLL)


def _end(cloud: Gcloud, job: Job, host: str, report: Report) -> int:
    if job.delete:
        remove(cloud)
    words = {0: "the run is done", STOPPED: "the run was stopped; the same command goes on"}
    failed = f"the run failed with status {report.status}: {host}: {report.why}"
    cloud.say(f"{words.get(report.status, failed)}. {'The slice is deleted' if job.delete else job.costs}")
    return report.status
