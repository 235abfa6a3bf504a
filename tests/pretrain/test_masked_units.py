"""Each phase masks units of its own: ERNIE's stages mask tokens, then phrases, then entities."""

import dataclasses

import numpy as np
import pytest

from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.examples.masking import Masking
from pretrain.objectives.masked_language_model import MaskedUnits, UnitPhase
from pretrain.recipe import every_task, resolve
from pretrain.recipes.registry import RECIPES
from pretrain.training.data import check_data, training_batches
from tests.data_pipelines.corpora import chosen, unmasked
from tests.data_pipelines.prepared import run

HAN = "赵钱孙李周吴郑王"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Text in which every phrase and every entity is followed by a token outside of them."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *HAN, "。"]), "utf-8")
    (folder / "phrases").write_text("赵钱\n", "utf-8")
    (folder / "entities").write_text("孙李周\n", "utf-8")
    (folder / "a.txt").write_text("\n\n".join(["赵钱吴孙李周郑赵钱王。" * 3] * 200), "utf-8")
    units = tuple(f"{name}=forward:{folder / file}" for name, file in (("phrase", "phrases"), ("entity", "entities")))
    told = {"tokenizer": str(folder / "vocab.txt"), "language": ("zh",), "units": units, "documents": "blank-line"}
    run(folder / "c", f"text:{folder / 'a.txt'}", **told)
    return Corpus(folder / "c")


def test_the_stages_of_ernie_mask_tokens_then_phrases_then_entities(corpus):
    recipe = resolve(RECIPES["ernie-tiny"], corpus)
    check_data(recipe, {"": corpus})
    whole = []
    for _, phase, task in every_task(recipe):
        batch = training_batches(recipe, {"": corpus}, phase, task).batch(0, np.arange(32))
        texts, found = unmasked(batch), chosen(batch)
        at = {name: texts == 5 + HAN.index(name) for name in "赵孙"}
        masked = {
            "phrase": [found[:, place : place + 2][at["赵"][:, place]] for place in range(1, 120)],
            "entity": [found[:, place : place + 3][at["孙"][:, place]] for place in range(1, 120)],
        }
        whole.append({name: all((x.all(1) == x.any(1)).all() for x in each) for name, each in masked.items()})
    assert whole == [
        {"phrase": False, "entity": False},
        {"phrase": True, "entity": False},
        {"phrase": False, "entity": True},
    ]


def test_a_phase_keeps_all_else_of_the_masking():
    objective = MaskedUnits(masking=Masking(0.3, ngrams=(1.0, 1.0)))
    phase = UnitPhase(1.0, 64, 4, unit="word_starts")
    assert objective.rows(phase).masks == dataclasses.replace(objective.masking, unit="word_starts")
    assert str(phase) == "4 rows of 64 tokens, masks by word_starts"
    with pytest.raises(ValueError, match="masking.unit=.word_starts.: each phase has its own, phases.0.unit"):
        MaskedUnits(masking=Masking(unit="word_starts"))


def test_a_corpus_without_a_phase_s_units_is_refused_before_any_step(corpus):
    recipe = resolve(RECIPES["ernie-tiny"], corpus)
    last = dataclasses.replace(recipe.phases[2], unit="name_starts")
    recipe = dataclasses.replace(recipe, phases=(*recipe.phases[:2], last))
    said = "masking by unit='name_starts': .* use one of token, word_starts, phrase_starts, entity_starts, or"
    with pytest.raises(UserError, match=said):
        check_data(recipe, {"": corpus})
