"""A teacher in finetuning: the loss beside torch's, layers before predictions, a run that goes on without it, and what
cannot teach."""

import dataclasses
import itertools
import json
import re
import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch.nn import functional

from finetune.__main__ import main
from finetune.commands.run import parse_run
from finetune.evaluators import Development, figures_of
from finetune.predict import Predictions
from finetune.tasks.classify import Classify
from finetune.tasks.tag import Tag
from finetune.teaching import RANGES, TEACHER
from finetune.training import Files, Programs, finetune
from models.core.noise import row_keys
from models.core.parameters import leaves
from models.families.bart import BartConfig
from models.families.deberta import DebertaConfig
from pretrain.objectives.distillation import CausalDistillation, Distillation
from pretrain.objectives.objective import TEACHERS, Bound, Moment, Phase, Sums, Teacher, Term, initialise
from pretrain.recipe import tasks_of, to_json
from pretrain.storage.journal import read_metrics
from pretrain.storage.run_directory import RunDirectory
from pretrain.training import run as runs
from pretrain.training.assembly import assemble, initial_params
from pretrain.training.opened import restore
from pretrain.training.signals import StopRequest
from pretrain.training.step import model_flops
from tests.finetune.conftest import arguments
from tests.pretrain import tiny
from tests.pretrain.test_ranges import assert_checked, refusal, tried

SOFT = {"temperature": 2.0, "soft_weight": 0.7, "own_weight": 0.3, "teacher": "runs/teacher"}
CLASSES, ROWS = np.array([0, 2, 1, 1, -1]), np.arange(4)  # the last row has no label
NUMBERS = np.where(CLASSES >= 0, CLASSES, np.nan)
BEST = {}  # parameters of the teacher
WORDS = np.array([[0, 2, -1], [-1, 1, 1]])


def apart(ours, theirs):
    """KL divergence in nats of all predictions, from the teacher's probabilities at temperature 2."""
    p, q = (torch.log_softmax(logits / 2.0, -1) for logits in (theirs, ours))
    return 4.0 * functional.kl_div(q, p, reduction="none", log_target=True).sum(-1)


def of_classes(ours, theirs):
    own = functional.cross_entropy(ours[0][ROWS], torch.from_numpy(CLASSES[ROWS]))
    return 0.3 * own + 0.7 * apart(ours[0], theirs)[ROWS].mean()


def of_passes(ours, theirs):
    one, other = (of_classes(ours[[number]], theirs) for number in range(2))
    logs = torch.log_softmax(ours[:, ROWS], -1)
    between = (logs.exp()[0] - logs.exp()[1]) * (logs[0] - logs[1])
    return (one + other) / 2 + 0.5 * between.sum(-1).mean() / 4


def of_words(ours, theirs):
    is_word = torch.from_numpy(WORDS != -1)
    own = functional.cross_entropy(ours[0][is_word], torch.from_numpy(WORDS)[is_word])
    return 0.3 * own + 0.7 * apart(ours[0], theirs)[is_word].mean()


def of_numbers(ours, theirs):
    numbers = torch.from_numpy(CLASSES[ROWS].astype(np.float32))
    pairs = ((0.3, numbers), (0.7, theirs[ROWS, 0]))
    return sum(factor * functional.mse_loss(ours[0][ROWS, 0], wanted) for factor, wanted in pairs)


@pytest.mark.parametrize(
    "task, labels, shape, wanted",
    [
        (Classify(**SOFT), CLASSES, (5, 3), of_classes),
        (Classify(**SOFT, r_drop=0.5), CLASSES, (5, 3), of_passes),
        (Classify(**SOFT | {"temperature": 1.0}, regression=True), NUMBERS, (5, 1), of_numbers),
        (Tag(**SOFT), WORDS, (2, 3, 3), of_words),
    ],
    ids=["classes", "r_drop", "numbers", "words"],
)
def test_the_loss_and_its_gradient_are_torchs(task, labels, shape, wanted, monkeypatch):
    rng = np.random.default_rng(0)
    ours, theirs = (rng.normal(size=(*more, *shape)).astype(np.float32) for more in ((2,), ()))
    batch = {"labels": jnp.asarray(labels)}

    def loss(logits):
        passes = itertools.count()
        scores = lambda self, model, params, batch, noise=None: {"logits": logits[next(passes)] if model else params}
        for cls in (Classify, Tag):
            monkeypatch.setattr(cls, "scores", lambda *of: scores(*of) | {"tags": jnp.zeros(shape[:-1])})
        moment = Moment(jnp.zeros((5, 2), jnp.uint32), True, 0, {TEACHER: Bound(TEACHER, None, theirs)})
        terms, _, _ = task.loss("student", None, batch, {}, moment)
        weights, factors = task.weights(batch), task.coefficients(0)
        assert terms.keys() == weights.keys() == factors.keys()
        return sum(factors[name] * terms[name].sum / weights[name] for name in factors)

    found, gradient = jax.value_and_grad(loss)(ours)
    of_torch = torch.tensor(ours, requires_grad=True)
    expected = wanted(of_torch, torch.from_numpy(theirs))
    expected.backward()
    assert float(found) == pytest.approx(expected.item(), rel=1e-5)
    np.testing.assert_allclose(gradient, of_torch.grad, rtol=1e-4, atol=1e-6)


def test_a_loss_on_dev_is_that_of_the_labels_alone():
    class Predictor:
        model = mesh = None

        def __call__(self, *of):
            return Predictions({"logits": [np.zeros(2)] * 2}, Sums({"label": Term(6.0)}, {"label": 4.0, "soft": 4.0}))

    rows, labels = SimpleNamespace(columns={"text": np.arange(2)}), ("no", "yes")
    dev = Development([SimpleNamespace(label=label) for label in labels], rows, labels, None)
    figures, _ = figures_of(Classify(**SOFT), Predictor(), {}, {}, dev)
    assert figures["loss"] == 1.5


def test_a_teacher_costs_one_pass_of_three(begun):
    model = dataclasses.replace(tiny.BERT, labels=("no", "yes"))
    phase = Phase(1.0, 16, 8)
    plain = tiny.bert(model=model, objective=Classify(), phases=(phase,))
    taught = dataclasses.replace(plain, objective=Classify(**SOFT), teachers=(Teacher(TEACHER, "", model),))
    costs = [model_flops(recipe, phase, tasks_of(recipe, phase)[0]) for recipe in (plain, taught)]
    assert costs[1] / costs[0] == pytest.approx(4 / 3, rel=1e-3)


@pytest.fixture(scope="module")
def teacher(begun, corpus_path):
    """A finetuned run of another family and width: its best checkpoint is not its newest, and its labels are stored in
    another order. Nothing is compiled."""
    wide = tiny.albert(model=dataclasses.replace(tiny.ALBERT, width=48))
    assert tiny.begun(wide, tiny.options(corpus_path, begun / "albert")) is not None

    def at_once(whole, state, carried):
        BEST.update(jax.device_get(dict(leaves(state.params))))
        for step, score in ((1, 0.9), (2, 0.1)):
            whole.evaluations[step] = {"loss": -score}
            params = jax.tree.map(lambda leaf: leaf * step, state.params)  # noqa: B023
            whole.checkpoints.save(state._replace(step=jnp.int32(step), params=params))
            whole.checkpoints.wait()
            with whole.directory.metrics.open("a") as file:
                file.write(json.dumps({"kind": "eval", "step": step, "loss": 1.0, "score": score}) + "\n")
        return state, 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "train", at_once)
        patch.setattr(runs, "trace", lambda stages, names: None)
        assert main(arguments(begun, begun / "teacher", "--from", begun / "albert")) == 0
    of_recipe = RunDirectory(begun / "teacher").recipe
    of_recipe.write_text(re.sub(r'"no",\s*"yes"', '"yes", "no"', of_recipe.read_text()))
    return begun / "teacher"


def changed(teacher, folder, model=None, vocabulary=None):
    """A copy of the teacher's recipe and tokenizer with something else."""
    recipe = RunDirectory(teacher).read_recipe()
    shutil.copytree(teacher / "tokenizer", folder / "tokenizer")
    (folder / "recipe.json").write_text(to_json(dataclasses.replace(recipe, model=model or recipe.model)))
    if vocabulary:
        file = folder / "tokenizer" / "tokenizer.json"
        file.write_text(file.read_text().replace(*vocabulary))
    return folder


def test_a_student_learns_from_the_best_checkpoint_and_goes_on_without_it_bit_for_bit(teacher, begun, tmp_path, capsys):
    gone, programs = tmp_path / "teacher", Programs()
    less = ["--own-weight", 0.5, "--epochs", 1, "--length", 8]
    shutil.copytree(teacher, gone)

    def student(workdir, stop=None):
        given = arguments(begun, tmp_path / workdir, "--teacher", gone, *less)
        task, options = parse_run(given[1:])
        programs.inputs = None  # read again, with the programs of before
        return finetune({"": Files(task, options.train, options.dev)}, options, stop, programs)

    assert student("once") == 0
    stop = StopRequest()
    stop.signal, stop.reached = "SIGTERM", lambda at: at == 2
    assert student("twice", stop) == 75
    gone.rename(tmp_path / "elsewhere")
    assert student("twice") == 0
    once, twice = (restore(RunDirectory(tmp_path / name)) for name in ("once", "twice"))
    assert tiny.equal(once.params, twice.params) and TEACHERS not in once.params
    for path, array in leaves(twice.frozen[TEACHERS][TEACHER]):
        of_labels = path.startswith("classifier/scores")
        np.testing.assert_array_equal(array, BEST[path][..., ::-1] if of_labels else BEST[path])
    for one in read_metrics(RunDirectory(tmp_path / "twice"), "train"):
        assert one["loss"] == pytest.approx(0.5 * one["label_loss"] + one["soft_loss"], rel=1e-5)
        assert one["soft_loss"] > 0
    assert main(arguments(begun, tmp_path / "twice", "--teacher", teacher, *less)) == 2
    assert f"its run began with other options (--teacher {gone}, now {teacher}); give" in capsys.readouterr().err


@pytest.mark.parametrize("causal", [False, True])
def test_layers_learn_what_those_of_pretraining_learn(causal):
    """The terms of the stage before predictions are those of pretraining's objective for the same rows."""
    ours = dataclasses.replace(tiny.GPT2, vocab_size=195) if causal else tiny.BERT
    config = dataclasses.replace(ours, width=48, depth=2)
    layers = Classify(teacher="runs/teacher", intermediate=1.0, layers="1:2", causal=causal).inside()
    objective = (CausalDistillation if causal else Distillation)(losses=layers.losses)
    recipe = tiny.bert(model=ours, objective=objective, teachers=(Teacher(TEACHER, "", config),))
    assembly = assemble(recipe)
    params = initial_params(assembly)
    theirs = initialise(jax.random.key(1), assembly.teachers[TEACHER], objective.spec(recipe.phases[0]))
    batch = {name: jnp.asarray(feature.blank(3)) for name, feature in objective.spec(recipe.phases[0]).items()}
    tokens = jax.random.randint(jax.random.key(0), batch["tokens"].shape, 5, 195)
    batch |= {"tokens": tokens, "segments": (jnp.arange(32) < jnp.array([[32], [20], [1]])).astype(jnp.int32)}
    keys = row_keys(0, 0, jnp.arange(3))

    @jax.jit
    def sums(params, theirs):
        moment = Moment(keys, True, 0, {TEACHER: Bound(TEACHER, assembly.teachers[TEACHER], theirs)})
        terms = [each.loss(assembly.model, params, batch, {}, moment)[0] for each in (layers, objective)]
        return [{name: of[name].sum for name in terms[0]} for of in terms]

    found, expected = sums(params, theirs)
    assert [*found] == ["embeddings_mse", "hidden_mse", "scores_mse"] == [*layers.weights(batch)]
    assert layers.coefficients(0) == dict.fromkeys(found, 1.0)
    for name in found:
        assert found[name] == pytest.approx(float(expected[name]), rel=1e-6)
        assert found[name] > 0 and layers.weights(batch)[name] == objective.weights(batch)[name] > 0


def test_a_stage_of_layers_comes_first_and_goes_on_bit_for_bit(teacher, begun, tmp_path, capsys):
    given = ["--teacher", teacher, "--intermediate", 1, "--epochs", 1, "--length", 8]
    programs, stop = Programs(), StopRequest()
    stop.signal = "SIGTERM"

    def student(workdir, at=None):
        """Go on up to a step -> the parameters there."""
        stop.reached = lambda step: step == at
        task, options = parse_run(arguments(begun, tmp_path / workdir, *given)[1:])
        programs.inputs = None
        assert finetune({"": Files(task, options.train, options.dev)}, options, stop, programs) == (75 if at else 0)
        return restore(RunDirectory(tmp_path / workdir)).params

    once, states = student("once"), [student("twice", at) for at in (1, 3, None)]
    assert tiny.equal(once, states[-1])
    heads, matrices = ([state[name] for state in states] for name in ("classifier", "projections"))
    equal = lambda trees: [tiny.equal(*pair) for pair in itertools.pairwise(trees)]
    assert equal(heads) == [True, False] and equal(matrices) == [False, False]
    assert leaves_of(matrices[0]) == {"teacher/embeddings": (32, 48), "teacher/hidden": (32, 48)}
    before, after = {"embeddings_mse", "hidden_mse", "scores_mse"}, {"label", "soft"}
    for one in read_metrics(RunDirectory(tmp_path / "once"), "train"):
        terms = {name.removesuffix("_loss") for name in one if name.endswith("_loss")}
        assert terms == (before if one["step"] <= 5 else after)
        assert one["loss"] == pytest.approx(sum(one[f"{name}_loss"] for name in terms), rel=1e-5)
        assert (one["learning_rate"] == 0) == (one["step"] in (5, 10))  # each stage has a schedule of its own
    assert [one["step"] for one in read_metrics(RunDirectory(tmp_path / "once"), "eval")] == [
        10
    ]  # not of a random head
    assert main(arguments(begun, tmp_path / "once", *given, "--epochs", 2)) == 2
    assert "another number of --epochs, which is fixed with --intermediate" in capsys.readouterr().err
    assert main(arguments(begun, tmp_path / "once", *given[:2], *given[4:])) == 2
    assert "began with other options (--intermediate 1.0, now 0.0); give these" in capsys.readouterr().err
    assert main(["eval", str(tmp_path / "once"), "--test", str(begun / "dev.tsv")]) == 0
    assert main(["export", str(tmp_path / "once"), "--to", str(tmp_path / "hf")]) == 0
    assert not [name for name in load_file(tmp_path / "hf" / "model.safetensors") if "projections" in name]


def leaves_of(tree):
    return {path: leaf.shape for path, leaf in leaves(tree)}


def test_what_layers_cannot_learn_is_said_in_one_line(teacher, begun, tmp_path, capsys):
    def said(*given):
        assert main(arguments(begun, tmp_path / "run", *given)) == 2 and not (tmp_path / "run").exists()
        (line,) = capsys.readouterr().err.strip().splitlines()
        return line

    model = RunDirectory(teacher).read_recipe().model
    taught = ["--intermediate", 1, "--teacher"]
    assert "--intermediate: needs --teacher; give it, or leave this out" in said("--intermediate", 1)
    assert "--layers last: needs --intermediate; give it" in said("--teacher", teacher, "--layers", "last")
    assert "--layers 'every': use skip, first, last, top, or pairs like" in said(*taught, teacher, "--layers", "every")
    message = "--intermediate: hidden_mse: layers=1:3: pairs layer 1 with 3; the student has 1 layers, the teacher 2"
    assert message in said(*taught, teacher, "--layers", "1:3")
    deberta = DebertaConfig(vocab_size=195, width=32, depth=2, heads=2, feed_forward=64, labels=model.labels)
    other = changed(teacher, tmp_path / "deberta", deberta)
    message = "--intermediate: scores_mse: DebertaConfig attends otherwise than by scaled products of all tokens; use"
    assert message in said(*taught, other)
    heads = changed(teacher, tmp_path / "heads", dataclasses.replace(model, heads=4))
    assert "--intermediate: scores_mse: needs as many heads in both" in said(*taught, heads)
    token = changed(teacher, tmp_path / "token", vocabulary=('"##a"', '"##aaa"'))
    assert f"--teacher {token}: has another tokenizer than --from" in said(*taught, token)
    bart = BartConfig(vocab_size=195, width=32, depth=1, decoder_depth=1, heads=2, feed_forward=64, labels=model.labels)
    bart = changed(teacher, tmp_path / "bart", bart)
    message = f"--teacher {bart}: is a bart, whose layers --intermediate does not compare"
    assert message in said(*taught, bart, "--from", bart)


def test_what_cannot_teach_is_said_in_one_line(teacher, begun, tmp_path, capsys):
    def said(*given):
        assert main(arguments(begun, tmp_path / "run", *given)) == 2 and not (tmp_path / "run").exists()
        (line,) = capsys.readouterr().err.strip().splitlines()
        return line

    assert f"--teacher {tmp_path}: is neither a run nor" in said("--teacher", tmp_path)
    assert f"--teacher {begun / 'from'}: was not finetuned; give another one" in said("--teacher", begun / "from")
    for name in ("train", "dev"):
        (tmp_path / f"{name}.tsv").write_text((begun / f"{name}.tsv").read_text().replace("\tyes", "\tmaybe"))
    other = ["--train", tmp_path / "train.tsv", "--dev", tmp_path / "dev.tsv"]
    assert f"--teacher {teacher}: has the labels yes, no, not maybe, no" in said("--teacher", teacher, *other)
    token = changed(teacher, tmp_path / "token", vocabulary=('"##a"', '"##aaa"'))
    assert f"--teacher {token}: has another tokenizer than --from" in said("--teacher", token)
    gpt = dataclasses.replace(tiny.GPT2, labels=("no", "yes"))
    gpt = changed(teacher, tmp_path / "gpt", dataclasses.replace(gpt, vocab_size=tiny.BERT.vocab_size))
    assert f"--teacher {gpt}: is a gpt2, which reads other tokens of a row" in said("--teacher", gpt)
    short = dataclasses.replace(RunDirectory(teacher).read_recipe().model, positions=8)
    short = changed(teacher, tmp_path / "short", short)
    assert "exceeds --teacher: its model.positions=8" in said("--teacher", short)
    assert "--temperature: needs --teacher; give it, or leave this out" in said("--temperature", 2)
    given = ["--teacher", teacher, "--regression", "--temperature", 2]
    assert "--temperature: --regression has no classes; leave it out" in said(*given)
    task = {"task": "classify", "train": str(begun / "train.tsv"), "dev": str(begun / "dev.tsv")}
    (tmp_path / "tasks").mkdir()
    for name in ("one", "other"):
        fields = task | {"text": ["first", "second"], "teacher": str(teacher)}
        (tmp_path / "tasks" / f"{name}.json").write_text(json.dumps(fields))
    places = ["--from", str(begun / "from"), "--tasks", str(tmp_path / "tasks"), "--workdir", str(tmp_path / "run")]
    assert main(["several", *places, "--length", "16"]) == 2
    assert f"--teacher {teacher}: teaches only a task that is trained alone" in capsys.readouterr().err


@pytest.mark.parametrize("task", ["answer", "choose", "write"])
def test_other_tasks_have_no_teacher(task, begun, tmp_path, capsys):
    given = [of for name in ("from", "train", "dev", "workdir", "teacher") for of in (f"--{name}", "x")]
    assert main(["run", task, *given]) == 2
    assert "--teacher" in capsys.readouterr().err


def test_words_of_a_conditional_random_field_have_no_teacher():
    with pytest.raises(ValueError, match="^--crf: has no probabilities of single words for --teacher; leave one of"):
        Tag(crf=True, teacher="runs/teacher")


@pytest.mark.parametrize("field", RANGES)
def test_every_number_is_checked(field):
    for other in tried(1.0):
        assert_checked(field, other, refusal(lambda: Classify(teacher="runs/teacher", **{field: other})))  # noqa: B023
