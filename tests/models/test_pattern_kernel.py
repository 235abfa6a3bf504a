"""The kernel of a sparse pattern is the dense form in outputs, every gradient and dropout, and hides what it hides."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.attention import plain
from models.attention.kernels.pattern_kernel import by_kernel
from models.attention.kernels.table import KERNELS
from models.attention.mask import Mask, visible
from models.attention.patterns.pattern import Pattern, blocks_of
from models.attention.self_attention import attention_of
from models.blocks.layer import LayerSizes
from models.core import noise as noise_of
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
def both_forms(rate: float, heads: int = HEADS):
    """(q, k, v, mask, noise, weights) -> (outputs, gradients of the weighted sum) of the dense form, of the kernel."""
    by_head = lambda x: x.reshape(*x.shape[:2], heads, -1)

    def of(attention, q, k, v, mask, noise, weights):
        attend = lambda q, k, v: attention(q, k, v, mask, dropout_rate=rate, noise=noise)
        outputs, pull = jax.vjp(attend, q, k, v)
        return outputs, pull(weights.astype(q.dtype))

    def dense(q, k, v, mask, **options):
        wide = (by_head(x).astype(jnp.float32) for x in (q, k, v))
        return plain.attention(*wide, mask, **options).reshape(q.shape).astype(q.dtype)

    kernel = lambda q, k, v, mask, **options: by_kernel(q, k, v, mask, heads, interpret=True, **options)
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
    (expected, slopes), (mixed, gradients) = both_forms(kind.rate)(q, k, v, mask, noise, weights)
    real = np.asarray(mask.segments > 0)
    assert np.isfinite(mixed).all()
    np.testing.assert_allclose(mixed[real], expected[real], atol=2e-6)
    for name, gradient, slope in zip("qkv", gradients, slopes, strict=True):
        np.testing.assert_allclose(gradient, slope, atol=2e-5, err_msg=name)
    token = int(np.random.default_rng(seed).choice(np.flatnonzero(real.all(0))))
    alone = np.zeros_like(weights)
    alone[:, token] = weights[:, token]
    _, (_, of_one) = both_forms(kind.rate)(q, k, v, mask, noise, alone)
    hidden = np.broadcast_to(~visible(mask)[:, :, token], (BATCH, HEADS, kind.length)).swapaxes(1, 2)
    by_head = lambda x: np.asarray(x).reshape(BATCH, kind.length, HEADS, HEAD_DIM)
    assert hidden.any() and not np.any(by_head(of_one[1])[hidden]) and not np.any(by_head(of_one[2])[hidden])
    assert not np.delete(of_one[0], token, axis=1).any()


@pytest.mark.parametrize("number", range(7))
@pytest.mark.parametrize("kind", KINDS, ids=IDS)
def test_the_kernel_is_the_dense_form_and_hides_what_it_hides(kind, number):
    check(kind, number)


def test_what_global_tokens_see_may_be_left_to_others():
    kind = KINDS[1]
    q, k, v, mask, noise, weights = random_case(kind, 0)
    of_globals = np.zeros(weights.shape[:2], bool)
    for row, positions in enumerate(np.asarray(mask.globals)):
        of_globals[row, positions[positions >= 0]] = True
    read, elsewhere = np.where(of_globals[..., None], 0.0, weights), np.asarray(mask.segments > 0) & ~of_globals
    apart = dataclasses.replace(mask, globals_apart=True)
    (expected, slopes), (mixed, gradients) = both_forms(kind.rate)(q, k, v, apart, noise, read)
    assert of_globals.any() and np.isfinite(mixed).all()
    np.testing.assert_allclose(mixed[elsewhere], expected[elsewhere], atol=2e-6)
    assert np.abs(mixed - expected)[of_globals].max() > 0.01  # nobody computed it
    for gradient, slope in zip(gradients, slopes, strict=True):
        np.testing.assert_allclose(gradient, slope, atol=2e-5)


OTHERS = {
    # (heads, width, length, pattern, dtype, tolerance)
    "bfloat16": (2, 128, 400, Pattern("bigbird", random=1), jnp.bfloat16, 0.02),
    "heads of 32, windows wider than a block": (
        4, 128, 400, Pattern("longformer", block=32, windows=(96,), dilations=(1, 2, 1, 3)), jnp.float32, 1e-5,
    ),
    "heads of 128, a key of noise for each": (2, 256, 768, Pattern("bigbird", block=128, random=1), jnp.float32, 1e-5),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_other_heads_windows_and_numbers(name, monkeypatch):
    heads, width, length, pattern, dtype, tolerance = OTHERS[name]
    if "noise" in name:
        monkeypatch.setattr(noise_of, "COUNTED", length**2)
    rng = np.random.default_rng(0)
    segments = jnp.asarray(np.sort(rng.integers(1, 3, (BATCH, length)), axis=1).astype(np.int32))
    mask = Mask(segments, blocks=jax.tree.map(lambda x: x[0], blocks_of(pattern, 1, heads, length)))
    q, k, v, weights = jnp.asarray(rng.normal(size=(4, BATCH, length, width)), dtype)
    both_forms.cache_clear()  # of another COUNTED
    expected, found = both_forms(0.2, heads)(q, k, v, mask, row_keys(0, 1, jnp.arange(BATCH)), weights)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        one, other = (np.asarray(x, np.float32) for x in (one, other))
        np.testing.assert_allclose(one, other, atol=tolerance * np.abs(other).max())


def test_what_fills_a_row_up_counts_for_the_vector_memory():
    """65 blocks are filled up to 72; an unknown chip has v4's memory."""
    sizes = LayerSizes(128, 2, 16, "gelu", 0.0, 0.1, 1e-12, 0.02)
    blocks = lambda length: blocks_of(Pattern("bigbird"), 1, 2, length)
    obstacles = lambda length: KERNELS["pattern"].obstacles(attention_of(sizes, length, blocks=blocks(length)))
    assert obstacles(4096) == []
    assert obstacles(4160) == ["length=4160 with 512 keys for a query does not fit into vector memory"]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(40))
def test_patterns_of_any_kind_are_the_dense_form(number):
    kind = any_kind(number)
    kind = kind._replace(length=int(kind.length * 64 / kind.block), block=64, ranked=False)
    for seed in range(5):
        check(kind, seed)
