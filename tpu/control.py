"""Look at a launched run, read its log, stop it, delete its slice."""

import dataclasses
import json
import tempfile
from pathlib import Path

from data_pipelines.errors import UserError
from tpu import gcloud
from tpu.gcloud import Gcloud, Slice
from tpu.launch import SETTINGS, state_folder
from tpu.watch import POLL, STOPPED, Log, read_reports, remove

STOP_WITHIN = 900  # seconds for the checkpoint


@dataclasses.dataclass(frozen=True)
class Run:
    """Of a run that `launch` began."""

    name: str
    """As given to launch."""
    bucket: str
    """As given to launch."""

    @property
    def state(self) -> str:
        return state_folder(self.bucket, self.name)


@dataclasses.dataclass(frozen=True)
class Logs(Run):
    """What the run printed on a host."""

    host: str = ""
    """One that status names; by default the first."""
    lines: int = 100
    """How many of the last lines; 0: all."""


def _there(options: Run) -> tuple[Gcloud, dict[str, dict]]:
    """The run's slice and its objects in the bucket; UserError when there is no run."""
    cloud = Gcloud(Slice(options.name, "", None, False), ".")
    objects = cloud.objects(options.state)
    if SETTINGS not in objects:
        raise UserError(f"--name {options.name}: launch has no run of that name in {options.bucket}")
    settings = cloud.call(gcloud.storage("cat", f"{options.state}/{SETTINGS}"))
    return Gcloud(Slice(**json.loads(settings.splitlines()[0].removeprefix("# "))), "."), objects


def status(options: Run) -> int:
    """Print the states of the slice, when each host wrote last, and how it ended -> 0."""
    cloud, objects = _there(options)
    for name, one in (cloud.look() or {options.name: gcloud.State("not there", "")}).items():
        print(f"{name}: {one.name} {one.more}".rstrip())
    reports = read_reports(cloud, options.state, objects)
    for host in sorted({name.split("/")[1] for name in objects if name.startswith(("log/", "ended/"))}):
        heard = [one["update_time"] for name, one in objects.items() if name.startswith(f"log/{host}/")]
        ended = f"ended with {reports[host].status}: {reports[host].why}" if host in reports else None
        print(f"{host}: {ended or f'last heard {max(heard)}'}")
    return 0


def logs(options: Logs) -> int:
    """Print the end of the log of a host -> 0."""
    cloud, objects = _there(options)
    hosts = sorted({name.split("/")[1] for name in objects if name.startswith("log/")})
    if options.host not in ("", *hosts) or not hosts:
        raise UserError(f"--host {options.host or 'any'}: has printed nothing; there are {', '.join(hosts) or 'none'}")
    lines = Log(cloud, options.state, options.host or hosts[0]).news(objects)
    print("".join(lines[-options.lines :]), end="")
    return 0


def _leave(cloud: Gcloud, text: str, to: str) -> None:
    """A word for the hosts and for who watches."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "word").write_text(f"{text}\n")
        cloud.call(gcloud.storage("cp", f"{folder}/word", to))


def stop(options: Run) -> int:
    """Have the run write a checkpoint and end, and wait for that -> 0. Raises UserError when it goes on."""
    cloud, _ = _there(options)
    _leave(cloud, "stop", f"{options.state}/stop")
    cloud.say("asked the run on all hosts for a checkpoint and its end")
    for _ in range(0, STOP_WITHIN, POLL):
        if reports := read_reports(cloud, options.state, cloud.objects(options.state)):
            for host, report in reports.items():
                print(f"{host}: ended with {report.status}: {report.why}")
            cloud.say(f"python -m tpu status says whether {options.name} is there, and costs")
            return 0
        cloud.sleep(POLL)
    raise UserError(f"--name {options.name}: goes on after {STOP_WITHIN} s: stop again, or python -m tpu delete")


def delete(options: Run) -> int:
    """Delete the slice and its request; launchers that watch it end -> 0."""
    cloud, _ = _there(options)
    _leave(cloud, f"{STOPPED} deleted", f"{options.state}/ended/delete")
    remove(cloud)
    cloud.say(f"{options.name} is deleted; what is in the bucket stays")
    return 0
