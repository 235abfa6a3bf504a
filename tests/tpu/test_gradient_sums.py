"""Devices add weight gradients up in float32, whatever the products are computed in, and each once."""

import functools
import json
import math
import os
import sys
from pathlib import Path
from subprocess import run

import pytest

ROOT = Path(__file__).parent.parent.parent
OTHERS = (
    "bert:data=2,fsdp=2", "electra:data=2", "xlnet:data=2", "adaptive:data=2", "adaptive:fsdp=2",
    "transformer-xl:fsdp=2",
)  # fmt: skip
SUMS = ("all-reduce", "reduce-scatter")
WIDTH = 32  # of the two layers of the tests' BERT


@pytest.fixture(
    scope="module",
    params=[("bert:fsdp=2", "bert:data=2", "bert:tensor=2"), pytest.param(OTHERS, marks=pytest.mark.slow)],
    ids=["bert", "others"],
)
def exchanged(request):
    """{recipe and mesh: what `partitioned.exchanged` found} in programs of bfloat16."""
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.tpu.partitioned", *request.param]
    environment |= {"PYTHONPATH": str(ROOT), "JAX_ENABLE_COMPILATION_CACHE": "0"}  # what is compiled is dumped
    done = run(command, env={**os.environ, **environment}, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def elements(found, *kinds):
    """Numbers that devices exchange."""
    return sum(times * math.prod(dims) for kind, _, dims, _, times in found["moved"] if kind in kinds)


def test_gradients_are_summed_in_float32(exchanged):
    """Over tensor no weight's is."""
    for program, found in ((program, found) for program, found in exchanged.items() if "tensor" not in program):
        sums = [(dtype, source) for kind, dtype, _, source, _ in found["moved"] if kind in SUMS]
        assert any("feed_forward/up/dot_general" in source for _, source in sums), program
        assert {dtype for dtype, _ in sums} <= {"f32", "s32"}, program


def test_kernels_are_still_gathered_in_bfloat16(exchanged):
    for program, found in exchanged.items():
        gathers = [(dtype, source) for kind, dtype, _, source, _ in found["moved"] if kind == "all-gather"]
        kernels = {dtype for dtype, source in gathers if "Layer" in source and "dot_general" in source}
        assert kernels == ({"bf16"} if "fsdp" in program else set()), program


def test_devices_exchange_no_more_than_the_mesh_implies(exchanged):
    """Each gradient is summed once, that of BERT's table for its lookups and for its logits; over data and fsdp, the
    shares of matrices once more. Over data nothing is gathered, over fsdp each matrix for either pass."""
    for program in filter(lambda name: name.startswith("bert") and "tensor" not in name, exchanged):
        found, by_fsdp = exchanged[program], "fsdp" in program
        moved = functools.partial(elements, found)
        implied = found["parameters"] + found["table"] + (found["matrices"] / 2 if "data=2,fsdp=2" in program else 0)
        # A few scalars are summed beside; BERT's pooler is resharded instead.
        assert -0.05 * found["parameters"] < moved(*SUMS) - implied < 100, program
        assert by_fsdp * found["matrices"] <= moved("all-gather") <= 2 * by_fsdp * found["matrices"], program


def test_over_tensor_devices_sum_a_layer_s_activations_and_nothing_else(exchanged):
    """BERT's look-ups, and of each layer attention's and feed-forward's outputs and four gradients of inputs: of
    queries, keys, values and feed-forward; of the last layer by the positions that are read. Of the logits their
    maximum, sum, target and the gradient of what they came from. No weight's gradient, and nothing is gathered."""
    for found in (found for program, found in exchanged.items() if "tensor" in program):
        rows, length, predictions = found["batch"]
        whole, read = rows * length * WIDTH, rows * (predictions + 1) * WIDTH  # the first token, for pairs
        first, last, logits = 6 * whole, 2 * whole + 4 * read, rows * predictions * (3 + WIDTH)
        assert 0 <= elements(found, *SUMS) - (whole + first + last + logits) < 100  # a few scalars
        assert elements(found, "all-gather", "collective-permute", "all-to-all") == 0
