"""Masked language modelling with its second term: pairs classified by their label, rows without one left out."""

import numpy as np
import pytest

from models.blocks.heads import PAIR, TOKENS
from pretrain.objectives.masked_language_model import MaskedLanguageModel
from pretrain.objectives.objective import Moment, Sums
from pretrain.training.evaluate import figures
from tests.pretrain import tiny

LABELS = np.array([-1, 0, 1, 1], np.int32)
OF_TOKENS = np.array([[0.0, 1.0, 0.5], [2.0, 0.0, 0.0], [0.0, 0.0, 3.0], [1.0, 0.0, 0.0]], np.float32)
OF_PAIRS = np.array([[9.0, -9.0], [2.0, 0.5], [0.3, 0.0], [-1.0, 1.0]], np.float32)
BATCH = {
    **dict.fromkeys(("tokens", "types", "segments"), np.ones((4, 2), np.int32)),
    "prediction_positions": np.zeros((4, 1), np.int32),
    "prediction_targets": np.array([[1], [0], [0], [2]], np.int32),
    "prediction_weights": np.array([[1], [1], [1], [0]], np.float32),
}


class Model:
    """Gives the logits above for whatever it is asked."""

    config = tiny.BERT

    def apply(self, variables, *inputs, method):
        return np.zeros((4, 2, 3)) if method == "encode" else {TOKENS: OF_TOKENS, PAIR: OF_PAIRS}[inputs[0]]


def nats(logits, target):
    return np.log(np.exp(logits).sum()) - logits[target]


@pytest.mark.parametrize("label", ["next_sentence", "sentence_order"])
def test_labelled_pairs_are_classified_under_the_label_s_name(label):
    objective = MaskedLanguageModel(**{"next_sentence": False} | {label: True})
    batch = BATCH | {label: LABELS}
    terms, *_ = objective.loss(Model(), {}, batch, {}, Moment(None, True))
    assert terms.keys() == objective.coefficients(0).keys() == {"mlm", label}
    assert terms["mlm"].sum == pytest.approx(nats(OF_TOKENS[0], 1) + nats(OF_TOKENS[1], 0) + nats(OF_TOKENS[2], 0))
    assert terms[label].sum == pytest.approx(nats(OF_PAIRS[1], 0) + nats(OF_PAIRS[2], 1) + nats(OF_PAIRS[3], 1))
    assert objective.weights(batch) == {"mlm": 3, label: 3}
    assert (terms["mlm"].hits, terms[label].hits) == (2, 2)


def test_without_labelled_pairs_only_tokens_are_predicted():
    unlabelled, batch = MaskedLanguageModel(), BATCH | {"next_sentence": LABELS * 0 - 1}
    sums = Sums(unlabelled.loss(Model(), {}, batch, {}, Moment(None, True))[0], unlabelled.weights(batch))
    assert figures(unlabelled, [sums], {}).keys() == {"mlm_loss", "mlm_accuracy"}
    objective = MaskedLanguageModel(next_sentence=False)
    terms, *_ = objective.loss(Model(), {}, BATCH, {}, Moment(None, True))
    assert terms.keys() == objective.coefficients(0).keys() == objective.weights(BATCH).keys() == {"mlm"}
