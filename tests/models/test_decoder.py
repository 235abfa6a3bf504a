"""A decoder with a cache computes what it computes without."""

import dataclasses

import jax
import numpy as np
import pytest

from models.core.program import Program
from models.families.registry import FAMILIES
from pretrain.objectives.protocols import CausalDecoder
from tests.contract import cases

LENGTH, PLACES = 12, 20
MODULES = {name: FAMILIES[name].module(case.model, Program(depth="scan")) for name, case in cases.CASES.items()}
DECODERS = [name for name, module in MODULES.items() if isinstance(module, CausalDecoder)]


@pytest.fixture(params=DECODERS)
def decoder(request):
    return MODULES[request.param], {"params": cases.params(cases.CASES[request.param])}


def texts(lengths):
    """Rows of such texts that end together: tokens, segments and positions i32[rows, LENGTH]."""
    column = np.arange(LENGTH) - (LENGTH - np.array(lengths)[:, None])
    tokens = np.random.default_rng(0).integers(5, 100, column.shape)
    arrays = {"tokens": tokens, "segments": column >= 0, "positions": np.maximum(column, 0)}
    return {name: np.asarray(array, np.int32) for name, array in arrays.items()}


def extended(model, variables, inputs, cuts):
    """Hidden states of the rows, read piece after piece."""
    extend = jax.jit(lambda piece, cache: model.apply(variables, piece, cache, method="extend"))
    cache, read = model.empty_cache(len(inputs["tokens"]), PLACES), []
    for begin, end in zip(cuts[:-1], cuts[1:], strict=True):
        hidden, cache = extend({name: array[:, begin:end] for name, array in inputs.items()}, cache)
        read.append(hidden)
    assert int(cache.filled) == LENGTH
    return np.concatenate(read, axis=1)


def test_pieces_after_a_cache_are_the_whole_row(decoder):
    model, variables = decoder
    inputs = texts([LENGTH, 5])
    whole = model.apply(variables, inputs, method="decode")
    real = inputs["segments"] > 0
    pieces = extended(model, variables, inputs, (0, 7, 8, LENGTH))
    np.testing.assert_allclose(pieces[real], np.asarray(whole)[real], atol=1e-5)


def test_without_positions_a_piece_goes_on_where_the_cache_ends(decoder):
    model, variables = decoder
    inputs = texts([LENGTH])
    del inputs["positions"]
    whole = model.apply(variables, inputs, method="decode")
    np.testing.assert_allclose(extended(model, variables, inputs, (0, 7, 8, LENGTH)), whole, atol=1e-5)


def test_a_full_cache_takes_no_more():
    model, variables = MODULES["gpt2"], {"params": cases.params(cases.CASES["gpt2"])}
    piece, cache = texts([LENGTH]), model.empty_cache(1, LENGTH + 1)
    extend = lambda cache: model.apply(variables, piece, cache, method="extend")
    _, cache = extend(cache)
    with pytest.raises(ValueError, match="13 places has no room for 12 tokens after 12"):
        extend(cache)
    assert np.isnan(jax.jit(extend)(cache)[0]).all()


def test_padding_before_a_text_changes_nothing(decoder):
    model, variables = decoder
    inputs = texts([LENGTH, 5])
    alone = {name: array[1:, -5:] for name, array in inputs.items()}
    padded = model.apply(variables, inputs, method="decode")[1:, -5:]
    np.testing.assert_allclose(padded, model.apply(variables, alone, method="decode"), atol=1e-5)
    del alone["positions"]  # which without padding are the places
    np.testing.assert_allclose(padded, model.apply(variables, alone, method="decode"), atol=1e-5)


def test_a_token_sees_no_later_one(decoder):
    model, variables = decoder
    inputs = texts([LENGTH])
    changed = inputs | {"tokens": inputs["tokens"] * (np.arange(LENGTH) <= 6)}
    before, after = (model.apply(variables, given, method="decode") for given in (inputs, changed))
    np.testing.assert_array_equal(np.asarray(before)[0, :7], np.asarray(after)[0, :7])
    assert np.abs(np.asarray(before) - np.asarray(after))[0, 7:].max() > 1e-3


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
