"""Several processes, one per host or GPU, as one program.

Who starts the processes tells them of each other: explicit options, JAX_COORDINATOR_ADDRESS with JAX_NUM_PROCESSES and
JAX_PROCESS_ID, Slurm, Open MPI, GKE or a Cloud TPU VM.
"""

import glob
import os
import urllib.request
from collections.abc import Callable, Mapping

import jax
from jax.experimental import multihost_utils

from data_pipelines.errors import UserError

HEARTBEAT_SECONDS = 30  # after so long without a sign of life, the other processes end (JAX's default: 100)
JOIN_SECONDS = 300
WORKERS_URL = "http://metadata.google.internal/computeMetadata/v1/instance/attributes/worker-network-endpoints"


def join(coordinator: str | None, processes: int | None, process: int | None) -> None:
    """Join the cluster that the arguments or the environment describe; nothing happens where there is none.

    To be called before JAX opens a backend.   coordinator: HOST:PORT of process 0.   UserError when some are missing.
    """
    given = {"coordinator": coordinator, "processes": processes, "process": process}
    missing = [f"--{name}" for name, value in given.items() if value is None]
    if missing and len(missing) < 3:
        raise UserError(f"several processes need --coordinator HOST:PORT, --processes N and --process I: "
                        f"{' and '.join(missing)} missing")  # fmt: skip
    if missing:
        found = explicit(os.environ)
        if found is None and not detected(os.environ, _cloud_tpu_workers):
            return
        coordinator, processes, process = found or (None, None, None)
    try:
        jax.distributed.initialize(
            coordinator, processes, process,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS, initialization_timeout=JOIN_SECONDS,
        )  # fmt: skip
    except (ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"the processes did not find each other ({reason}): start the same command on every host, "
            "and let the hosts reach process 0's port"
        ) from None


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
    if "," in environment.get("TPU_WORKER_HOSTNAMES", "") or environment.get("MEGASCALE_COORDINATOR_ADDRESS"):
        return True  # GKE
    return cloud_tpu_workers() > 1


def _cloud_tpu_workers() -> int:
    """Hosts of this Cloud TPU slice, by its metadata server; 1 elsewhere."""
    if os.environ.get("JAX_PLATFORMS") == "cpu" or not (glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*")):
        return 1
    request = urllib.request.Request(WORKERS_URL, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=2) as answer:
            return len(answer.read().decode().split(","))
    except OSError:
        return 1


def is_first() -> bool:
    """Whether this process writes what is written once."""
    return jax.process_index() == 0


def barrier(name: str) -> None:
    """Return when all processes are here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def preempted(step: int) -> bool:
    """Whether all processes stop after this step, because one of them got SIGTERM; to be asked at every step."""
    return multihost_utils.reached_preemption_sync_point(step)
