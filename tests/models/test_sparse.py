"""Attention in blocks is the dense form, in outputs and in every gradient, whatever the pattern, rows and dropout."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.attention import plain, sparse
from models.attention.mask import Mask, is_global, visible
from models.attention.patterns.blocks import Blocks
from models.core.noise import row_keys
from tests.models.programs import QUICK

BATCH, HEADS, HEAD_DIM = 2, 2, 4


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


KINDS = (
    Kind(length=61, columns=(0, 7), rows=(0, 7), drawn=2, heads=2, rate=0.2),  # BigBird's, rows that end in a block
    Kind(reach=True, offsets=(-2, -1, 0, 1, 2), globals=3, rate=0.1),  # Longformer's
    Kind(columns=(1, 4), rows=(2,), drawn=3, heads=2),  # rows that are no columns; what is drawn twice counts twice
    Kind(length=45, offsets=(-2, 0), columns=(3,), drawn=1, causal=True, rate=0.3),
    Kind(length=53, block=16, globals=2, rows=(0,), drawn=1, heads=2, ranked=True),
)


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
def both_forms(kind: Kind):
    """(q, k, v, mask, noise, weights) -> (outputs, gradients of the weighted sum) of the dense form, of the blocks."""

    def of(attention, q, k, v, mask, noise, weights):
        attend = lambda *qkv: attention(*qkv, mask, dropout_rate=kind.rate, noise=noise)
        outputs, pull = jax.vjp(attend, q, k, v)
        return outputs, pull(weights)

    both = lambda *inputs: (of(plain.attention, *inputs), of(sparse.attention, *inputs))
    return jax.jit(both, compiler_options=QUICK)


def random_case(kind: Kind, seed: int):
    rng = np.random.default_rng(seed)
    mask = random_mask(kind, rng)
    q, k, v, weights = rng.normal(size=(4, BATCH, kind.length, HEADS, HEAD_DIM)).astype(np.float32)
    weights *= np.asarray(mask.segments > 0)[..., None, None]  # of padding nothing is read
    return q, k, v, mask, row_keys(seed, 1, jnp.arange(BATCH)), weights


def check(kind: Kind, seed: int) -> None:
    """One case's outputs and gradients; of one token, that nothing hidden from it has a gradient."""
    q, k, v, mask, noise, weights = random_case(kind, seed)
    (expected, slopes), (mixed, gradients) = both_forms(kind)(q, k, v, mask, noise, weights)
    real = np.asarray(mask.segments > 0)
    np.testing.assert_allclose(mixed[real], expected[real], atol=2e-6)
    for name, gradient, slope in zip("qkv", gradients, slopes, strict=True):
        np.testing.assert_allclose(gradient, slope, atol=1e-5, err_msg=name)
    token = int(np.random.default_rng(seed).choice(np.flatnonzero(real.all(0))))
    alone = np.zeros_like(weights)
    alone[:, token] = weights[:, token]
    _, (_, of_one) = both_forms(kind)(q, k, v, mask, noise, alone)
    hidden = np.broadcast_to(~visible(mask)[:, :, token], (BATCH, HEADS, kind.length)).swapaxes(1, 2)
    assert hidden.any() and not np.any(of_one[1][hidden]) and not np.any(of_one[2][hidden])
    assert not np.delete(of_one[0], token, axis=1).any()


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("kind", KINDS, ids=("bigbird", "longformer", "repeats", "causal", "ranked"))
def test_blocks_are_the_dense_form_and_hide_what_it_hides(kind, number):
    check(kind, number)


def test_what_global_tokens_see_may_be_left_to_others():
    q, k, v, mask, noise, weights = random_case(KINDS[1], 0)
    of_globals = np.asarray(is_global(mask.globals, KINDS[1].length))
    weights[of_globals] = 0
    apart = dataclasses.replace(mask, globals_apart=True)
    (expected, slopes), (mixed, gradients) = both_forms(KINDS[1])(q, k, v, apart, noise, weights)
    elsewhere = np.asarray(mask.segments > 0) & ~of_globals
    np.testing.assert_allclose(mixed[elsewhere], expected[elsewhere], atol=2e-6)
    assert np.isfinite(mixed).all() and np.abs(mixed - expected)[of_globals].max() > 0.01  # nobody computed it
    for gradient, slope in zip(gradients, slopes, strict=True):
        np.testing.assert_allclose(gradient, slope, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(40))
def test_patterns_of_any_kind_are_the_dense_form(number):
    kind = any_kind(number)
    for seed in range(5):
        check(kind, seed)
