"""Text to text: rows, loss and gradients of an encoder-decoder and of a decoder beside transformers' classes; what is
written after them; files."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import torch

from data_pipelines import noise
from data_pipelines.errors import UserError
from data_pipelines.examples.layout import Chosen
from data_pipelines.tokenizers import words
from data_pipelines.tokenizers.made import Made, special_ids
from finetune.evaluators import Development, figures_of
from finetune.options import Training
from finetune.predict import Predictions
from finetune.registry import TASKS
from finetune.rows import RowsOfBucket
from finetune.tasks import write
from finetune.tasks.write import Pair, Write
from finetune.training import Read, recipe_of
from pretrain.objectives.objective import Moment, Sums, Term
from pretrain.recipe import from_json, to_json
from pretrain.training.assembly import model_of
from tests.contract import cases
from tests.data_pipelines.corpora import chosen, equal, fits, unmasked
from tests.finetune import beside
from tests.pretrain import reference, tiny

CONFIGS = {"t5": tiny.T5, "gpt2": tiny.GPT2}
UNILM = cases.CASES["unilm"].model
TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijkl"]
PAIRS = [Pair("F, line 1", "a b c d", ("e f",)), Pair("F, line 2", "b", ("g h i j",)), Pair("F, line 3", "l k", None)]


@pytest.fixture(scope="module")
def made():
    tokenizer = words.assemble({word: index for index, word in enumerate(TOKENS)}, cased=False, keep_accents=False)
    return Made(tokenizer, special_ids(tokenizer, {}), {})


def config_of(name):
    return dataclasses.replace((CONFIGS | {"unilm": UNILM})[name], dropout=0.0, attention_dropout=0.0)


def task_of(name):
    return Write(target_length=4).suited(config_of(name))


def batch_of(task, given, made, length):
    rows = task.encode(given, made, (), length)
    return rows, task.layout(0, length).padded(rows, np.arange(len(rows)))


def shown(made, tokens):
    return ["".join(made.tokenizer.id_to_token(token)[:2].replace("[P", "-") for token in row) for row in tokens]


def test_an_encoder_reads_inputs_and_a_decoder_targets_with_their_ends(made, caplog):
    rows, batch = batch_of(task_of("t5"), PAIRS, made, 4)
    assert shown(made, batch["tokens"]) == ["abc[S", "b[S--", "lk[S-"]
    assert shown(made, batch["targets"]) == ["ef[S-", "ghi[S", "[S---"]
    assert shown(made, batch["decoder_tokens"]) == [
        "-ef[S",
        "-ghi",
        "-[S--",
    ]  # behind its segment padding may be anything
    assert batch["weights"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]]
    assert batch["decoder_segments"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0]]
    assert [record.getMessage() for record in caplog.records] == [
        "inputs longer than 3 tokens, which are cut: 1, the first is F, line 1",
        "targets longer than --target-length, which are cut: 1, the first is F, line 2",
    ]


def test_targets_that_follow_the_end_token_have_the_frame_of_pretraining(made):
    _, batch = batch_of(dataclasses.replace(task_of("t5"), start=3), PAIRS, made, 5)
    assert shown(made, batch["tokens"]) == ["[Cabc[S", "[Cb[S--", "[Clk[S-"]
    assert shown(made, batch["targets"]) == ["[Cef[S", "[Cgh[S", "[C[S--"]
    assert shown(made, batch["decoder_tokens"])[:2] == ["[S[Cef", "[S[Cgh"]


def test_a_tokenizer_in_which_nothing_ends_texts_is_an_error(made):
    without = made._replace(special={"pad": 0})
    with pytest.raises(Exception, match="--from: its tokenizer has no eod or sep token to end texts with"):
        task_of("t5").encode(PAIRS, without, (), 8)


def test_a_decoder_goes_on_after_the_delimiter_and_learns_the_target_alone(made):
    rows, batch = batch_of(task_of("gpt2"), PAIRS, made, 8)
    assert shown(made, batch["tokens"]) == ["abc[Sef--", "b[Sghi---", "lk[S-----"]
    assert shown(made, batch["targets"]) == ["bc[Sef[S--", "[Sghi[S---", "k[S[S-----"]
    assert batch["weights"].tolist()[:2] == [[0, 0, 0, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 0, 0, 0]]
    assert not batch["weights"][2].any()
    with pytest.raises(Exception, match="--length 5: leaves no room for inputs beside --target-length; raise it"):
        batch_of(task_of("gpt2"), PAIRS, made, 5)


def test_of_a_target_and_its_end_a_share_is_masked_anew_in_each_epoch_and_ranks_follow_the_source(made, caplog):
    task = Write(target_length=8).suited(UNILM)
    rows = task.encode(PAIRS, made, (), 13)
    layout, some = task.layout(0, 13), Chosen([RowsOfBucket(rows, np.arange(3))], np.zeros(3), np.array([1, 0, 2]))
    batch = layout.padded(rows, np.arange(3))
    assert batch["types"].tolist()[1] == [4] * 3 + [5] * 5 + [0] * 5  # [CLS] b [SEP] g h i j [SEP]
    assert batch["ranks"].tolist()[1] == [0, 0, 0, 3, 4, 5, 6, 7, 0, 0, 0, 0, 0]
    assert shown(made, unmasked(batch)) == ["[Cabc[Sef[S-----", "[Cb[Sghij[S-----", "[Clk[S---------"]
    assert batch["prediction_weights"].sum(1).tolist() == [2, 4, 0]  # 70% of 3, of 5; the last has no target
    assert (batch["tokens"][chosen(batch)] == 4).all() and "inputs longer than 3 tokens" in caplog.text
    ends = 0
    for epoch in range(40):
        built = layout.build(some, noise.key(epoch, np.arange(3)))
        assert fits(built, layout) and equal({"rows": unmasked(built)}, {"rows": unmasked(batch)[[1, 0, 2]]})
        ends += built["tokens"][0, 7] == 4
    assert 15 < ends < 40 and equal(batch, layout.padded(rows, np.arange(3)))
    assert task.predictions == {"lm": ("prediction_targets", "prediction_weights")}


def test_what_unilm_writes_with_is_asked_of_the_tokenizer(made):
    task = Write(target_length=4).suited(UNILM)
    with pytest.raises(UserError, match="--from: its tokenizer has no mask token, with which it writes; use another"):
        task.encode(PAIRS, made._replace(special={"pad": 0, "cls": 2, "sep": 3}), (), 12)
    with pytest.raises(UserError, match="--length 6: leaves no room for inputs beside --target-length; raise it"):
        task.encode(PAIRS, made, (), 6)


@pytest.mark.parametrize("name", CONFIGS)
def test_loss_and_gradients_are_those_of_transformers_class(name, made, tmp_path):
    config, task = config_of(name), task_of(name)
    model, params = beside.model_and_parameters(config, None, tmp_path, 1 if name == "t5" else 8)
    _, batch = batch_of(task, PAIRS[:2], made, 8)

    def loss(params, batch):
        _, terms = task.forward(model_of(config, task.asks, reference.FLOAT32), params, batch, Moment((), train=False))
        return terms["lm"].sum / task.weights(batch)["lm"]

    found, gradients = jax.jit(jax.value_and_grad(loss))(params, batch)
    tensor = {key: torch.from_numpy(array).long() for key, array in batch.items()}
    labels = torch.where(tensor["weights"] > 0, tensor["targets"], -100)
    inputs = {"input_ids": tensor["tokens"], "attention_mask": tensor["segments"]}
    if task.causal:  # which shifts labels itself
        logits = model(**inputs).logits
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    else:
        expected = model(**inputs, labels=labels).loss
    expected.backward()
    assert float(found) == pytest.approx(expected.item(), rel=1e-5)
    beside.check_gradients(model, gradients, config, None, tmp_path)


WRITTEN_AFTER = {
    "t5": ["abcd[S", "b[S", "lk[S"],
    "gpt2": ["abc[S", "b[S", "lk[S"],
    "unilm": ["[Cab[S[M", "[Cb[S[M", "[Clk[S[M"],
}


@pytest.mark.parametrize("name, expected", WRITTEN_AFTER.items())
def test_what_is_written_follows_inputs_alone(name, expected, made, monkeypatch):
    task, asked = task_of(name), []
    monkeypatch.setattr(write, "texts_after", lambda *given: asked.append(given[3:]) or ["x"] * 3)
    rows = task.encode(PAIRS, made, (), 8)
    assert task.generated(None, None, None, rows, made) == {"texts": ["x"] * 3}
    assert asked[0][0] is made and shown(made, asked[0][1]) == expected and asked[0][2].max_tokens == 4


def test_files_have_a_target_or_several_and_models_are_compared_by_the_metric_that_is_named(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"input": "a", "target": ["b c", "d"]}\n{"input": 1, "target": "e"}\n')
    task = Write(prefix="do: ", metric="F1")
    found = task.read(file)
    assert [(one.text, one.label) for one in found] == [("do: a", ("b c", "d")), ("do: 1", ("e",))]
    figures = task.figures(found, [{"text": "c"}, {"text": "e"}], ())
    assert figures["score"] == figures["F1"] == pytest.approx((2 / 3 + 1) / 2) and figures["exact_match"] == 0.5
    assert [one.label for one in Write(target="other").read(file, is_labelled=False)] == [None, None]
    file.write_text('{"input": "a", "target": []}\n')
    with pytest.raises(Exception, match="a.jsonl, line 1: list target is empty; give a target"):
        task.read(file)
    with pytest.raises(ValueError, match="--metric: unknown metric bleu; use one of BLEU, F1"):
        Write(metric="bleu")
    with pytest.raises(Exception, match="--from: bert models cannot write text; use one with a decoder"):
        Write().suited(tiny.BERT)


def test_figures_are_of_what_is_written_and_a_phase_has_targets_of_a_length(made, monkeypatch):
    task = task_of("t5")
    rows, sums = task.encode(PAIRS[:2], made, (), 8), Sums({"lm": Term(np.float32(6))}, {"lm": np.float32(3)})
    monkeypatch.setattr(write, "texts_after", lambda *given: ["e f", "x"])

    class Predictor:
        model = mesh = None
        __call__ = lambda *given: Predictions({}, sums)

    found, answers = figures_of(task, Predictor(), {}, {}, Development(PAIRS[:2], rows, (), made))
    assert (found["loss"], found["exact_match"]) == (2, 0.5) and answers == [{"text": one} for one in ("e f", "x")]
    of = Read(task, {"train": rows, "heldout": rows}, Development(PAIRS[:2], rows, (), made))
    with pytest.raises(UserError, match="targets can follow its pad token 7, but the model starts them with 0"):
        task.check(tiny.T5, SimpleNamespace(path="here", special={"pad": 7}), None)
    assert TASKS["write"] is Write  # and recipe.json may name it
    recipe = recipe_of({"": of}, tiny.T5, Training(source=Path("from"), workdir=Path("run")))
    assert (recipe.phases[0].target_length, recipe.phases[0].length) == (4, 128)  # whatever the rows have
    assert from_json(to_json(recipe)) == recipe
