"""Run several processes, one per host or GPU, as one program.

Processes learn of each other from explicit options, from JAX_COORDINATOR_ADDRESS with JAX_NUM_PROCESSES and
JAX_PROCESS_ID, or from their launcher: Slurm, Open MPI, GKE or a Cloud TPU VM.
"""

import contextlib
import glob
import itertools
import json
import os
import re
import socket
import sys
import threading
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from data_pipelines.errors import PassingError, UserError
from tpu import chatter
from tpu.local import HEARTBEAT_SECONDS

JOIN_SECONDS = 300
WAITING_SECONDS = 10  # before a message says that this process waits for others
TOGETHER = "start the same command on every host, and let the hosts reach process 0's port"
FAREWELL_SECONDS = 5  # for other processes to read why this one ends, before the end of process 0 cuts them off
# JAX tries as often before it decides that a machine is alone.
METADATA_TRIES, METADATA_PAUSE = 6, 0.5
GOOGLE = "0x1ae0"  # PCI vendor id


def join(coordinator: str | None, processes: int | None, process: int | None) -> None:
    """Join the cluster that the arguments or the environment describe, if any.
    Call this before JAX opens a backend.   coordinator: HOST:PORT of process 0.   UserError if only some are given."""
    settings = {"coordinator": coordinator, "processes": processes, "process": process}
    missing = [f"--{name}" for name, value in settings.items() if value is None]
    if missing and len(missing) < 3:
        needed = "--coordinator HOST:PORT, --processes N and --process I"
        raise UserError(f"several processes need {needed}: {' and '.join(missing)} missing")
    if missing:
        found = explicit(os.environ)
        if found is None and not detected(os.environ, cloud_tpu_workers):
            return
        coordinator, processes, process = found or (None, None, None)
    if coordinator is not None and not re.fullmatch(r"\S+:\d{1,5}", coordinator):
        raise UserError(f"--coordinator {coordinator!r}: give HOST:PORT of process 0, like 10.0.0.2:7000")
    chatter.sort_out()
    # JAX's handler would replace that of `pretrain.training.signals`, and misses a SIGTERM before the first step.
    jax.config.update("jax_enable_preemption_service", False)
    said = f"waiting up to {JOIN_SECONDS} seconds for the other processes of this run: {TOGETHER}"
    waiting = threading.Timer(WAITING_SECONDS, _say, [said])
    waiting.start()
    try:
        jax.distributed.initialize(
            coordinator,
            processes,
            process,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            initialization_timeout=JOIN_SECONDS,
        )
    except (ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        kind = UserError if isinstance(error, ValueError) else PassingError
        raise kind(f"the processes did not find each other ({reason}): {TOGETHER}") from None
    finally:
        waiting.cancel()
    _joined.set()


def explicit(environment: Mapping[str, str]) -> tuple[str, int, int] | None:
    """Return (coordinator, processes, process) from JAX's variables, None without them; UserError if not numbers."""
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    values = [environment.get(name) for name in names]
    if not all(values):
        return None
    try:
        return values[0], int(values[1]), int(values[2])
    except ValueError:
        raise UserError(f"{names[1]}={values[1]}, {names[2]}={values[2]}: both must be whole numbers") from None


def detected(environment: Mapping[str, str], cloud_tpu_workers: Callable[[], int]) -> bool:
    """Return whether a launcher that `jax.distributed.initialize` knows has started several processes."""
    size = lambda name: int(environment.get(name, "1") or 1)
    if size("SLURM_STEP_NUM_TASKS") > 1 or size("OMPI_COMM_WORLD_SIZE") > 1:
        return True
    hosts = next((environment[name] for name in _HOSTS if name in environment), None)
    if "," in (hosts or "") or environment.get("MEGASCALE_COORDINATOR_ADDRESS"):
        return True  # GKE
    if hosts is not None or any(name in environment for name in _ALONE) or environment.get("JAX_PLATFORMS") == "cpu":
        return False
    return cloud_tpu_workers() > 1


def cloud_tpu_workers() -> int:
    """Return the hosts of this machine's Cloud TPU slices, by its metadata server; 1 without a TPU or a server.
    Raises PassingError if there are both and the server fails: it would be worse if each host trained alone."""
    if not has_tpus():
        return 1
    try:
        endpoints, settings = _metadata("worker-network-endpoints"), _metadata("tpu-env")
    except OSError as error:
        if isinstance(getattr(error, "reason", None), socket.gaierror) and error.reason.errno == socket.EAI_NONAME:
            return 1  # not in Google Cloud
        raise PassingError(
            f"the metadata server does not say how many hosts this TPU slice has ({error}); start again, or give "
            "--coordinator, --processes and --process, or, on a single host, set TPU_SKIP_MDS_QUERY=1"
        ) from None
    slices = re.search(r"MEGASCALE_NUM_SLICES: *'?(\d+)", settings)
    return len(endpoints.split(",")) * int(slices[1] if slices else 1)


def has_tpus() -> bool:
    """Return whether this machine has TPU chips, without opening them."""
    vendors = map(Path.read_text, Path("/sys/bus/pci/devices").glob("*/vendor"))
    return bool(glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*")) and GOOGLE in map(str.strip, vendors)


def _metadata(attribute: str) -> str:
    """Return an attribute from the machine's metadata server, '' if it does not exist; OSError if the server fails."""
    server = os.environ.get("GCE_METADATA_IP", "metadata.google.internal")
    url = f"http://{server}/computeMetadata/v1/instance/attributes/{attribute}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    for number in range(METADATA_TRIES):
        time.sleep(METADATA_PAUSE if number else 0)
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                return answer.read().decode()
        except OSError as error:  # an attribute may also be missing in a VM's first seconds
            last = error
    if getattr(last, "code", None) == 404:
        return ""
    raise last


def is_first() -> bool:
    """Return whether this is the process that writes the run's files."""
    return _here().process_id == 0


def number() -> int:
    """Return the number of this process in the run, from 0."""
    return _here().process_id or 0


def size() -> int:
    """Return the number of processes in the run."""
    return _here().num_processes or 1


def several() -> bool:
    """Return whether this process has joined others and can exchange messages with them."""
    return _joined.is_set() and size() > 1


def gather(what: str, decide: Callable[[], Any]) -> list:
    """Return the results of decide(), JSON values, of all processes, in order of their numbers. All processes must call
    this with the same `what`, in the same order.
    If decide() raises in one process, all raise: that process its own error, the others a UserError that names it."""
    if not several():
        return [decide()]
    store, number, me, failure = _here().client, next(_numbers), _here().process_id, None
    try:
        said = {"value": decide()}
    except Exception as error:
        failure, said = error, {"error": str(error) or type(error).__name__, "status": getattr(error, "status", None)}
    store.key_value_set(f"{_GATHERED}/{number}/{me}", json.dumps({"what": what, **said}))
    heard = [json.loads(_wait_for(f"{_GATHERED}/{number}/{other}")) for other in range(size())]
    if number:  # all processes have read the previous value, because all are here
        store.key_value_delete(f"{_GATHERED}/{number - 1}/{me}")
    if failure is not None:
        raise failure
    for other, message in enumerate(heard):
        if message["what"] != what:
            raise RuntimeError(f"process {other} is at {message['what']!r}, process {me} at {what!r}")
        if "error" in message:
            kind = PassingError if message["status"] == PassingError.status else UserError
            raise kind(f"process {other}: {message['error']}")
    return [message["value"] for message in heard]


def agree(what: str, decide: Callable[[], Any]) -> Any:
    """Return decide(), a JSON value, which must be the same in all processes; UserError if one fails or differs."""
    values = gather(what, decide)
    for other, value in enumerate(values):
        if value != values[0]:
            raise UserError(f"{what}: process {other} has {_difference(value, values[0])}; give all hosts the same")
    return values[0]


def from_first(what: str, decide: Callable[[], Any]) -> Any:
    """Return decide() of the first process, a JSON value, in all processes; if it raises there, all raise."""
    return gather(what, decide if is_first() else lambda: None)[0]


def _difference(theirs, firsts) -> str:
    if isinstance(theirs, dict) and isinstance(firsts, dict):
        names = [name for name in sorted(theirs | firsts) if theirs.get(name) != firsts.get(name)]
        return ", ".join(f"{name}={theirs.get(name)} where process 0 has {firsts.get(name)}" for name in names)
    return f"{theirs} where process 0 has {firsts}"


@contextlib.contextmanager
def ending_together() -> Iterator[None]:
    """On an error in this context, tell the other processes by `notify` and end this process at once.
    Otherwise JAX would wait at exit for the others, which wait for this process in a computation."""
    try:
        yield
    except (Exception, SystemExit) as error:  # rich exits if its output pipe is closed
        if not several():
            raise
        if _tells_of_a_lost_process(error):
            time.sleep(FAREWELL_SECONDS / 2)  # for that process's own message to arrive
            end_with_others()
            chatter.tell_of_loss()
            leave(PassingError.status)
        _say(f"error: {error}" if isinstance(error, UserError) else traceback.format_exc().rstrip())
        unread = "its output is no longer read" if isinstance(error, SystemExit) else ""
        status = error.status if isinstance(error, UserError) else 1
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # if process 0, which holds the notices, is gone
            notify("ended", f"{status} {unread or str(error) or type(error).__name__}")
        leave(status)


def end_with_others() -> None:
    """End this process if another one has ended with an error, and print which one and why."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # if process 0, which holds the notices, is gone
        for process, said in notices("ended").items():
            if process != _here().process_id:
                status, _, reason = said.partition(" ")
                _say(f"error: process {process} ended, and this one with it: {reason}")
                leave(PassingError.status if int(status) == PassingError.status else UserError.status)


def _say(line: str) -> None:
    """Print to stderr; a closed pipe, because the program that started the processes was killed, is ignored."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def _tells_of_a_lost_process(error: Exception) -> bool:
    """Return whether an error means that a computation or agreement between processes broke off."""
    kinds = (jax.errors.JaxRuntimeError, ValueError)
    if isinstance(error, TimeoutError):  # Orbax raises it for any error while it waits
        error = error.__cause__
    said = isinstance(error, kinds) and any(name in str(error) for name in ("Gloo", "UNAVAILABLE"))
    return said or isinstance(error, _FirstLost)


def notify(kind: str, text: str) -> None:
    """Leave a notice for the other processes, which read it by `notices`."""
    _here().client.key_value_set(f"{_NOTICES}/{kind}/{_here().process_id}", text, allow_overwrite=True)


def notices(kind: str) -> dict[int, str]:
    """Return the latest notice of this kind from each process that left one."""
    return {int(key.rsplit("/", 1)[1]): text for key, text in _here().client.key_value_dir_get(f"{_NOTICES}/{kind}")}


def leave(status: int) -> None:
    """End this process at once; process 0, which holds the notices, first waits a while for the others to leave."""
    with contextlib.suppress(OSError):  # as in `_say`
        Console().show_cursor()  # a progress line has hidden it and does not get to restore it
        sys.stdout.flush()
        sys.stderr.flush()
    if several():
        with contextlib.suppress(Exception):  # if process 0 is gone, notices are, too
            notify("left", "")
            end = time.monotonic() + FAREWELL_SECONDS
            while is_first() and len(notices("left")) < size() and time.monotonic() < end:
                time.sleep(0.1)
    os._exit(status)


class _FirstLost(PassingError):
    """Process 0, which holds the key-value store, is gone."""


def _wait_for(key: str) -> str:
    """Wait for the value of a key; if a process dies, JAX's heartbeat ends this one, see `join`."""
    while True:
        try:
            return _here().client.blocking_key_value_get(key, 10_000)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                reason = " ".join(str(error).split())[:200]
                raise _FirstLost(f"the first process cannot be reached ({reason})") from error


def _here():
    """Return this process's place in JAX's cluster: process_id, num_processes, client (the shared key-value store).
    JAX has no public name for it, and `jax.process_index()` would open the backend, which takes long on a TPU."""
    from jax._src import distributed

    return distributed.global_state


_HOSTS = ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")  # set by GKE
_ALONE = ("TPU_SKIP_MDS_QUERY", "COLAB_RELEASE_TAG")  # set where no metadata server knows of other hosts
_GATHERED, _NOTICES = "pretrain/gathered", "pretrain/notices"
_numbers = itertools.count()
_joined = threading.Event()
