"""BigBird-ETC: attention of long and global tokens in blocks is the dense one, of which the contract has parity."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.attention import etc
from models.attention.etc import Operands, Sight
from models.core.noise import row_keys
from tests.models.programs import QUICK, equations
from tpu.flops import flops

BATCH, HEADS, SIZE = 2, 2, 4
SHAPES = {  # length, globals, block, window, clipped distance, rate of dropout
    "a last block that is short": (29, 5, 4, 3, 3, 0.0),
    "a wide window": (26, 3, 3, 5, 2, 0.5),
    "distances beyond the window": (9, 2, 2, 1, 12, 0.5),
    "one block": (5, 1, 8, 3, 2, 0.5),
}
KINDS = ("long", "global")


def sights(shape, seed):
    """Rows of a few documents and padding; each token belongs to a global token of its document, or to none."""
    (length, number, block, window, *_), rng = SHAPES[shape], np.random.default_rng(seed)
    segments = np.sort(rng.integers(0, 3, (BATCH, length)))[:, ::-1].astype(np.int32)
    of_globals = rng.integers(0, 3, (BATCH, number)).astype(np.int32)
    global_of = rng.integers(-1, number, (BATCH, length)).astype(np.int32)
    return etc.sights(segments, of_globals, global_of, block, window)


def operands(shape, seed, kind):
    """Random ones, and weights of outputs."""
    length, number, _, _, clip, _ = SHAPES[shape]
    n, m = (length, number) if kind == "long" else (number, length)
    rng = np.random.default_rng(seed)
    draw = lambda *size: rng.normal(size=(*size, HEADS, SIZE)).astype(np.float32)
    *given, weights = (draw(BATCH, number) for number in (n, n, n, m, m, n))
    return Operands(*given, draw(2 * clip + 1 + etc.FAR_LABELS)), weights


@functools.cache
def compiled(shape):
    """For each kind, (outputs, gradients of their weighted sum) of the dense form and of the blocked one."""
    of_kinds, rate = [sight[-2:] for sight in sights(shape, 0)], SHAPES[shape][-1]

    def run(of_long, of_globals, keys):
        def both(given, seen, weights, size):
            results = []
            for form in (etc.dense, etc.blocked):
                attend = functools.partial(form, sight=Sight(*seen, *size), dropout_rate=rate, noise=keys)
                output, pull = jax.vjp(attend, given)
                results.append((output, pull(weights)[0]))
            return results

        return [both(*inputs, size) for inputs, size in zip((of_long, of_globals), of_kinds, strict=True)]

    return jax.jit(run, compiler_options=QUICK)


def results(shape, seed):
    """Kind -> (dense results, blocked ones) of a drawn case and its Sight; weights of padding are 0."""
    inputs, seen = [], sights(shape, seed)
    for kind, sight in zip(KINDS, seen, strict=True):
        given, weights = operands(shape, seed, kind)
        inputs.append((given, sight[:-2], weights * (np.asarray(sight.near) > 0)[..., None, None]))
    found = compiled(shape)(*inputs, row_keys(7, seed, jnp.arange(BATCH)))
    return dict(zip(KINDS, zip(found, seen, strict=True), strict=True))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("shape", SHAPES)
def test_blocked_equals_dense_in_outputs_and_every_gradient(shape, seed):
    for kind, (((expected, theirs), (ours, gradients)), sight) in results(shape, seed).items():
        assert np.isfinite(ours).all(), kind
        real = np.asarray(sight.near) > 0
        np.testing.assert_allclose(ours[real], expected[real], atol=2e-6, err_msg=kind)
        for name, ours, expected in zip(Operands._fields, gradients, theirs, strict=True):
            np.testing.assert_allclose(ours, expected, atol=1e-5, err_msg=f"{kind} {name}")


def test_twice_the_length_costs_twice_as_much_and_no_array_has_all_pairs():
    def products(length):
        shape = lambda n: jax.ShapeDtypeStruct((1, n, HEADS, SIZE), np.float32)
        rows = lambda n: jax.ShapeDtypeStruct((1, n), np.int32)

        def both(own, other, relative, segments, of_globals, global_of):
            seen = etc.sights(segments, of_globals, global_of, block=8, window=3)
            kinds = ((own, other), (other, own))
            given = [Operands(near, near, near, far, far, relative) for near, far in kinds]
            mix = functools.partial(etc.blocked, dropout_rate=0.5, noise=jnp.zeros((1, 2), jnp.uint32))
            return sum(mix(one, sight).sum() for one, sight in zip(given, seen, strict=True))

        relative = jax.ShapeDtypeStruct((9, HEADS, SIZE), np.float32)
        inputs = shape(length), shape(4), relative, rows(length), rows(4), rows(length)
        traced = jax.make_jaxpr(jax.grad(both, (0, 1, 2)))(*inputs)
        sizes = [variable.aval.size for equation in equations(traced.jaxpr) for variable in equation.outvars]
        return flops(traced, {}).products, max(sizes)

    (cost, largest), (twice, larger) = products(256), products(512)
    assert 1.95 * cost < twice <= 2 * cost
    assert larger == 2 * largest
