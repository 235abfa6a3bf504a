"""Several processes, one per host or GPU, as one program.

Who starts the processes tells them of each other: explicit options, JAX_COORDINATOR_ADDRESS with JAX_NUM_PROCESSES and
JAX_PROCESS_ID, Slurm, Open MPI, GKE or a Cloud TPU VM.
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
WAITING_SECONDS = 10  # until it is said that others are waited for
FAREWELL_SECONDS = 5  # for the other processes to hear why this one ends, which the first one's end would cut off
# JAX asks as often before it takes a machine for one that stands alone.
METADATA_TRIES, METADATA_PAUSE = 6, 0.5
GOOGLE = "0x1ae0"  # as a maker of PCI devices


def join(coordinator: str | None, processes: int | None, process: int | None) -> None:
    """Join the cluster that the arguments or the environment describe; nothing happens where there is none.

    To be called before JAX opens a backend.   coordinator: HOST:PORT of process 0.   UserError when some are missing.
    """
    given = {"coordinator": coordinator, "processes": processes, "process": process}
    missing = [f"--{name}" for name, value in given.items() if value is None]
    if missing and len(missing) < 3:
        raise UserError(
            f"several processes need --coordinator HOST:PORT, --processes N and --process I: "
            f"{' and '.join(missing)} missing"
        )
    if missing:
        found = explicit(os.environ)
        if found is None and not detected(os.environ, cloud_tpu_workers):
            return
        coordinator, processes, process = found or (None, None, None)
    if coordinator is not None and not re.fullmatch(r"\S+:\d{1,5}", coordinator):
        raise UserError(f"--coordinator {coordinator!r}: give HOST:PORT of process 0, like 10.0.0.2:7000")
    chatter.sort_out()
    # Its handler would take SIGTERM from `pretrain.training.signals`, and it forgets what comes before the first step.
    jax.config.update("jax_enable_preemption_service", False)
    waiting = threading.Timer(WAITING_SECONDS, _say_that_it_waits)
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
        raise kind(
            f"the processes did not find each other ({reason}): start the same command on every host, "
            "and let the hosts reach process 0's port"
        ) from None
    finally:
        waiting.cancel()
    _joined.set()


def _say_that_it_waits() -> None:
    print(
        f"waiting for the other processes of this run, {JOIN_SECONDS} seconds at most: start the same command on every "
        "host, and let the hosts reach process 0's port",
        file=sys.stderr,
        flush=True,
    )


def explicit(environment: Mapping[str, str]) -> tuple[str, int, int] | None:
    """(coordinator, processes, process) from JAX's own variables, None without them; UserError when they are broken."""
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    values = [environment.get(name) for name in names]
    if not all(values):
        return None
    try:
        return values[0], int(values[1]), int(values[2])
    except ValueError:
        raise UserError(f"{names[1]}={values[1]}, {names[2]}={values[2]}: give both a whole number") from None


def detected(environment: Mapping[str, str], cloud_tpu_workers: Callable[[], int]) -> bool:
    """Whether a launcher that `jax.distributed.initialize` knows has started several processes."""
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
    """Hosts of this machine's Cloud TPU slices, by its metadata server; 1 where there is neither TPU nor such a server.

    PassingError where there are both and the server does not say: as many hosts that train alone would be the worse.
    """
    if not has_tpus():
        return 1
    try:
        endpoints, settings = _metadata("worker-network-endpoints"), _metadata("tpu-env")
    except OSError as error:
        if isinstance(getattr(error, "reason", None), socket.gaierror) and error.reason.errno == socket.EAI_NONAME:
            return 1  # not in Google Cloud
        raise PassingError(
            f"how many hosts this TPU slice has is not known: the metadata server does not say ({error}); start the "
            "same command again, or give --coordinator, --processes and --process, or, on a single host, "
            "TPU_SKIP_MDS_QUERY=1"
        ) from None
    slices = re.search(r"MEGASCALE_NUM_SLICES: *'?(\d+)", settings)
    return len(endpoints.split(",")) * int(slices[1] if slices else 1)


def has_tpus() -> bool:
    """Whether this machine has chips of Google's, found without opening them."""
    vendors = map(Path.read_text, Path("/sys/bus/pci/devices").glob("*/vendor"))
    return bool(glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*")) and GOOGLE in map(str.strip, vendors)


def _metadata(attribute: str) -> str:
    """What the machine's metadata server says of it, '' where it has no such attribute. OSError where it fails."""
    server = os.environ.get("GCE_METADATA_IP", "metadata.google.internal")
    url = f"http://{server}/computeMetadata/v1/instance/attributes/{attribute}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    for number in range(METADATA_TRIES):
        time.sleep(METADATA_PAUSE if number else 0)
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                return answer.read().decode()
        except OSError as error:  # in a VM's first seconds an attribute may be missing, too
            last = error
    if getattr(last, "code", None) == 404:
        return ""
    raise last


def is_first() -> bool:
    """Whether this process writes what is written once."""
    return _here().process_id == 0


def number() -> int:
    """Which process of the run this is, from 0."""
    return _here().process_id or 0


def size() -> int:
    """Processes of the run."""
    return _here().num_processes or 1


def several() -> bool:
    """Whether this process has joined others, so that it can hear and be heard."""
    return _joined.is_set() and size() > 1


def gather(what: str, decide: Callable[[], Any]) -> list:
    """What decide(), a JSON value, gives in each process, by their numbers. All ask the same in the same order.

    Where it raises, all raise: that process its own error, the others a UserError which names the process.
    """
    if not several():
        return [decide()]
    store, number, me, failure = _here().client, next(_numbers), _here().process_id, None
    try:
        said = {"value": decide()}
    except Exception as error:
        failure, said = error, {"error": str(error) or type(error).__name__, "status": getattr(error, "status", None)}
    store.key_value_set(f"{_GATHERED}/{number}/{me}", json.dumps({"what": what, **said}))
    heard = [json.loads(_wait_for(f"{_GATHERED}/{number}/{other}")) for other in range(size())]
    if number:  # what everybody has read, since everybody is here
        store.key_value_delete(f"{_GATHERED}/{number - 1}/{me}")
    if failure is not None:
        raise failure
    for other, one in enumerate(heard):
        if one["what"] != what:
            raise RuntimeError(f"process {other} is at {one['what']!r}, process {me} at {what!r}")
        if "error" in one:
            kind = PassingError if one["status"] == PassingError.status else UserError
            raise kind(f"process {other}: {one['error']}")
    return [one["value"] for one in heard]


def agree(what: str, decide: Callable[[], Any]) -> Any:
    """decide(), a JSON value, where it gives the same in all processes; UserError where one fails or differs."""
    values = gather(what, decide)
    for other, value in enumerate(values):
        if value != values[0]:
            raise UserError(f"{what}: process {other} has {_difference(value, values[0])}; give all hosts the same")
    return values[0]


def from_first(what: str, decide: Callable[[], Any]) -> Any:
    """decide() of the first process, a JSON value, in all of them; where it raises there, all raise."""
    return gather(what, decide if is_first() else lambda: None)[0]


def _difference(theirs, firsts) -> str:
    if isinstance(theirs, dict) and isinstance(firsts, dict):
        names = [name for name in sorted(theirs | firsts) if theirs.get(name) != firsts.get(name)]
        return ", ".join(f"{name}={theirs.get(name)} where process 0 has {firsts.get(name)}" for name in names)
    return f"{theirs} where process 0 has {firsts}"


@contextlib.contextmanager
def ending_together() -> Iterator[None]:
    """An error that leaves this context ends this process at once, and the others hear of it by `notices`.

    JAX would wait at exit for the others, which wait for this process in a computation.
    """
    try:
        yield
    except (Exception, SystemExit) as error:  # rich exits where nobody reads what it prints
        if not several():
            raise
        if _tells_of_a_lost_process(error):
            time.sleep(FAREWELL_SECONDS / 2)  # for its own last words to arrive
            end_with_others()
            chatter.tell_of_loss()
            leave(PassingError.status)
        _say(f"error: {error}" if isinstance(error, UserError) else traceback.format_exc().rstrip())
        unread = "nobody reads what it prints" if isinstance(error, SystemExit) else ""
        status = error.status if isinstance(error, UserError) else 1
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # the first process, which holds the notices, is gone
            notify("ended", f"{status} {unread or str(error) or type(error).__name__}")
        leave(status)


def end_with_others() -> None:
    """End this process where another one has ended with an error, saying which and why."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # the first process, which holds the notices, is gone
        for process, said in notices("ended").items():
            if process != _here().process_id:
                status, _, reason = said.partition(" ")
                _say(f"error: process {process} ended, and this one with it: {reason}")
                leave(PassingError.status if int(status) == PassingError.status else UserError.status)


def _say(line: str) -> None:
    """To whoever reads it: where nobody does, because what started the processes was killed, they end all the same."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def _tells_of_a_lost_process(error: Exception) -> bool:
    """Whether what several processes compute or settle together broke off in the middle."""
    kinds = (jax.errors.JaxRuntimeError, ValueError)
    error = error.__cause__ if isinstance(error, TimeoutError) else error  # as Orbax calls all that ends its waiting
    said = isinstance(error, kinds) and any(name in str(error) for name in ("Gloo", "UNAVAILABLE"))
    return said or isinstance(error, _FirstLost)


def notify(kind: str, text: str) -> None:
    """Tell the other processes, which read it from `notices`."""
    _here().client.key_value_set(f"{_NOTICES}/{kind}/{_here().process_id}", text, allow_overwrite=True)


def notices(kind: str) -> dict[int, str]:
    """The latest notice of this kind from each process that gave one."""
    return {int(key.rsplit("/", 1)[1]): text for key, text in _here().client.key_value_dir_get(f"{_NOTICES}/{kind}")}


def leave(status: int) -> None:
    """End this process at once; the first one, which holds the notices, when the others have left or a while later."""
    with contextlib.suppress(OSError):  # as in `_say`
        Console().show_cursor()  # a line that shows progress has hidden it, and is not there to the end
        sys.stdout.flush()
        sys.stderr.flush()
    if several():
        with contextlib.suppress(Exception):  # without the first process there is nobody to tell
            notify("left", "")
            end = time.monotonic() + FAREWELL_SECONDS
            while is_first() and len(notices("left")) < size() and time.monotonic() < end:
                time.sleep(0.1)
    os._exit(status)


class _FirstLost(PassingError):
    """The first process, which holds what others wait for, is gone, whatever JAX says of it."""


def _wait_for(key: str) -> str:
    """The value of a key as soon as there is one; a process that died ends this one, see `join`."""
    while True:
        try:
            return _here().client.blocking_key_value_get(key, 10_000)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                reason = " ".join(str(error).split())[:200]
                raise _FirstLost(f"the first process cannot be reached ({reason})") from error


def _here():
    """This process's place in JAX's cluster: process_id, num_processes, client (the key-value store that all share).

    JAX has no public name for it; `jax.process_index()` would open the backend, which a TPU does in its own time.
    """
    from jax._src import distributed

    return distributed.global_state


_HOSTS = ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")  # GKE's
_ALONE = ("TPU_SKIP_MDS_QUERY", "COLAB_RELEASE_TAG")  # where no metadata server tells of others
_GATHERED, _NOTICES = "pretrain/gathered", "pretrain/notices"
_numbers = itertools.count()
_joined = threading.Event()
