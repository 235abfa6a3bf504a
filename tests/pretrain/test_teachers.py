"""Distillation: a teacher from another run stands beside the model, never trained, saved once."""

import dataclasses

import pytest

from data_pipelines.errors import UserError
from pretrain.objectives.distillation import Distillation
from pretrain.objectives.masked_language_model import MaskedLanguageModel
from pretrain.objectives.objective import TEACHERS, Teacher
from pretrain.recipe import check, from_json, to_json
from pretrain.schedules import Schedule
from pretrain.storage.journal import read_metrics
from pretrain.storage.run_directory import RunDirectory
from pretrain.training.opened import restore
from pretrain.training.run import run
from pretrain.training.step import model_flops
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


def test_what_is_wrong_with_a_teacher_is_said_in_one_line(corpus_path, source, tmp_path):
    options = tiny.options(corpus_path, tmp_path / "run")
    with pytest.raises(UserError, match="teachers: the recipe has none, Distillation needs teacher; give each"):
        check(tiny.bert(model=STUDENT, objective=Distillation()))
    with pytest.raises(UserError, match="teachers: the recipe has teacher, MaskedLanguageModel needs none"):
        check(recipe(source, objective=PLAIN))
    with pytest.raises(
        UserError, match="objective Distillation: needs Encoder, predictions, which TransformerXLConfig lacks"
    ):
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
