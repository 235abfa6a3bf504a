"""Objectives hand a model the arrays that its family declares: one input more is no edit of any objective."""

import numpy as np
import pytest

from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from models.core.family import Input, unfit_inputs
from models.core.program import Program
from pretrain.objectives.causal_language_model import CausalLanguageModel
from pretrain.objectives.masked_language_model import MaskedLanguageModel
from pretrain.objectives.objective import inputs_of
from pretrain.recipe import check
from tests.pretrain import boxes, tiny


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    boxes.register(monkeypatch)


def test_a_model_is_given_what_it_declares_and_the_batch_has(corpus_path):
    recipe = boxes.recipe()
    batch = recipe.objective.examples(Corpus(corpus_path), "train", recipe.phases[0], 0).build(0, np.arange(2))
    of_boxes = boxes.Boxed(boxes.BoxedConfig(), Program())
    assert set(inputs_of(of_boxes, batch)) == {"tokens", "boxes"}


def test_rows_without_a_required_input_are_refused():
    with pytest.raises(UserError, match="MaskedLanguageModel: its rows do not fit BoxedConfig: boxes is missing"):
        check(boxes.recipe(layout="packed-sentences"))


@pytest.mark.parametrize(
    "recipe, lacking",
    [
        (tiny.bert(objective=CausalLanguageModel()), "Recurrent, AdaptivePredictor"),
        (tiny.transformer_xl(objective=MaskedLanguageModel()), "Encoder, predictions, pair"),
        (tiny.xlnet(objective=MaskedLanguageModel()), "predictions, pair"),
    ],
    ids=["bert", "transformer-xl", "xlnet"],
)
def test_a_model_without_what_an_objective_asks_for_is_refused(recipe, lacking):
    with pytest.raises(UserError, match=f"needs {lacking}, which {type(recipe.model).__name__} lacks"):
        check(recipe)


DECLARED = {"tokens": Input(("length",)), "boxes": Input(("length", 4), "float32"), "hint": Input((), required=False)}
FIT = {"tokens": ((8,), np.int32), "boxes": ((8, 4), np.float32), "other": ((3,), np.int32)}


@pytest.mark.parametrize(
    "changes, said",
    [
        ({}, []),
        ({"boxes": ((8, 5), np.float32)}, ["boxes is float32[8, 5] in place of float32['length', 4]"]),
        ({"boxes": ((8, 4), np.int32)}, ["boxes is int32[8, 4] in place of float32['length', 4]"]),
    ],
    ids=str,
)
def test_rows_fit_where_shapes_and_types_are_the_declared_ones(changes, said):
    assert unfit_inputs(DECLARED, FIT | changes) == said
