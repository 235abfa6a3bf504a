"""A new attention kernel is one entry in the table, for choice and trace, and one in that of costs, for plans."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from models.attention import plain
from models.attention.kernels.kernel import Kernel
from models.attention.kernels.table import KERNELS
from models.attention.layouts import HEADS_APART, Mixing
from models.attention.mask import Mask
from models.attention.multi_head import MultiHeadAttention
from models.blocks.layer import layer_sizes
from pretrain.training.attention_choice import chosen_program
from tests.pretrain import tiny
from tests.tpu.test_plan import BUSY, FLOPS, V5E, WORK, ms
from tpu.estimate import kernel_seconds
from tpu.flops import flops
from tpu.kernel_costs import COSTS, Cost


def attention(*arguments, **options):
    """Plain attention that passes through a program of its own."""
    y = plain.attention(*arguments, **options)
    copy = lambda y_ref, out_ref: out_ref.__setitem__(..., y_ref[...])
    declared = pl.CostEstimate(flops=16 * 10**6, bytes_accessed=0, transcendentals=0)
    shape = jax.ShapeDtypeStruct(y.shape, y.dtype)
    return pl.pallas_call(copy, out_shape=shape, cost_estimate=declared, name="toy_copies", interpret=True)(y)


@pytest.fixture
def toy(monkeypatch):
    mixing, cost = Mixing(HEADS_APART, attention), Cost(lambda generation, call: 1e5)
    monkeypatch.setitem(KERNELS, "toy", Kernel("toy", "self", ("cpu",), lambda asked: [], lambda asked: mixing))
    monkeypatch.setitem(COSTS, "toy", cost)


def test_it_is_chosen_traced_and_costed(toy, tmp_path):
    recipe = tiny.bert(model=dataclasses.replace(tiny.BERT, depth=2))  # an only layer is read at few positions
    program = chosen_program(recipe, tiny.options(tmp_path, tmp_path, dtype="bfloat16"), platform="cpu")
    assert program.attention == "toy"
    layer, mask = MultiHeadAttention(layer_sizes(tiny.BERT), program), Mask(jnp.ones((2, 32), jnp.int32))
    x = np.random.default_rng(0).normal(size=(2, 32, tiny.BERT.width)).astype(jnp.bfloat16)
    params = jax.eval_shape(layer.init, jax.random.key(0), x, mask, None)
    found = flops(jax.make_jaxpr(lambda params: layer.apply(params, x, mask, None))(params), COSTS)
    assert found.kernels == {"toy": 16e6} and found.unknown == ()
    assert ms(BUSY._replace(kernels={"toy": 1}), flops=FLOPS)[0] is None
    assert ms(BUSY._replace(kernels={"toy": 1}), flops=found, kernels=COSTS) == (pytest.approx(10), "")
    assert kernel_seconds(found, WORK, V5E, COSTS) == {"toy": pytest.approx(1e5 / 16 / 1.5e9)}  # a chip's share
