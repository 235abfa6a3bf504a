"""A decoder with a cache computes what it computes without."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from models.core.program import Program
from models.families.registry import FAMILIES
from pretrain.objectives.protocols import CausalDecoder
from tests.contract import cases

LENGTH, PLACES, PIECE = 12, 20, 4
MODULES = {name: FAMILIES[name].module(case.model, Program(depth="scan")) for name, case in cases.CASES.items()}
DECODERS = [name for name, module in MODULES.items() if isinstance(module, CausalDecoder)]


def texts(lengths):
    """Rows of such texts that end together: tokens, segments and positions i32[rows, LENGTH]."""
    column = np.arange(LENGTH) - (LENGTH - np.array(lengths)[:, None])
    tokens = np.random.default_rng(0).integers(5, 100, column.shape)
    arrays = {"tokens": tokens, "segments": column >= 0, "positions": np.maximum(column, 0)}
    return {name: np.asarray(array, np.int32) for name, array in arrays.items()}


@functools.cache
def compiled(name, positions=True):
    """(inputs, inputs) -> hidden states of the rows, read as a whole, and of others, read piece by piece."""
    model, variables = MODULES[name], {"params": cases.params(cases.CASES[name])}

    def both(inputs, in_pieces):
        if not positions:
            in_pieces = {field: array for field, array in in_pieces.items() if field != "positions"}
        pieces = jax.tree.map(lambda array: array.reshape(len(array), -1, PIECE).swapaxes(0, 1), in_pieces)
        extend = lambda cache, piece: model.apply(variables, piece, cache, method="advance")[::-1]
        cache, read = jax.lax.scan(extend, model.empty_cache(len(inputs["tokens"]), PLACES), pieces)
        whole = model.apply(variables, inputs, method="decode")
        return whole, read.swapaxes(0, 1).reshape(whole.shape), cache.filled

    return jax.jit(both)


@pytest.mark.parametrize("name", DECODERS)
def test_pieces_after_a_cache_are_the_whole_row_and_padding_before_a_text_changes_nothing(name):
    inputs = texts([LENGTH, 5])
    whole, pieces, filled = map(np.asarray, compiled(name)(inputs, inputs))
    real = inputs["segments"] > 0
    assert filled == LENGTH
    np.testing.assert_allclose(pieces[real], whole[real], atol=1e-5)
    first = {field: np.roll(array[1:], 5, axis=1).repeat(2, 0) for field, array in inputs.items()}  # padding after it
    alone, _, _ = compiled(name)(first, first)
    np.testing.assert_allclose(whole[1, -5:], alone[1, :5], atol=1e-5)


@pytest.mark.parametrize("name", DECODERS)
def test_a_token_sees_no_later_one_and_without_positions_a_piece_goes_on_where_the_cache_ends(name):
    inputs = texts([LENGTH, LENGTH])
    changed = inputs | {"tokens": inputs["tokens"] * (np.arange(LENGTH) <= 6)}
    whole, pieces, _ = map(np.asarray, compiled(name, positions=False)(changed, inputs))
    np.testing.assert_allclose(pieces[:, :7], whole[:, :7], atol=1e-5)
    assert np.abs(pieces - whole)[:, 7:].max() > 1e-3


def test_a_full_cache_takes_no_more():
    model, variables = MODULES["gpt2"], {"params": cases.params(cases.CASES["gpt2"])}
    piece, cache = texts([LENGTH]), model.empty_cache(1, LENGTH + 1)
    extend = lambda cache: model.apply(variables, piece, cache, method="advance")
    _, cache = extend(cache)
    with pytest.raises(ValueError, match="13 places has no room for 12 tokens after 12"):
        extend(cache)
    assert np.isnan(jax.jit(extend)(cache)[0]).all()


def test_gpt2_draws_what_adds_to_the_residual_stream_narrower_with_depth():
    config = dataclasses.replace(FAMILIES["gpt2"].sizes["tiny"], vocab_size=100, depth=8)
    inputs = {name: np.ones((1, 4), np.int32) for name in ("tokens", "segments")}
    module = FAMILIES["gpt2"].module(config, Program(depth="scan"))
    layers = jax.jit(module.init)(jax.random.key(0), inputs)["params"]["layers"]
    narrower = {("attention", "output"), ("feed_forward", "down")}
    for block, parts in layers.items():
        for name in parts.keys() - {"norm"}:
            expected = config.init_std / (4 if (block, name) in narrower else 1)
            assert abs(float(np.std(parts[name]["kernel"])) / expected - 1) < 0.02, (block, name)
