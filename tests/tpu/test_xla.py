"""XLA's settings: names that the compiler knows, and float32 that is float32."""

import dataclasses
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.core.program import Program
from pretrain.training import placement
from pretrain.training.assembly import assemble
from tests.pretrain import tiny
from tpu import xla
from tpu.mesh import MeshShape, make_mesh
from tpu.xla import (
    PARTS_BESIDE_PRODUCTS,
    SUMS_BESIDE_PRODUCTS,
    compiler_options,
    platform_options,
    small_product_options,
)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])  # the TPU's are compiled by the tests of the plan
def test_the_compiler_knows_every_option(platform):
    double = jax.jit(lambda x: 2 * x, compiler_options=platform_options(platform))
    assert double(jnp.ones(2)).sum() == 4
    with pytest.raises(Exception, match="No such compile option"):
        jax.jit(lambda x: 2 * x, compiler_options={"xla_no_such_option": True})(jnp.ones(2))


SMALL_PRODUCTS = """
from pretrain.commands.platform import prepare_cpu
prepare_cpu()
import jax
from tpu.mesh import row_mesh
from tpu.xla import compiler_options, small_product_options
mesh, rows = row_mesh(jax.devices(), [1]), jax.numpy.ones((512, 512))
of = lambda function, options: jax.jit(function, compiler_options=options(mesh)).lower(rows).compile().as_text()
product, reduction = lambda x: x @ x.T, lambda x: x.max(-1)
assert "ynn_fusion" in of(product, small_product_options) and "ynn_fusion" not in of(product, compiler_options)
assert "ynn_fusion" in of(reduction, small_product_options) and "ynn_fusion" in of(reduction, compiler_options)
"""


def test_small_products_alone_and_all_reductions_are_ynnpacks_on_cpus():
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    done = subprocess.run([sys.executable, "-c", SMALL_PRODUCTS], env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-3000:]


def test_a_small_models_steps_are_compiled_for_small_products(monkeypatch):
    monkeypatch.setattr(placement, "jit_on", lambda mesh, assembly, step, options, **how: options)
    mesh, assembly = make_mesh(MeshShape(), jax.devices()[:1]), assemble(tiny.bert(), Program())
    for limit, expected in (placement.SMALL, small_product_options(mesh)), (0, compiler_options(mesh)):
        monkeypatch.setattr(placement, "SMALL", limit)
        (stage,) = placement.stages(assembly, mesh)
        assert stage.train.run == stage.evaluate.run == expected


VERSIONS = [("0.0.42.1", True), ("0.0.48", False), ("0.0.52.dev20261101", False), (None, True)]


@pytest.mark.parametrize("installed, apart", VERSIONS)
def test_an_old_compiler_for_tpus_is_not_asked_for_what_it_crashes_on(installed, apart, monkeypatch):
    def version(package):
        if installed is None:
            raise PackageNotFoundError(package)
        return installed

    monkeypatch.setattr(xla, "version", version)
    assert ("xla_tpu_dot_dot_fusion" in platform_options("tpu")) == apart


ONLY_V5E = (MeshShape(data=4), MeshShape(fsdp=4))  # libtpu 0.0.48 refuses the options elsewhere
BESIDE = [
    ("TPU v5 lite", MeshShape(data=4), "0.0.48", SUMS_BESIDE_PRODUCTS),
    ("TPU v5 lite", MeshShape(data=2, fsdp=2), "0.0.48", PARTS_BESIDE_PRODUCTS),
    ("TPU v5 lite", MeshShape(slice=2, data=2), "0.0.48", {}),
    ("TPU v5 lite", MeshShape(data=2, tensor=2), "0.0.48", {}),
    ("TPU v5 lite", MeshShape(), "0.0.48", {}),
    ("TPU v5 lite", MeshShape(data=4), "0.1.2", {}),  # which may not know an option, and would end the run
    *((kind, shape, "0.0.48", {}) for kind in ("TPU v4", "TPU v5p", "TPU v6 lite") for shape in ONLY_V5E),
]


@pytest.mark.parametrize("kind, shape, installed, beside", BESIDE)
def test_collectives_are_beside_products_where_chips_share_out_the_batch_and_parameters_alone(
    kind, shape, installed, beside, monkeypatch
):
    monkeypatch.setattr(xla, "version", lambda package: installed)
    assert compiler_options(mesh_of(kind, shape)) == platform_options("tpu") | beside


def mesh_of(kind, shape):
    sizes = dataclasses.asdict(shape)
    chips = np.full(tuple(sizes.values()), SimpleNamespace(platform="tpu", device_kind=kind))
    return SimpleNamespace(devices=chips, shape=sizes, size=chips.size)


@pytest.mark.parametrize("shape, ride", [(MeshShape(data=2), True), (MeshShape(fsdp=2), False)])
def test_scattered_sums_ride_in_no_loop(shape, ride, monkeypatch):
    monkeypatch.setattr(xla, "version", lambda package: "0.0.48")
    mesh = mesh_of("TPU v5 lite", shape)
    assert (compiler_options(mesh, looped=True) == compiler_options(mesh)) == ride


@pytest.mark.parametrize("depth", ["scan", "unroll"])
def test_the_compiler_is_told_of_a_loop_over_layers(depth, monkeypatch):
    told = []
    monkeypatch.setattr(placement, "small_product_options", lambda mesh, looped: told.append(looped) or {})
    placement.stages(assemble(tiny.bert(), Program(depth=depth)), make_mesh(MeshShape(), jax.devices()[:1]))
    assert told == [depth == "scan"]


@pytest.mark.parametrize("dtype, precise", [("float32", True), ("bfloat16", False)])
def test_a_step_in_float32_does_not_round_its_products(dtype, precise):
    mesh = make_mesh(MeshShape(), jax.devices()[:1])
    assembly = assemble(tiny.bert(), Program(dtype=dtype))
    step = placement.stages(assembly, mesh)[0].train
    products = [line for line in step.run.lower(*step.arguments).as_text().splitlines() if "dot_general" in line]
    highest = ["precision = [HIGHEST, HIGHEST]" in line for line in products]
    assert all(highest) if precise else sum(highest) == 2 < len(highest)  # rows of types, and their gradient
    assert compiler_options(mesh) == {}
