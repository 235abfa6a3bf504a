"""Distillation: a teacher from another run stands beside the model, never trained, saved once."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from data_pipelines.errors import UserError
from data_pipelines.examples.masking import Masking
from models.core.noise import row_keys
from models.families.deberta import DebertaConfig
from pretrain.objectives.distillation import CausalDistillation, Distillation
from pretrain.objectives.masked_language_model import MaskedLanguageModel
from pretrain.objectives.matching import Match
from pretrain.objectives.objective import TEACHERS, Bound, Moment, Teacher
from pretrain.recipe import check, from_json, to_json
from pretrain.schedules import Schedule
from pretrain.storage.journal import read_metrics
from pretrain.storage.run_directory import RunDirectory
from pretrain.training.assembly import assemble, initial_params
from pretrain.training.opened import restore
from pretrain.training.run import run
from pretrain.training.step import model_flops
from pretrain.training.teaching import of_stored, taken, with_sources
from tests.pretrain import boxes, tiny

STUDENT = tiny.BERT
TEACHER = dataclasses.replace(STUDENT, width=48)
WIDE = boxes.BoxedConfig(width=24)
PLAIN = MaskedLanguageModel(next_sentence=False)


def recipe(source, teacher=TEACHER, **changes):
    constant = Schedule("constant", peak=1e-3, warmup=0.0)
    teachers = (Teacher("teacher", str(source), teacher),)
    fields = {"model": STUDENT, "objective": Distillation(), "teachers": teachers, "schedule": constant}
    return tiny.bert(**fields | changes)


def of_boxes(source, teacher=WIDE, **changes):
    """A recipe that trains within a second."""
    return recipe(source, teacher, model=boxes.BoxedConfig(), objective=Distillation(layout="boxes"), **changes)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    boxes.register(monkeypatch)


@pytest.fixture
def source(registered, corpus_path, tmp_path):
    """A run of the teacher."""
    run(boxes.recipe(model=WIDE, steps=1), tiny.options(corpus_path, tmp_path / "teacher"))
    return tmp_path / "teacher"


def test_a_student_learns_from_a_run_and_goes_on_without_it_bit_for_bit(corpus_path, source, tmp_path):
    run(of_boxes(source, steps=6), tiny.options(corpus_path, tmp_path / "once"))
    run(of_boxes(source, steps=3), tiny.options(corpus_path, tmp_path / "twice"))
    moved = source.rename(source.with_name("elsewhere"))
    assert run(of_boxes(source, steps=6), tiny.options(corpus_path, tmp_path / "twice")) == 0
    once = tiny.final_state(tmp_path / "once", 6)
    assert tiny.equal(once.params, tiny.final_state(tmp_path / "twice", 6).params)
    assert TEACHERS not in once.params and TEACHERS not in once.opt_state[0].mu
    restored = restore(RunDirectory(tmp_path / "twice"))
    assert tiny.equal(restored.frozen[TEACHERS]["teacher"], restore(RunDirectory(moved)).params)
    figures = read_metrics(RunDirectory(tmp_path / "twice"), "eval")[-1]
    assert figures["loss"] == pytest.approx(figures["mlm_loss"] + figures["logits_kl_loss"], rel=1e-5)
    assert figures["logits_kl_loss"] > 0


INSIDE = (
    Match("hidden", "mse"),
    Match("values", "kl", weight=0.0, weight_end=1.0, steps=4),
    Match("hidden", "cosine", "top"),
)


def test_a_student_of_what_is_inside_trains_its_projections_and_goes_on_bit_for_bit(corpus_path, tmp_path):
    run(tiny.bert(model=TEACHER, objective=PLAIN, steps=1), tiny.options(corpus_path, tmp_path / "teacher"))
    sources = {name: Teacher(name, str(tmp_path / "teacher"), TEACHER) for name in ("one", "other")}
    objective = Distillation(losses=INSIDE, own=0.0, taught_by=("one", "other"), several="drawn")
    taught = lambda steps: recipe("", objective=objective, teachers=tuple(sources.values()), steps=steps)
    run(taught(4), tiny.options(corpus_path, tmp_path / "once"))
    for steps in (2, 4):
        run(taught(steps), tiny.options(corpus_path, tmp_path / "twice"))
    first, last = tiny.final_state(tmp_path / "twice", 2).params, tiny.final_state(tmp_path / "twice", 4).params
    assert tiny.equal(last, tiny.final_state(tmp_path / "once", 4).params)
    before, after = (params["projections"]["one"]["hidden"] for params in (first, last))
    assert before.shape == (32, 48) and not (before == after).all()
    head = lambda params: params["predictions"]["dense"]["kernel"]  # which no loss of the student reads
    assert (head(first) == head(last)).all()
    figures = read_metrics(RunDirectory(tmp_path / "once"), "eval")[-1]
    parts = {match.name: figures[f"{match.name}_loss"] for match in INSIDE}
    assert figures["loss"] == pytest.approx(sum(parts.values()), rel=1e-5)


def test_a_decoder_that_is_its_own_teacher_has_nothing_to_learn_from_it():
    """Without dropout, all its losses beside the tokens' are 0, and those of another teacher are not."""
    model = dataclasses.replace(tiny.GPT2, vocab_size=195, dropout=0.0, attention_dropout=0.0)
    losses = Match(), Match("hidden", "mse"), Match("attention", "kl"), Match("values", "kl")
    objective = CausalDistillation(losses=losses)
    distilled = tiny.bert(model=model, objective=objective, teachers=(Teacher("teacher", "", model),))
    check(distilled)
    assembly, phase = assemble(distilled), distilled.phases[0]
    rng, rows = np.random.default_rng(0), (2, phase.length)
    tokens = rng.integers(5, 195, rows, dtype=np.int32)
    batch = {
        "tokens": tokens,
        "targets": tokens,
        "segments": np.ones(rows, np.int32),
        "weights": np.ones(rows, np.float32),
    }
    keys = row_keys(0, 0, jnp.arange(2))

    def sums(params, theirs):
        teachers = {"teacher": Bound("teacher", assembly.teachers["teacher"], theirs)}
        moment = Moment(keys, True, 0, teachers)
        return {name: term.sum for name, term in objective.loss(assembly.model, params, batch, {}, moment)[0].items()}

    one, other = (initial_params(assembly, jax.random.key(seed)) for seed in (0, 1))
    same, different = (jax.jit(sums)(one, theirs) for theirs in (one, other))
    for match in losses:
        assert abs(same[match.name]) < 1e-3 < different[match.name]
    assert same["lm"] == pytest.approx(float(different["lm"])) and same["lm"] > 100


def test_a_student_begins_with_layers_of_its_teacher():
    deep = dataclasses.replace(STUDENT, depth=4)
    teacher = lambda copied, model=deep: Teacher("teacher", "", model, copied)
    student = recipe("", model=dataclasses.replace(STUDENT, depth=2), teachers=(teacher("2 4"),))
    theirs = initial_params(assemble(tiny.bert(model=deep, objective=PLAIN)), jax.random.key(1))
    ours = initial_params(assemble(student))
    begun = taken(student, {"teacher": theirs}, ours)
    of_layers = lambda params: params["layers"]["attention"]["query"]["kernel"]
    assert (of_layers(begun) == of_layers(theirs)[jnp.array([1, 3])]).all()
    assert tiny.equal(begun["embeddings"], theirs["embeddings"]) and not tiny.equal(ours, begun)
    outside = dataclasses.replace(student, teachers=(teacher("embeddings"),))
    begun = taken(outside, {"teacher": theirs}, ours)
    assert tiny.equal(begun["embeddings"], theirs["embeddings"]) and tiny.equal(begun["layers"], ours["layers"])
    narrow = dataclasses.replace(student, model=dataclasses.replace(student.model, width=16))
    with pytest.raises(
        UserError, match=r"^teachers.0.copied='2 4': embeddings/.* is \[.*, 32\] there and \[.*, 16\] her"
    ):
        taken(narrow, {"teacher": theirs}, initial_params(assemble(narrow)))
    wrong = dataclasses.replace(student, teachers=(teacher("2 5"),))
    with pytest.raises(
        UserError, match="^teachers.0.copied='2 5': 2 5: does not name 2 of the teacher's 4 layers; use"
    ):
        taken(wrong, {"teacher": theirs}, ours)
    albert = dataclasses.replace(tiny.ALBERT, depth=2)
    shared = dataclasses.replace(student, model=albert, teachers=(teacher("skip", albert),))
    of_albert = initial_params(assemble(shared))
    with pytest.raises(
        UserError, match="^teachers.0.copied='skip': layers are shared, or in several stacks; use embed"
    ):
        taken(shared, {"teacher": of_albert}, of_albert)
    foreign = dataclasses.replace(student, teachers=(teacher("first", tiny.GPT2),))
    with pytest.raises(
        UserError, match="^teachers.0.copied='first': a bert takes no weights from a gpt2; leave it out"
    ):
        taken(foreign, {"teacher": theirs}, ours)


def test_the_command_line_names_a_teacher_whose_config_is_read(source, corpus_path, tmp_path):
    unnamed, workdir = of_boxes(""), RunDirectory(tmp_path / "run")
    found = with_sources(unnamed, str(source), workdir).teachers[0]
    assert (found.source, found.model.width) == (str(source), WIDE.width)
    with pytest.raises(
        UserError, match="^--teacher: bert needs one; give a Hugging Face folder or the workdir of a run"
    ):
        with_sources(unnamed, None, workdir)
    two = dataclasses.replace(unnamed, teachers=(*unnamed.teachers, dataclasses.replace(found, name="other")))
    for wrong in ("x", "teacher=x,y", "teacher=x,others=y", "teacher=x,other=y,other=z"):
        with pytest.raises(
            UserError, match="^--teacher .*: the recipe's teachers are teacher, other; write NAME=PATH,"
        ):
            with_sources(two, wrong, workdir)
    plain = with_sources(boxes.recipe(), str(source), workdir)
    assert plain.teachers == (found,) and plain.objective == Distillation(**vars(boxes.recipe().objective))
    stored = of_stored(boxes.recipe(objective=dataclasses.replace(PLAIN, masking=Masking(copies=1))), 3)
    assert with_sources(stored, str(source), workdir).objective.stored == 0
    with pytest.raises(
        UserError, match="^objective ReplacedTokenDetection: learns from no teacher and no soft targets"
    ):
        with_sources(tiny.electra(), str(source), workdir)
    with pytest.raises(UserError, match=r"^--teacher .*nowhere"):
        with_sources(unnamed, str(tmp_path / "nowhere"), workdir)
    run(with_sources(unnamed, str(source), workdir), tiny.options(corpus_path, workdir.path))
    source.rename(source.with_name("elsewhere"))
    for given in (str(source), f"teacher={source}", None):
        assert with_sources(unnamed, given, workdir).teachers == (found,)
    assert with_sources(boxes.recipe(), str(source), workdir) == plain
    assert with_sources(boxes.recipe(), None, workdir) == boxes.recipe()
    with pytest.raises(UserError, match=r"objective.kind: .*; and \d+ more\); give the old values"):
        run(boxes.recipe(), tiny.options(corpus_path, workdir.path))
    with pytest.raises(UserError, match="^--teacher, --soft-targets: a run learns from one of them"):
        tiny.options(corpus_path, workdir.path, teacher="x", soft_targets=tmp_path)
    with pytest.raises(UserError, match="^--teacher other: the run in .* began with teacher=.*; give that, or"):
        with_sources(unnamed, "other", workdir)


def test_losses_that_cannot_be_are_said_in_one_line():
    def refused(losses, teacher=TEACHER, student=STUDENT, **fields):
        with pytest.raises((UserError, ValueError)) as error:
            check(recipe("x", teacher, model=student, objective=Distillation(losses=losses, **fields)))
        return str(error.value)

    deep = dataclasses.replace(TEACHER, depth=3)
    two = dataclasses.replace(STUDENT, depth=2)
    assert "hidden_mse: skip: 3 layers are not a multiple of 2; give" in refused((Match("hidden", "mse"),), deep, two)
    more = dataclasses.replace(TEACHER, heads=4)
    assert refused((Match("scores", "mse"),), more) == (
        "objective.losses: scores_mse: needs as many heads in both, the student has 2, the teacher 4; set model.heads"
    )
    uneven = (Match("values", "kl", relation_heads=3),)
    assert refused(uneven) == (
        "objective.losses: values_kl: relation_heads=3 must divide the widths of all heads, [32, 48]; change it"
    )
    check(recipe("x", deep, model=two, objective=Distillation(losses=(Match("embeddings", "mse"),))))
    assert "ElectraConfig has several encoders; use the folder" in refused((Match("hidden", "mse"),), tiny.ELECTRA)
    assert "T5Config attends otherwise than by scaled products" in refused((Match("attention", "kl"),), tiny.T5)
    deberta = DebertaConfig(vocab_size=195, positions=32, width=32, depth=1, heads=2, feed_forward=64)
    assert "DebertaConfig attends otherwise than by" in refused((Match("attention", "kl"),), deberta)
    assert "must be one or more, each once" in refused((Match(), Match(temperature=2.0)))
    assert "objective.several='all': use mean or drawn" in refused((Match(),), several="all")
    assert "there is no 'logits' by 'cosine'; use logits by kl, cross-entropy, mse" in _message("logits", "cosine")
    assert "needs steps with the end of its weight" in _message(weight_end=0.5)
    assert "losses.layers='3': use skip, first, last, top, or pairs" in _message("hidden", "mse", "3")
    assert "losses.layers='top': has no effect on logits" in _message(layers="top")
    assert "losses.temperature=2.0: has no effect by mse" in _message("hidden", "mse", temperature=2.0)
    assert "losses.relation_heads=2: has no effect on attention" in _message("attention", "kl", relation_heads=2)


def _message(*fields, **named):
    with pytest.raises(ValueError) as error:
        Match(*fields, **named)
    return str(error.value)


def test_what_is_wrong_with_a_teacher_is_said_in_one_line(corpus_path, source, tmp_path):
    options = tiny.options(corpus_path, tmp_path / "run")
    with pytest.raises(UserError, match="teachers: the recipe has none, Distillation needs teacher; give each"):
        check(tiny.bert(model=STUDENT, objective=Distillation()))
    with pytest.raises(UserError, match="teachers: the recipe has teacher, MaskedLanguageModel needs none"):
        check(recipe(source, objective=PLAIN))
    lacking = "needs Encoder, predictions, which the teacher.s TransformerXLConfig lacks; give another --teacher"
    with pytest.raises(UserError, match=f"objective Distillation: {lacking}"):
        check(recipe(source, tiny.TRANSFORMER_XL))
    with pytest.raises(UserError, match=r"phases.0.length=32: exceeds teachers.0.model.positions=16; lower"):
        check(recipe("runs/teacher", dataclasses.replace(TEACHER, positions=16)))
    with pytest.raises(UserError, match=r"^teachers.0.source .*: model.width is 24 there and 32 here; .*, or"):
        run(of_boxes(source, boxes.BoxedConfig(width=32)), options)
    with pytest.raises(UserError, match=r"^teachers.0.source .*nowhere"):
        run(of_boxes(tmp_path / "nowhere"), options)
    assert not options.workdir.exists()


def test_a_recipe_with_a_teacher_survives_json_and_one_without_says_nothing_of_them():
    distilled = recipe("runs/teacher")
    assert from_json(to_json(distilled)) == distilled
    assert TEACHERS not in to_json(tiny.bert())
    before, after = to_json(distilled).rsplit('"bert"', 1)
    with pytest.raises(UserError, match="teachers.0.model.family: this version has no pegasus"):
        from_json(f'{before}"pegasus"{after}')


def test_a_teacher_costs_its_forward_pass_alone():
    phase = tiny.bert().phases[0]
    alone = lambda model: model_flops(tiny.bert(model=model, objective=PLAIN), phase)
    taught = lambda teacher: model_flops(recipe("x", teacher), phase)
    assert taught(STUDENT) - taught(TEACHER) == pytest.approx((alone(STUDENT) - alone(TEACHER)) / 3)
