"""Device noise is uniform, independent between rows, sites and steps, and a function of the row's key alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from models.core import noise

KEYS = noise.row_keys(1, 2, jnp.arange(64))


def words(keys, n=4096):
    return np.asarray(noise.bits(keys, (n,)))


def agreement(a, b):
    """Share of equal bits; 0.5 for independent words."""
    return 1 - np.bitwise_count(a ^ b).mean() / 32


def test_every_byte_is_uniform():
    counts = [np.bincount(column, minlength=256) for column in words(KEYS).view(np.uint8).reshape(-1, 4).T]
    assert min(stats.chisquare(count).pvalue for count in counts) > 1e-4


def test_a_row_of_all_the_elements_that_are_counted_may_have_axes_of_one():
    shape = 1, 65536, 65536
    assert jax.eval_shape(lambda keys: noise.bits(keys, shape), KEYS).shape == (64, *shape)
    ends = [noise.bits_at(KEYS, shape, [jnp.full((1, 1), at) for at in (0, row, 7)]) for row in (0, 65535)]
    assert abs(agreement(*map(np.asarray, ends)) - 0.5) < 0.1


def test_neighbouring_words_are_independent():
    stream = words(KEYS)
    for distance in (1, 2, 3, 64, 128, 1024):
        assert abs(agreement(stream[:, distance:], stream[:, :-distance]) - 0.5) < 2e-3
    pairs = (stream[:, 1:] >> 28) * 16 + (stream[:, :-1] >> 28)
    assert stats.chisquare(np.bincount(pairs.reshape(-1), minlength=256)).pvalue > 1e-4


CHANGES = {
    "row": lambda: noise.row_keys(1, 2, jnp.arange(64) + 1),
    "step": lambda: noise.row_keys(1, 3, jnp.arange(64)),
    "seed": lambda: noise.row_keys(2, 2, jnp.arange(64)),
    "site": lambda: noise.fold(KEYS, 0),
    "seed and step exchanged": lambda: noise.row_keys(2, 1, jnp.arange(64)),
    "first word of the key": lambda: KEYS.at[:, 0].set(jnp.roll(KEYS[:, 0], 1)),
    "second word of the key": lambda: KEYS.at[:, 1].set(jnp.roll(KEYS[:, 1], 1)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_row_step_seed_site_or_key_gives_independent_noise(change):
    assert abs(agreement(words(KEYS), words(CHANGES[change]())) - 0.5) < 2e-3


def test_sites_are_independent_of_each_other():
    streams = [words(noise.fold(KEYS, tag)) for tag in range(8)]
    streams += [words(noise.fold(noise.fold(KEYS, tag), 1)) for tag in range(8)]
    for i, one in enumerate(streams):
        for other in streams[:i]:
            assert abs(agreement(one, other) - 0.5) < 2e-3


def test_no_two_rows_share_a_shifted_stream():
    keys = noise.row_keys(0, 0, jnp.arange(128))
    stream = words(keys, 8192).reshape(-1)
    repeats = len(stream) - len(np.unique(stream))
    expected = len(stream) ** 2 / 2**33  # of uniform words
    assert abs(repeats - expected) < 6 * expected**0.5


def test_noise_depends_on_the_row_not_on_the_batch_around_it():
    whole = noise.bits(noise.row_keys(1, 2, jnp.arange(8)), (3, 5))
    part = noise.bits(noise.row_keys(1, 2, jnp.array([6, 3])), (3, 5))
    np.testing.assert_array_equal(part, whole[jnp.array([6, 3])])


def test_no_row_repeats_within_a_long_run():
    keys = jnp.concatenate([noise.row_keys(0, step, jnp.arange(256)) for step in range(100)])
    assert len(np.unique(np.asarray(keys), axis=0)) == len(keys)


@pytest.mark.parametrize("shape", [(4, 2**15, 2**16), (2, 2**16, 2**16)])
def test_no_two_slices_of_a_row_share_noise_however_long_the_row(shape):
    heads, queries, _ = shape
    thin = jax.jit(lambda keys: noise.bits(keys, shape)[:, :: heads // 2, :: queries // 2, :512]).lower(KEYS).compile()
    assert thin.memory_analysis().temp_size_in_bytes < 2**20  # nothing else is computed
    slices = np.moveaxis(np.asarray(thin(KEYS)).reshape(64, 4, 512), 1, 0)
    for i, one in enumerate(slices):
        for other in slices[:i]:
            assert abs(agreement(one, other) - 0.5) < 2e-3


def test_a_row_that_can_be_counted_is_hashed_as_one_and_a_longer_one_by_slices(monkeypatch):
    index = np.arange(30, dtype=np.uint32).reshape(2, 3, 5)
    first, second = (KEYS[:, word].reshape(-1, 1, 1, 1) for word in (0, 1))
    monkeypatch.setattr(noise, "COUNTED", 30)
    np.testing.assert_array_equal(noise.bits(KEYS, (2, 3, 5)), noise.hashed(noise.spread(index) + first, second))
    monkeypatch.setattr(noise, "COUNTED", 14)
    slices = [noise.bits(noise.fold(KEYS, number), (5,)) for number in range(6)]
    np.testing.assert_array_equal(noise.bits(KEYS, (2, 3, 5)).reshape(64, 6, 5), np.stack(slices, axis=1))


@pytest.mark.parametrize("counted", [30, 14, 4])
def test_the_bits_of_some_elements_are_those_of_the_whole(counted, monkeypatch):
    monkeypatch.setattr(noise, "COUNTED", counted)
    at = [jnp.array(index)[None] for index in ([[1], [0]], [[0], [2]], [[4, 0, 1]])]
    whole = np.asarray(noise.bits(KEYS, (2, 3, 5)))
    np.testing.assert_array_equal(noise.bits_at(KEYS, (2, 3, 5), at), whole[:, [[1], [0]], [[0], [2]], [[4, 0, 1]]])


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_zeroes_its_share_and_scales_the_rest(rate):
    x = jnp.full((64, 100, 40), 3.0)
    dropped = np.asarray(noise.dropout(x, rate, KEYS))
    zero = dropped == 0
    assert abs(zero.mean() - rate) < 5 * (rate * (1 - rate) / x.size) ** 0.5
    np.testing.assert_allclose(dropped[~zero], 3.0 / (1 - rate), rtol=1e-6)
    spread = 5 * (rate * (1 - rate) / 4000) ** 0.5
    assert np.abs(zero.mean(axis=(1, 2)) - rate).max() < spread  # in every row too


def test_dropout_passes_the_gradient_where_it_keeps_keeps_the_dtype_and_does_nothing_without_keys_or_rate():
    x = jnp.ones((64, 10), jnp.bfloat16)
    dropped, pull = jax.vjp(lambda x: noise.dropout(x, 0.5, KEYS), x)
    assert dropped.dtype == jnp.bfloat16
    np.testing.assert_array_equal(pull(x)[0], dropped)
    assert noise.dropout(x, 0.5, None) is x and noise.dropout(x, 0.0, KEYS) is x


def test_gumbel_noise_has_its_distribution():
    draws = np.asarray(noise.gumbel(KEYS, (2000,))).reshape(-1)
    assert stats.kstest(draws, "gumbel_r").pvalue > 1e-4


@pytest.mark.parametrize("word", [0, 0xFFFFFFFF])
def test_gumbel_noise_is_finite_at_the_extremes(word, monkeypatch):
    monkeypatch.setattr(noise, "bits", lambda keys, shape: jnp.full((len(keys), *shape), word, jnp.uint32))
    assert np.isfinite(noise.gumbel(KEYS, (3,))).all()
