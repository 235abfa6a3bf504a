"""Attention in blocks, in plain operations and as a kernel, is the dense form, in outputs and in every gradient,
whatever the pattern, rows and dropout."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.attention import plain, sparse
from models.attention.kernels.pattern_kernel import by_kernel
from models.attention.kernels.table import KERNELS
from models.attention.mask import Mask, is_global, visible
from models.attention.multi_head import attention_of
from models.attention.patterns.blocks import Blocks
from models.attention.patterns.pattern import Pattern, blocks_of
from models.blocks.layer import LayerSizes
from models.core import noise as noise_of
from models.core.noise import row_keys
from tests.models.programs import QUICK

BATCH, HEADS = 2, 2


class Kind(NamedTuple):
    """What a program is compiled for.

    drawn, globals: how many.   heads: with drawn blocks, reach and dilation of their own.   rate: of dropout.
    """

    length: int = 48
    block: int = 8
    offsets: tuple[int, ...] = (-1, 0, 1)
    columns: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    drawn: int = 0
    heads: int = 1
    reach: bool = False
    globals: int = 0
    causal: bool = False
    ranked: bool = False
    rate: float = 0.0


# What a test computes with, and name -> a pattern.
KINDS = {
    "blocks": {
        "bigbird": Kind(length=61, columns=(0, 7), rows=(0, 7), drawn=2, heads=2, rate=0.2),  # rows end in a block
        "longformer": Kind(reach=True, offsets=(-2, -1, 0, 1, 2), globals=3, rate=0.1),
        "repeats": Kind(columns=(1, 4), rows=(2,), drawn=3, heads=2),  # count twice; rows that are no columns
        "causal": Kind(length=45, offsets=(-2, 0), columns=(3,), drawn=1, causal=True, rate=0.3),
        "ranked": Kind(length=50, block=4, globals=2, rows=(0,), drawn=1, heads=2, ranked=True),  # some see nothing
    },
    "kernel": {
        "bigbird": Kind(length=1100, block=64, columns=(0, 17), rows=(0, 17), drawn=2, heads=2, rate=0.2),  # 3 chunks
        "longformer": Kind(length=300, block=128, reach=True, heads=2, globals=3, rate=0.1),
        "causal": Kind(length=300, block=64, columns=(1, 3), rows=(2,), drawn=3, globals=2, causal=True),  # repeats
    },
}


def any_kind(seed: int) -> Kind:
    """A pattern of a random kind."""
    rng = np.random.default_rng(seed)
    length, block = int(rng.integers(17, 80)), int(rng.choice([4, 8, 16]))
    number = -(-length // block)
    some = lambda most: tuple(sorted(map(int, rng.choice(number, rng.integers(0, most + 1), replace=False))))
    offsets = {0, *map(int, rng.integers(-3, 4, rng.integers(0, 5)))}
    flags = rng.random(4) < 0.3
    drawn, chosen, heads = (int(n) for n in rng.integers((0, 0, 1), (4, 4, HEADS + 1)))
    return Kind(
        length, block, tuple(sorted(offsets)), some(2), some(2), drawn, heads, reach=bool(flags[0]),
        globals=chosen * int(flags[1]), causal=bool(flags[2]), ranked=bool(flags[3]),
        rate=float(rng.choice([0.0, 0.1, 0.5])),
    )  # fmt: skip


def drawn_blocks(kind: Kind, rng) -> np.ndarray:
    """i32[heads, blocks, n]: some are -1; where there is dropout, which tells repeats apart, none is seen twice."""
    number = -(-kind.length // kind.block)
    table = rng.integers(-1, number, (kind.heads, number, kind.drawn)).astype(np.int32)
    if kind.rate:
        for head, block in np.ndindex(table.shape[:2]):
            named = {block + offset for offset in kind.offsets} | {*kind.columns}
            for place, drawn in enumerate(table[head, block]):
                table[head, block, place] = -1 if drawn in named else drawn
                named.add(drawn)
    return table


def random_mask(kind: Kind, rng) -> Mask:
    """Packed rows with padding at some end, or in between."""
    segments = np.sort(rng.integers(1, 4, (BATCH, kind.length)), axis=1).astype(np.int32)
    segments[0, kind.length - rng.integers(0, 9) :] = 0
    segments[1, : rng.integers(0, 9)] = 0
    limits = [rng.integers(*ends, kind.heads).astype(np.int32) if kind.reach else None for ends in ((1, 20), (1, 4))]
    blocks = Blocks(drawn_blocks(kind, rng), *limits, kind.block, kind.offsets, kind.columns, kind.rows)
    chosen = [rng.choice(kind.length, kind.globals, replace=False) for _ in range(BATCH)]
    chosen = np.where(rng.random((BATCH, kind.globals)) < 0.3, -1, chosen).astype(np.int32)
    ranks = rng.permuted(np.tile(np.arange(kind.length, dtype=np.int32), (BATCH, 1)), axis=1)
    ranked = {"ranks": ranks, "thresholds": ranks, "itself": bool(kind.length % 2)} if kind.ranked else {}
    mask = Mask(segments, blocks=blocks, globals=chosen if kind.globals else None, causal=kind.causal, **ranked)
    return jax.tree.map(jnp.asarray, mask)


@functools.cache
def both_forms(form: str, rate: float):
    """(q, k, v, mask, noise, weights) -> (outputs, gradients of the weighted sum) of the dense form, of the other."""

    def kernel(q, k, v, mask, **options):
        flat = (x.reshape(*x.shape[:2], -1) for x in (q, k, v))  # heads side by side
        return by_kernel(*flat, mask, heads=q.shape[2], interpret=True, **options).reshape(q.shape)

    def dense(q, k, v, mask, **options):
        wide = (x.astype(jnp.float32) for x in (q, k, v))
        return plain.attention(*wide, mask, **options).astype(q.dtype)

    def of(attention, q, k, v, mask, noise, weights):
        attend = lambda *qkv: attention(*qkv, mask, dropout_rate=rate, noise=noise)
        outputs, pull = jax.vjp(attend, q, k, v)
        return outputs, pull(weights)

    other = {"blocks": sparse.attention, "kernel": kernel}[form]
    return jax.jit(lambda *inputs: (of(dense, *inputs), of(other, *inputs)), compiler_options=QUICK)


def random_case(kind: Kind, seed: int, head_dim: int = 4):
    rng = np.random.default_rng(seed)
    mask = random_mask(kind, rng)
    q, k, v, weights = rng.normal(size=(4, BATCH, kind.length, HEADS, head_dim)).astype(np.float32)
    weights *= np.asarray(mask.segments > 0)[..., None, None]  # of padding nothing is read
    return q, k, v, mask, row_keys(seed, 1, jnp.arange(BATCH)), weights


WIDTHS = {"blocks": 4, "kernel": 64}  # of heads; two fill the kernel's lanes


def check(form: str, kind: Kind, seed: int) -> None:
    """One case's outputs and gradients; of one token, that nothing hidden from it has a gradient."""
    q, k, v, mask, noise, weights = random_case(kind, seed, WIDTHS[form])
    (expected, slopes), (mixed, gradients) = both_forms(form, kind.rate)(q, k, v, mask, noise, weights)
    real = np.asarray(mask.segments > 0)
    assert np.isfinite(mixed).all()
    np.testing.assert_allclose(mixed[real], expected[real], atol=2e-6)
    for name, gradient, slope in zip("qkv", gradients, slopes, strict=True):
        np.testing.assert_allclose(gradient, slope, atol=1e-5 if form == "blocks" else 2e-5, err_msg=name)
    token = int(np.random.default_rng(seed).choice(np.flatnonzero(real.all(0))))
    alone = np.zeros_like(weights)
    alone[:, token] = weights[:, token]
    _, (_, of_one) = both_forms(form, kind.rate)(q, k, v, mask, noise, alone)
    hidden = np.broadcast_to(~visible(mask)[:, :, token], (BATCH, HEADS, kind.length)).swapaxes(1, 2)
    assert hidden.any() and not np.any(of_one[1][hidden]) and not np.any(of_one[2][hidden])
    assert not np.delete(of_one[0], token, axis=1).any()


@pytest.mark.parametrize("form, name", [(form, name) for form, kinds in KINDS.items() for name in kinds])
def test_blocks_are_the_dense_form_and_hide_what_it_hides(form, name):
    for seed in range(2 if form == "blocks" else 1):
        check(form, KINDS[form][name], seed)


@pytest.mark.parametrize("form", KINDS)
def test_what_global_tokens_see_may_be_left_to_others(form):
    kind = KINDS[form]["longformer"]
    q, k, v, mask, noise, weights = random_case(kind, 0, WIDTHS[form])
    of_globals = np.asarray(is_global(mask.globals, kind.length))
    weights[of_globals] = 0
    apart = dataclasses.replace(mask, globals_apart=True)
    (expected, slopes), (mixed, gradients) = both_forms(form, kind.rate)(q, k, v, apart, noise, weights)
    elsewhere = np.asarray(mask.segments > 0) & ~of_globals
    np.testing.assert_allclose(mixed[elsewhere], expected[elsewhere], atol=2e-6)
    assert np.isfinite(mixed).all() and np.abs(mixed - expected)[of_globals].max() > 0.01  # nobody computed it
    for gradient, slope in zip(gradients, slopes, strict=True):
        np.testing.assert_allclose(gradient, slope, atol=2e-5)


WIDE = Pattern("longformer", block=32, windows=(96,), dilations=(1, 2, 1, 3))
OTHERS = {  # (heads, head_dim, length, pattern, dtype, tolerance)
    "heads of 32, windows wider than a block, bfloat16": (4, 32, 200, WIDE, jnp.bfloat16, 0.02),
    "heads of 128, a key of noise for each": (2, 128, 768, Pattern("bigbird", block=128, random=1), jnp.float32, 1e-5),
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_kernel_with_other_heads_windows_and_numbers(name, monkeypatch):
    heads, head_dim, length, pattern, dtype, tolerance = OTHERS[name]
    if "noise" in name:
        monkeypatch.setattr(noise_of, "COUNTED", length**2)
    rng = np.random.default_rng(0)
    segments = jnp.asarray(np.sort(rng.integers(1, 3, (BATCH, length)), axis=1).astype(np.int32))
    mask = Mask(segments, blocks=jax.tree.map(lambda x: x[0], blocks_of(pattern, 1, heads, length)))
    q, k, v, weights = jnp.asarray(rng.normal(size=(4, BATCH, length, heads, head_dim)), dtype)
    both_forms.cache_clear()  # of another COUNTED
    expected, found = both_forms("kernel", 0.2)(q, k, v, mask, row_keys(0, 1, jnp.arange(BATCH)), weights)
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
@pytest.mark.parametrize("form", KINDS)
def test_patterns_of_any_kind_are_the_dense_form(form, number):
    kind = any_kind(number)
    if form == "kernel":
        kind = kind._replace(length=int(kind.length * 64 / kind.block), block=64, ranked=False)
    for seed in range(5):
        check(form, kind, seed)
