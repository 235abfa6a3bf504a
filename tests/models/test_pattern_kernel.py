"""The kernel of a sparse pattern is the dense form in outputs, every gradient and dropout, and hides what it hides."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.attention import plain
from models.attention.kernels.pattern_kernel import by_kernel
from models.attention.mask import visible
from models.core.noise import row_keys
from tests.models.programs import QUICK
from tests.models.test_sparse import BATCH, Kind, any_kind, random_mask

HEADS, HEAD_DIM = 2, 64  # side by side in the 128 lanes that the kernel has

KINDS = (
    # BigBird's, in rows that end in a block, in three chunks of blocks.
    Kind(length=1100, block=64, columns=(0, 17), rows=(0, 17), drawn=2, heads=2, rate=0.2),
    Kind(length=500, block=128, reach=True, heads=2, globals=3, rate=0.1),  # Longformer's
    Kind(length=300, block=64, columns=(1, 3), rows=(2,), drawn=3, globals=2, causal=True),  # repeats, for all heads
)
IDS = ("bigbird", "longformer", "causal")


@functools.cache
def both_forms(kind: Kind):
    """(q, k, v, mask, noise, weights) -> (outputs, gradients of the weighted sum) of the dense form, of the kernel."""
    by_head = lambda x: x.reshape(*x.shape[:2], HEADS, -1)

    def of(attention, q, k, v, mask, noise, weights):
        attend = lambda q, k, v: attention(q, k, v, mask, dropout_rate=kind.rate, noise=noise)
        outputs, pull = jax.vjp(attend, q, k, v)
        return outputs, pull(weights)

    def dense(q, k, v, mask, **options):
        return plain.attention(*map(by_head, (q, k, v)), mask, **options).reshape(q.shape)

    kernel = lambda q, k, v, mask, **options: by_kernel(q, k, v, mask, HEADS, interpret=True, **options)
    return jax.jit(lambda *inputs: (of(dense, *inputs), of(kernel, *inputs)), compiler_options=QUICK)


def random_case(kind: Kind, seed: int):
    rng = np.random.default_rng(seed)
    mask = random_mask(kind, rng)
    q, k, v, weights = rng.normal(size=(4, BATCH, kind.length, HEADS * HEAD_DIM)).astype(np.float32)
    weights *= np.asarray(mask.segments > 0)[..., None]  # of padding nothing is read
    return q, k, v, mask, row_keys(seed, 1, jnp.arange(BATCH)), weights


def check(kind: Kind, seed: int) -> None:
    """One case's outputs and gradients; of one token, that nothing hidden from it has a gradient."""
    q, k, v, mask, noise, weights = random_case(kind, seed)
    (expected, slopes), (mixed, gradients) = both_forms(kind)(q, k, v, mask, noise, weights)
    real = np.asarray(mask.segments > 0)
    assert np.isfinite(mixed).all()
    np.testing.assert_allclose(mixed[real], expected[real], atol=2e-6)
    for name, gradient, slope in zip("qkv", gradients, slopes, strict=True):
        np.testing.assert_allclose(gradient, slope, atol=2e-5, err_msg=name)
    token = int(np.random.default_rng(seed).choice(np.flatnonzero(real.all(0))))
    alone = np.zeros_like(weights)
    alone[:, token] = weights[:, token]
    _, (_, of_one) = both_forms(kind)(q, k, v, mask, noise, alone)
    hidden = np.broadcast_to(~visible(mask)[:, :, token], (BATCH, HEADS, kind.length)).swapaxes(1, 2)
    by_head = lambda x: np.asarray(x).reshape(BATCH, kind.length, HEADS, HEAD_DIM)
    assert hidden.any() and not np.any(by_head(of_one[1])[hidden]) and not np.any(by_head(of_one[2])[hidden])
    assert not np.delete(of_one[0], token, axis=1).any()


@pytest.mark.parametrize("number", range(7))
@pytest.mark.parametrize("kind", KINDS, ids=IDS)
def test_the_kernel_is_the_dense_form_and_hides_what_it_hides(kind, number):
    check(kind, number)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(40))
def test_patterns_of_any_kind_are_the_dense_form(number):
    kind = any_kind(number)
    kind = kind._replace(length=int(kind.length * 64 / kind.block), block=64, ranked=False)
    for seed in range(5):
        check(kind, seed)
