"""Where BERT and ELECTRA drop out, and that a row's noise does not depend on the batch around it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.core.noise import row_keys
from models.core.parameters import leaves, nest
from models.core.program import Program
from models.families import bert, electra
from tests.models.shapes import parameter_shapes

SIZES = {"vocab_size": 50, "positions": 16, "dropout": 0.0, "attention_dropout": 0.0}
BERT = bert.BertConfig(width=16, depth=2, heads=2, feed_forward=32, **SIZES)
ELECTRA = electra.ElectraConfig(
    embedding=8, discriminator=electra.Tower(16, 2, 2, 32), generator=electra.Tower(8, 2, 1, 16), **SIZES
)
METHODS = {
    "bert": (bert.FAMILY, BERT, "encode"),
    "generator": (electra.FAMILY, ELECTRA, "generate"),
    "discriminator": (electra.FAMILY, ELECTRA, "encode"),
}
SCAN = Program(depth="scan")
ROWS = 6
TOKENS = np.random.default_rng(0).integers(5, 50, (ROWS, 12)).astype(np.int32)
BATCH = {"tokens": TOKENS, "types": np.zeros_like(TOKENS), "segments": np.ones_like(TOKENS)}
SLOTS = np.zeros((ROWS, 3), np.int32)


def random_params(config):
    """Parameters of the usual scale; drawn here because the model's own initialisation takes long to compile."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: rng.normal(0.5, 0.5, leaf.shape).astype(np.float32), parameter_shapes(config))


@functools.cache
def compiled(name, dropout, attention_dropout):
    """Jitted (parameters, batch, keys) -> outputs of one part of a model."""
    family, config, method = METHODS[name]
    config = dataclasses.replace(config, dropout=dropout, attention_dropout=attention_dropout)
    module = family.module(config, SCAN)
    slots = lambda inputs: (SLOTS[: len(inputs["tokens"])],) if method == "generate" else ()
    apply = lambda params, inputs, *rest: module.apply({"params": params}, inputs, *rest, method=method)
    return jax.jit(lambda params, inputs, keys: apply(params, inputs, *slots(inputs), keys))


def run(name, rates, step, rows=slice(None)):
    """What one part returns for some rows of the batch, with the noise of a step: [rows, ...]."""
    params = random_params(METHODS[name][1])
    keys = row_keys(0, step, jnp.arange(ROWS))
    inputs = {name: array[rows] for name, array in BATCH.items()}
    output = compiled(name, *rates)(params, inputs, keys[rows])
    output = np.asarray(output).reshape(len(TOKENS[rows]), -1)
    return np.where(np.isfinite(output), output, 0.0)


@pytest.mark.parametrize("rates", [(0.2, 0.0), (0.0, 0.2)], ids=["dropout", "attention_dropout"])
@pytest.mark.parametrize("name", METHODS)
def test_each_rate_alone_switches_on_noise_of_the_step_and_the_row_whatever_the_batch(name, rates):
    outputs = run(name, rates, step=1)
    assert not np.allclose(outputs, run(name, rates, step=2))
    rows = np.array([4, 1, 1, 5, 0, 2])
    np.testing.assert_allclose(run(name, rates, step=1, rows=rows), outputs[rows], rtol=1e-5, atol=1e-5)


def test_the_embeddings_are_dropped_out_too():
    module = bert.FAMILY.module(dataclasses.replace(BERT, dropout=0.5), SCAN)
    # Every block adds nothing, so the embeddings remain, normalised.
    fixed = {"kernel": 0.0, "bias": 0.0, "scale": 1.0}
    flat = {path: (leaf, fixed.get(path.split("/")[-1])) for path, leaf in leaves(random_params(BERT))}
    params = nest({path: leaf if value is None else np.full_like(leaf, value) for path, (leaf, value) in flat.items()})
    keys = row_keys(0, 0, jnp.arange(ROWS))
    hidden = jax.jit(lambda *batch: module.apply({"params": params}, *batch, method="encode"))(BATCH, keys)
    commonest = [np.unique(row.round(5), return_counts=True)[1].max() for row in np.asarray(hidden).reshape(-1, 16)]
    assert 6 < np.mean(commonest) < 10  # half of the 16 features are 0 before the norm, hence equal after it


BAD = {
    "width": {"width": 15},
    "depth": {"depth": 0},
    "dropout": {"dropout": 1.0},
    "attention_dropout": {"attention_dropout": -0.1},
    "activation": {"activation": "swish"},
}


@pytest.mark.parametrize("field", BAD)
def test_impossible_configs_are_refused_by_the_field_name(field):
    with pytest.raises(ValueError, match=rf"model\.{field}="):
        dataclasses.replace(BERT, **BAD[field])


def test_a_tower_is_named_in_the_message():
    with pytest.raises(ValueError, match=r"model\.generator\.width=15"):
        dataclasses.replace(ELECTRA, generator=electra.Tower(15, 2, 2, 16))
