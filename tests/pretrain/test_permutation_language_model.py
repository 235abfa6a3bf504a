"""Permutation language modelling remembers the reused part alone and predicts what the batch says."""

import numpy as np
import pytest

from data_pipelines.examples.permutations import Permuting
from models.blocks.memory import Memory
from pretrain.objectives.objective import Moment
from pretrain.objectives.permutation_language_model import PermutationLanguageModel
from tests.pretrain import tiny

BATCH = {
    "tokens": np.ones((2, 4), np.int32),
    "prediction_positions": np.array([[1], [0]], np.int32),
    "prediction_targets": np.array([[1], [0]], np.int32),
    "prediction_weights": np.array([[1], [0]], np.float32),
}
BEFORE, AFTER = (Memory(np.full((1, 2, 3, 4), x, np.float32), np.ones((2, 3), np.int32)) for x in (1, 2))
LOGITS = np.array([[0.0, 1.0, 0.5], [9.0, 0.0, 0.0]], np.float32)


class Model:
    """Gives the logits above and keeps what its query stream was asked."""

    config = tiny.XLNET

    def apply(self, variables, *inputs, method):
        if method == "token_logits":
            return LOGITS
        assert method == "query"
        self.asked = inputs
        return np.zeros((2, 4)), AFTER


@pytest.mark.parametrize(("reuse_len", "remembered"), [(2, 2), (0, None)])
@pytest.mark.parametrize("train", [True, False])
def test_the_reused_part_is_remembered_or_the_whole_row_where_there_is_none(train, reuse_len, remembered):
    model, objective = Model(), PermutationLanguageModel(Permuting(reuse_len=reuse_len))
    terms, after, _ = objective.loss(model, {}, BATCH, BEFORE._asdict(), Moment("noise", train))
    _, memory, positions, reuse, noise = model.asked
    assert memory.hidden is BEFORE.hidden and positions is BATCH["prediction_positions"]
    assert reuse == remembered and noise == ("noise" if train else None)
    assert after["hidden"] is AFTER.hidden
    assert terms["plm"].sum == pytest.approx(np.log(np.exp(LOGITS[0]).sum()) - 1.0)
    assert objective.weights(BATCH) == {"plm": 1} and terms["plm"].hits == 1
