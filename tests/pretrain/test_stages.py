"""Phases that train otherwise than the one before, and tasks that take turns in one: each through whole runs."""

import dataclasses
import json
import shutil
from types import SimpleNamespace

import flax.linen as nn
import jax
import numpy as np
import pytest

from data_pipelines.corpus import open_corpora
from data_pipelines.errors import UserError
from models.attention.encoder import Encoder, EncoderConfig, encoder_parameters
from models.attention.mask import Mask
from models.attention.patterns.pattern import Pattern
from models.attention.transformer import encode
from models.blocks.embeddings import Term
from models.blocks.heads import TOKENS, token_head
from models.core import parameters
from models.core.family import Family, Input
from models.core.parameters import leaves
from models.families.registry import FAMILIES
from pretrain.objectives.masked_language_model import MaskedLanguageModel
from pretrain.objectives.next_token_prediction import NextTokenPrediction
from pretrain.objectives.objective import Task
from pretrain.optimizers import Optimizer
from pretrain.recipe import Phase, asked_of_teachers, check, extended, from_json, rate_after, to_json
from pretrain.schedules import Schedule
from pretrain.storage.checkpoints import ABOUT, phase_of
from pretrain.storage.journal import Journal, read_metrics
from pretrain.storage.run_directory import RunDirectory
from pretrain.training import run as runs
from pretrain.training.assembly import assemble, initial_params, parameter_shapes, split_frozen
from pretrain.training.data import check_data, phase_batches
from pretrain.training.loop import _enter
from pretrain.training.opened import open_mean, open_model
from pretrain.training.placement import of_phase, place_given, stages
from pretrain.training.run import run
from pretrain.training.step import initial_state
from tests.pretrain import tiny, toys
from tpu.mesh import row_mesh

TOKENS_ALONE = MaskedLanguageModel(next_sentence=False)
STAGES = (
    Phase(0.5, 32, 8),
    Phase(
        0.5,
        32,
        8,
        objective=TOKENS_ALONE,
        optimizer=Optimizer("adagrad"),
        schedule=Schedule("constant", peak=5e-3, warmup=0.0),
        frozen=("predictions", "layers[0:1]"),
    ),
)


def staged(**changes):
    """With a layer to freeze and one to train."""
    model = dataclasses.replace(tiny.BERT, depth=2)
    return tiny.bert(**{"model": model, "phases": STAGES, "steps": 12} | changes)


@pytest.fixture(scope="module")
def two_stages(corpus_path, tmp_path_factory):
    """The work directory of a run with a checkpoint in each stage. Tests must not change it."""
    workdir = tmp_path_factory.mktemp("stages") / "run"
    run(staged(), tiny.options(corpus_path, workdir, log_every=1, checkpoint_every=3, keep=9))
    return workdir


def test_a_stage_trains_its_parts_alone_by_its_optimiser_at_its_rate(two_stages):
    whole, first = tiny.final_state(two_stages), tiny.final_state(two_stages, 6)
    params, old = dict(leaves(whole.params)), dict(leaves(first.params))
    same = {path for path in params if np.array_equal(params[path], old[path])}
    of_pairs = {path for path in params if path.startswith(("pooler", "pair"))}  # no loss reads these any more
    assert same == {path for path in params if path.startswith("predictions")} | of_pairs
    stacked = [path for path in params if path.startswith("layers/")]
    assert all(np.array_equal(params[path][0], old[path][0]) for path in stacked)
    assert all((params[path][1] != old[path][1]).any() for path in stacked if "key/bias" not in path)
    (sums, *_) = whole.opt_state
    assert not any(path.startswith("predictions") for path, _ in leaves(sums.sum_of_squares))
    assert all((leaf[0] == np.float32(0.1)).all() for path, leaf in leaves(sums.sum_of_squares) if path in stacked)
    found = {entry["step"]: entry for entry in read_metrics(RunDirectory(two_stages), "train")}
    assert found[7]["learning_rate"] == found[12]["learning_rate"] == pytest.approx(5e-3)
    assert found[6]["learning_rate"] == pytest.approx(rate_after(tiny.bert(steps=6), 5))  # its own steps' last
    assert "next_sentence_loss" in found[6] and "next_sentence_loss" not in found[7]


@pytest.mark.parametrize("gone", [(12,), (12, 9, 6)])
def test_a_run_of_stages_goes_on_bit_for_bit_from_a_checkpoint_of_either(two_stages, corpus_path, tmp_path, gone):
    workdir = shutil.copytree(two_stages, tmp_path / "run")
    for step in gone:
        shutil.rmtree(workdir / "checkpoints" / str(step))
    run(staged(), tiny.options(corpus_path, workdir, log_every=1, checkpoint_every=3, keep=9))
    assert tiny.equal(tiny.final_state(workdir), tiny.final_state(two_stages))


def test_what_is_frozen_is_there_and_leaves_something_to_train():
    def refused(*frozen):
        phase = dataclasses.replace(STAGES[0], frozen=frozen)
        with pytest.raises(UserError) as caught:
            stages(assemble(staged(phases=(phase,))), row_mesh(jax.devices()[:1], [1]))
        return str(caught.value)

    assert "phases.0.frozen: no parameters are below layer; did you mean layers" in refused("layer[0:1]")
    assert "has layer numbers, but is not a stack of layers" in refused("embeddings[0:1]")
    assert "phases.0.frozen: layers[0] is not a path; write layers 0 and 1 as layers[0:2]" in refused("layers[0]")
    assert "phases.0.frozen: layers[1:3] is not a range of the 2 layers" in refused("layers[1:3]")
    rest = ("embeddings", "predictions", "pooler", "pair")
    assert "nothing is left to train" in refused("layers", *rest)
    assert "nothing is left to train" in refused("layers[0:1]", "layers[1:2]", *rest)


def test_a_phase_gives_the_models_rotary_positions_their_base(corpus_path, tmp_path, capsys):
    """From the first step of the phase, in evaluation, and in what is made of its checkpoints."""
    near = Pattern("longformer", block=16, windows=(16,))
    sizes = {"width": 16, "depth": 1, "heads": 2, "feed_forward": 24, "dropout": 0.0, "init_std": 0.3, "pattern": near}
    model = dataclasses.replace(FAMILIES["modernbert"].sizes["tiny"], vocab_size=195, **sizes)
    phases = [Phase(0.5, 32, 8, global_base=base) for base in (10.0, None)]
    staged = lambda *of: tiny.bert(model=model, objective=TOKENS_ALONE, phases=of, steps=4)
    how = {"log_every": 1, "checkpoint_every": 2, "keep": 9}
    losses = {}
    for name, of in {"both": phases, "one": [dataclasses.replace(phase, global_base=10.0) for phase in phases]}.items():
        assert run(staged(*of), tiny.options(corpus_path, tmp_path / name, **how)) == 0
        losses[name] = [entry["loss"] for entry in read_metrics(RunDirectory(tmp_path / name), "train")]
    assert losses["both"][:2] == losses["one"][:2] and losses["both"][2] != losses["one"][2]
    assert tiny.equal(tiny.final_state(tmp_path / "both", 2).params, tiny.final_state(tmp_path / "one", 2).params)
    assert open_model(tmp_path / "both", 2).config.global_base == 10.0
    assert open_model(tmp_path / "both").config == model and model.global_base == 160_000.0
    shutil.rmtree(tmp_path / "both" / "checkpoints" / "4")
    run(staged(*phases), tiny.options(corpus_path, tmp_path / "both", **how))
    resumed = [entry["loss"] for entry in read_metrics(RunDirectory(tmp_path / "both"), "train")]
    assert resumed == losses["both"]
    assert from_json(to_json(staged(*phases))) == staged(*phases)
    for recipe, said in (
        (tiny.bert(phases=phases[:1] * 2), "phases.0.global_base=10.0: this model has none"),
        (
            staged(*phases[1:] * 1, dataclasses.replace(phases[0], global_base=-1.0)),
            "phases.1.global_base=-1.0: must be above 0",
        ),
    ):
        with pytest.raises(UserError, match=said):
            check(recipe)


def test_two_seeds_rates_and_lengths_of_run_are_one_program(registered):
    def text(**changes):
        step = stages(assemble(toys.recipe(**changes)), row_mesh(jax.devices()[:1], [1]))[0].train
        return step.run.lower(*step.arguments).as_text()

    one = text(seed=1, schedule=Schedule(peak=1e-3, warmup=0.1))
    assert one == text(seed=2, steps=77, schedule=Schedule(peak=0.5, warmup=0.3, final=0.1))
    assert one != text(seed=1, schedule=Schedule("cosine"))


# Masked tokens of one corpus and next tokens of another, by one trunk


@dataclasses.dataclass(frozen=True)
class BothConfig(EncoderConfig):
    """Without types."""

    @property
    def terms(self):
        return (Term("positions", self.positions, "positions", by_place=True),)


class Both(Encoder):
    """An encoder that is a decoder where its tokens see none after them."""

    @nn.compact
    def encode(self, inputs, noise=None, slots=None, causal=False):
        mask = Mask(inputs["segments"], causal=causal)
        return encode(self, self.config, self.embeddings(inputs), mask, noise, self.program, slots)

    def decode(self, inputs, noise=None):
        return self.encode(inputs, noise, causal=True)

    def softmax(self, hidden):
        table = self.embeddings.tokens
        return (
            hidden,
            table,
            jax.numpy.where(jax.numpy.arange(len(table)) < self.config.vocab_size, 0.0, -jax.numpy.inf),
        )

    def begin(self): ...
    def advance(self): ...
    def take(self): ...
    def token_logits(self): ...


def _table(config):
    return [parameter for parameter in encoder_parameters("both") if parameter.path != "embeddings/types"]


BOTH = Family(
    config=BothConfig,
    sizes={},
    inputs=dict.fromkeys(("tokens", "segments"), Input(("length",))),
    trunk=Both,
    table=_table,
    heads=(token_head("cls.predictions"),),
    hf={},
)
TASKS = (
    Task("masked", MaskedLanguageModel(layout="packed-sentences", next_sentence=False), 2.0, corpus="a"),
    Task("next", NextTokenPrediction(), 1.0, corpus="b"),
)


@pytest.fixture
def both(monkeypatch, corpus_path):
    """A recipe of two tasks, and how it is run in a work directory."""
    monkeypatch.setitem(FAMILIES, "both", BOTH)
    model = BothConfig(**vars(tiny.BERT))
    recipe = tiny.bert(model=model, steps=12, phases=(Phase(1.0, 32, 8, tasks=TASKS),))

    def go(workdir, recipe=recipe):
        options = tiny.options(corpus_path, workdir, log_every=6, checkpoint_every=5, keep=9, eval_every=6)
        assert run(recipe, dataclasses.replace(options, corpus=f"a={corpus_path},b={corpus_path}")) == 0

    return recipe, go


def test_two_tasks_train_one_trunk_with_figures_of_each_and_go_on_bit_for_bit(both, tmp_path, monkeypatch):
    recipe, go = both
    assert from_json(to_json(recipe)) == recipe
    told = []
    monkeypatch.setattr(Journal, "doing", lambda self, what: told.append(what))
    go(tmp_path / "whole")
    assert sorted(what for what in told if what != "evaluating") == [
        "compiling phase 1",
        "compiling task masked",
        "compiling task next",
    ]
    for kind in ("train", "eval"):
        *_, last = read_metrics(RunDirectory(tmp_path / "whole"), kind)
        assert {"loss", "masked/loss", "masked/mlm_accuracy", "next/loss", "next/perplexity"} <= last.keys()
    assert last["loss"] == pytest.approx((2 * last["masked/loss"] + last["next/loss"]) / 3)
    shutil.copytree(tmp_path / "whole", tmp_path / "killed")
    for step in (12, 10):
        shutil.rmtree(tmp_path / "killed" / "checkpoints" / str(step))
    go(tmp_path / "killed")
    assert tiny.equal(tiny.final_state(tmp_path / "killed"), tiny.final_state(tmp_path / "whole"))


def test_what_a_task_does_not_read_has_a_gradient_of_zero_in_its_steps(both):
    recipe, _ = both
    one = row_mesh(jax.devices()[:1], [1])
    made = of_phase(stages(assemble(recipe), one), 0)
    assert made.keys() == {"masked", "next"} and not made["next"].untrained()
    alone = dataclasses.replace(recipe, phases=(Phase(1.0, 32, 8, objective=TASKS[1].objective),))
    (stage,) = stages(assemble(dataclasses.replace(alone, objective=TASKS[0].objective)), one)
    assert not stage.untrained()  # it has no head for masked tokens

    state, frozen = jax.device_get(initial_state(made["next"].assembly, initial_params(made["next"].assembly)))

    def moments(task):
        stage = made[task]
        batch = {name: np.ones((8, *of.shape), of.dtype) for name, of in stage.task.objective.spec(stage.phase).items()}
        after, _ = stage.train.run(state, frozen, batch, place_given(stage))
        return dict(leaves(after.opt_state[0].mu))

    of_next, of_masked = moments("next"), moments("masked")
    of_head = [path for path in of_next if path.startswith(TOKENS)]
    assert of_head and all(not of_next[path].any() for path in of_head)
    assert any(of_masked[path].any() for path in of_head)


def test_tasks_that_cannot_be_told_apart_or_read_what_is_not_there_are_refused(both, corpus_path):
    recipe, _ = both
    twice = dataclasses.replace(recipe, phases=(Phase(1.0, 32, 8, tasks=TASKS[:1] * 2),))
    with pytest.raises(UserError, match=r"phases.0.tasks: the names \['masked', 'masked'\] must differ"):
        check(twice)
    for name in ("", "loss", "a/b"):
        with pytest.raises(UserError, match="must differ, without / and other than loss"):
            check(
                dataclasses.replace(
                    twice, phases=(Phase(1.0, 32, 8, tasks=(dataclasses.replace(TASKS[0], name=name),)),)
                )
            )
    beside = dataclasses.replace(recipe.phases[0], objective=TOKENS_ALONE)
    with pytest.raises(UserError, match="phases.0.objective: has no effect with tasks; leave one of them out"):
        check(dataclasses.replace(recipe, phases=(beside,)))
    with pytest.raises(UserError, match="--corpus: task next reads b=DIR, but there is only a; add it"):
        check_data(recipe, open_corpora(f"a={corpus_path}", {}))
    fields = json.loads(to_json(recipe))
    double = to_json(recipe).replace('"corpus": "a"', '"corpus": "a", "corpus": "b"')
    with pytest.raises(UserError, match="^corpus: occurs twice in one object; remove one of them"):
        from_json(double)
    empty = fields | {"phases": [fields["phases"][0] | {"tasks": []}]}
    with pytest.raises(UserError, match="phases.0.tasks: is empty; add tasks, or leave it out"):
        from_json(json.dumps(empty))
    first = fields["phases"][0] | {"target_length": 8}
    said = "phases.0.target_length: a phase of masked-language-model has no such field; leave it out, or put a task"
    with pytest.raises(UserError, match=said):
        from_json(json.dumps(fields | {"phases": [first]}))
    fields["phases"][0]["tasks"][1]["objective"]["kind"] = "next-word"
    with pytest.raises(UserError, match="phases.0.tasks.1.objective.kind: this version has no next-word"):
        from_json(json.dumps(fields))


def test_phases_without_a_schedule_share_the_recipe_s_and_others_begin_it_anew():
    apart = dataclasses.replace(STAGES[0], share=0.25, schedule=Schedule("constant", peak=7e-3, warmup=0.0))
    shared = dataclasses.replace(STAGES[0], share=0.25)
    recipe = staged(steps=400, phases=(shared, shared, apart, shared), schedule=Schedule(peak=1e-3, warmup=0.1))
    alone = staged(steps=200, phases=STAGES[:1] * 2, schedule=recipe.schedule)
    assert [rate_after(recipe, step) for step in (0, 50, 199)] == [rate_after(alone, step) for step in (0, 50, 199)]
    assert rate_after(recipe, 250) == pytest.approx(7e-3)
    half = staged(steps=100, phases=STAGES[:1], schedule=recipe.schedule)
    assert [rate_after(recipe, 300 + step) for step in (0, 50, 99)] == [rate_after(half, step) for step in (0, 50, 99)]


def test_a_stage_with_a_schedule_of_its_own_is_made_longer_at_its_rate():
    stage = dataclasses.replace(STAGES[0], schedule=Schedule("linear", peak=1e-5, warmup=0.0, final=0.5))
    recipe = staged(steps=100, phases=(STAGES[0], stage))
    longer = extended(recipe, 100, 200, "constant")
    assert [rate_after(longer, step) for step in (0, 30, 60, 99)] == [rate_after(recipe, at) for at in (0, 30, 60, 99)]
    assert rate_after(longer, 100) == rate_after(longer, 199) == rate_after(recipe, 99) == pytest.approx(5e-6)
    with pytest.raises(UserError, match="--extend decay: after 50 steps the last phase has not begun; train"):
        extended(recipe, 50, 200, "decay")


def test_what_begins_to_be_read_in_a_later_phase_begins_with_moments_anew():
    first = dataclasses.replace(STAGES[0], objective=TOKENS_ALONE)
    same = assemble(tiny.bert(phases=(STAGES[0],) * 2))
    state, _ = initial_state(same, initial_params(same))
    adam, *rest = state.opt_state
    state = state._replace(opt_state=(adam._replace(count=jax.numpy.int32(6)), *rest))
    for phases, count in (((first, STAGES[0]), 0), ((STAGES[0], STAGES[0]), 6)):
        recipe = tiny.bert(phases=phases)
        made = stages(assemble(recipe), row_mesh(jax.devices()[:1], [1]))
        assert _enter(SimpleNamespace(recipe=recipe, stages=made), state, 0, 1).opt_state[0].count == count


def test_two_objectives_ask_a_teacher_for_what_either_needs():
    @dataclasses.dataclass(frozen=True)
    class Asking(MaskedLanguageModel):
        teachers = {"teacher": ("one",)}

    @dataclasses.dataclass(frozen=True)
    class AskingMore(MaskedLanguageModel):
        teachers = {"teacher": ("two",)}

    recipe = staged(phases=(Phase(0.5, 32, 8, objective=Asking()), Phase(0.5, 32, 8, objective=AskingMore())))
    assert asked_of_teachers(recipe) == {"teacher": ("one", "two")}


def test_tasks_that_read_one_corpus_alike_have_noise_and_an_order_of_their_own(corpus_path, tmp_path):
    alike = tuple(Task(name, TOKENS_ALONE) for name in ("one", "other"))
    recipe = staged(phases=(Phase(1.0, 32, 8, tasks=alike),))
    (made,) = phase_batches(recipe, open_corpora(str(corpus_path), {}), 0, tmp_path / "examples.json", print).values()
    one, other = (made.batches[task.name].batch(0, np.arange(8))["tokens"] for task in alike)
    assert (one != other).any()


def test_what_is_frozen_needs_no_room_for_gradients(monkeypatch):
    recipe = staged(frozen=("embeddings",))
    shapes = parameter_shapes(recipe)
    needed = 4 * sum(map(parameters.count, (shapes, split_frozen(shapes, recipe)[0])))
    monkeypatch.setattr(runs, "device_memory", lambda: needed / jax.device_count())
    runs._check_memory(recipe)
    with pytest.raises(UserError, match="parameters and their gradients take"):
        runs._check_memory(staged())


def test_a_checkpoint_is_read_as_of_the_phase_that_wrote_it_wherever_phases_begin_now(two_stages, tmp_path):
    workdir = shutil.copytree(two_stages, tmp_path / "run")
    (workdir / "recipe.json").write_text(to_json(staged(steps=40)))  # by which step 9 is of the first phase
    opened = open_model(workdir, 9)
    assert opened.run.phase == 1 and opened.objective == STAGES[1].objective
    assert tiny.equal(opened.run.params, tiny.final_state(two_stages, 9).params)


def test_checkpoints_of_stages_that_train_otherwise_have_no_mean(two_stages):
    assert open_mean(two_stages, 2).averaged == (9, 12) and open_mean(two_stages, 2, step=6).averaged == (3, 6)
    said = (
        "--average 3: phase 1, of the checkpoint of step 6, trains other parameters or tasks than phase 2, of step 12"
    )
    with pytest.raises(UserError, match=said):
        open_mean(two_stages, 3)


@pytest.mark.parametrize("phase", [None, 7, "1"])
def test_a_phase_that_the_recipe_has_not_is_as_none(tmp_path, phase):
    (tmp_path / "9").mkdir()
    (tmp_path / "9" / ABOUT).write_text(json.dumps({"custom_metadata": {"phase": phase}}))
    assert phase_of(tmp_path / "9", staged()) == 1 and phase_of(tmp_path / "9", staged(steps=40)) == 0
