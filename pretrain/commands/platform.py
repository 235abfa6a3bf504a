"""Settings of the whole process, to be applied before JAX opens its backend; those of a program are in `tpu/xla.py`."""

import contextlib
import ctypes
import glob
import os
import sys
import time
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path

from data_pipelines.cloud import in_cloud, place

# In float32 on AVX-512, Eigen's products run at 95 to 107 GFLOP/s a core, YNNPACK's at 73 to 98.
# The value takes single products away from YNNPACK and leaves it the reductions, which it vectorises.
CPU_FLAGS = {"--xla_cpu_experimental_ynn_fusion_type": "-individual_dot"}

TPU_FILES = ("/dev/accel*", "/dev/vfio/[0-9]*")
# NVIDIA's GPUs (dxg: those of Windows under WSL), AMD's
DEVICE_FILES = (*TPU_FILES, "/dev/nvidia[0-9]*", "/dev/dxg", "/dev/kfd")
GPU_PLUGINS = {"cuda": ("jax_cuda12_plugin", "jax_cuda13_plugin"), "rocm": ("jax_rocm60_plugin", "jax_rocm7_plugin")}

KEPT_SECONDS = 90 * 24 * 3600  # of a compiled program since it was read

_ARENA_MAX, _MMAP_MAX, _TRIM_THRESHOLD = -8, -4, -1  # mallopt's parameters in glibc's malloc.h


def accelerators() -> list[str]:
    """Device files of TPUs and GPUs on this machine, found without opening any, unless JAX_PLATFORMS says cpu."""
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return []
    return [path for pattern in DEVICE_FILES for path in glob.glob(pattern)]


def may_be_one_of_several() -> bool:
    """Whether something tells of other processes: a launcher's variables, or hardware that comes in slices."""
    launchers = ("JAX_COORDINATOR_ADDRESS", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "TPU_WORKER_HOSTNAMES")
    return bool(accelerators()) or any(name in os.environ for name in launchers)


def prepare() -> None:
    """Make this process ready for the machine that it runs on.

    JAX itself chooses among TPUs, or GPUs where there is no libtpu; without a TPU that is there to plan with, and JAX
    is kept from it: it would print errors.
    """
    found = accelerators()
    if not os.environ.get("JAX_PLATFORMS"):  # '' means to JAX that nobody has chosen
        if not found:
            os.environ["JAX_PLATFORMS"] = "cpu"
        elif not any(fnmatch(path, pattern) for path in found for pattern in TPU_FILES) and find_spec("libtpu"):
            gpus = [name for name, plugins in GPU_PLUGINS.items() if any(map(find_spec, plugins))]
            os.environ["JAX_PLATFORMS"] = ",".join([*gpus, "cpu"])
    if found:
        keep_compiled()
    else:
        prepare_cpu()


def keep_compiled() -> None:
    """Have JAX keep compiled programs for the next start, unless JAX_COMPILATION_CACHE_DIR says where.

    A large model compiles for minutes, and a preempted run starts often. Not on CPUs: programs compile in seconds
    there, and one that another machine compiled may not run.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(_cache())
    # What no start has read for long goes: JAX's own limit fails for good after a kill at the wrong time, because it
    # wants two files of each program.
    for file in _cache().glob("*-cache"):
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            if time.time() - max(file.stat().st_atime, file.stat().st_mtime) > KEPT_SECONDS:
                file.unlink()


def keep_compiled_with(workdir: Path) -> None:
    """Keep them in a work directory that is in a bucket instead: process 0 writes them for all hosts, and they outlive
    a preempted machine. To be called before the first program is compiled.
    """
    if not in_cloud(workdir) or os.environ.get("JAX_COMPILATION_CACHE_DIR") != str(_cache()):
        return
    import jax

    jax.config.update("jax_compilation_cache_dir", str(place(workdir) / "compiled"))
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")  # XLA's own code knows no gs:// paths


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "pretrain" / "xla"


def prepare_cpu() -> None:
    """Set XLA's flags, but never one that XLA_FLAGS already names, and keep freed memory for the next step."""
    given = os.environ.get("XLA_FLAGS", "").split()
    names = {flag.partition("=")[0] for flag in given}
    added = [f"{name}={value}" for name, value in CPU_FLAGS.items() if name not in names]
    os.environ["XLA_FLAGS"] = " ".join(given + added)
    keep_memory()


def keep_memory() -> None:
    """Have glibc reuse large blocks; elsewhere nothing happens.

    XLA:CPU allocates its temporaries anew at each step, and glibc returns blocks above 32 MB to the system at once: a
    bert-tiny step took 54,000 page faults, a quarter of its time. One arena, because the others always map such blocks.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is not None:
        for parameter, value in ((_ARENA_MAX, 1), (_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1)):
            mallopt(parameter, value)
