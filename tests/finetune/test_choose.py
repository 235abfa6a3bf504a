"""Choices: scores, loss and gradients beside transformers' class, of lists beside torch; figures beside scikit-learn;
files; a run whose test has more choices than it was trained on."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import torch
import transformers
from sklearn.metrics import label_ranking_average_precision_score

from data_pipelines.tokenizers import stored
from data_pipelines.tokenizers.made import Made, special_ids
from finetune.__main__ import main
from finetune.tasks.choose import Choices, Choose, _of_choices
from models.blocks.heads import CHOICE, POOLER
from pretrain.objectives.objective import Phase
from pretrain.training.assembly import model_of
from tests.contract.cases import noise
from tests.finetune import beside
from tests.pretrain import reference, tiny

CONFIG = dataclasses.replace(tiny.BERT, dropout=0.0, attention_dropout=0.0)


@pytest.fixture(scope="module")
def made(corpus_path):
    return stored.load(corpus_path / "tokenizer")


ASKED = [("ba de ki", ["lo", "mu na po", "ri"]), ("su", ["te vo", "za ba de ki lo mu", "de"])]


def examples(labels):
    pairs = [tuple((asked, choice) for choice in choices) for asked, choices in ASKED]
    first, second = zip(pairs, labels, strict=True)
    return [Choices("", *first), Choices("", second[0][:2], second[1])]  # the second one has two


def batch_of(task, given, made):
    rows = task.encode(given, made, (), 32)
    return task.layout(0, int(rows.lengths.max())).padded(rows, np.arange(len(rows)))


def test_scores_loss_and_gradients_are_those_of_transformers_class(made, tmp_path):
    given = examples([(2,), (1,)])
    task = Choose(ranking=True).fitted(given)
    model, params = beside.model_and_parameters(CONFIG, (POOLER, CHOICE), tmp_path)
    batch = batch_of(task, given, made)

    def loss(params, batch):
        outputs = task.scores(model_of(CONFIG, task.asks, reference.FLOAT32), params, batch)
        return task.terms(outputs, batch)["choice"].sum / task.weights(batch)["choice"], outputs["scores"]

    (found, scores), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, batch)
    losses = []
    for row, example in enumerate(given):  # each with its own choices and padding
        texts = [made.tokenizer.encode(*pair) for pair in example.texts]
        length = max(map(len, texts))
        arrays = {"input_ids": "ids", "token_type_ids": "type_ids", "attention_mask": "attention_mask"}
        inputs = {
            name: torch.tensor([[getattr(one, of) + [0] * (length - len(one)) for one in texts]])
            for name, of in arrays.items()
        }
        theirs = model(**inputs, labels=torch.tensor(example.label))
        losses.append(theirs.loss)
        expected = theirs.logits.detach().numpy()[0]
        assert np.abs(scores[row, : len(texts)] - expected).max() <= 1e-5 * np.abs(expected).max()
    expected = sum(losses) / 2
    expected.backward()
    assert float(found) == pytest.approx(expected.item(), rel=1e-5)
    beside.check_gradients(model, gradients, CONFIG, (POOLER, CHOICE), tmp_path)


def test_each_choice_draws_noise_of_its_own_and_a_row_has_the_tokens_of_all():
    keys = np.asarray(_of_choices(noise(3), 4))
    assert keys.shape == (12, 2) and len({*map(tuple, keys.tolist())}) == 12
    assert Choose(texts=4).rows(Phase(1.0, 32, 8)).tokens == 128


def test_the_loss_of_a_list_is_torchs_and_what_is_not_known_or_no_choice_counts_nowhere(made):
    given = [*examples([(0, 2), (1,)]), examples([None, None])[0]]
    task = Choose(ranking=True).fitted(given)
    batch = batch_of(task, given, made)
    scores = np.array([[1.0, 3.0, -2.0], [0.5, 2.0, np.finfo(np.float32).min], [1, 2, 3]], np.float32)
    term, weight = task.terms({"scores": scores}, batch)["choice"], task.weights(batch)["choice"]
    log = torch.log_softmax(torch.from_numpy(scores), 1)
    assert float(term.sum) == pytest.approx(float(-(log[0, 0] + log[0, 2]) / 2 - log[1, 1]), rel=1e-6)
    assert (float(term.hits), float(weight)) == (1, 2)


def test_figures_are_those_of_scikit_learn():
    rng = np.random.default_rng(0)
    scores, right = rng.normal(size=(20, 5)).astype(np.float32), rng.integers(0, 5, 20)
    given = [Choices("", (("", ""),) * 5, (int(one),)) for one in right]
    task = Choose(ranking=True)
    found = task.figures(given, task.answers(given, None, {"scores": [*scores]}, ()), ())
    # Of one right choice the average precision is the reciprocal of its rank
    expected = label_ranking_average_precision_score(np.eye(5)[right], scores)
    assert found["reciprocal_rank"] == found["score"] == pytest.approx(expected)
    assert found["first"] == (scores.argmax(1) == right).mean()
    alone = Choose().figures(given, Choose().answers(given, None, {"scores": [*scores]}, ()), ())
    assert alone == {"score": found["first"], "accuracy": found["first"]}
    several = [given[0]._replace(label=(1, 3))]
    ranked = task.figures(several, [{"order": [2, 0, 3, 1, 4]}], ())
    assert ranked["reciprocal_rank"] == pytest.approx(1 / 3)


def test_choices_are_columns_or_a_list_and_labels_numbers_or_letters(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        '{"text": "p", "q": "why?", "choices": ["x", "y", "z"], "label": "C"}\n'
        '{"text": "r", "q": "how?", "choices": ["x", 2], "label": 1}\n'
    )
    (tmp_path / "a.tsv").write_text("text\tq\tone\ttwo\tlabel\np\twhy?\tx\ty\t0\n")
    first, second = Choose(text=("text", "q")).read(tmp_path / "a.jsonl")
    assert first[1:] == ((("p", "why? x"), ("p", "why? y"), ("p", "why? z")), (2,))
    assert second[1:] == ((("r", "how? x"), ("r", "how? 2")), (1,))
    (only,) = Choose(choices=("one", "two")).read(tmp_path / "a.tsv")
    assert only[1:] == ((("p", "x"), ("p", "y")), (0,))


BAD = [
    ({"text": "a", "choices": ["x"], "label": 0}, "line 1: has 1 choice; give 2 or more"),
    ({"text": "a", "choices": "x", "label": 0}, "line 1: has 1 choice; give 2 or more"),
    (
        {"text": "a", "choices": ["x", "y"], "label": 2},
        "label=2 is not one of the choices, 0 or A to 1 or B; correct it",
    ),
    ({"text": "a", "choices": ["x", "y"], "label": "x y"}, "label='x y' is not one of the choices"),
    ({"text": "a", "choices": ["x", "y"], "label": [0, 1]}, "names 2 right choices; give one, or add --ranking"),
    ({"text": "a", "choices": ["x", "y"], "label": []}, "label=[] names 0 right choices; give one"),
    ({"text": "a", "choices": ["x", "y"]}, "line 1: has no label, but has text, choices"),
    ({"text": "a", "choices": ["x", None], "label": 0}, "line 1: choices=None is not a text; correct it"),
]


@pytest.mark.parametrize("fields, message", BAD)
def test_a_malformed_file_is_one_line_that_names_it(fields, message, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(fields))
    with pytest.raises(Exception) as error:
        Choose().read(tmp_path / "a.jsonl")
    assert message in str(error.value) and "a.jsonl, line 1: " in str(error.value)


def test_a_run_reads_more_choices_than_it_was_trained_on_and_its_export_loads_in_transformers(
    made: Made, tmp_path, capsys
):
    model = reference.torch_model(CONFIG, "model", heads=(POOLER, CHOICE))
    model.save_pretrained(tmp_path / "from")
    transformers.PreTrainedTokenizerFast(tokenizer_object=made.tokenizer).save_pretrained(tmp_path / "from")
    assert special_ids(made.tokenizer, {}) == made.special
    rows = [{"text": asked, "choices": choices[:2], "label": 1} for asked, choices in ASKED] * 4
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "test.jsonl").write_text("\n".join(json.dumps({"text": a, "choices": c}) for a, c in ASKED))
    files = ["--train", tmp_path / "train.jsonl", "--dev", tmp_path / "train.jsonl", "--workdir", tmp_path / "run"]
    size = ["--length", 16, "--batch-size", 8, "--epochs", 1]
    assert main([*map(str, ("run", "choose", "--from", tmp_path / "from", *files, *size))]) == 0
    out = ["--predictions", str(tmp_path / "out.jsonl")]
    assert main(["eval", str(tmp_path / "run"), "--test", str(tmp_path / "test.jsonl"), *out]) == 0
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "hf")]) == 0
    load = transformers.AutoModelForMultipleChoice.from_pretrained
    theirs, info = load(tmp_path / "hf", output_loading_info=True)
    assert not any(info.values())
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    for (asked, choices), answer in zip(ASKED, answers, strict=True):
        texts = tokenizer([asked] * 3, choices, padding=True, return_tensors="pt")
        with torch.no_grad():
            logits = theirs(**{name: one[None] for name, one in texts.items()}).logits[0].numpy()
        assert np.abs(logits - answer["scores"]).max() < 1e-5 and answer["choice"] == logits.argmax()
