"""ELECTRA's objective: what is sampled, what counts as replaced, and noise of their own for both towers."""

import numpy as np
import pytest

from models.core.noise import row_keys
from pretrain.objectives.objective import Moment
from pretrain.objectives.replaced_token_detection import ReplacedTokenDetection
from tests.pretrain import tiny

MASK, ORIGINAL, OTHER = 4, 7, 8
SCORES = np.array([[0.5, -1.0, 2.0], [0.1, 3.0, -9.0]], np.float32)
BATCH = {
    "tokens": np.array([[5, MASK, 6], [5, MASK, 0]], np.int32),
    "types": np.zeros((2, 3), np.int32),
    "segments": np.array([[1, 1, 1], [1, 1, 0]], np.int32),  # the last is padding
    "prediction_positions": np.array([[1], [1]], np.int32),
    "prediction_targets": np.full((2, 1), ORIGINAL, np.int32),
    "prediction_weights": np.ones((2, 1), np.float32),
}
KEYS = row_keys(0, 0, np.arange(2))
SURE = np.where(np.arange(10) == [[ORIGINAL], [OTHER]], 99.0, 0.0).astype(np.float32)  # of the row's token


class Model:
    """A generator that gives these logits, a discriminator that gives SCORES, and what they were asked."""

    config = tiny.ELECTRA

    def __init__(self, logits):
        self.logits, self.seen, self.noise = logits, None, {}

    def apply(self, variables, *inputs, method):
        if method == "token_scores":
            return SCORES
        self.noise[method], self.seen = inputs[-1], inputs[0]["tokens"]
        return self.logits if method == "generate" else None


def loss(model, train=True):
    return ReplacedTokenDetection().loss(model, {}, BATCH, {}, Moment(KEYS, train))[0]


def test_a_sample_that_hits_the_original_is_no_replacement_and_padding_does_not_count():
    model = Model(SURE)
    sums = loss(model)
    np.testing.assert_array_equal(model.seen, [[5, ORIGINAL, 6], [5, OTHER, 0]])
    nats = np.log1p(np.exp(np.array([0.5, -1.0, 2.0, 0.1, -3.0])))  # four are original, the last is replaced
    assert sums["discriminator"].sum == pytest.approx(nats.sum(), rel=1e-6)
    assert ReplacedTokenDetection().weights(BATCH) == {"generator": 2, "discriminator": 5}


def test_towers_have_noise_of_their_own_and_none_in_evaluation():
    model = Model(SURE)
    loss(model)
    assert not np.intersect1d(model.noise["generate"], model.noise["encode"]).size
    loss(model, train=False)
    assert model.noise == {"generate": None, "encode": None}


def test_tokens_are_sampled_not_the_best_taken():
    uniform = Model(np.zeros((2, 10), np.float32) - 0.01 * np.arange(10, dtype=np.float32))
    loss(uniform)
    assert (np.asarray(uniform.seen)[:, 1] != 0).any()
