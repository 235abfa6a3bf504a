"""Every registered recipe builds, lowers and survives JSON; phases share one run."""

import dataclasses
import json
import shutil

import jax
import pytest

from data_pipelines.corpus import Corpus
from data_pipelines.examples.masking import Masking
from data_pipelines.examples.permutations import Permuting
from data_pipelines.examples.span_corruption import Corruption
from data_pipelines.order import Order
from models.attention.patterns.pattern import Pattern
from models.core.program import Program, default
from models.families.electra import Tower
from pretrain.commands import recipes as table
from pretrain.objectives.sequence_to_sequence import DENOISING
from pretrain.optimizers import Optimizer
from pretrain.recipe import Phase, Recipe, boundaries, check, from_json, phase_at, resolve, to_json
from pretrain.recipes.registry import RECIPES, find
from pretrain.schedules import Schedule
from pretrain.storage.journal import read_metrics
from pretrain.storage.run_directory import RunDirectory
from pretrain.training.assembly import ALL, assemble, frozen_layers, own_parameters
from pretrain.training.placement import stages
from pretrain.training.run import run
from pretrain.training.start import random_origin
from tests.pretrain import tiny, toys
from tests.pretrain.fields import replaced
from tpu.mesh import MeshShape, make_mesh

SMALL = {"width": 32, "depth": 1, "heads": 2, "feed_forward": 128}
# Fields of models, objectives and phases that change numbers in a step, not what is computed
NUMBERS = {"dropout": 0.1, "attention_dropout": 0.1, "init_std": 0.02, "norm_epsilon": 1e-6, "positions": 512}
NUMBERS |= {"memory": 32, "embedding": 32, "block": 16, "share": 1.0, "batch_size": 16, "masking": Masking()}
NUMBERS |= {"permuting": Permuting(reuse_len=32, perm_size=32), "corruption": Corruption(), "target_length": 14}
NUMBERS |= {"decoder_depth": 1, "source_depth": 1, "generator_depth": 1, "head_dim": 16, "frozen": ()}


def shrunk(recipe):
    """The recipe with a tiny model, and tiny teachers: its phases, objective and optimiser as they are."""

    def small(model):
        towers = {"discriminator": Tower(**SMALL), "generator": Tower(16, 1, 1, 32), "embedding": 32}
        narrow = {"embedding": 32} if "embedding" in vars(model) else {}
        sizes = towers if hasattr(model, "discriminator") else SMALL | narrow
        return dataclasses.replace(model, vocab_size=300, **sizes)

    teachers = tuple(dataclasses.replace(one, model=small(one.model), copied="") for one in recipe.teachers)
    return dataclasses.replace(recipe, model=small(recipe.model), teachers=teachers)


def numbered(value, **more):
    """A part of a recipe with the numbers above, and others."""
    fields = {field.name for field in dataclasses.fields(value)}
    return dataclasses.replace(value, **{name: of for name, of in (NUMBERS | more).items() if name in fields})


def of_one_trace(recipe):
    """A tiny recipe, the same for all whose steps differ in numbers alone."""
    small, more = shrunk(recipe), {}
    model = small.model
    if cutoffs := getattr(model, "cutoffs", ()):
        more |= {"cutoffs": (100, 200)[: len(cutoffs)]}
    if sparse := getattr(model, "pattern", Pattern()).name != "dense":
        more |= {"pattern": numbered(model.pattern)}
    length = 512 if sparse else 64
    targets = {"target_length": length} if getattr(recipe.objective, "layout", "") == DENOISING else {}
    phase = numbered(recipe.phases[0], length=length, globals=4, global_base=None, **targets)
    optimizer, schedule = Optimizer(recipe.optimizer.name), Schedule("constant", peak=1e-3)
    parts = {"model": numbered(model, **more), "objective": numbered(recipe.objective), "phases": (phase,)}
    return Recipe("tiny", "", optimizer=optimizer, schedule=schedule, steps=20, teachers=small.teachers, **parts)


TRACES = {of_one_trace(recipe): name for name, recipe in RECIPES.items()}


@pytest.mark.parametrize("recipe", TRACES, ids=TRACES.values())
def test_every_recipe_lowers_at_a_tiny_size_from_shapes_alone(recipe):
    (stage,) = stages(assemble(recipe, Program()), make_mesh(MeshShape(), jax.devices()[:1]))
    state = stage.train.arguments[0]
    after, metrics = jax.eval_shape(stage.train.run, *stage.train.arguments)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    assert metrics.loss.shape == ()


def test_nothing_is_allocated_to_place_a_memory_that_fits_on_no_single_device():
    mesh = make_mesh(MeshShape(), jax.devices()[:1])
    state = stages(assemble(RECIPES["xlnet-large"], Program()), mesh)[0].state
    assert state.carry["hidden"].shape == (24, 8192, 384, 1024)  # 309 GB


def test_the_program_of_an_accelerator_does_not_grow_with_depth():
    """So that a deep model compiles as quickly as a shallow one."""

    def lines(depth, program):
        recipe = replaced(shrunk(RECIPES["bert-tiny"]), "model.depth", depth)
        step = stages(assemble(recipe, program), make_mesh(MeshShape(), jax.devices()[:1]))[0].train
        return str(step.run.trace(*step.arguments).jaxpr).count("\n")

    assert lines(3, default("tpu")) == lines(7, default("tpu")) < lines(5, Program(depth="unroll"))


KEPT = {kept["recipe"]: kept for kept in json.loads(table.FILE.read_text())}


# To count parameters, a model of each kind is traced; the others are slow together.
OF_A_KIND = [*TRACES.values()]
COUNTED = [pytest.param(name, marks=() if name in OF_A_KIND else pytest.mark.slow) for name in RECIPES]


@pytest.mark.parametrize("name", COUNTED)
def test_the_table_says_what_a_recipe_is(name):
    assert list(KEPT) == list(RECIPES)
    assert KEPT[name] == table.row(RECIPES[name]), "make it anew: python -m pretrain.commands.recipes"


def test_the_table_counts_what_grows_with_the_vocabulary_apart():
    small, large = (table.row(replaced(RECIPES["bert-base"], "model.vocab_size", size)) for size in (128, 30522))
    assert small["body"] == large["body"] == "86.6M"  # 12 layers of 7.09M, positions, types, pooler, heads
    assert (small["published"], large["published"]) == ("86.7M (128)", "110.2M (30,522)")


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_can_train_survives_json_and_is_found_by_its_name(name):
    check(RECIPES[name])
    assert from_json(to_json(RECIPES[name])) == RECIPES[name] == find(name)
    assert RECIPES[name].source


def test_fields_that_a_recipe_leaves_out_have_their_defaults():
    written = json.loads(to_json(RECIPES["bert-base"]))
    del written["objective"]["sentence_order"], written["objective"]["masking"]["rate"]
    del written["model"]["pattern"], written["order"], written["mixture"]
    assert from_json(json.dumps(written)) == RECIPES["bert-base"]
    assert (RECIPES["bert-base"].order, RECIPES["bert-base"].mixture) == (Order(1, 4), "proportional")


def test_resolving_takes_the_vocabulary_of_the_corpus(corpus_path):
    recipe = dataclasses.replace(tiny.bert(), model=dataclasses.replace(tiny.BERT, vocab_size=30522))
    resolved = resolve(recipe, Corpus(corpus_path))
    assert resolved.model.vocab_size == 195
    assert dataclasses.replace(resolved, model=recipe.model) == recipe


def test_phases_end_at_their_shares_of_the_steps_and_the_last_at_the_total():
    phases = (Phase(0.9, 128, 8), Phase(0.1, 512, 8))
    assert boundaries(tiny.bert(phases=phases, steps=1_000_000)) == [900_000, 1_000_000]
    thirds = tiny.bert(phases=(Phase(1 / 3, 16, 8),) * 3, steps=10)
    assert boundaries(thirds) == [3, 7, 10]
    assert [phase_at(thirds, step) for step in range(11)] == [0] * 3 + [1] * 4 + [2] * 4


def test_both_phases_share_one_optimiser_state_also_when_cut_off(corpus_path, tmp_path, monkeypatch, capsys):
    toys.register(monkeypatch)
    recipe = toys.recipe(phases=(Phase(0.6, 16, 8), Phase(0.4, 32, 16)), steps=20)
    workdir = tmp_path / "run"
    assert run(recipe, tiny.options(corpus_path, workdir)) == 0
    said = capsys.readouterr().out
    assert "phase 1 of 2" in said and "steps 0 to 12" in said and "phase 2 of 2" in said and "steps 12 to 20" in said
    state = tiny.final_state(workdir)
    assert state.step == state.opt_state[0].count == 20  # Adam's moments are not begun anew
    assert [entry["step"] for entry in read_metrics(RunDirectory(workdir), "train")] == [1, 5, 10, 12, 13, 15, 20]
    shutil.rmtree(workdir / "checkpoints" / "20")  # as if killed before it was written
    assert RunDirectory(workdir).checkpoint_steps()[-1] == 15
    run(recipe, tiny.options(corpus_path, workdir))
    assert tiny.equal(tiny.final_state(workdir), state)


def test_the_first_stage_of_a_translation_trains_what_is_new_and_what_meets_it():
    for name in ("bart-translation-tiny", "bart-translation-large"):
        recipe = RECIPES[name]
        whole = {"source", "source_tokens", "encoder/positions", "encoder/padding_positions"}
        whole |= {"decoder/positions", "decoder/padding_positions"}
        stack = range(recipe.model.depth)
        for row in own_parameters(recipe):
            held = frozen_layers(row.path, recipe.phases[0].frozen)
            if any(row.path == path or row.path.startswith(f"{path}/") for path in whole):
                assert not held, row.path
            elif row.path.startswith(tuple(f"encoder/layers/attention/{of}/" for of in ("query", "key", "value"))):
                assert {layer for layers in held for layer in stack[layers]} == {*stack[1:]}, row.path
            elif row.path.startswith("encoder/layers/"):
                assert {layer for layers in held for layer in stack[layers]} == {*stack}, row.path
            else:
                assert held == [ALL], row.path
        assert recipe.phases[1].frozen == ()
        assert "also what is frozen (tokens, " in random_origin(recipe)
    assert random_origin(RECIPES["bart-tiny"]) == "starting from random weights"
