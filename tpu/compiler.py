"""Compile for TPUs on a machine without one: libtpu compiles for any slice; reports are cached by the program's
hash."""

import gzip
import hashlib
import importlib.util
import json
import os
import re
import tempfile
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import jax
from jax.experimental import topologies

from data_pipelines.errors import UserError
from tpu.generations import GENERATIONS
from tpu.topologies import Topology

INSTALL = "make setup-plan (or pip install -r requirements-plan.txt)"
# Variables of a Cloud TPU VM; without them libtpu waits for a metadata server.
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # plans may run at the same time, because none owns a chip
}
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_NEEDED = re.compile(r"(?:requires|required for [\w ]*\(|Used) ?([\d.]+)([KMGT]?)")


class Report(NamedTuple):
    """The compiler's report on a program; sizes in bytes per device.

    seconds: of compilation.   hlo: text of the optimised program, '' if it does not fit.
    needed: bytes that a program that does not fit would need, None if it fits.   cached: whether the report comes from
    the cache.
    """

    seconds: float
    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int
    hlo: str
    needed: float | None = None
    cached: bool = False

    @property
    def total(self) -> float:
        """HBM that the program takes; outputs that reuse an argument's memory cost nothing."""
        if self.needed is not None:
            return self.needed
        return self.arguments + self.temporaries + self.outputs - self.aliased + self.code


def prepare() -> None:
    """Set the environment for libtpu; call this before JAX opens a backend. Raises UserError without libtpu."""
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(f"a plan needs XLA's TPU compiler, libtpu, which is not installed: {INSTALL}")
    os.environ |= _ENVIRONMENT
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # programs from the cache leave no dump to read
    # A kernel's bytes in a program name files and lines of its trace, which would differ between checkouts.
    jax.config.update("jax_traceback_in_locations_limit", 0)


def devices(topology: Topology, slices: int = 1) -> list[jax.Device]:
    """Return stand-ins for the devices of slices, for a mesh to compile for; UserError if slices cannot be joined."""
    if slices > 1 and not topology.device.slice_bandwidth:
        raise UserError(f"--mesh slice={slices}: slices of {topology.generation} do not work together; use one slice")
    options = {**GENERATIONS[topology.generation].options, "chips_per_host_bounds": list(topology.host_bounds)}
    options |= {"num_slices": slices} if slices > 1 else {}
    return list(topologies.get_topology_desc(str(topology), "tpu", **options).devices)


def compile_for_tpu(lowered: jax.stages.Lowered, options: Mapping, topology: Topology, cache: Path) -> Report:
    """Compile a program that was lowered for `devices(topology)`, or take its report from the cache folder.

    options: the XLA options that it was jitted with, as part of the cache's key; the program's text does not show them.
    """
    place = cache / f"{program_hash(lowered, options, topology)}.json.gz"
    if place.is_file():
        with gzip.open(place, "rt") as file:
            return Report(**json.load(file), cached=True)
    report = _compile(lowered)
    kept = report._asdict()
    kept.pop("cached")
    temporary = place.with_suffix(f".{os.getpid()}")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with gzip.open(temporary, "wt") as file:
            json.dump(kept, file)
        temporary.replace(place)
    except OSError as error:
        raise UserError(f"--cache {cache}: cannot write there ({error.strerror}); choose another folder") from None
    return report


def program_hash(lowered: jax.stages.Lowered, options: Mapping, topology: Topology) -> str:
    """Hash the StableHLO (with shapes and shardings), the slice, XLA's options and the compiler's version."""
    settings = str(sorted(options.items()))
    parts = (lowered.as_text(), str(topology), settings, version("libtpu"), version("jaxlib"))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _compile(lowered: jax.stages.Lowered) -> Report:
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            # The dump has the cycles that XLA estimated; `compiled.as_text()` fails with some versions of libtpu.
            compiled = lowered.compile(compiler_options={"xla_dump_to": folder})
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return Report(time.perf_counter() - start, 0, 0, 0, 0, 0, "", needed=_needed(str(error)))
        seconds = time.perf_counter() - start
        # The longest dump; small helper programs are dumped, too.
        hlo = max((file.read_text() for file in Path(folder).glob("*.after_codegen.txt")), key=len)
    memory, parts = compiled.memory_analysis(), ("argument", "output", "alias", "temp", "generated_code")
    return Report(seconds, *(getattr(memory, f"{part}_size_in_bytes") for part in parts), hlo)


def _needed(message: str) -> float:
    """Return the bytes that the compiler's message says a program needs; infinite if it names none."""
    sizes = [float(number) * _UNITS[unit] for number, unit in _NEEDED.findall(message)]
    return max(sizes, default=float("inf"))
