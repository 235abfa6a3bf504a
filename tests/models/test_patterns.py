"""Sparse patterns: tables of blocks made by NumPy, what they draw, what they refuse."""

import dataclasses
import functools
import hashlib
import itertools
import re
import time

import jax
import numpy as np
import pytest

from models.attention.patterns.blocks import counts
from models.attention.patterns.pairs import pairs
from models.attention.patterns.pattern import PATTERNS, Pattern, check, on_host
from models.attention.patterns.table import DRAWN, GLOBAL, WINDOW, table
from tests.models.programs import QUICK

BIGBIRD = Pattern("bigbird", block=4)
CASES = [  # pattern, tokens of a row; the last block may be shorter
    (BIGBIRD, 64),
    (BIGBIRD, 33),
    (dataclasses.replace(BIGBIRD, window=5, random=2, seed=7), 63),
    (dataclasses.replace(BIGBIRD, global_blocks=3, random=1), 40),
    (dataclasses.replace(BIGBIRD, global_blocks=0, window=1), 37),
    (dataclasses.replace(BIGBIRD, window=3, random=0, global_blocks=1), 12),
    (dataclasses.replace(BIGBIRD, random=11), 64),  # all that are free
]


def blocks_seen(pattern, length, layer, head, depth=3, heads=4):
    """Block of queries -> (its window, its global, its drawn blocks), each a list, from the tables."""
    made = on_host(pattern, depth, heads, length)
    drawn = made.drawn[layer, min(head, made.drawn.shape[1] - 1)]
    inside = lambda numbers: [number for number in numbers if 0 <= number < made.number]
    return {
        block: (inside(block + offset for offset in made.offsets), list(made.columns), inside(drawn[block]))
        for block in range(made.number)
        if block not in made.rows
    }


@pytest.mark.parametrize("pattern, length", CASES)
def test_bigbird_draws_so_many_others_of_each_block(pattern, length):
    for layer, head in ((0, 0), (2, 3)):
        rows = blocks_seen(pattern, length, layer, head)
        assert len(rows) == -(-length // pattern.block) - pattern.global_blocks
        for near, everywhere, drawn in rows.values():
            assert len(drawn) == len(set(drawn)) == pattern.random
            assert not set(drawn) & {*near, *everywhere}


def test_bigbird_s_window_and_global_blocks_are_those_of_the_paper():
    near, everywhere, _ = blocks_seen(BIGBIRD, 64, 0, 0)[5]
    assert near == [4, 5, 6] and everywhere == [0, 15]
    assert on_host(BIGBIRD, 3, 4, 64).rows == (0, 15)
    assert on_host(dataclasses.replace(BIGBIRD, global_blocks=3), 3, 4, 64).columns == (0, 1, 15)


def test_every_layer_head_and_seed_draws_by_itself_whatever_the_others_are():
    drawn = on_host(BIGBIRD, 3, 4, 256).drawn
    tables = {drawn[layer, head].tobytes() for layer in range(3) for head in range(4)}
    assert len(tables) == 12
    np.testing.assert_array_equal(on_host(BIGBIRD, 2, 2, 256).drawn, drawn[:2, :2])
    other = on_host(dataclasses.replace(BIGBIRD, seed=1), 3, 4, 256).drawn
    assert (other != drawn).any(axis=(2, 3)).all()


def test_each_set_of_free_blocks_is_as_probable():
    """A row with 5 free blocks of which 2 are drawn: 10 sets."""
    pattern = dataclasses.replace(BIGBIRD, random=2)
    drawn = on_host(pattern, 40, 50, 4 * 10).drawn[:, :, 4].reshape(-1, 2)  # 10 blocks, 0 and 9 global, 3 4 5 near
    sets, number = np.unique(drawn, axis=0, return_counts=True)
    assert {tuple(one) for one in sets} == {(a, b) for a in (1, 2, 6, 7, 8) for b in (1, 2, 6, 7, 8) if a < b}
    assert (abs(number - 200) < 5 * 200**0.5).all()


def test_what_is_drawn_never_changes():
    """A resumed run, another host and another version of NumPy have the same blocks."""
    table = on_host(Pattern("bigbird"), 12, 12, 4096).drawn
    assert table[3, 5, 20].tolist() == [9, 39, 46]
    assert hashlib.sha256(table.astype("<i4").tobytes()).hexdigest()[:16] == "6c6394e1790000c4"


def test_tables_and_pairs_at_65_536_tokens_are_made_in_seconds_are_small_and_grow_with_the_length_alone():
    began = time.process_time()
    drawn = on_host(Pattern("bigbird"), 24, 16, 65_536).drawn
    for pattern in (Pattern("bigbird"), Pattern("longformer", windows=(32, 512) * 12)):
        long, short = (pairs(pattern, 24, 16, length) / length for length in (65_536, 8_192))
        assert (abs(long / short - 1) < 0.08).all()  # keys of a query, but for global rows and the ends
    assert time.process_time() - began < 8 and drawn.nbytes < 5e6


LONGFORMER, STRIDED, FIXED = (Pattern(name) for name in ("longformer", "strided", "fixed"))
REFUSED = [  # pattern, changes, tokens of a row, said
    (BIGBIRD, {"random": 12}, 64, "random=12: a row has 16 blocks of 4; for some queries only 11 of them are neither"),
    (BIGBIRD, {"random": 12}, 64, "lower it, or use rows of at least 68 tokens"),
    (BIGBIRD, {}, 28, "use rows of at least 32 tokens"),
    (BIGBIRD, {"global_blocks": 16, "random": 0}, 64, "global_blocks=16: a row has 16 blocks of 4, which would all be"),
    (BIGBIRD, {"window": 4}, 64, "window=4: must be odd"),
    (LONGFORMER, {"windows": (32, 33)}, 64, "windows=[32, 33]: must be even"),
    (LONGFORMER, {"windows": (32, 33)}, 64, "use 34 instead of 33"),
    (LONGFORMER, {"windows": (8, 8, 8)}, 64, "windows=[8, 8, 8]: must be one for all layers, or one for each of the 2"),
    (
        LONGFORMER,
        {"dilations": (1, 2, 3)},
        64,
        "dilations=[1, 2, 3]: must be one for all heads, or one for each of the 2",
    ),
    *((name, {"stride": 8}, 512, "stride=8: a row has 8 blocks of 64") for name in (STRIDED, FIXED)),
    (STRIDED, {"stride": 8}, 512, "more than 512 tokens"),
    (FIXED, {"stride": 4, "summary": 4}, 512, "summary=4: must be below"),
]
TAKEN = [  # what just fits
    *((BIGBIRD, {"random": 11}, 64), (BIGBIRD, {"random": 12}, 68), (BIGBIRD, {}, 32)),
    *((BIGBIRD, {"global_blocks": 15, "random": 0}, 64), (STRIDED, {"stride": 7}, 512), (FIXED, {"stride": 7}, 512)),
    *((LONGFORMER, {"windows": (8, 16), "dilations": (2,)}, 64), (LONGFORMER, {"dilations": (1, 2)}, 64)),
]


@pytest.mark.parametrize("pattern, changes, length, said", [*REFUSED, *((*case, None) for case in TAKEN)])
def test_a_row_that_is_too_short_or_a_pattern_that_does_not_fit_is_an_error_that_says_how_to_fit_it(
    pattern, changes, length, said
):
    pattern = dataclasses.replace(pattern, **changes)
    if said is None:
        check(pattern, 2, 2, length)
        return
    with pytest.raises(ValueError, match=rf"^model\.pattern\.[^\n]*{re.escape(said)}[^\n]*$"):
        check(pattern, 2, 2, length)


def test_fields_out_of_their_ranges():
    for wrong in ({"windows": ()}, {"windows": (8, 0)}, {"dilations": (-1,)}, {"block": 0}, {"seed": -1}):
        (field,) = wrong
        with pytest.raises(ValueError, match=rf"^model\.pattern\.{field}=.*must be"):
            Pattern("longformer", **wrong)
    with pytest.raises(ValueError, match="model.pattern.name='big': use one of dense, .*, strided, fixed"):
        Pattern("big")


OTHERS = {"block": 8, "window": 5, "random": 1, "global_blocks": 4, "seed": 1}
OTHERS |= {"windows": (16,), "dilations": (2,), "stride": 5, "summary": 2}


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_reads_the_fields_that_are_said_of_it_and_no_others(name):
    def tables(**fields):
        made = on_host(dataclasses.replace(Pattern(name, block=4, windows=(8,), stride=4), **fields), 2, 2, 128)
        arrays, static = jax.tree.flatten(made)
        return str(static), [array.tolist() for array in arrays]

    read = {field for field, value in OTHERS.items() if tables(**{field: value}) != tables()}
    assert read == set(PATTERNS[name].fields) and {*OTHERS, "name"} == {x.name for x in dataclasses.fields(Pattern)}


def test_tables_are_shared_and_nobody_can_change_them():
    for pattern in (BIGBIRD, Pattern("longformer", block=4), Pattern("fixed", block=4)):
        arrays = jax.tree.leaves(on_host(pattern, 2, 2, 64))
        assert arrays and not any(array.flags.writeable for array in arrays)


def test_a_window_wider_than_the_row_is_the_row():
    huge = Pattern("longformer", block=4, windows=(2**31 - 2,), dilations=(3,))
    made = on_host(huge, 1, 1, 32)
    assert made.offsets == tuple(range(-7, 8)) and made.reach[0, 0] == 32
    assert on_host(dataclasses.replace(BIGBIRD, window=10**9 + 1, random=0), 1, 1, 32).offsets == tuple(range(-7, 8))


DEPTH, HEADS = 3, 4
SPARSE = [
    *CASES,
    (Pattern("longformer", block=4, windows=(8,)), 64),
    (Pattern("longformer", block=4, windows=(2, 10, 6), dilations=(1, 1, 2, 3)), 43),
    (Pattern("longformer", block=8, windows=(200,), dilations=(2,)), 43),
    (Pattern("strided", block=4, stride=3), 62),
    (Pattern("fixed", block=4, stride=4, summary=2), 62),
]


@functools.cache
def dense(pattern, length, causal=False):
    """How often each query sees each key, by the definition, of tables for a causal mask or not: [depth, heads, length,
    length]."""
    of_layers = jax.jit(jax.vmap(lambda blocks: counts(blocks, length)), compiler_options=QUICK)
    return np.broadcast_to(of_layers(on_host(pattern, DEPTH, HEADS, length, causal)), (DEPTH, HEADS, length, length))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("pattern, length", SPARSE)
def test_pairs_are_those_of_the_definition(pattern, length, causal):
    all_pairs = dense(pattern, length)
    expected = (np.tril(all_pairs) if causal else all_pairs).sum((2, 3)).mean(1)
    np.testing.assert_array_equal(pairs(pattern, DEPTH, HEADS, length, causal=causal), expected)


@pytest.mark.parametrize("causal", [False, True])
def test_pairs_with_tokens_that_see_all_are_those_of_the_mean_choice(causal):
    pattern, length = Pattern("longformer", block=2, windows=(2,)), 8
    near, places = dense(pattern, length)[0, 0] > 0, np.arange(length)
    may = places[:, None] >= places if causal else np.ones((length, length), bool)

    def with_chosen(tokens):
        chosen = np.isin(places, tokens)
        return (may & (near | chosen[:, None] | chosen)).sum()

    mean = np.mean([with_chosen(tokens) for tokens in itertools.combinations(range(length), 3)])
    assert pairs(pattern, DEPTH, HEADS, length, 3, causal) == pytest.approx([mean] * DEPTH)


def test_pairs_of_what_is_dense():
    assert pairs(Pattern(), 2, 4, 10).tolist() == [100, 100] and pairs(Pattern(), 1, 4, 10, causal=True) == 55


@pytest.mark.parametrize("pattern, length", [case for case in SPARSE if case[0].name == "longformer"])
def test_longformer_s_windows_are_the_paper_s_token_by_token(pattern, length):
    """Section 3.1: half a window on each side, with gaps of the dilation between its tokens."""
    windows, dilations = pattern.windows * DEPTH, pattern.dilations * HEADS  # one is for all
    i, j = np.arange(length)[:, None], np.arange(length)
    for layer, head in itertools.product(range(DEPTH), range(HEADS)):
        window, dilation = windows[layer], dilations[head]
        near = {side * step * dilation for step in range(window // 2 + 1) for side in (-1, 1)}
        np.testing.assert_array_equal(dense(pattern, length)[layer, head], np.isin(j - i, list(near)))


def blocks_with(seen, block):
    """bool[length, length] -> [blocks, blocks], those in which something is seen."""
    short = -len(seen) % block
    number = (len(seen) + short) // block
    return np.pad(seen > 0, (0, short)).reshape(number, block, number, block).any((1, 3))


def paper(name, length, stride, summary):
    """Which keys a query sees by Child et al. 2019, section 4.3: bool[length, length]. Their l is stride, c summary."""
    i, j = np.arange(length)[:, None], np.arange(length)
    if name == "strided":
        seen = (j >= i - stride) | ((i - j) % stride == 0)
    else:
        seen = (j // stride == i // stride) | (j % stride >= stride - summary)
    return seen & (j <= i)


@pytest.mark.parametrize("length", [64, 62])
@pytest.mark.parametrize(
    "name, stride, summary", [("strided", 4, 1), ("strided", 1, 1), ("fixed", 4, 1), ("fixed", 5, 2)]
)
def test_the_sparse_transformer_s_patterns_are_the_paper_s_block_by_block(name, stride, summary, length):
    pattern, block = Pattern(name, block=4, stride=stride, summary=summary), 4
    of_blocks = blocks_with(paper(name, length, block * stride, block * summary), block)
    expected = np.tril(of_blocks.repeat(block, 0).repeat(block, 1))[:length, :length]
    np.testing.assert_array_equal(np.tril(dense(pattern, length)[2, 3]), expected)


def test_in_an_encoder_they_are_the_same_towards_both_sides():
    strided = dense(Pattern("strided", block=4, stride=3), 62)[0, 0]
    np.testing.assert_array_equal(strided, strided.T)
    fixed = dense(Pattern("fixed", block=4, stride=4), 64)[0, 0][::4, ::4]
    assert np.flatnonzero(fixed[5]).tolist() == [3, 4, 5, 6, 7, 11, 15]


@pytest.mark.parametrize("pattern, length", SPARSE)
def test_causal_tables_lack_what_a_causal_mask_hides_and_nothing_else(pattern, length):
    made = on_host(pattern, DEPTH, HEADS, length, causal=True)
    assert max(made.offsets) == 0 and (made.drawn <= np.arange(made.number)[:, None]).all()
    np.testing.assert_array_equal(np.tril(dense(pattern, length, causal=True)), np.tril(dense(pattern, length)))


@pytest.mark.parametrize("pattern, length", SPARSE)
def test_a_table_names_the_blocks_of_which_something_is_seen(pattern, length):
    for layer, head in ((0, 1), (2, 3)):
        made = table(pattern, DEPTH, HEADS, length, layer, head)
        np.testing.assert_array_equal(made > 0, blocks_with(dense(pattern, length)[layer, head], pattern.block))


def test_a_table_says_why_a_block_is_seen():
    kinds = table(dataclasses.replace(BIGBIRD, random=0), 1, 1, 24, 0, 0)
    w, g = WINDOW, GLOBAL
    expected = [[g] * 6, [g, w, w, 0, 0, g], [g, w, w, w, 0, g], [g, 0, w, w, w, g], [g, 0, 0, w, w, g], [g] * 6]
    np.testing.assert_array_equal(kinds, expected)
    drawn = on_host(BIGBIRD, 2, 2, 64).drawn[1, 0]
    kinds = table(BIGBIRD, 2, 2, 64, 1, 0)
    assert [np.flatnonzero(row == DRAWN).tolist() for row in kinds[1:-1]] == drawn[1:-1].tolist()
