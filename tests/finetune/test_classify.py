"""Classification: a run from a pretrained model to Hugging Face's class; its loss beside that class's; bad files."""

import dataclasses
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import torch
import transformers

from data_pipelines.errors import UserError
from finetune.__main__ import main
from finetune.commands import run as command
from finetune.tasks.classify import Classify
from finetune.training import changed_options, weights_of
from models.blocks.heads import CLASSIFIER, POOLER
from pretrain.objectives.objective import Phase
from pretrain.optimizers import Optimizer
from pretrain.recipe import Recipe
from pretrain.schedules import Schedule
from pretrain.storage.journal import read_metrics
from pretrain.storage.run_directory import RunDirectory
from pretrain.training.assembly import assemble
from pretrain.training.opened import open_model
from pretrain.training.start import load_weights
from pretrain.training.step import given_in, initial_state, train_step
from tests.finetune.conftest import arguments, write
from tests.models.shapes import parameter_shapes
from tests.pretrain import reference, tiny

CONFIG = dataclasses.replace(tiny.BERT, dropout=0.0, attention_dropout=0.0, labels=("no", "perhaps", "yes"))


@pytest.fixture(scope="module")
def trained(begun):
    assert main(arguments(begun, begun / "run")) == 0
    return begun / "run"


def test_a_run_evaluates_each_epoch_and_its_best_checkpoint_is_read_and_loads_in_transformers(
    trained, begun, tmp_path, capsys
):
    evaluations = read_metrics(RunDirectory(trained), "eval")
    assert [one["step"] for one in evaluations] == [5, 10]
    best = max(evaluations, key=lambda one: one["score"])
    out = tmp_path / "out.jsonl"
    capsys.readouterr()
    assert main(["eval", str(trained), "--test", str(begun / "dev.tsv"), "--predictions", str(out)]) == 0
    said = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert {name: float(said[name]) for name in said} == pytest.approx({n: best[n] for n in said}, abs=5e-5)
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert main(["export", str(trained), "--to", str(tmp_path / "hf")]) == 0

    load = transformers.AutoModelForSequenceClassification.from_pretrained
    model, info = load(tmp_path / "hf", output_loading_info=True)
    assert not any(info.values()) and model.config.id2label == {0: "no", 1: "yes"}
    rows = [line.split("\t") for line in (begun / "dev.tsv").read_text().splitlines()[1:]]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    cut = {"truncation": True, "max_length": 16, "return_tensors": "pt"}
    texts = tokenizer(*map(list, zip(*[row[:2] for row in rows], strict=True)), padding=True, **cut)
    with torch.no_grad():
        shares = torch.softmax(model(**texts).logits, -1).numpy()
    assert np.abs(shares[:, 1] - [one["scores"]["yes"] for one in answers]).max() < 1e-5
    right = np.mean([one["label"] == row[2] for one, row in zip(answers, rows, strict=True)])
    assert right == pytest.approx(best["accuracy"])


def test_features_stand_beside_the_finetuned_run(trained, begun, tmp_path, capsys):
    files = [of for name in ("train", "dev") for of in (f"--{name}", str(begun / f"{name}.tsv"))]
    asked = [
        "probe",
        str(begun / "from"),
        *files,
        "--length",
        "16",
        "--out",
        str(tmp_path),
        "--finetuned",
        str(trained),
    ]
    assert main([*asked, "--text", "first", "second"]) == 0
    names, *lines = (line.split("\t") for line in (tmp_path / "probe.tsv").read_text().splitlines())
    assert names == ["layer", "accuracy", "f1", "matthews", "share in the mix"]
    of_layers = ["0 (embeddings)", "1", "mix of all", "last 1 side by side"]
    assert [line[0] for line in lines] == ["most frequent", *of_layers, "finetuned"]
    best = max(read_metrics(RunDirectory(trained), "eval"), key=lambda one: one["score"])
    assert [float(value) for value in lines[-1][1:4]] == pytest.approx([best[name] for name in names[1:4]])
    given = ((begun / f"{of}.tsv").read_text().splitlines()[1:] for of in ("train", "dev"))
    train, dev = ([line.split("\t")[2] for line in of] for of in given)
    usual = max(["no", "yes"], key=train.count)
    assert float(lines[0][1]) == pytest.approx(dev.count(usual) / len(dev))
    for given, message in (
        (["--text", "second", "first"], f"--finetuned {trained}: has other labels or columns (no, yes) than --train"),
        (["--text", "first", "second", "--task", "rte"], "--task: this run has no task rte"),
        (["--text", "first", "--label-column", "2"], "--label-column: is for words, but --text is for texts"),
    ):
        assert main([*asked, *given]) == 2
        assert message in capsys.readouterr().err


def test_a_run_that_is_stopped_ends_as_if_nothing_had_happened(trained, begun, monkeypatch):
    stopping = arguments(begun, begun / "stopped")
    real = command.finetune

    def stopped(task, options, stop):
        seen = []
        monkeypatch.setattr(stop, "reached", lambda at: (seen.append(at), at == 3)[1])
        stop.signal = "SIGTERM"
        return real(task, options, stop)

    monkeypatch.setattr(command, "finetune", stopped)
    assert main(stopping) == 75
    monkeypatch.setattr(command, "finetune", real)
    assert main(stopping) == 0
    assert tiny.equal(tiny.final_state(begun / "stopped").params, tiny.final_state(trained).params)


def test_a_run_does_not_go_on_with_other_examples(trained, begun, tmp_path, capsys):
    lines = (begun / "dev.tsv").read_text().splitlines(keepends=True)
    (tmp_path / "dev.tsv").write_text("".join(lines[:-1]))
    assert main([*arguments(begun, trained), "--dev", str(tmp_path / "dev.tsv")]) == 2
    assert f"--workdir {trained}: its run began with other examples" in capsys.readouterr().err


def test_a_run_does_not_go_on_from_other_weights(trained, begun, capsys):
    assert main([*arguments(begun, trained), "--from-scratch"]) == 2
    assert f"--workdir {trained}: its run began with {begun / 'from'}, not random weights" in capsys.readouterr().err


def test_a_run_does_not_go_on_with_other_options(trained, begun, capsys):
    assert main([*arguments(begun, trained), "--peak", "0.1", "--label-smoothing", "0.5"]) == 2
    changes = "(--label-smoothing 0.0, now 0.5; --peak 0.01, now 0.1)"
    assert f"--workdir {trained}: its run began with other options {changes}; give these" in capsys.readouterr().err


def test_rows_of_more_lengths_are_no_changed_options(trained):
    recipe = RunDirectory(trained).read_recipe()
    (phase,) = recipe.phases
    more = dataclasses.replace(phase, tasks=(*phase.tasks, dataclasses.replace(phase.tasks[0], name=":8")))
    assert changed_options(recipe, dataclasses.replace(recipe, phases=(more,))) == []
    slower = dataclasses.replace(recipe, phases=(more,), schedule=dataclasses.replace(recipe.schedule, peak=0.5))
    assert changed_options(recipe, slower) == ["--peak 0.01, now 0.5"]


def test_a_run_does_not_go_on_where_what_it_began_with_was_trained_anew(trained, begun, capsys):
    (about,) = (begun / "from").glob("checkpoints/*/_CHECKPOINT_METADATA")
    before = about.read_text()
    about.write_text(before.replace('"commit_timestamp_nsecs": 1', '"commit_timestamp_nsecs": 2'))
    assert main(arguments(begun, trained)) == 2
    about.write_text(before)
    said = f"--from {begun / 'from'}: its weights are not those that the run in --workdir {trained} began with; restore"
    assert said in capsys.readouterr().err


def test_weights_of_a_folder_are_told_apart_by_their_content(tmp_path):
    found = []
    for content in ("one", "other", "one"):
        (tmp_path / "model.safetensors").write_text(content)
        found.append(weights_of(tmp_path))
    assert found[0] == found[2] != found[1]


@pytest.mark.parametrize(
    ("labels", "columns"), [(("no", "yes"), [0, 1]), (("yes", "no"), [1, 0]), (("no", "never"), None)]
)
def test_a_run_hands_its_head_on_by_the_names_of_labels(labels, columns, trained):
    config = dataclasses.replace(RunDirectory(trained).read_recipe().model, labels=labels)
    shapes = parameter_shapes(config, (POOLER, CLASSIFIER))
    nothing = lambda *_: jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), shapes)
    corpus = SimpleNamespace(tokenizer_path=RunDirectory(trained).tokenizer)
    params = load_weights("--from", str(trained), config, shapes, corpus, nothing)
    before = open_model(trained).params
    wanted = 0.0 if columns is None else np.asarray(before["classifier"]["scores"]["kernel"])[:, columns]
    assert (params["classifier"]["scores"]["kernel"] == wanted).all()
    np.testing.assert_array_equal(params["pooler"]["kernel"], before["pooler"]["kernel"])


def batch_of(rows, seed):
    batch = reference.random_batch(CONFIG, seed, rows=rows)
    batch |= {"place": np.zeros(rows, np.int32), "labels": batch["tokens"][:, 0] % 3}
    return {name: batch[name] for name in Classify().spec(Phase(1.0, 32, rows))}


def test_a_hundred_steps_follow_torch_on_transformers_class(tmp_path):
    task, steps, rate = Classify(), 100, 5e-4
    model = reference.torch_model(CONFIG, "model", heads=(POOLER, CLASSIFIER))
    model.save_pretrained(tmp_path)
    params = reference.load(tmp_path, CONFIG, parameter_shapes(CONFIG, (POOLER, CLASSIFIER)), tmp_path)
    schedule, optimizer = Schedule("constant", peak=rate, warmup=0.0), Optimizer(decay=0.1, clip=0.0)
    adamw = reference.torch_adamw(model, optimizer, rate)
    recipe = Recipe("parity", "", CONFIG, task, optimizer, schedule, (Phase(1.0, 32, 8),), steps)
    assembly = assemble(recipe, reference.FLOAT32)
    ours, given = jax.jit(train_step(assembly, {})), given_in(recipe, 0)
    state, _ = initial_state(assembly, jax.tree.map(jax.numpy.asarray, params))
    losses = []
    for step in range(steps):
        batch = batch_of(8, 100 + step)
        loss = model(**reference.torch_inputs(batch), labels=torch.from_numpy(batch["labels"]).long()).loss
        adamw.zero_grad()
        loss.backward()
        adamw.step()
        state, metrics = ours(state, {}, batch, given)
        losses.append((float(metrics.loss), loss.item()))
    found, expected = np.array(losses).T
    assert (np.abs(found - expected) / np.abs(expected)).max() <= 1e-5
    assert expected[-10:].mean() < expected[:10].mean() - 0.1  # it did learn


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"label_smoothing": 0.2}, lambda logits, y: torch.nn.functional.cross_entropy(logits, y, label_smoothing=0.2)),
        (
            {"class_weights": (0.5, 1.0, 3.0)},
            lambda logits, y: torch.nn.functional.cross_entropy(logits, y, torch.tensor([0.5, 1.0, 3.0])),
        ),
        ({"regression": True}, lambda logits, y: torch.nn.functional.mse_loss(logits[:, 0], y.float())),
    ],
    ids=["smoothed", "weighted", "regression"],
)
def test_losses_are_torchs(changes, expected):
    task, rng = Classify(**changes), np.random.default_rng(0)
    logits, labels = rng.normal(size=(6, 3)).astype(np.float32), np.array([0, 2, 1, 1, 2, 0])
    batch = {"labels": labels.astype(np.float32 if task.regression else np.int32)}
    term, weight = task.terms({"logits": logits}, batch)["label"], task.weights(batch)["label"]
    wanted = expected(torch.from_numpy(logits), torch.from_numpy(labels))
    assert float(term.sum / weight) == pytest.approx(float(wanted), rel=1e-6)


@pytest.mark.parametrize(("windows", "labels", "first"), [("mean", "bba", 0.4), ("vote", "aba", 2 / 3)])
def test_windows_of_a_text_answer_together(windows, labels, first):
    of_a = np.array([0.6, 0.3, 0.55, 0.05, 0.8])  # of three windows of one text and of one each of two
    rows = SimpleNamespace(columns={"text": np.array([0, 1, 0, 0, 2])})
    logits = [*np.log(np.stack([of_a, 1 - of_a], axis=1))]
    answers = Classify(windows=windows).answers([None] * 3, rows, {"logits": logits}, ("a", "b"))
    assert "".join(one["label"] for one in answers) == labels
    assert answers[0]["scores"]["a"] == pytest.approx(first)
    tied = SimpleNamespace(columns={"text": np.array([0, 0, 1, 2, 2])})  # one vote each: the likelier one
    answers = Classify(windows="vote").answers([None] * 3, tied, {"logits": logits}, ("a", "b"))
    assert [one["label"] for one in answers] == ["b", "a", "b"]


BAD = [
    ("first\tsecond\tfirst\na\tb\tyes\n", "train.tsv, line 1: has two columns 'first'; rename one of them"),
    (
        "first\tlabel\na\tyes\nb\tno\n",
        "train.tsv, line 2: has no second, but has first, label; name columns with --text",
    ),
    ("first\tsecond\tlabel\na\tb\n", "train.tsv, line 2: has 2 columns, but the first line has 3"),
    ("first\tsecond\tlabel\n", "train.tsv: has no records; give another file"),
    (
        "first\tsecond\tlabel\na\tb\tyes\n",
        "--train: all rows have label='yes'; give",
    ),
    ("first\tsecond\tlabel\na\tb\tyes\na\tb\t\n", "train.tsv, line 3: label is empty; give it a value"),
    (b"first\tsecond\tlabel\na\xff\tb\tyes\n", "train.tsv: is not UTF-8 at byte"),
]


@pytest.mark.parametrize("content, message", BAD)
def test_a_malformed_file_is_one_line_that_names_it(content, message, begun, tmp_path, capsys):
    file = tmp_path / "train.tsv"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert main([*arguments(begun, tmp_path / "run"), "--train", str(file)]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_spaces_make_no_other_label(tmp_path):
    write(tmp_path / "dev.tsv", [("a", "b", "yes "), ("a", "b", "no"), ("a", "b", " yes")])
    task = Classify(text=("first",))
    assert task.labels_of(task.read(tmp_path / "dev.tsv")) == ("no", "yes")


def test_a_number_that_is_none_is_not_left_out(tmp_path):
    write(tmp_path / "dev.tsv", [("a", "b", "nan")])
    with pytest.raises(UserError, match="dev.tsv, line 2: label='nan' is not a number; correct it"):
        Classify(text=("first",), regression=True).read(tmp_path / "dev.tsv")


def test_a_label_that_only_dev_has_is_named_with_its_line(begun, tmp_path, capsys):
    write(tmp_path / "dev.tsv", [("a", "b", "yes"), ("a", "b", "yess")])
    assert main([*arguments(begun, tmp_path / "run"), "--dev", str(tmp_path / "dev.tsv")]) == 2
    assert "dev.tsv, line 3: --train has no label yess; did you mean yes?" in capsys.readouterr().err


def test_help_of_run_names_the_tasks_and_how_they_are_run(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["run", "--help"])
    said = capsys.readouterr().out
    assert not ended.value.code and "answer, choose, classify, tag, write" in said and "--layer-decay" in said
