"""FLOPs of traced programs against arithmetic."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

from tpu.flops import Kernel, flops

X, W = jnp.zeros((4, 8)), jnp.zeros((8, 8))
PRODUCT = 2 * 4 * 8 * 8


def count(function, *arguments, kernels=None):
    return flops(jax.make_jaxpr(function)(*arguments), kernels or {})


def test_a_product():
    assert count(lambda x, w: x @ w, X, W).total == PRODUCT
    scores = lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", q, k)
    assert count(scores, jnp.zeros((2, 3, 4, 5)), jnp.zeros((2, 7, 4, 5))).total == 2 * 2 * 4 * 3 * 7 * 5


def test_a_convolution():
    image, kernel = jnp.zeros((1, 10, 10, 3)), jnp.zeros((2, 2, 3, 16))
    conv = lambda i, k: jax.lax.conv_general_dilated(i, k, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    assert count(conv, image, kernel).total == 2 * (9 * 9 * 16) * (2 * 2 * 3)


def test_loops_are_multiplied_and_nested_programs_entered():
    turn = lambda x, w: (jax.jit(lambda x, w: x @ w)(x, w), None)
    scanned = lambda x, ws: jax.lax.scan(turn, x, ws)[0]
    assert count(scanned, X, jnp.zeros((5, 8, 8))).total == 5 * PRODUCT


def test_what_is_computed_again_counts_again():
    block = lambda x, w: jnp.sin(x @ w) @ w
    loss = lambda block: lambda x, w: block(x, w).sum()
    plain = count(jax.grad(loss(block), argnums=(0, 1)), X, W).total
    again = count(jax.grad(loss(jax.checkpoint(block)), argnums=(0, 1)), X, W).total
    assert (plain, again) == (6 * PRODUCT, 7 * PRODUCT)


def test_the_dearest_branch_counts():
    either = lambda p, x, w: jax.lax.cond(p, lambda: x @ w, lambda: x @ w @ w)
    assert count(either, True, X, W).total == 2 * PRODUCT


def test_every_device_of_a_shard_map_counts():
    mesh = jax.sharding.AbstractMesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    mapped = jax.shard_map(lambda x, w: x @ w, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    assert count(mapped, X, W).total == PRODUCT


def kernel(x):
    body = lambda x_ref, out_ref: out_ref.__setitem__(..., x_ref[...] * 2)
    return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), name="attend_forward")(x)


def test_kernels_count_by_their_own_arithmetic():
    known = {"attend": Kernel(lambda arguments, results: 10.0 * arguments[0].size * results[0].size, {"v5e": 0.5})}
    twice = lambda x: jax.lax.scan(lambda x, _: (kernel(x), None), x, None, length=2)[0]
    found = count(twice, X, kernels=known)
    assert found.kernels == {"attend": pytest.approx(2 * 10 * 32 * 32)} and found.unknown == ()
    assert found.total == 2 * 10 * 32 * 32


def test_a_kernel_without_arithmetic_is_named():
    assert any("attend_forward" in name for name in count(kernel, X).unknown)
