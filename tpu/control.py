"""The commands status, logs, stop and delete for a launched run."""

import dataclasses
import tempfile
from pathlib import Path

from data_pipelines.errors import UserError
from tpu.gcloud import Gcloud, Slice
from tpu.launch import SETTINGS, Run
from tpu.watch import POLL, STOPPED, news, read_reports, remove

STOP_WITHIN = 900  # seconds to wait for the checkpoint and the end of the run


@dataclasses.dataclass(frozen=True)
class Logs(Run):
    """Print the log of a host."""

    host: str = ""
    """Host as shown by status; by default the first one."""


def _there(options: Run) -> tuple[Gcloud, dict[str, dict], str]:
    """Return the run's slice, the objects in its folder and its settings. Raises UserError if there is no such run."""
    cloud = Gcloud(Slice(options.name, options.bucket.rstrip("/")), ".")
    objects = cloud.objects()
    if SETTINGS not in objects:
        raise UserError(f"--name {options.name}: launch has no run of that name in {options.bucket}")
    settings = cloud.read([SETTINGS]).decode()
    cloud.settle(cloud.where.as_in(settings))  # older settings have no project: gcloud's default is used
    return cloud, objects, settings


def _tell(cloud: Gcloud, name: str, line: str) -> None:
    """Write an object that hosts and watching launchers read."""
    with tempfile.NamedTemporaryFile("w") as file:
        Path(file.name).write_text(f"{line}\n")
        cloud.storage("cp", file.name, f"{cloud.where.state}/{name}")


def status(options: Run) -> int:
    """Print the states of the slice, and for each host when it last wrote or how it ended -> 0."""
    cloud, objects, _ = _there(options)
    for name, (state, more) in (cloud.look() or {options.name: ("not there", "")}).items():
        print(f"{name}: {state} {more}".rstrip())
    files = sorted(name for name in objects if name.startswith("log/"))
    said = {name.split("/")[1]: f"last heard {objects[name]['update_time']}" for name in files}
    said |= {host: f"ended with {number} {why}" for host, (number, why) in read_reports(cloud, objects).items()}
    for host in sorted(said):
        print(f"{host}: {said[host]}")
    return 0


def logs(options: Logs) -> int:
    """Print the log of a host -> 0."""
    cloud, objects, _ = _there(options)
    hosts = sorted({name.split("/")[1] for name in objects if name.startswith("log/")})
    if options.host not in ("", *hosts) or not hosts:
        have = ", ".join(hosts) or "none"
        raise UserError(f"--host {options.host or 'any'}: printed nothing yet; hosts with a log: {have}")
    print("".join(news(cloud, objects, {}, options.host or hosts[0])), end="")
    return 0


def stop(options: Run) -> int:
    """Ask the run to write a checkpoint and end, and wait for that -> 0. Raises UserError if it does not end."""
    cloud, _, settings = _there(options)
    _tell(cloud, "stop", "stop")
    cloud.say("asked the run on all hosts to write a checkpoint and end")
    for _ in range(0, STOP_WITHIN, POLL):
        if any(name.startswith("ended/") for name in cloud.objects()):
            status(options)
            if "\nDELETE=()\n" in settings and cloud.look():
                cloud.say(f"{options.name} {cloud.where.costs}")
            return 0
        cloud.sleep(POLL)
    cure = "see python -m tpu status, then stop again, or python -m tpu delete"
    raise UserError(f"--name {options.name}: has not ended in {STOP_WITHIN} s: {cure}")


def delete(options: Run) -> int:
    """Delete the slice and its request -> 0; launchers that watch it end."""
    cloud, _, _ = _there(options)
    _tell(cloud, "ended/delete", f"{STOPPED} deleted")
    there = cloud.look()
    remove(cloud)
    none = f"no slice of that name in {cloud.where.zone} of {cloud.where.project}; nothing was deleted"
    cloud.say(f"{options.name} is deleted; what is in the bucket stays" if there else none)
    return 0
