"""A TPU slice in Google Cloud: make it, wait for it, reach its workers, delete it.

A slice is its name, zone and project; nothing about it is kept on this side. A queued resource and the slice that it
brings have the same name.
"""

import json
import time
from collections.abc import Callable
from typing import NamedTuple

from data_pipelines.errors import UserError
from tpu.accelerators import Accelerator
from tpu.gcloud import GcloudError, call

# States of a VM or of a queued resource
ENDED = {"PREEMPTED", "TERMINATED", "SUSPENDED", "FAILED"}
ENDING = {"DELETING", "SUSPENDING"}
PASSING = {"CREATING", "STARTING", "RESTARTING", "REIMAGING", "REPAIRING", "STOPPING", "HIDING", "UNHIDING"}
POLL = 20  # seconds between two looks
SSH_DELAYS = (5, 10, 20, 40, 80)  # seconds between tries, on top of the minute for which gcloud itself tries
ALL = "all"


class Machine(NamedTuple):
    """Where a slice is."""

    name: str
    zone: str
    project: str | None = None


class Wanted(NamedTuple):
    """What to create."""

    accelerator: Accelerator
    runtime: str
    """The image of the VMs."""
    spot: bool
    queued: bool


def _place(machine: Machine) -> list[str]:
    return [f"--zone={machine.zone}", *([f"--project={machine.project}"] if machine.project else [])]


def _vm(machine: Machine, verb: str, *flags: str) -> list[str]:
    return ["gcloud", "compute", "tpus", "tpu-vm", verb, machine.name, *_place(machine), *flags, "--quiet"]


def _queue(machine: Machine, verb: str, *flags: str) -> list[str]:
    return ["gcloud", "compute", "tpus", "queued-resources", verb, machine.name, *_place(machine), *flags, "--quiet"]


def describe_command(machine: Machine, queued: bool = False) -> list[str]:
    return (_queue if queued else _vm)(machine, "describe", "--format=json")


def create_command(machine: Machine, wanted: Wanted) -> list[str]:
    kind = f"--accelerator-type={wanted.accelerator.name}"
    spot = ["--spot"] if wanted.spot else []
    if wanted.queued:
        image = f"--runtime-version={wanted.runtime}"
        return _queue(machine, "create", f"--node-id={machine.name}", kind, image, *spot)
    return _vm(machine, "create", kind, f"--version={wanted.runtime}", *spot)


def delete_command(machine: Machine, queued: bool) -> list[str]:
    return _queue(machine, "delete", "--force") if queued else _vm(machine, "delete")


def ssh_command(machine: Machine, worker: int | str, remote: str) -> list[str]:
    """Run a shell command on a worker, or on 'all'. Keep-alives, because a preempted VM closes no connection."""
    alive = ["--ssh-flag=-oServerAliveInterval=15", "--ssh-flag=-oServerAliveCountMax=4"]
    return _vm(machine, "ssh", f"--worker={worker}", *alive, f"--command={remote}")


def copy_command(machine: Machine, file: str, worker: int | str = ALL) -> list[str]:
    """Copy a file into the home directory on a worker."""
    place = [*_place(machine), f"--worker={worker}", "--quiet"]
    return ["gcloud", "compute", "tpus", "tpu-vm", "scp", file, f"{machine.name}:", *place]


def look(machine: Machine) -> dict | None:
    """What Google Cloud says of the slice: 'state', 'acceleratorType', 'health' ...; None when there is none."""
    return _described(machine, describe_command(machine))


def queue_state(machine: Machine) -> dict | None:
    """The 'state' of the queued resource: a dictionary with 'state'; None when there is none."""
    found = _described(machine, describe_command(machine, queued=True))
    return found and found["state"]


def _described(machine: Machine, command: list[str]) -> dict | None:
    try:
        return json.loads(call(command, machine.name, machine.zone))
    except GcloudError as error:
        if error.kind == "missing":
            return None
        raise


def is_gone(machine: Machine) -> bool:
    """Whether the slice does not exist, or was preempted or ended."""
    found = look(machine)
    return found is None or found["state"] in ENDED


def is_deleted(machine: Machine) -> bool:
    """Whether nothing is left, which a preemption does not do: it leaves the VM or its queued resource behind."""
    return look(machine) is None and queue_state(machine) is None


def delete(machine: Machine) -> str:
    """Delete the slice and its queued resource -> which of the two was deleted; UserError when there is neither."""
    queued = queue_state(machine) is not None
    call(delete_command(machine, queued), machine.name, machine.zone)
    return "queued resource and VM" if queued else "VM"


def ensure_ready(machine: Machine, wanted: Wanted, say: Callable[[str], None]) -> bool:
    """Wait until the slice is READY, creating it where needed, in place of one that was preempted -> whether it is new.

    Raises GcloudError: kind 'gone' when it ends while we wait, 'capacity', 'quota' and so on when it cannot be had.
    """
    found, queue = _without_remains(machine, wanted.queued, say)
    kind = wanted.accelerator.name
    if found is not None and (other := found.get("acceleratorType", kind)) != kind:
        cure = "use another --name, or python -m tpu delete first"
        raise UserError(f"--type {kind}: {machine.name} exists and is a {other}: {cure}")
    new = found is None and queue is None
    if new:
        one = wanted.accelerator
        shape = f" ({one.topology})" if one.topology else ""
        say(f"creating {machine.name}: {one.name}, chips {one.chips}{shape}, hosts {one.hosts}, in {machine.zone}")
        say(f"it costs until you run python -m tpu delete --name {machine.name} --zone {machine.zone}")
        call(create_command(machine, wanted), machine.name, machine.zone)
    _wait(machine, wanted.queued and found is None, say)
    return new


def _without_remains(machine: Machine, queued: bool, say: Callable[[str], None]) -> tuple[dict | None, dict | None]:
    """The slice and its queued resource, None each when there is none, once nothing that has ended is in the way."""
    while True:
        found = look(machine)
        queue = queue_state(machine) if queued else None
        states = {one["state"] for one in (found, queue) if one is not None}
        if states & ENDING:
            say(f"{machine.name} is {' and '.join(sorted(states & ENDING))}: waiting for its end")
            time.sleep(POLL)
        elif states & ENDED:
            say(f"{machine.name} is {' and '.join(sorted(states & ENDED))}: deleting it")
            delete(machine)
        else:
            return found, queue


def _wait(machine: Machine, queued: bool, say: Callable[[str], None]) -> None:
    said = None
    while True:
        state = _queue_step(machine) if queued else None
        if state is None:
            found = look(machine)
            state = "missing" if found is None else found["state"]
            if state == "READY":
                return
            if state == "missing" or state in ENDED | ENDING:
                raise GcloudError("gone", f"--name {machine.name}: the VM is {state}")
            if state not in PASSING:
                raise UserError(f"--name {machine.name}: the VM is {state}: python -m tpu delete, then launch again")
        if state != said:
            say(f"{machine.name} is {state}")
            said = state
        time.sleep(POLL)


def _queue_step(machine: Machine) -> str | None:
    """The state of the queued resource while it waits, None once it is ACTIVE. Raises GcloudError when it ended."""
    queue = queue_state(machine)
    state = "missing" if queue is None else queue["state"]
    if state == "FAILED":
        reason = queue.get("failedData", {}).get("error", {}).get("message", "no reason given")
        raise UserError(f"--queued: the request failed ({reason}): python -m tpu delete, then launch again")
    if state == "missing" or state in ENDED | ENDING:
        raise GcloudError("gone", f"--name {machine.name}: the queued resource is {state}")
    return None if state == "ACTIVE" else state


def patiently(machine: Machine, command: list[str], say: Callable[[str], None], show=None) -> str:
    """`call` an ssh or scp command again while ssh does not get through, as in a VM's first minute.

    Raises GcloudError: kind 'gone' when there is no VM any more.
    """
    for delay in SSH_DELAYS:
        try:
            return call(command, machine.name, machine.zone, show)
        except GcloudError as error:
            if error.kind == "missing" or (error.kind == "ssh" and is_gone(machine)):
                raise GcloudError("gone", f"--name {machine.name}: the VM is gone") from None
            if error.kind != "ssh":
                raise
            say(f"ssh to {machine.name} does not get through: again in {delay} s")
            time.sleep(delay)
    return call(command, machine.name, machine.zone, show)
