"""Settings of the whole process, applied before JAX opens its backend; `tpu/xla.py` has those of one program."""

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
# This value moves single products from YNNPACK to Eigen and leaves YNNPACK the reductions, which it vectorises.
CPU_FLAGS = {"--xla_cpu_experimental_ynn_fusion_type": "-individual_dot"}

TPU_FILES = ("/dev/accel*", "/dev/vfio/[0-9]*")
# NVIDIA's GPUs (dxg: under WSL on Windows), AMD's
DEVICE_FILES = (*TPU_FILES, "/dev/nvidia[0-9]*", "/dev/dxg", "/dev/kfd")
GPU_PLUGINS = {"cuda": ("jax_cuda12_plugin", "jax_cuda13_plugin"), "rocm": ("jax_rocm60_plugin", "jax_rocm7_plugin")}

KEPT_SECONDS = 90 * 24 * 3600  # how long a compiled program is kept after its last use

_ARENA_MAX, _MMAP_MAX, _TRIM_THRESHOLD = -8, -4, -1  # mallopt's parameters in glibc's malloc.h


def accelerators() -> list[str]:
    """List the device files of TPUs and GPUs on this machine, without opening any; none if JAX_PLATFORMS is cpu."""
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return []
    return [path for pattern in DEVICE_FILES for path in glob.glob(pattern)]


def may_be_one_of_several() -> bool:
    """Return whether there may be other processes: a launcher set its variables, or there are accelerators."""
    launchers = ("JAX_COORDINATOR_ADDRESS", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "TPU_WORKER_HOSTNAMES")
    return bool(accelerators()) or any(name in os.environ for name in launchers)


def prepare() -> None:
    """Set up this process for its machine. JAX chooses TPUs, or GPUs if libtpu is not installed. Without a TPU, libtpu
    only serves for planning; JAX must then not try it, since it would print errors."""
    devices = accelerators()
    if not os.environ.get("JAX_PLATFORMS"):  # JAX treats '' as unset
        if not devices:
            os.environ["JAX_PLATFORMS"] = "cpu"
        elif not any(fnmatch(path, pattern) for path in devices for pattern in TPU_FILES) and find_spec("libtpu"):
            gpus = [name for name, plugins in GPU_PLUGINS.items() if any(map(find_spec, plugins))]
            os.environ["JAX_PLATFORMS"] = ",".join([*gpus, "cpu"])
    if devices:
        keep_compiled()
    else:
        prepare_cpu()


def keep_compiled() -> None:
    """Turn on JAX's compilation cache, unless JAX_COMPILATION_CACHE_DIR already does: a large model takes minutes to
    compile. CPUs need no cache: seconds suffice, and a program that another machine compiled may not run."""
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(_cache())
    # Programs that were not used for long are deleted here: JAX's own limit needs two files per program and fails for
    # good after a kill that leaves one.
    for file in _cache().glob("*-cache"):
        with contextlib.suppress(FileNotFoundError):  # another process deleted it
            if time.time() - max(file.stat().st_atime, file.stat().st_mtime) > KEPT_SECONDS:
                file.unlink()


def keep_compiled_with(workdir: Path) -> None:
    """Move the compilation cache into a workdir that is in a bucket: process 0 writes it for all hosts, and it outlives
    a preempted machine. Call this before the first program is compiled."""
    if not in_cloud(workdir) or os.environ.get("JAX_COMPILATION_CACHE_DIR") != str(_cache()):
        return
    import jax

    jax.config.update("jax_compilation_cache_dir", str(place(workdir) / "compiled"))
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")  # XLA itself cannot read gs:// paths


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "pretrain" / "xla"


def prepare_cpu() -> None:
    """Add CPU_FLAGS to XLA_FLAGS, except flags already set there, and keep freed memory for the next step."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    names = {flag.partition("=")[0] for flag in flags}
    added = [f"{name}={value}" for name, value in CPU_FLAGS.items() if name not in names]
    os.environ["XLA_FLAGS"] = " ".join(flags + added)
    keep_memory()


def keep_memory() -> None:
    """Make glibc reuse large blocks; without glibc, do nothing. XLA:CPU allocates its temporaries in every step, and
    glibc returns blocks above 32 MB to the system at once: a bert-tiny step took 54,000 page faults, a quarter of its
    time. One arena, because the others always map such blocks."""
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is not None:
        for parameter, value in ((_ARENA_MAX, 1), (_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1)):
            mallopt(parameter, value)
