"""UniLM's objective: what its recipe masks, and the loss of each task."""

import numpy as np
import pytest

from data_pipelines.errors import UserError
from pretrain.objectives.cross_entropy import predicted
from pretrain.objectives.objective import Phase
from pretrain.objectives.unified_language_model import NAMES, UnifiedLanguageModel
from pretrain.recipe import check
from tests.contract import cases
from tests.pretrain import tiny

OBJECTIVE = UnifiedLanguageModel()


def test_losses_of_the_tasks_are_those_of_their_rows_and_together_the_loss():
    batch = cases.batch(cases.CASES["unilm"])  # a row of each
    logits = np.random.default_rng(0).normal(size=(batch["prediction_targets"].size, 100)).astype(np.float32)
    counts = {name: np.asarray(of) for name, of in OBJECTIVE.counts(logits, batch).items()}
    report = OBJECTIVE.report(counts)
    by_row, slots = logits.reshape(4, -1, 100), batch["prediction_weights"].sum(1)
    for row, name in enumerate(NAMES):
        term = predicted(by_row[row], batch["prediction_targets"][row], batch["prediction_weights"][row])
        assert report[f"{name}_loss"] == pytest.approx(float(term.sum) / slots[row], rel=1e-5)
    whole = predicted(logits, batch["prediction_targets"], batch["prediction_weights"]).sum
    assert sum(nats for nats, _ in counts.values()) == pytest.approx(float(whole), rel=1e-5)
    assert sum(n for _, n in counts.values()) == slots.sum()
    assert OBJECTIVE.report({NAMES[0]: np.float32([0, 0])}) == {}  # an evaluation without rows of a task


def test_a_model_without_the_tasks_is_refused_and_of_five_masks_one_covers_several_tokens():
    with pytest.raises(UserError, match="objective UnifiedLanguageModel: needs ClozeWriter, which BertConfig lacks"):
        check(tiny.bert(objective=OBJECTIVE))
    masking = OBJECTIVE.rows(Phase(1.0, 128, 8)).masks
    assert (masking.unit, masking.ngrams, masking.rate) == ("token", (0.8, 0.1, 0.1), 0.15)
