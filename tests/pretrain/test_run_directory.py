"""A work directory holds one run: what may change when it goes on, and what is refused."""

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import re
import shutil

import pytest

from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from pretrain.objectives.masked_language_model import MaskedLanguageModel
from pretrain.optimizers import Optimizer
from pretrain.recipe import Phase, boundaries
from pretrain.schedules import Schedule
from pretrain.storage import run_directory
from pretrain.storage.journal import read_metrics
from pretrain.storage.run_directory import RunDirectory, versions
from pretrain.training import loop
from pretrain.training.run import longer_or_shorter, run
from pretrain.training.start import load_weights
from tests.models.shapes import parameter_shapes
from tests.pretrain import tiny, toys


def start(workdir, recipe, corpus, init_from, **options):
    return run_directory.start(recipe, {"": corpus}, tiny.options(corpus.path, workdir, init_from=init_from, **options))


pytestmark = pytest.mark.usefixtures("registered")


@pytest.fixture
def started(corpus_path, tmp_path):
    """(work directory that has begun but holds no checkpoint, its recipe, its corpus)."""
    recipe, corpus = tiny.bert(), Corpus(corpus_path)
    start(tmp_path / "run", recipe, corpus, None)
    return tmp_path / "run", recipe, corpus


def refusal(*arguments) -> str:
    with pytest.raises(UserError) as caught:
        start(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_directory_holds_all_that_the_run_was(started):
    workdir, recipe, corpus = started
    directory = RunDirectory(workdir)
    assert directory.read_recipe() == recipe
    about = directory.read_run()
    assert about["corpus"] == str(corpus.path) and about["fingerprint"] == corpus.fingerprint
    assert about["versions"] == versions()
    longer = dataclasses.replace(recipe, steps=recipe.steps + 1)
    for other, same in ((longer, True), (dataclasses.replace(recipe, seed=1), False)):
        start(workdir.parent / f"seed {other.seed}", other, corpus, None)
        assert (RunDirectory(workdir.parent / f"seed {other.seed}").identity() == directory.identity()) == same
    for name in ("tokenizer.json", "vocab.txt"):
        assert (directory.tokenizer / name).read_bytes() == (corpus.tokenizer_path / name).read_bytes()


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"seed": 7, "optimizer": Optimizer(decay=0.5)}, "(optimizer.decay: 0.01 -> 0.5; seed: 0 -> 7)"),
        (
            {"objective": MaskedLanguageModel(layout="packed-sentences", next_sentence=False)},
            "(objective.layout: segment-pairs -> packed-sentences; objective.next_sentence: True -> False)",
        ),
        ({"phases": (Phase(0.5, 32, 8), Phase(0.5, 32, 8))}, "phases.0.share: 1.0 -> 0.5; phases.1.batch_size: None"),
    ],
)
def test_another_recipe_is_refused_listing_old_and_new_values(started, changes, said):
    workdir, recipe, corpus = started
    message = refusal(workdir, dataclasses.replace(recipe, **changes), corpus, None)
    assert said in message and "--workdir" in message
    assert RunDirectory(workdir).read_recipe() == recipe  # and nothing has been written
    longer = dataclasses.replace(recipe, steps=1000)  # which is welcome
    _, before = start(workdir, longer, corpus, None)
    assert before == recipe and RunDirectory(workdir).read_recipe() == longer


def test_another_corpus_or_other_initial_weights_are_refused(started, tmp_path):
    workdir, recipe, corpus = started
    folder = shutil.copytree(corpus.path, tmp_path / "other")
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"fingerprint": "f" * 64}))
    message = refusal(workdir, recipe, Corpus(folder), None)
    assert "f" * 12 in message and corpus.fingerprint[:12] in message and "--workdir" in message
    assert "was started from random weights" in refusal(workdir, recipe, corpus, "hf/base")


def test_a_corpus_that_moved_is_found_through_the_option(started, corpus_path, tmp_path):
    workdir, recipe, _ = started
    about = RunDirectory(workdir).read_run()
    (workdir / "run.json").write_text(json.dumps(about | {"corpus": str(tmp_path / "gone")}))
    with pytest.raises(UserError, match="no longer at .*gone; give its path with --corpus"):
        RunDirectory(workdir).open_corpora()
    assert RunDirectory(workdir).open_corpora(str(corpus_path))[""].path == corpus_path
    start(workdir, recipe, Corpus(corpus_path), None)
    assert RunDirectory(workdir).open_corpora()[""].path == corpus_path  # the new place is remembered


def test_a_place_that_is_not_writable_is_named(corpus_path, tmp_path):
    (tmp_path / "file").write_text("")
    message = refusal(tmp_path / "file" / "run", tiny.bert(), Corpus(corpus_path), None)
    assert "--workdir" in message and "file/run" in message and "choose another" in message


def test_checkpoints_without_a_recipe_are_no_place_to_start(started):
    workdir, recipe, corpus = started
    (workdir / "checkpoints" / "5").mkdir(parents=True)
    (workdir / "recipe.json").unlink()
    assert "no recipe.json" in refusal(workdir, recipe, corpus, None)


ENTRIES = "identity", "corpus", "fingerprint", "init_heads_anew", "versions"
NOT_WRITTEN = "run.json: is not as `run` writes it"


@pytest.mark.parametrize(
    "name, old, new, said",
    [
        ("recipe.json", '"family": "bert"', '"family": "XLNetConfig"', "recipe.json"),
        ("recipe.json", '"schedule":', '"timetable":', "recipe.json"),
        ("recipe.json", '"schedule".*', "", "recipe.json"),  # cut in half
        ("run.json", '"init_from".*', "", "run.json"),
        ("run.json", ".+", "[]", NOT_WRITTEN),
        ("run.json", '"corpus": "[^"]*"', '"corpus": 5', NOT_WRITTEN),
        *(("run.json", f'"{name}":', '"former":', NOT_WRITTEN) for name in ENTRIES),
    ],
)
def test_a_file_of_another_version_or_form_is_one_line(started, name, old, new, said):
    workdir, recipe, corpus = started
    damaged, places = re.subn(old, new, (workdir / name).read_text(), count=1, flags=re.DOTALL)
    assert places == 1
    (workdir / name).write_text(damaged)
    assert said in refusal(workdir, recipe, corpus, None)


@pytest.mark.parametrize("line", ["{bad", '{"step": 1}', "[1]"])
def test_a_line_that_is_no_measurement_is_named(line, tmp_path):
    directory = RunDirectory(tmp_path)
    directory.metrics.write_text(f'{{"kind": "eval", "step": 5, "loss": 1.0}}\n{line}\n')
    with pytest.raises(UserError, match="metrics.jsonl: line 2 is not a metrics entry"):
        read_metrics(directory, "eval")


def test_initial_weights_are_remembered_when_the_run_dies_before_its_first_checkpoint(corpus_path, tmp_path):
    source = tmp_path / "source"
    run(toys.recipe(steps=5), tiny.options(corpus_path, source))
    recipe = toys.recipe(name="continued", steps=1, schedule=Schedule("constant", peak=0.0, warmup=0.0))
    start(tmp_path / "run", recipe, Corpus(corpus_path), str(source))
    run(recipe, tiny.options(corpus_path, tmp_path / "run"))  # without --init-from, as the message advises
    assert tiny.equal(tiny.final_state(tmp_path / "run").params, tiny.final_state(source).params)


def test_weights_of_a_run_with_another_model_are_refused_by_the_setting_and_with_cures_that_it_has(started):
    workdir, _, corpus = started
    wide, alone = dataclasses.replace(tiny.BERT, width=64), MaskedLanguageModel(next_sentence=False)
    start(workdir.parent / "headless", tiny.bert(objective=alone), corpus, None)
    more = "; give the recipe the heads that it has"
    for setting, source, model, said in [
        ("--init-from", workdir, tiny.ELECTRA, " is a 'bert' model, but the recipe's is 'electra'"),
        ("--init-from", workdir, wide, " model.width is 32 there and 64 here; set --model.width 32"),
        ("teachers.0.source", workdir, wide, " model.width is 32 there and 64 here; set --teachers.0.model.width 32"),
        ("--init-from", workdir.parent / "headless", tiny.BERT, f"{more}, or start them anew with --init-heads-anew$"),
        ("teachers.0.source", workdir.parent / "headless", tiny.BERT, f"{more}$"),
    ]:
        with pytest.raises(UserError, match=f"^{setting} .*{said}"):
            load_weights(setting, str(source), model, parameter_shapes(model), corpus)


def rates(workdir):
    """Step -> learning rate."""
    return {entry["step"]: entry["learning_rate"] for entry in read_metrics(RunDirectory(workdir), "train")}


def test_what_changes_with_the_total_is_said_on_resume(corpus_path, tmp_path, capsys):
    workdir = tmp_path / "run"
    for steps in (10, 20):
        run(toys.recipe(steps=steps, schedule=Schedule(peak=0.1)), tiny.options(corpus_path, workdir))
        said = "steps: 10 -> 20; the schedule is stretched to the new total: learning rate 0 -> 0.0474"
        assert (said in capsys.readouterr().out) == (steps == 20)
    found = rates(workdir)
    assert found[20] == 0 and 0.04 < found[11] < 0.05
    assert longer_or_shorter(toys.recipe(steps=10), toys.recipe(steps=20), 10) == "steps: 10 -> 20"  # nothing else
    phases = tuple(Phase(share, 32, 8) for share in (0.5, 0.5))
    moved = longer_or_shorter(*(toys.recipe(steps=steps, phases=phases) for steps in (10, 40)), 10)
    assert "step 10 moves from phase 2 to phase 1, as phases are shares of steps (see --extend)" in moved


def test_a_run_made_longer_goes_on_from_its_rate_also_when_killed(corpus_path, tmp_path, capsys):
    workdir, stable = tmp_path / "run", Schedule("warmup-stable-decay", peak=0.1, final=0.5)

    def go(steps, extend=None):
        run(toys.recipe(steps=steps, schedule=stable), tiny.options(corpus_path, workdir, keep=9, extend=extend))

    go(10)
    identity = RunDirectory(workdir).identity()
    go(20, "constant")
    assert "steps: 10 -> 20; --extend constant: learning rate 0.05 -> 0.05" in capsys.readouterr().out
    found = rates(workdir)
    assert found[10] == found[11] == found[15] == found[20] == pytest.approx(0.05)
    whole = tiny.final_state(workdir)
    for gone in ("20", "15"):  # as if killed before these were written
        shutil.rmtree(workdir / "checkpoints" / gone)
    go(20, "constant")
    assert tiny.equal(tiny.final_state(workdir), whole)
    run(RunDirectory(workdir).read_recipe(), tiny.options(corpus_path, tmp_path / "anew"))
    assert tiny.equal(tiny.final_state(tmp_path / "anew"), whole)
    recipes = [(folder / "recipe.json").read_bytes() for folder in (workdir, tmp_path / "anew")]
    assert recipes[0] == recipes[1]
    with pytest.raises(UserError, match="--extend constant has added a phase to this run; give --extend again"):
        go(30)
    go(30, "decay")
    longer = RunDirectory(workdir).read_recipe()
    assert boundaries(longer) == [10, 20, 30] and RunDirectory(workdir).identity() == identity
    assert rates(workdir)[21] == pytest.approx(0.05) and rates(workdir)[30] == pytest.approx(0.05)


def test_a_phase_without_steps_is_said(corpus_path, tmp_path, capsys):
    phases = (Phase(0.01, 16, 8), Phase(0.99, 16, 8))
    run(toys.recipe(steps=4, phases=phases), tiny.options(corpus_path, tmp_path / "run"))
    assert "phase 1 has no steps: phases.0.share=0.01 of 4\n" in capsys.readouterr().out


def test_how_a_run_goes_on_is_chosen_together_with_more_steps(started):
    workdir, recipe, corpus = started
    options = tiny.options(corpus.path, workdir, extend="decay")
    with pytest.raises(UserError, match="--extend decay: .* has no checkpoint to resume; leave this"):
        run_directory.longer(options, dataclasses.replace(recipe, steps=30))
    (workdir / "checkpoints" / "5").mkdir(parents=True)
    with pytest.raises(UserError, match="--extend decay: .* already has 20 steps; give more with --steps"):
        run_directory.longer(options, recipe)
    with pytest.raises(UserError, match="another recipe .phases.0.length: 32 -> 16"):
        run_directory.longer(options, dataclasses.replace(recipe, steps=30, phases=(Phase(1.0, 16, 8),)))


def test_fewer_steps_than_are_done_are_refused_and_nothing_is_written(started):
    workdir, recipe, corpus = started
    for step in (5, 10):
        (workdir / "checkpoints" / str(step)).mkdir(parents=True)
    contents = lambda: {file: file.read_bytes() for file in workdir.rglob("*") if file.is_file()}
    before = contents()
    said = refusal(workdir, dataclasses.replace(recipe, steps=9), corpus, None)
    assert "--steps 9: " in said and "has already done 10; give 10 or more" in said
    assert contents() == before
    start(workdir, dataclasses.replace(recipe, steps=10), corpus, None)  # all of them are done


def test_half_a_line_of_figures_is_dropped_and_later_ones_go_with_their_steps(corpus_path, tmp_path):
    workdir, directory = tmp_path / "run", RunDirectory(tmp_path / "run")
    run(toys.recipe(steps=10), tiny.options(corpus_path, workdir))
    figures = [json.dumps({"kind": "train", "step": step, "loss": 1.0}) for step in (12, 15)]
    with directory.metrics.open("a") as file:
        file.write("\n".join(figures)[:-10])  # killed at step 15, two steps after the last checkpoint
    assert [entry["step"] for entry in read_metrics(directory, "train")] == [1, 5, 10, 12]
    run(toys.recipe(steps=20), tiny.options(corpus_path, workdir))
    steps = [entry["step"] for entry in map(json.loads, directory.metrics.read_text().splitlines())]
    assert steps == [1, 5, 10, 10, 11, 15, 20, 20]  # each train step once; evaluations at both ends


def test_a_run_that_has_done_its_steps_makes_up_for_a_lost_evaluation_alone(corpus_path, tmp_path, capsys):
    workdir, directory = tmp_path / "run", RunDirectory(tmp_path / "run")
    for lost in (True, False, False):
        assert run(toys.recipe(steps=5), tiny.options(corpus_path, workdir)) == 0
        assert [entry["step"] for entry in read_metrics(directory, "eval")] == [5]
        lines = directory.metrics.read_text().splitlines(keepends=True)
        directory.metrics.write_text("".join(line for line in lines if not lost or '"eval"' not in line))
    assert capsys.readouterr().out.count("done: 5 steps") == 3
    figures = directory.metrics.read_text()
    shutil.rmtree(workdir / "checkpoints")
    with pytest.raises(UserError, match="its checkpoints/ was removed; restore it, or use another --workdir"):
        run(toys.recipe(steps=5), tiny.options(corpus_path, workdir))
    assert directory.metrics.read_text() == figures


def test_an_evaluation_that_a_kill_cuts_off_is_made_up_for_and_none_is_made_twice(corpus_path, tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    def go(name, killed_at=0, before=True):
        def evaluate(run, state, *rest, whole=loop._evaluate):
            run.checkpoints.wait()
            if int(state.step) != killed_at or not before:
                whole(run, state, *rest)
            if int(state.step) == killed_at:
                raise Killed

        with monkeypatch.context() as patch, pytest.raises(Killed) if killed_at else contextlib.nullcontext():
            patch.setattr(loop, "_evaluate", evaluate)
            run(toys.recipe(steps=15), tiny.options(corpus_path, tmp_path / name, eval_every=5))
        return read_metrics(RunDirectory(tmp_path / name), "eval")

    assert go("run", 5) == []
    assert [entry["step"] for entry in go("run", 5, before=False)] == [5]
    go("run", 10)
    whole = go("whole")
    assert [entry["step"] for entry in whole] == [5, 10, 15] and go("run") == whole


def test_a_work_directory_that_this_host_does_not_share_is_an_error(corpus_path, tmp_path, monkeypatch):
    corpus, recipe = Corpus(corpus_path), toys.recipe()
    monkeypatch.setattr(run_directory, "SHARED_SECONDS", 0)
    # As on a second host: the first one has written elsewhere.
    monkeypatch.setattr(run_directory, "from_first", lambda what, decide: (None, "what the first has written"))
    with pytest.raises(UserError, match="--workdir .*: this host does not see files that the first host writes"):
        start(tmp_path / "run", recipe, corpus, None)


def test_a_second_run_in_a_work_directory_is_refused_while_the_first_lasts(started):
    workdir, _, _ = started
    second = run_directory.alone(workdir)
    with run_directory.alone(workdir), pytest.raises(UserError, match="another run is training there"):
        second.__enter__()
    with run_directory.alone(workdir):
        pass


def test_where_the_disk_has_no_locks_a_run_goes_on_trust_and_another_failure_is_said(started, monkeypatch):
    workdir, _, _ = started
    numbers = [errno.ENOLCK, errno.EIO]

    def flock(*_):
        raise OSError(numbers[0], os.strerror(numbers[0]))

    monkeypatch.setattr(fcntl, "flock", flock)
    with run_directory.alone(workdir):
        del numbers[0]
    with run_directory.disk_errors(RunDirectory(workdir)), pytest.raises(OSError, match="Input/output error"):
        run_directory.alone(workdir).__enter__()


def test_a_work_directory_that_is_removed_during_a_run_is_said_by_name(corpus_path, tmp_path, monkeypatch):
    workdir = tmp_path / "run"
    monkeypatch.setattr(loop.Meter, "report", lambda meter, step: shutil.rmtree(workdir, ignore_errors=True))
    with pytest.raises(UserError, match="--workdir .*was removed during the run"):
        run(toys.recipe(steps=15), tiny.options(corpus_path, workdir, checkpoint_every=5))


def test_a_corpus_is_no_work_directory(corpus_path, tmp_path):
    shutil.copytree(corpus_path, tmp_path / "corpus")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match="--workdir .*is a corpus"):
        run(toys.recipe(), tiny.options(tmp_path / "corpus", tmp_path / "corpus"))
    assert sorted(tmp_path.rglob("*")) == before
