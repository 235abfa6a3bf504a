"""Ways of finetuning: products beside frozen matrices, rows read twice, several tasks at once, several seeds."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from finetune.__main__ import main
from finetune.commands import suite as command
from finetune.options import Training
from finetune.tasks import classify
from finetune.tasks.classify import Classify
from finetune.training import loop_options
from models.core.parameters import leaves
from pretrain.objectives.objective import Moment
from pretrain.storage.journal import read_metrics
from pretrain.storage.run_directory import RunDirectory
from pretrain.training.opened import open_model
from tests.finetune.conftest import arguments
from tests.pretrain import tiny


def params_of(workdir):
    return dict(leaves(open_model(workdir).params))


def test_with_lora_a_run_trains_products_and_the_head_and_exports_the_form_of_the_model(begun, tmp_path):
    assert main(arguments(begun, tmp_path / "run", "--lora", 2, "--epochs", 1)) == 0
    before, after = params_of(begun / "from"), params_of(tmp_path / "run")
    changed = {path for path in after if path in before and not np.array_equal(before[path], after[path])}
    assert changed == {f"layers/attention/{name}/kernel" for name in ("query", "value")} | {
        path for path in changed if path.startswith("pooler/")
    }
    difference = np.asarray(after["layers/attention/query/kernel"] - before["layers/attention/query/kernel"])[0]
    assert np.linalg.matrix_rank(difference, tol=1e-5) == 2
    state = tiny.final_state(tmp_path / "run").params  # what a checkpoint holds
    assert {path.partition("/")[0] for path, _ in leaves(state)} == {"classifier", "lora", "pooler"}
    assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "hf")]) == 0
    load = transformers.AutoModelForSequenceClassification.from_pretrained
    model, info = load(tmp_path / "hf", output_loading_info=True)
    assert not any(info.values())
    of_torch = model.bert.encoder.layer[0].attention.self.query.weight.detach().numpy().T
    np.testing.assert_array_equal(of_torch, after["layers/attention/query/kernel"][0])


def test_what_is_frozen_stays(begun, tmp_path):
    assert main(arguments(begun, tmp_path / "run", "--frozen", "embeddings", "layers", "--epochs", 1)) == 0
    before, after = params_of(begun / "from"), params_of(tmp_path / "run")
    assert all(np.array_equal(before[path], after[path]) for path in after if path in before and "pooler" not in path)
    assert not np.array_equal(before["pooler/kernel"], after["pooler/kernel"])


def test_from_scratch_takes_no_weights(begun, tmp_path):
    shared = {"source": begun / "from", "workdir": tmp_path}
    given = [loop_options(Training(**shared, from_scratch=of), 5, {}) for of in (False, True)]
    assert [one.init_from for one in given] == [str(begun / "from"), None]


def test_rows_read_twice_have_half_of_r_drops_loss(monkeypatch):
    task, rng = Classify(r_drop=0.7), np.random.default_rng(0)
    twice = rng.normal(size=(2, 5, 3)).astype(np.float32)
    batch = {"labels": np.array([0, 2, 1, 1, -1])}
    given = iter(twice)
    monkeypatch.setattr(Classify, "scores", lambda self, *of: {"logits": jnp.asarray(next(given))})
    terms, _, _ = task.loss(None, {}, batch, {}, Moment(np.zeros((5, 2), np.uint32), True))
    weights, factors = task.weights(batch), task.coefficients(0)
    found = sum(factors[name] * terms[name].sum / weights[name] for name in factors)
    one, other = (torch.log_softmax(torch.from_numpy(logits[:4]), -1) for logits in twice)
    labels = torch.tensor([0, 2, 1, 1])
    likely = sum(torch.nn.functional.nll_loss(logs, labels) for logs in (one, other))
    apart = lambda p, q: torch.nn.functional.kl_div(q, p, reduction="batchmean", log_target=True)
    wanted = (likely + 0.7 / 2 * (apart(one, other) + apart(other, one))) / 2
    assert float(found) == pytest.approx(float(wanted), rel=1e-6)


def test_one_of_several_tasks_reads_its_part_of_the_scores(monkeypatch):
    monkeypatch.setattr(classify, "hidden_states", lambda *of: jnp.zeros((2, 1, 4)))
    monkeypatch.setattr(classify, "apply_head", lambda *of: jnp.arange(10).reshape(2, 5))
    batch = {"place": jnp.zeros(2, int)}
    found = [Classify(part=part).scores(None, {}, batch)["logits"].tolist() for part in ((0, 2), (2, 5), (0, 0))]
    assert found == [[[0, 1], [5, 6]], [[2, 3, 4], [7, 8, 9]], [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]]


@pytest.fixture(scope="module")
def tasks(begun, tmp_path_factory):
    """A folder of two tasks with other labels."""
    folder = tmp_path_factory.mktemp("tasks")
    for split in ("train", "dev"):
        lines = (begun / f"{split}.tsv").read_text().replace("\tyes", "\t2.5").replace("\tno", "\t-1.5")
        (folder / f"numbers.{split}.tsv").write_text(lines)
    shared = {"task": "classify", "text": ["first", "second"], "length": 16, "batch_size": 8, "epochs": 1, "peak": 1e-2}
    files = {split: str(begun / f"{split}.tsv") for split in ("train", "dev")}
    (folder / "alike.json").write_text(json.dumps(shared | files))
    files = {split: f"numbers.{split}.tsv" for split in ("train", "dev")}
    (folder / "numbers.json").write_text(json.dumps(shared | files | {"regression": True, "metric": "error"}))
    return folder


def test_several_tasks_share_a_trunk_and_have_scores_of_their_own(begun, tasks, tmp_path, capsys, caplog):
    size = ["--batch-size", "8", "--length", "16", "--epochs", "1", "--peak", "1e-2"]
    places = ["--from", str(begun / "from"), "--tasks", str(tasks), "--workdir", str(tmp_path / "run")]
    assert main(["several", *places, *size]) == 0
    assert "alike.json: run options (batch_size, epochs, length, peak) have no effect here" in caplog.text
    last = read_metrics(RunDirectory(tmp_path / "run"), "eval")[-1]
    assert {"alike/accuracy", "numbers/pearson"} <= last.keys()
    assert last["score"] == pytest.approx((last["alike/score"] + last["numbers/score"]) / 2)
    assert open_model(tmp_path / "run").config.labels == ("alike/no", "alike/yes", "numbers/label")
    out = tmp_path / "out.jsonl"
    asked = ["eval", str(tmp_path / "run"), "--test", str(begun / "dev.tsv")]
    assert main([*asked, "--task", "alike", "--predictions", str(out)]) == 0
    assert {json.loads(line)["label"] for line in out.read_text().splitlines()} <= {"yes", "no"}
    capsys.readouterr()
    assert main(asked) == 2
    assert "--task: this run has no task without a name; use one of alike, numbers" in capsys.readouterr().err


def test_a_suite_that_is_stopped_goes_on_and_compiles_for_all_seeds_once(begun, tasks, tmp_path, monkeypatch, capsys):
    real, seen = command.finetune, []

    def finetune(files, options, stop, programs):
        seen.append((options.workdir.parts[-2:], programs.placed))
        return 75 if len(seen) == 2 else real(files, options, stop, programs)

    monkeypatch.setattr(command, "finetune", finetune)
    suite = ["suite", str(begun / "from"), "--tasks", str(tasks), "--seeds", "2", "--out", str(tmp_path / "card.md")]
    assert main(suite) == 75 and not (tmp_path / "card.md").exists()
    assert main(suite) == 0
    assert [of for of, _ in seen[2:]] == [(name, seed) for name in ("alike", "numbers") for seed in "01"]
    assert [placed is None for _, placed in seen[2:]] == [True, False, True, False]
    scores = json.loads((tmp_path / "card.json").read_text())
    seeds = [RunDirectory(tmp_path / "card" / "alike" / seed).read_recipe().seed for seed in "01"]
    assert seeds == [0, 1]
    for name, of_task in scores.items():
        for seed, score in enumerate(of_task):
            entries = read_metrics(RunDirectory(tmp_path / "card" / name / str(seed)), "eval")
            assert score == max(one["score"] for one in entries)
    median = f"{100 * np.median(scores['alike']):.1f}"
    assert f" | accuracy | {median} |" in (tmp_path / "card.md").read_text()
    assert f" | error | {-np.median(scores['numbers']):.3f} |" in (tmp_path / "card.md").read_text()
    assert "| alike | classify | all examples, " in (tmp_path / "card.md").read_text()
    assert (tmp_path / "card.png").stat().st_size > 1000
