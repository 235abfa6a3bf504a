"""Process settings that make XLA:CPU fast; to be applied before JAX opens its backend."""

import ctypes
import glob
import os
import sys

# In float32 on AVX-512, Eigen's products run at 95 to 107 GFLOP/s a core, YNNPACK's at 73 to 98.
# The value takes single products away from YNNPACK and leaves it the reductions, which it vectorises.
CPU_FLAGS = {"--xla_cpu_experimental_ynn_fusion_type": "-individual_dot"}

_ARENA_MAX, _MMAP_MAX, _TRIM_THRESHOLD = -8, -4, -1  # mallopt's parameters in glibc's malloc.h


def accelerators() -> list[str]:
    """Device files of TPUs and GPUs on this machine, found without opening any, unless JAX_PLATFORMS says cpu."""
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return []
    return [path for pattern in ("/dev/accel*", "/dev/vfio/[0-9]*", "/dev/nvidia[0-9]*") for path in glob.glob(pattern)]


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
