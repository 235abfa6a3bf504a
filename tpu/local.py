"""A real cluster on one machine: several processes, each with simulated CPU devices, connected over loopback."""

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from data_pipelines.errors import UserError

# Without a heartbeat for this long, the other processes end (JAX's default: 100). Tests set it lower.
HEARTBEAT_SECONDS = int(os.environ.get("PRETRAIN_HEARTBEAT_SECONDS", 30))
GRACE_SECONDS = HEARTBEAT_SECONDS + 20  # for the others to notice that a process is gone, before they are killed


@dataclasses.dataclass(frozen=True)
class Local:
    """Run a command as a cluster on this machine: local --processes 2 --devices 4 -- python -m pretrain run ..."""

    processes: int = 2
    """Number of processes, like the hosts of a slice."""
    devices: int = 4
    """Number of simulated CPU devices in each process."""

    def __post_init__(self):
        for field in ("processes", "devices"):
            if getattr(self, field) < 1:
                raise UserError(f"--{field} {getattr(self, field)}: must be at least 1")


def local(options: Local, command: Sequence[str]) -> int:
    """Run the command in every process -> the exit status that all processes have, else 1.
    Each line of output begins with the number of its process. SIGTERM and SIGINT are passed on."""
    if not command:
        raise UserError("local: give the command after --, as in `-- python -m pretrain run bert-tiny ...`")
    port, asked = _reserved_port(), []
    address = f"localhost:{port.getsockname()[1]}"
    # Before the first process starts, so that an early signal reaches all of them.
    old = {number: signal.signal(number, lambda *_: asked.append("stop")) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        processes = [_start(options, command, address, index) for index in range(options.processes)]
        readers = [threading.Thread(target=_copy_lines, args=(i, p)) for i, p in enumerate(processes)]
        for reader in readers:
            reader.start()
        statuses = _wait(processes, asked)
    finally:
        port.close()
        for number, handler in old.items():
            signal.signal(number, handler)
    for reader in readers:
        reader.join()
    return statuses[0] if len(set(statuses)) == 1 and statuses[0] >= 0 else 1


def _reserved_port() -> socket.socket:
    """Reserve a free port until process 0 has loaded JAX, whose server may share it."""
    port = socket.socket()
    port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    port.bind(("localhost", 0))
    return port


def _start(options: Local, command: Sequence[str], address: str, index: int) -> subprocess.Popen:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={options.devices}"
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags.strip(),
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(options.processes),
        "JAX_PROCESS_ID": str(index),
        "PYTHONUNBUFFERED": "1",
    }
    # In its own session, so that the terminal's Ctrl-C reaches it once, through this program.
    try:
        return subprocess.Popen(
            command,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise UserError(f"local: {command[0]} cannot be started ({error.strerror}); give a command after --") from None


def _copy_lines(index: int, process: subprocess.Popen) -> None:
    for line in process.stdout:
        print(f"[{index}] {line}", end="", flush=True)


def _wait(processes: list[subprocess.Popen], asked: list[str]) -> list[int]:
    """Wait for the exit statuses, negative for a signal. If a process fails, the others are killed after a while.
    asked: has an entry for each signal to pass on."""
    deadline = None
    while True:
        statuses = [process.poll() for process in processes]
        failed = [index for index, status in enumerate(statuses) if status not in (None, 0, 75)]
        # Of processes that failed together, name the killed one before those that lost it.
        failed.sort(key=lambda index: statuses[index] > 0 or statuses[index] == -signal.SIGABRT)
        if failed and deadline is None:
            deadline = time.monotonic() + GRACE_SECONDS
            if statuses[failed[0]] < 0 or len(set(statuses) - {0, 75}) > 1:
                print(_lost(failed[0], statuses[failed[0]], None in statuses), file=sys.stderr, flush=True)
        if None not in statuses:
            return statuses
        while asked:
            asked.pop()
            for process in processes:
                process.terminate()
        if deadline is not None and time.monotonic() > deadline:
            for process in processes:
                process.kill()
        time.sleep(0.1)


def _lost(index: int, status: int, others: bool) -> str:
    """Return the message about the first process that failed.   others: whether some still run."""
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    said = f"process {index} {how}"
    if others:
        said += f": others cannot go on without it and end within {GRACE_SECONDS} seconds"
    if status == 2:  # its own message says how to fix it
        return said
    return f"{said}. Start the same command again: the run goes on from its last checkpoint"
