"""XLNet's two streams see what they may and no more; both streams, the memory and the noise of each row."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.attention.distances import shift
from models.attention.mask import visible
from models.attention.relative import shift_to
from models.blocks.memory import Memory
from models.core.noise import row_keys
from models.core.program import Program
from models.families.xlnet import FAMILY, XLNet, XLNetConfig, both_masks
from tests.models.shapes import random_params

CONFIG = XLNetConfig(
    vocab_size=60, width=16, depth=3, heads=2, feed_forward=24, dropout=0.0, attention_dropout=0.0, memory=5
)
SCAN = Program()
ROWS, LENGTH, SLOTS = 2, 10, 4
KEYS = row_keys(0, 0, jnp.arange(ROWS))


@functools.cache
def compiled(config, program, reuse):
    module = XLNet(config, program)

    def run(params, batch, memory, keys):
        arguments = ({name: batch[name] for name in FAMILY.inputs}, memory, batch["positions"], reuse, keys)
        hidden, memory = module.apply({"params": params}, *arguments, method="query")
        return module.apply({"params": params}, hidden, method="token_logits"), memory

    return jax.jit(run)


def predict(batch, memory, config=CONFIG, program=SCAN, reuse=None, keys=None):
    """(logits [batch, n, vocab], memory)."""
    logits, memory = compiled(config, program, reuse)(random_params(config), batch, memory, keys)
    return np.asarray(logits).reshape(*batch["positions"].shape, -1)[..., : config.vocab_size], memory


def random_batch(seed):
    """A random order of each row; the predicted do not see themselves. One row runs backwards."""
    rng = np.random.default_rng(seed)
    ranks = np.argsort(rng.random((ROWS, LENGTH)), axis=1).astype(np.int32)
    positions = np.sort(np.argsort(rng.random((ROWS, LENGTH)), axis=1)[:, :SLOTS], axis=1).astype(np.int32)
    thresholds = ranks + 1
    np.put_along_axis(thresholds, positions, np.take_along_axis(ranks, positions, axis=1), axis=1)
    return {
        "tokens": rng.integers(0, 60, (ROWS, LENGTH)).astype(np.int32),
        "types": np.sort(rng.integers(0, 3, (ROWS, LENGTH)), axis=1).astype(np.int32),
        "segments": np.ones((ROWS, LENGTH), np.int32),
        "ranks": ranks,
        "thresholds": thresholds,
        "reversed": np.array([0, 1], np.int32),
        "positions": positions,
    }


def random_memory(seed, length):
    hidden = np.random.default_rng(seed).normal(size=(CONFIG.depth, ROWS, length, CONFIG.width))
    return Memory(hidden.astype(np.float32), np.ones((ROWS, length), np.int32))


def test_the_book_s_order_3_2_4_1_gives_its_two_masks():
    order = np.array([3, 2, 4, 1])
    ranks = np.argsort(order)[None].astype(np.int32)
    ones = np.ones((1, 4), np.int32)
    everywhere = np.arange(4, dtype=np.int32)[None]
    (content, _), (query, _) = both_masks(ones, ones, ranks, ranks, everywhere, jnp.zeros((1, 0), jnp.int32))
    np.testing.assert_array_equal(visible(content)[0, 0], [[1, 1, 1, 1], [0, 1, 1, 0], [0, 0, 1, 0], [0, 1, 1, 1]])
    np.testing.assert_array_equal(visible(query)[0, 0], [[0, 1, 1, 1], [0, 0, 1, 0], [0, 0, 0, 0], [0, 1, 1, 0]])


@pytest.mark.parametrize("remembered", [0, 5])
@pytest.mark.parametrize("seed", range(2))
def test_a_token_changes_exactly_the_predictions_that_may_see_it(seed, remembered):
    batch, memory = random_batch(seed), random_memory(seed, remembered)
    before, _ = predict(batch, memory)
    thresholds = np.take_along_axis(batch["thresholds"], batch["positions"], axis=1)
    for at in range(LENGTH):
        tokens = batch["tokens"].copy()
        tokens[:, at] = (tokens[:, at] + 1) % 60
        after, _ = predict(batch | {"tokens": tokens}, memory)
        np.testing.assert_array_equal((before != after).any(axis=-1), batch["ranks"][:, at, None] < thresholds)


@pytest.mark.parametrize("seed", range(2))
def test_a_token_changes_exactly_the_contents_that_may_see_it(seed):
    """The new memory is the content stream before each layer; what sees a token may pass it on to the next layer."""
    batch, memory = random_batch(seed), random_memory(seed, LENGTH)
    before = predict(batch, memory)[1]
    sees = (batch["ranks"][:, None, :] < batch["thresholds"][:, :, None]) | np.eye(LENGTH, dtype=bool)
    for at in range(LENGTH):
        tokens = batch["tokens"].copy()
        tokens[:, at] = (tokens[:, at] + 1) % 60
        after = predict(batch | {"tokens": tokens}, memory)[1]
        changed = (np.asarray(before.hidden) != np.asarray(after.hidden)).any(axis=-1)
        np.testing.assert_array_equal(changed[0], np.broadcast_to(np.arange(LENGTH) == at, (ROWS, LENGTH)))
        np.testing.assert_array_equal(changed[1:], np.broadcast_to(sees[:, :, at], changed[1:].shape))


def test_a_prediction_that_sees_nothing_depends_on_no_token():
    batch = random_batch(0)
    batch |= {"thresholds": np.full_like(batch["thresholds"], -1)}
    first, _ = predict(batch, random_memory(0, 0))
    other, _ = predict(batch | {"tokens": batch["tokens"][::-1]}, random_memory(0, 0))
    np.testing.assert_array_equal(first, other)
    assert np.isfinite(first).all()


def test_memory_of_another_segment_or_none_is_not_seen():
    batch, memory = random_batch(1), random_memory(1, 5)
    foreign, empty = memory._replace(segments=np.full((ROWS, 5), 9, np.int32)), XLNet(CONFIG, SCAN).empty_memory(ROWS)
    for nothing in (foreign, empty):
        np.testing.assert_allclose(predict(batch, nothing)[0], predict(batch, random_memory(0, 0))[0], atol=2e-5)
    assert not np.allclose(predict(batch, foreign)[0], predict(batch, memory)[0], atol=1e-3)


def test_the_leading_positions_are_remembered_after_what_was():
    batch, memory = random_batch(2), random_memory(2, 5)
    _, new = predict(batch, memory, reuse=3)
    np.testing.assert_array_equal(new.hidden[:, :, :2], memory.hidden[:, :, 3:])
    tokens = random_params(CONFIG)["tokens"]
    np.testing.assert_array_equal(new.hidden[0, :, 2:], tokens[batch["tokens"][:, :3]])
    kept = lambda params: jnp.sum(compiled(CONFIG, SCAN, 3)(params, batch, memory, None)[1].hidden)
    assert not any(leaf.any() for leaf in jax.tree.leaves(jax.grad(kept)(random_params(CONFIG))))


def test_shifting_to_positions_takes_rows_of_the_whole_shift():
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(2, 3, 7, 19)).astype(np.float32)  # 7 queries, 12 keys
    positions = np.array([[0, 6, 3], [5, 5, 1]])
    whole = np.asarray(shift(scores, 12))
    some = np.stack([scores[row][:, at] for row, at in enumerate(positions)])
    expected = np.stack([whole[row][:, at] for row, at in enumerate(positions)])
    np.testing.assert_array_equal(shift_to(6 - positions, some, 12), expected)
    for i, j in np.ndindex(7, 12):
        np.testing.assert_array_equal(whole[..., i, j], scores[..., i, j + 6 - i])


def test_noise_belongs_to_its_row():
    config = dataclasses.replace(CONFIG, dropout=0.3, attention_dropout=0.3)
    batch, memory = random_batch(4), random_memory(4, 5)
    both, _ = predict(batch, memory, config, keys=KEYS)
    assert not np.allclose(both, predict(batch, memory, config, keys=row_keys(0, 1, jnp.arange(ROWS)))[0])
    turned = jax.tree.map(lambda leaf: leaf[::-1], batch)
    there, _ = predict(turned, Memory(memory.hidden[:, ::-1], memory.segments[::-1]), config, keys=KEYS[::-1])
    np.testing.assert_allclose(there[::-1], both, atol=5e-5)
