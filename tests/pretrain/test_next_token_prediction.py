"""Rows of packed documents as a model reads them, and what the objective adds up."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from data_pipelines.batches import make_examples
from data_pipelines.corpus import Corpus
from models.attention.mask import Mask
from models.core.program import Program
from models.families.registry import FAMILIES
from pretrain.objectives.next_token_prediction import NextTokenPrediction
from pretrain.objectives.objective import Moment
from pretrain.objectives.phase import Phase
from tests.contract import cases
from tests.data_pipelines.corpora import SPECIAL, epoch, numbered, write_corpus

CASE = cases.CASES["gpt2"]
MODEL, VARIABLES = FAMILIES["gpt2"].module(CASE.model, Program()), {"params": cases.params(CASE)}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    documents = numbered([[6], [9], [4, 3]])
    return Corpus(write_corpus(tmp_path_factory.mktemp("c") / "c", documents, 100, special=SPECIAL | {"eod": 99}))


def row(objective, corpus):
    """The one row of the corpus."""
    return epoch(make_examples(objective.rows(Phase(1.0, 32, 1)), corpus, "train", 1, seed=0))


@functools.cache
def of_embeddings():
    """Gradients of a weighted sum of the losses by the embeddings that the layers read."""

    def loss(x, segments, weights, targets):
        hidden = MODEL.apply(VARIABLES, x, Mask(segments, causal=True), None, method="transform")[0]
        log = jax.nn.log_softmax(MODEL.apply(VARIABLES, hidden, method="token_logits"))
        return -jnp.sum(weights.reshape(-1) * log[jnp.arange(len(log)), targets.reshape(-1)])

    return jax.jit(jax.grad(loss))


@pytest.mark.parametrize("separate", [True, False])
def test_a_documents_loss_depends_on_no_other_document_in_the_row_if_they_are_separate(corpus, separate):
    told = row(NextTokenPrediction(separate=True), corpus)["segments"]
    batch = row(NextTokenPrediction(separate=separate), corpus)
    x = MODEL.apply(VARIABLES, batch, method="embed")
    last = (told == told.max()).astype(np.float32)
    gradient = np.abs(of_embeddings()(x, batch["segments"], last, batch["targets"])).max(-1)
    assert gradient[last > 0].max() > 1e-3
    assert told.max() == 3 and (gradient[last == 0].max() == 0) == separate


def test_positions_that_restart_are_read(corpus):
    plain, anew = (row(NextTokenPrediction(restart=restart), corpus) for restart in (False, True))
    assert "positions" not in plain and anew["positions"].max() < 24
    table = VARIABLES["params"]["embeddings"]["positions"]
    moved = MODEL.apply(VARIABLES, anew, method="embed") - MODEL.apply(VARIABLES, plain, method="embed")
    np.testing.assert_allclose(moved[0], table[anew["positions"][0]] - table[: moved.shape[1]], atol=1e-6)


def test_z_loss_is_the_mean_square_of_the_log_normaliser(corpus):
    objective, batch = NextTokenPrediction(z_loss=0.25), row(NextTokenPrediction(), corpus)
    moment = Moment(np.zeros((1, 2), np.uint32), False)
    sums, _, counts = objective.loss(MODEL, VARIABLES["params"], batch, {}, moment)
    hidden = MODEL.apply(VARIABLES, batch, method="decode")
    normaliser = jax.nn.logsumexp(MODEL.apply(VARIABLES, hidden, method="token_logits"), axis=-1)
    np.testing.assert_allclose(sums["z"], (normaliser**2) @ batch["weights"].reshape(-1), rtol=1e-5)
    assert objective.weights(batch) == {"lm": counts["lm_total"], "z": counts["lm_total"]}
    assert objective.coefficients(0) == {"lm": 1.0, "z": 0.25}
    without = dataclasses.replace(objective, z_loss=0.0)
    assert without.coefficients(0) == {"lm": 1.0} and without.weights(batch).keys() == {"lm"}
