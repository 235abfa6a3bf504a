"""Questions: rows of windows; loss beside transformers' class; spans and thresholds beside what looks at all; metrics
beside torchmetrics'; a run from files to what SQuAD's program reads."""

import dataclasses
import importlib
import json
import logging

import jax
import numpy as np
import pytest
import torch
import transformers

from data_pipelines.tokenizers import words
from data_pipelines.tokenizers.made import Made, special_ids
from finetune.__main__ import main
from finetune.commands.eval import figures_by_dev
from finetune.tasks.answer import NOTHING, Answer, Question, best_spans, best_threshold
from finetune.texts import ending
from models.blocks.heads import SPANS
from pretrain.storage.journal import read_metrics
from pretrain.storage.run_directory import RunDirectory
from pretrain.training.assembly import model_of
from tests.finetune import beside
from tests.pretrain import reference, tiny

CONFIG = dataclasses.replace(tiny.BERT, dropout=0.0, attention_dropout=0.0)
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz.中文", "##b", "what"]
PASSAGE = "a b c d e f g h i j. k l m"


@pytest.fixture
def made():
    tokenizer = words.assemble({word: index for index, word in enumerate(WORDS)}, cased=False, keep_accents=False)
    return Made(tokenizer, special_ids(tokenizer, {}), {})


def asked(answer, passage=PASSAGE, text="what x"):
    label, begin = (answer,) if answer else NOTHING, passage.find(answer)
    return Question("F, question q", "q", text, passage, (begin, begin + len(answer)) if answer else None, label)


def shown(made, rows):
    """Of each row its words, and those at its targets."""
    for row, begin in enumerate(rows.starts[:-1]):
        tokens = [made.tokenizer.id_to_token(token) for token in rows.tokens[begin : rows.starts[row + 1]]]
        yield " ".join(tokens), " ".join(tokens[rows.columns["start"][row] : rows.columns["end"][row] + 1])


def test_windows_have_all_of_a_passage_and_the_answers_that_they_have_whole(made):
    rows = Answer(stride=3).encode([asked("d e f")], made, (), 11)  # 3 special tokens, 2 of the question
    assert [*shown(made, rows)] == [
        ("[CLS] what x [SEP] a b c d e f [SEP]", "d e f"),
        ("[CLS] what x [SEP] d e f g h i [SEP]", "d e f"),
        ("[CLS] what x [SEP] g h i j . k [SEP]", "[CLS]"),
        ("[CLS] what x [SEP] j . k l m [SEP]", "[CLS]"),
    ]
    assert rows.types[: rows.starts[1]].tolist() == [0] * 4 + [1] * 7
    whole = Answer().encode([asked("j.", text="what"), asked("")], made, (), 30)
    assert [end for _, end in shown(made, whole)] == ["j .", "[CLS]"]
    assert whole.types[: whole.starts[1]].tolist() == [0] * 3 + [1] * 15
    halves = Answer().encode([asked("m")], made, (), 11)
    assert len(halves) == len(rows) and halves.tokens.tolist() == rows.tokens.tolist()
    causal = Answer(causal=True, stride=6).encode([asked("k")], ending(made), (), 11)
    assert [*shown(made, causal)] == [
        ("what x [SEP] a b c d e f g [SEP]", "[SEP]"),
        ("what x [SEP] g h i j . k l [SEP]", "k"),
        ("what x [SEP] l m [SEP]", "[SEP]"),
    ]
    assert not causal.types.any()


def test_tokens_of_answers_are_those_that_any_of_their_characters_are_in(made):
    rows = Answer().encode([asked("b", "aab ab. 中文"), asked("中", "aab ab. 中文")], made, (), 30)
    assert [end for _, end in shown(made, rows)] == ["[UNK]", "中"]


def test_what_is_cut_or_lost_is_counted_and_what_has_no_room_is_named(made, caplog):
    Answer(max_question_tokens=1).encode([asked("a b c d e f g"), asked("a")], made, (), 10)
    assert [record.getMessage() for record in caplog.records] == [
        "questions longer than --max-question-tokens, which are cut: 2, the first is F, question q",
        "answers that no window contains whole, which count as no answer in the loss: 1, the first is F, question q",
    ]
    for task, length, message in (
        (
            Answer(stride=7),
            11,
            "--stride 7: skips tokens of the passage of F, question q, of which a row of 11 holds 6",
        ),
        (Answer(), 6, "--length 6: leaves no room for the passage of F, question q; raise it"),
    ):
        with pytest.raises(Exception, match=message):
            task.encode([asked("a")], made, (), length)


def squad_file(folder, questions, name="q.json"):
    """questions: (passage, text, further fields) each."""
    paragraphs = [
        {"context": passage, "qas": [{"id": f"q{number}", "question": text, **fields}]}
        for number, (passage, text, fields) in enumerate(questions)
    ]
    file = folder / name
    file.write_text(json.dumps({"data": [{"title": "t", "paragraphs": paragraphs}]}, ensure_ascii=False), "utf-8")
    return file


def answers(*pairs):
    return {"answers": [{"answer_start": begin, "text": text} for begin, text in pairs]}


def test_wrong_offsets_move_to_the_nearest_place_and_are_counted(tmp_path, caplog):
    given = [answers((7, "ab")), answers((4, "ab")), answers((3, "ab"), (-1, "zz")), answers((-1, "c"))]
    given.append({"is_impossible": True, "answers": [], "plausible_answers": []})
    file = squad_file(tmp_path, [("ab ab c ab", "what", fields) for fields in given])
    found = Answer().read(file)
    assert [one.span for one in found] == [(8, 10), (3, 5), (3, 5), (6, 7), None]
    assert [one.label for one in found] == [("ab",), ("ab",), ("ab", "zz"), ("c",), NOTHING]
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (
            logging.WARNING,
            f"answers not at their answer_start, which move to the nearest match: 3, the first is {file}, question q0",
        ),
        (
            logging.WARNING,
            f"answers not in their passages, skipped as the question has others: 1, the first is {file}, question q2",
        ),
    ]
    unsaid = squad_file(tmp_path, [("ab", "what", {}), ("ab", "what", answers((0, "")))])
    assert [one.label for one in Answer().read(unsaid, is_labelled=False)] == [None, None]


def of_one(**fields):
    return json.dumps({"data": [{"paragraphs": [{"context": "ab", "qas": [fields]}]}]})


BAD = [
    ('{"data": [\n}', "q.json, line 2: is not JSON (Expecting value); give a file in SQuAD's format"),
    ("[]", "q.json: has no list 'data'; give data, paragraphs, context, qas as SQuAD's files do"),
    ('{"data": []}', "q.json: has no questions; give another file"),
    ('{"data": [{}]}', "q.json, data[0]: has no list 'paragraphs'; give"),
    ('{"data": [{"paragraphs": [{"qas": []}]}]}', "q.json, data[0].paragraphs[0]: has no text 'context'; add one"),
    (of_one(question="x"), "q.json, data[0].paragraphs[0].qas[0]: has no text 'id'; add one"),
    (of_one(id="x"), "q.json, question x: has no text 'question'; add one"),
    (of_one(id="x", question="y"), "q.json, question x: has no answer; give `answers`, or is_impossible"),
    (of_one(id="x", question="y", answers="a"), "q.json, question x: answers is not a list; give one"),
    (of_one(id="x", question="y", answers=[{"text": "a"}]), "q.json, question x: has an answer without a number"),
    (
        of_one(id="x", question="y", **answers((0, "c"))),
        "question x: its answer 'c' does not occur in its context; correct",
    ),
]


@pytest.mark.parametrize("content, message", BAD)
def test_a_malformed_file_is_one_line_that_names_it(content, message, tmp_path):
    (tmp_path / "q.json").write_text(content)
    with pytest.raises(Exception) as error:
        Answer().read(tmp_path / "q.json")
    assert message in str(error.value) and "\n" not in str(error.value)


def test_scores_loss_and_gradients_are_those_of_transformers_class(tmp_path):
    """Which is given rows without padding: it has none left out of its softmax."""
    task, sizes = Answer(), (32, 20, 9)
    model, params = beside.model_and_parameters(CONFIG, (SPANS,), tmp_path)
    batch = reference.random_batch(CONFIG, 0, rows=3)
    rng, place = np.random.default_rng(0), np.arange(32)
    batch["segments"] = (place < np.array(sizes)[:, None]).astype(np.int32)
    batch["tokens"] = rng.integers(5, CONFIG.vocab_size, (3, 32)).astype(np.int32) * batch["segments"]
    batch["types"] = (place >= 6).astype(np.int32) * batch["segments"]
    batch |= {"start": np.array([7, 0, 3], np.int32), "end": np.array([12, 0, 3], np.int32)}

    def loss(params, batch):
        outputs = task.scores(model_of(CONFIG, task.asks, reference.FLOAT32), params, batch)
        return task.terms(outputs, batch)["span"].sum / task.weights(batch)["span"], outputs

    (found, outputs), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, batch)
    losses = []
    for row, size in enumerate(sizes):
        of_row = {name: array[row : row + 1, :size] for name, array in batch.items() if array.ndim == 2}
        targets = {f"{name}_positions": torch.tensor([int(batch[name][row])]) for name in ("start", "end")}
        theirs = model(**reference.torch_inputs(of_row), **targets)
        losses.append(theirs.loss)
        for name in ("start", "end"):
            ours, expected = outputs[name][row, :size], theirs[f"{name}_logits"].detach().numpy()[0]
            assert np.abs(ours - expected).max() <= 1e-5 * np.abs(expected).max()
    expected = sum(losses) / len(losses)
    expected.backward()
    assert float(found) == pytest.approx(expected.item(), rel=1e-5)
    beside.check_gradients(model, gradients, CONFIG, (SPANS,), tmp_path)


def test_hits_are_rows_of_which_both_ends_are_the_best_guess_and_rows_without_target_count_nowhere():
    scores = {"start": np.eye(4, dtype=np.float32)[[1, 1, 1]], "end": np.eye(4, dtype=np.float32)[[2, 3, 2]]}
    batch = {"segments": np.ones((3, 4), np.int32), "start": np.array([1, 1, -1]), "end": np.array([2, 2, -1])}
    term = Answer().terms(scores, batch)["span"]
    log = np.log(np.exp(1) + 3)
    assert float(term.sum) == pytest.approx(log - 1 + log - 0.5, rel=1e-6)
    assert (float(term.hits), float(Answer().weights(batch)["span"])) == (1, 2)


@pytest.mark.parametrize("seed", range(4))
def test_the_best_span_and_the_best_threshold_are_those_of_a_search_of_all(seed):
    rng = np.random.default_rng(seed)
    start, end, allowed = rng.normal(size=12), rng.normal(size=12), np.isin(np.arange(12), range(4, 10))
    spans = [(start[a] + end[b], a, b) for a in range(4, 10) for b in range(a, min(a + 3, 10))]
    for top in (1, 4, 99):
        assert best_spans(start, end, allowed, 3, top) == sorted(spans, reverse=True)[:top]

    above, f1, is_none = np.round(rng.normal(size=20), 1), rng.random(20), rng.random(20) < 0.5
    f1[is_none] = 0
    total = lambda threshold: np.where(above > threshold, is_none, f1).sum()
    best = max(map(total, [-9, *above]))
    assert total(best_threshold(above, f1, is_none)) == pytest.approx(best)


def test_the_best_window_answers_and_none_where_its_score_is_far_above(made):
    task, examples = Answer(stride=3), [asked("d e f"), asked("")]
    rows = task.encode(examples, made, (), 11)
    assert len(rows) == 8
    outputs = {name: [np.zeros(11, np.float32) for _ in range(8)] for name in ("start", "end")}
    for row, at, score in ((0, 7, 2.0), (1, 4, 3.0), (5, 5, 1.0)):
        outputs["start"][row][at] = outputs["end"][row][at + 1] = score
    outputs["start"][1][6] = outputs["end"][1][1] = 9  # the one after the other's end, and in the question
    outputs["end"][1][6] = -9
    for row in range(4, 8):
        outputs["start"][row][0] = 5 + row
    found = task.answers(examples, rows, outputs, ())
    assert [(one["text"], one["score"], one["no_answer"]) for one in found] == [("f g", 9, -9), ("e f", 2, 7)]
    for one, alone in zip(dataclasses.replace(task, top=3).answers(examples, rows, outputs, ()), found, strict=True):
        texts, scores = zip(*(of.values() for of in one.pop("best")), strict=True)
        assert one == alone and (texts[0], scores[0]) == (one["text"], one["score"])
        assert len({*texts}) == 3 and scores == (*sorted(scores, reverse=True),)
    figures = task.figures(examples, found, ())
    assert (figures["threshold"], figures["unanswered_f1"], figures["f1"]) == pytest.approx((-1, 1, 0.7))
    decided = task.chosen(figures)
    assert [one["text"] for one in decided.answers(examples, rows, outputs, ())] == ["f g", ""]
    assert "threshold" not in decided.figures(examples, found, ())
    never = task.chosen({})  # no question of --dev was without answer
    assert [one["text"] for one in never.answers(examples, rows, outputs, ())] == ["f g", "e f"]
    assert dataclasses.replace(task, threshold=0.5).chosen(figures).threshold == 0.5
    assert never.written(found[:1], ".json") == '{"q": "f g"}\n'
    with pytest.raises(Exception, match="several questions have the same id; give a file that ends in .jsonl"):
        never.written(found, ".json")


def test_what_is_chosen_by_dev_is_of_the_task_and_of_the_last_evaluation_up_to_the_step(tmp_path):
    given = [
        (2, {"a/threshold": 1.0, "b/threshold": 2.0, "loss": 9}),
        (4, {"a/threshold": 3.0}),
        (6, {"threshold": 4.0}),
    ]
    lines = [json.dumps({"kind": "eval", "step": step} | figures) + "\n" for step, figures in given]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    assert figures_by_dev(tmp_path, 3, "b") == {"threshold": 2.0}
    assert figures_by_dev(tmp_path, 5, "a") == {"threshold": 3.0}
    assert figures_by_dev(tmp_path, 9, "")["threshold"] == 4 and figures_by_dev(tmp_path, 1, "") == {}


TEXTS = [
    ("the Norman Conquest, in 1066", ("Norman conquest", "a conquest")),
    ("An apple!", ("apple",)),
    ("two", ("three", "two men")),
    ("", ("four",)),
]


def test_figures_are_torchmetrics_of_squad_and_chinese_is_compared_by_characters():
    examples = [Question("", str(n), "", "", (0, 1), right) for n, (_, right) in enumerate(TEXTS)]
    found = Answer().figures(examples, [{"text": text} for text, _ in TEXTS], ())
    target = [
        {"answers": {"answer_start": [0] * len(right), "text": [*right]}, "id": str(n)}
        for n, (_, right) in enumerate(TEXTS)
    ]
    squad = importlib.import_module("torchmetrics.functional.text").squad  # to import it takes seconds
    theirs = squad([{"prediction_text": text, "id": str(n)} for n, (text, _) in enumerate(TEXTS)], target)
    assert found["f1"] == pytest.approx(theirs["f1"].item() / 100)
    assert found["exact_match"] == pytest.approx(theirs["exact_match"].item() / 100) and found["score"] == found["f1"]
    chinese = Answer().figures(examples[:1], [{"text": "北京很大"}], ())
    assert chinese["f1"] == 0
    chinese = Answer().figures([examples[0]._replace(label=("北京很小。",))], [{"text": "北京很大"}], ())
    assert chinese["f1"] == 0.75


def test_a_run_answers_a_file_as_its_export_does_in_transformers(made, tmp_path, capsys):
    model = reference.torch_model(dataclasses.replace(CONFIG, vocab_size=len(WORDS)), "model", heads=(SPANS,))
    model.save_pretrained(tmp_path / "from")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made.tokenizer)
    tokenizer.save_pretrained(tmp_path / "from")
    questions = [(PASSAGE, f"what {letter}", answers((2 * n, letter))) for n, letter in enumerate("abcd")]
    questions += [(PASSAGE, "what z", {"is_impossible": True, "answers": []})] * 4
    file = squad_file(tmp_path, questions)
    given = ["--from", tmp_path / "from", "--train", file, "--dev", file, "--workdir", tmp_path / "run"]
    size = ["--length", 16, "--batch-size", 8, "--epochs", 2, "--peak", 1e-2]
    assert main([*map(str, ("run", "answer", *given, *size))]) == 0
    evaluations = read_metrics(RunDirectory(tmp_path / "run"), "eval")
    assert [one["step"] for one in evaluations] == [2, 4]  # an epoch is 16 windows of 8 questions
    best = max(evaluations, key=lambda one: one["score"])
    capsys.readouterr()
    out = tmp_path / "out.json"
    assert main(["eval", str(tmp_path / "run"), "--test", str(file), "--predictions", str(out)]) == 0
    said = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert {name: float(said[name]) for name in said} == pytest.approx({n: best[n] for n in said}, abs=5e-5)
    assert "threshold" in best and "threshold" not in said and "unanswered_f1" in said
    assert [*json.loads(out.read_text())] == [f"q{number}" for number in range(8)]
    assert main(["eval", str(tmp_path / "run"), "--test", str(file), "--predictions", str(out), "--top", "3"]) == 2
    assert "--top 3: needs a run on answer and --predictions with a name that ends in .jsonl" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "hf")]) == 0
    load = transformers.AutoModelForQuestionAnswering.from_pretrained
    _, info = load(tmp_path / "hf", output_loading_info=True)
    assert not any(info.values())
