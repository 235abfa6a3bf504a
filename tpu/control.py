"""Look at a launched run, read its log, stop it, delete its slice."""

import dataclasses

from data_pipelines.errors import UserError
from tpu import machine as cloud
from tpu.launch import REPORT, WORKER, named_reports, say, show_commands
from tpu.machine import ALL, Machine, delete_command, describe_command, look, patiently, queue_state, ssh_command

STOP_WITHIN = 600  # seconds for the checkpoint


@dataclasses.dataclass(frozen=True)
class Slice:
    """Of a slice that `launch` made."""

    name: str
    """As given to launch."""
    zone: str
    """As given to launch."""
    project: str | None = None
    """Google Cloud project; by default gcloud's."""
    dry_run: bool = False
    """Print every command and run none."""

    @property
    def machine(self) -> Machine:
        return Machine(self.name, self.zone, self.project)


@dataclasses.dataclass(frozen=True)
class Logs(Slice):
    """What the run printed on a worker."""

    worker: int = 0
    """Which."""
    lines: int = 100
    """How many of the last lines."""
    follow: bool = False
    """Stay, and show what comes."""


def status(options: Slice) -> int:
    """Print the states of the queued resource, of the slice, and of the run on each worker -> 0."""
    machine = options.machine
    if options.dry_run:
        show_commands(
            ("the slice", describe_command(machine)),
            ("its place in line", describe_command(machine, queued=True)),
            ("what each worker does", ssh_command(machine, ALL, REPORT)),
        )
        return 0
    found, queue = look(machine), queue_state(machine)
    if found is None and queue is None:
        raise UserError(f"--name {machine.name}: nothing of that name in --zone {machine.zone}")
    if queue is not None:
        print(f"queued resource: {queue['state']}")
    if found is not None:
        print(f"VM: {found['state']} {found.get('acceleratorType', '')} {found.get('health', '')}".rstrip())
        if found["state"] == "READY":
            for worker, report in named_reports(machine):
                print(f"{worker}: {report}")
    return 0


def logs(options: Logs) -> int:
    """Print the end of the log on a worker -> 0."""
    follow = "-F " if options.follow else ""
    command = ssh_command(options.machine, options.worker, f"tail -n {options.lines} {follow}run/log.txt")
    if options.dry_run:
        show_commands((f"the log on worker {options.worker}", command))
        return 0
    patiently(options.machine, command, say, show=lambda line: print(line, end="", flush=True))
    return 0


def stop(options: Slice) -> int:
    """SIGTERM to the run on all workers, and wait for its end -> 0. Raises UserError when it goes on."""
    machine = options.machine
    command = ssh_command(machine, ALL, f"{WORKER} stop {STOP_WITHIN}")
    if options.dry_run:
        show_commands(("the run writes a checkpoint and ends", command))
        return 0
    say("asking the run on all workers for a checkpoint and its end")
    printed = patiently(machine, command, say)
    print(printed, end="")
    if ": running" in printed:
        raise UserError(f"--name {machine.name}: still running after {STOP_WITHIN} s: stop again, or delete")
    say(f"{machine.name} still costs: python -m tpu delete --name {machine.name} --zone {machine.zone}")
    return 0


def delete(options: Slice) -> int:
    """Delete the slice, and the queued resource that brought it -> 0."""
    machine = options.machine
    if options.dry_run:
        show_commands(
            ("whether a queued resource brought it", describe_command(machine, queued=True)),
            ("if so", delete_command(machine, queued=True)),
            ("if not", delete_command(machine, queued=False)),
        )
        return 0
    say(f"deleted: {cloud.delete(machine)} {machine.name}")
    return 0
