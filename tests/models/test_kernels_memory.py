"""Our TPU kernels read no memory that nobody wrote, stay inside their blocks, and do not race."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from models.attention.kernels.relative_kernel import by_kernel
from models.attention.kernels.row_attention import Setting, row_attention
from tests.models import test_relative_kernel as relative

STRICT = pltpu.InterpretParams(
    detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise", num_cores_or_threads=2
)


def of_rows():
    rng = np.random.default_rng(0)
    products, biases = (rng.normal(size=(*shape, 3 * 128)).astype(np.float32) for shape in ((2, 256), ()))
    segments = np.where(np.arange(256) < 70, [[1], [2]], 2).astype(np.int32)
    of_row = lambda interpret, *x: row_attention(*x, segments, relative.KEYS, Setting(64, 0.2, True, interpret))[0]
    return of_row, (products, biases)


def of_relative(kind):
    q, context, biases, mask, types, heads = relative.case(kind, 64, jnp.float32, length=128, memory=128, n=20)
    attend = functools.partial(by_kernel, dropout_rate=0.2, noise=relative.KEYS)
    return lambda interpret, *x: attend(*x, mask, types, heads, interpret=interpret), (q, context, biases)


KERNELS = {
    "row_attention": of_rows,
    "relative, whole rows": functools.partial(of_relative, "content"),
    "relative, chosen": functools.partial(of_relative, "query"),
    "relative, causal": functools.partial(of_relative, "causal"),
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_and_its_gradient(name, capfd):
    attend, inputs = KERNELS[name]()

    def loss(interpret, *x):
        return (attend(interpret, *x) ** 2).sum()

    gradients = lambda how: jax.value_and_grad(functools.partial(loss, how), tuple(range(len(inputs))))
    strict, plain = (jax.jit(gradients(how))(*inputs) for how in (STRICT, True))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(b).max()), strict, plain)
    assert "RACE DETECTED" not in capfd.readouterr().out
