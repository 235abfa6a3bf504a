"""FLOPs of traced programs against arithmetic."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

from models.attention.kernels.splash import splash
from models.attention.mask import Mask
from tpu.flops import flops
from tpu.kernel_costs import COSTS, Cost

X, W = jnp.zeros((4, 8)), jnp.zeros((8, 8))
PRODUCT = 2 * 4 * 8 * 8


def count(function, *arguments, kernels=None):
    return flops(jax.make_jaxpr(function)(*arguments), kernels or {})


def test_a_product():
    assert count(lambda x, w: x @ w, X, W).total == PRODUCT
    scores = lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", q, k)
    assert count(scores, jnp.zeros((2, 3, 4, 5)), jnp.zeros((2, 7, 4, 5))).total == 2 * 2 * 4 * 3 * 7 * 5


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


def test_every_device_of_a_shard_map_counts():
    mesh = jax.sharding.AbstractMesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    mapped = jax.shard_map(lambda x, w: x @ w, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    assert count(mapped, X, W).total == PRODUCT


def kernel(x, declared=None):
    body = lambda x_ref, out_ref: out_ref.__setitem__(..., x_ref[...] * 2)
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(body, out_shape=shape, cost_estimate=declared, name="attend_forward")(x)


def test_kernels_count_what_they_declare():
    declared = pl.CostEstimate(flops=70, bytes_accessed=1, transcendentals=1)
    found = count(jax.vmap(lambda x: kernel(x, declared)), jnp.zeros((3, 4, 8)), kernels={"attend": Cost(None)})
    assert found.kernels == {"attend": 3 * 70} and found.unknown == ()


def test_kernels_that_declare_nothing_count_by_their_cost():
    known = {
        "attend": Cost(lambda generation, call: 7, lambda call: 10.0 * call.arguments[0].size * call.results[0].size)
    }
    twice = lambda x: jax.lax.scan(lambda x, _: (kernel(x), None), x, None, length=2)[0]
    found = count(twice, X, kernels=known)
    assert found.kernels == {"attend": pytest.approx(2 * 10 * 32 * 32)} and found.unknown == ()
    assert found.total == 2 * 10 * 32 * 32
    ((name, call, times),) = found.calls
    assert (name, times, call.turns) == ("attend", 2, 1)


def test_a_kernel_whose_flops_nobody_declares_is_named():
    assert any("attend_forward" in name for name in count(kernel, X).unknown)
    assert any("attend_forward" in name for name in count(kernel, X, kernels={"attend": Cost(None)}).unknown)


@pytest.mark.parametrize("causal, share, rows", [(False, 1, 2), (True, 3 / 4, 2), (False, 1, 1)])
def test_splash_attention_counts_the_blocks_that_it_computes(causal, share, rows):
    """Of a causal mask and two blocks of 512 queries and keys, three of four; a single row is no axis of the kernel."""
    x, segments = jnp.zeros((rows, 3, 1024, 64), jnp.bfloat16), jnp.ones((rows, 1024), jnp.int32)
    attend = lambda q, k, v: splash(q, k, v, Mask(segments, causal=causal)).astype(jnp.float32).sum()
    product = 2 * rows * 3 * 1024 * 1024 * 64
    expected = {"splash_mha_fwd": 2 * product * share, "splash_mha_dkv": 5 * product * share}
    found = count(jax.grad(attend, (0, 1, 2)), x, x, x, kernels=COSTS)
    assert found.kernels == expected
    turns = rows * 3 * 2 * 2 * share  # of 512 queries and keys
    cycles = {name: COSTS[name].cycles("v5p", call) for name, call, _ in found.calls}
    assert cycles == {
        "splash_mha_fwd": pytest.approx(turns * 1922, 0.01),
        "splash_mha_dkv": pytest.approx(turns * 3134, 0.01),
    }
