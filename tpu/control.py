"""Look at a launched run, read its log, stop it, delete its slice."""

import dataclasses
import tempfile
from pathlib import Path

from data_pipelines.errors import UserError
from tpu import gcloud
from tpu.gcloud import Gcloud, Slice
from tpu.launch import SETTINGS, Run, slice_of
from tpu.watch import POLL, STOPPED, news, read_reports, remove

STOP_WITHIN = 900  # seconds for the checkpoint


@dataclasses.dataclass(frozen=True)
class Logs(Run):
    """What the run printed on a host."""

    host: str = ""
    """One that status names; by default the first."""


def _there(options: Run) -> tuple[Gcloud, dict[str, dict], str]:
    """The run's slice, what is in its folder, its settings. UserError without one."""
    cloud = Gcloud(Slice(options.name, "", ""), ".")
    objects = cloud.objects(options.state)
    if SETTINGS not in objects:
        raise UserError(f"--name {options.name}: launch has no run of that name in {options.bucket}")
    settings = cloud.call(gcloud.storage("cat", f"{options.state}/{SETTINGS}"))
    cloud.where = slice_of(settings)
    if not cloud.where.project:  # launch once left it to gcloud, at each command anew
        cloud.where = cloud.where._replace(project=cloud.default_project())
    return cloud, objects, settings


def _tell(cloud: Gcloud, url: str, line: str) -> None:
    """The hosts and who watches them."""
    with tempfile.NamedTemporaryFile("w") as file:
        Path(file.name).write_text(f"{line}\n")
        cloud.call(gcloud.storage("cp", file.name, url))


def status(options: Run) -> int:
    """Print the states of the slice, when each host wrote last, and how it ended -> 0."""
    cloud, objects, _ = _there(options)
    for name, (state, more) in (cloud.look() or {options.name: ("not there", "")}).items():
        print(f"{name}: {state} {more}".rstrip())
    heard = {name.split("/")[1]: objects[name]["update_time"] for name in sorted(objects) if name.startswith("log/")}
    said = {host: f"last heard {time}" for host, time in heard.items()}
    for host, (number, why) in read_reports(cloud, options.state, objects).items():
        said[host] = f"ended with {number} {why}"
    for host in sorted(said):
        print(f"{host}: {said[host]}")
    return 0


def logs(options: Logs) -> int:
    """Print the log of a host -> 0."""
    cloud, objects, _ = _there(options)
    hosts = sorted({name.split("/")[1] for name in objects if name.startswith("log/")})
    if options.host not in ("", *hosts) or not hosts:
        raise UserError(f"--host {options.host or 'any'}: has printed nothing; there are {', '.join(hosts) or 'none'}")
    print("".join(news(cloud, options.state, options.host or hosts[0], objects, {})), end="")
    return 0


def stop(options: Run) -> int:
    """Have the run write a checkpoint and end, and wait for that -> 0. Raises UserError when it goes on."""
    cloud, _, settings = _there(options)
    _tell(cloud, f"{options.state}/stop", "stop")
    cloud.say("asked the run on all hosts for a checkpoint and its end")
    for _ in range(0, STOP_WITHIN, POLL):
        if any(name.startswith("ended/") for name in cloud.objects(options.state)):
            status(options)
            if "\nDELETE=()\n" in settings and cloud.look():
                cloud.say(f"{options.name} {options.costs}")
            return 0
        cloud.sleep(POLL)
    raise UserError(f"--name {options.name}: goes on after {STOP_WITHIN} s: stop again, or python -m tpu delete")


def delete(options: Run) -> int:
    """Delete the slice and its request; launchers that watch it end -> 0."""
    cloud, _, _ = _there(options)
    _tell(cloud, f"{options.state}/ended/delete", f"{STOPPED} deleted")
    there = cloud.look()
    remove(cloud)
    none = f"nothing of that name is in {cloud.where.zone} of {cloud.where.project}; nothing was deleted"
    cloud.say(f"{options.name} is deleted; what is in the bucket stays" if there else none)
    return 0
