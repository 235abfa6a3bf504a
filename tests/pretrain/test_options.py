"""Every field does something: another value of it shows in the parameters, the loss or the batches."""

import dataclasses
import functools
import re

import flax.linen as nn
import jax
import numpy as np
import pytest
from flax.errors import FlaxError

from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.examples.denoising import Noises
from data_pipelines.loader import Loader
from models.attention.patterns.pattern import PATTERNS, Pattern
from models.core.parameters import decays, leaves
from models.core.program import Program
from pretrain.objectives.objective import Moment, shapes_of
from pretrain.objectives.sequence_to_sequence import SequenceToSequence
from pretrain.storage.journal import read_metrics
from pretrain.storage.run_directory import RunDirectory
from pretrain.training import evaluate, loop, placement
from pretrain.training.assembly import assemble, initial_params
from pretrain.training.attention_choice import chosen_program
from pretrain.training.run import run
from tests.pretrain import tiny, toys
from tests.pretrain.fields import fields_of, other, replaced

MAKE = (tiny.albert, tiny.bert, tiny.electra, tiny.etc, tiny.transformer_xl, tiny.xlnet)
RECIPES = {recipe.name: recipe for recipe in (make() for make in MAKE)}
RECIPES["t5"] = tiny.t5(objective=SequenceToSequence("prefix"))
# What is compared elsewhere, field by field
ELSEWHERE = {
    "optimizer": "test_optimizers",
    "schedule": "test_schedules",
    "name": "test_run_directory",
    "source": "test_run_directory",
    "steps": "test_schedules",
    "frozen": "test_step",
    "teachers": "test_teachers",
    "phases.0.share": "test_recipes",
    "order": "test_data",
    "mixture": "test_data",
    "objective.evaluation_memory": "test_memory",
    "objective.masking.copies": "test_layouts",
    "objective.masking.fate": "test_masking",
    "objective.masking.similar": "test_similar_words",
    "objective.corruption.density": "test_span_corruption",
    "objective.corruption.span": "test_span_corruption",
    "objective.start": "test_sequence_to_sequence",
    "t5.objective.layout": "test_text_to_text",
    "model.labels": "finetune/test_classify",
    "lora": "test_lora",
}
ELSEWHERE |= {f"objective.noises.{noise.name}": "test_denoising" for noise in dataclasses.fields(Noises)}
# Patterns, for the fields that they read; `models/attention/patterns` reads them for all families
SPARSE = [Pattern("bigbird", block=4, random=1), Pattern("longformer", block=4, windows=(8,), dilations=(1,))]
SPARSE += [Pattern("fixed", block=4, stride=3)]
LABELS = ("objective.next_sentence", "objective.sentence_order")  # of which a recipe has one at most


def pattern_field(path):
    """The name of a pattern's field, of which all patterns have not one."""
    group, _, name = path.rpartition(".")
    return name if group == "model.pattern" and name != "name" else None


SIZES = {"positions": 40, "types": 5, "embedding": 28, "width": 36, "depth": 3, "feed_forward": 52}
SIZES |= {"generator.width": 44, "generator.depth": 7, "generator.feed_forward": 60}  # other than the discriminator's


def sizes_of(name):
    """Path of each of a model's fields that is a dimension of a parameter -> another value, which no other one has."""
    sized = {path: [end for end in SIZES if f".{path}".endswith(f".{end}")] for path in fields_of(RECIPES[name])}
    sized |= {"model.depth": []} if name == "albert" else {}  # its layers share their parameters
    return {path: SIZES[max(ends, key=len)] for path, ends in sized.items() if ends and path.startswith("model.")}


def compared(name):
    """Other fields that change the parameters or the loss (the model's), or the batches or their weights."""
    elsewhere = lambda path: {path, path.partition(".")[0], f"{name}.{path}"} & ELSEWHERE.keys()
    fields = [path for path in fields_of(RECIPES[name]) if not elsewhere(path) and path not in sizes_of(name)]
    return [path for path in fields if name == "bert" or not pattern_field(path)]


@functools.cache
def traced(recipe, what, like=None):
    """The 'shapes' of the initial parameters; how they are made ('init') or a 'loss' in training, as jaxprs.

    like: the recipe whose parameters the loss is given, by default the same.
    """
    assembly = assemble(recipe, Program())
    if what == "shapes":
        return jax.eval_shape(lambda: initial_params(assembly))
    if what == "init":
        return told(lambda: initial_params(assembly))
    carry, _ = recipe.objective.carry(assembly.model, recipe.phases[0], True)
    of_model = functools.partial(recipe.objective.loss, assembly.model)
    loss = lambda params, batch, keys: of_model(params, batch, carry, Moment(keys, True))[0]
    return told(loss, traced(like or recipe, "shapes"), *rows_and_keys(recipe))


def told(function, *arguments):
    """A function's jaxpr, without the addresses of objects in it, and its constants."""
    closed = jax.make_jaxpr(function)(*arguments)
    return re.sub("0x[0-9a-f]+", "", str(closed)), [np.asarray(constant).tobytes() for constant in closed.consts]


def rows_and_keys(recipe):
    """Arguments of a loss besides the parameters, as shapes."""
    spec = recipe.objective.spec(recipe.phases[0])
    return shapes_of(spec, 8), jax.ShapeDtypeStruct((8, 2), np.uint32)


def first_batch(recipe, corpus):
    """What a batch is, and how its losses are weighted."""
    phase = recipe.phases[0]
    batch = recipe.objective.examples(corpus, "train", phase, recipe.seed).batch(0, np.arange(phase.batch_size))
    arrays = [(name, array.shape, array.tobytes()) for name, array in batch.items()]
    return arrays, recipe.objective.coefficients(0)


@pytest.mark.parametrize("name", RECIPES)
def test_every_size_is_a_dimension_of_the_parameters(name):
    changed = functools.reduce(lambda recipe, field: replaced(recipe, *field), sizes_of(name).items(), RECIPES[name])
    before, after = (
        {size for leaf in jax.tree.leaves(traced(recipe, "shapes")) for size in leaf.shape}
        for recipe in (RECIPES[name], changed)
    )
    assert len(sizes_of(name)) >= 3 and set(sizes_of(name).values()) <= after - before


@pytest.mark.parametrize("name, field", [(name, field) for name in RECIPES for field in compared(name)])
def test_every_field_of_a_recipe_matters(name, field, corpus_path):
    recipe = RECIPES[name]
    if of_pattern := pattern_field(field):
        pattern = next(one for one in SPARSE if of_pattern in PATTERNS[one.name].fields)
        recipe = replaced(recipe, "model.pattern", pattern)
    if field in {"objective.layout", *LABELS} and LABELS[0] in fields_of(recipe):
        recipe = functools.reduce(lambda so_far, label: replaced(so_far, label, False), {*LABELS} - {field}, recipe)
    changed = replaced(recipe, field, other(field, fields_of(recipe)[field]))
    if field.startswith("model."):
        what = "init" if field.endswith("init_std") else "loss"
        try:
            assert traced(changed, what, recipe) != traced(recipe, what, recipe)
        except (FlaxError, ValueError):  # the loss does not take these parameters
            assert traced(changed, "shapes") != traced(recipe, "shapes")
    else:
        corpus = Corpus(corpus_path)
        assert first_batch(changed, corpus) != first_batch(recipe, corpus)


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "t5"])  # which draws each by its inputs
def test_every_matrix_is_drawn_with_init_std(name, monkeypatch):
    monkeypatch.setattr(nn.initializers, "normal", nn.initializers.constant)
    recipe = replaced(RECIPES[name], "model.init_std", 0.5)
    params = dict(leaves(jax.jit(lambda: initial_params(assemble(recipe, Program())))()))
    drawn = [parameter for parameter in assemble(recipe).table if decays(parameter)]
    assert len(drawn) >= 8
    for path, axes in ((parameter.path, parameter.axes) for parameter in drawn):
        values = params[path][: recipe.model.vocab_size if axes[0] == "vocab" else None]
        assert values.size and (values == 0.5).all(), path
        assert np.count_nonzero(params[path]) == values.size, f"{path}: padding rows are not 0"


@pytest.mark.parametrize("name", RECIPES)
def test_what_is_observed_depends_on_nothing_else(name, corpus_path):
    corpus, recipe = Corpus(corpus_path), RECIPES[name]
    again = dataclasses.replace(recipe, name="another")
    assert traced(again, "loss", recipe) == traced(recipe, "loss", recipe)
    assert first_batch(again, corpus) == first_batch(recipe, corpus)


@functools.cache
def gradient(program):
    recipe = tiny.bert()
    of_model = functools.partial(recipe.objective.loss, assemble(recipe, program).model)
    loss = lambda params, batch, keys: of_model(params, batch, {}, Moment(keys, True))[0]["mlm"].sum
    return told(jax.grad(loss), traced(recipe, "shapes"), *rows_and_keys(recipe))


@pytest.mark.parametrize(
    "field, value", [("dtype", "bfloat16"), ("depth", "unroll"), ("remat", "dots"), ("remat", "full")]
)
def test_every_field_of_a_program_changes_what_is_compiled(field, value):
    assert gradient(Program(**{field: value})) != gradient(Program())
    assert {one.name for one in dataclasses.fields(Program)} == {"dtype", "depth", "remat", "attention"}


# Every run option, through a run of a toy of 20 steps


@pytest.fixture
def toy_run(corpus_path, tmp_path, monkeypatch):
    """Run a toy with some options -> its directory."""
    toys.register(monkeypatch)

    def go(recipe=None, **options):
        assert run(recipe or toys.recipe(), tiny.options(corpus_path, tmp_path / "run", **options)) == 0
        return RunDirectory(tmp_path / "run")

    return go


def steps_of(directory, kind):
    return [entry["step"] for entry in read_metrics(directory, kind)]


def test_options_of_a_run(toy_run, monkeypatch):
    sizes, evaluators, parts, stages, seen = [], evaluate.Evaluators.__init__, [], placement.stages, []

    def recorded(*rest, processes, **more):
        seen.append(processes)
        return Loader(*rest, processes=0, **more)  # what several processes do is seen by test_kills

    made = lambda self, *rest: sizes.append(rest[2]) or evaluators(self, *rest)
    monkeypatch.setattr(evaluate.Evaluators, "__init__", made)
    monkeypatch.setattr(placement, "stages", lambda *rest: parts.append(rest[2]) or stages(*rest))
    monkeypatch.setattr(loop, "Loader", recorded)
    options = {"log_every": 8, "eval_every": 7, "eval_examples": 24, "checkpoint_every": 3, "keep": 2, "keep_every": 6}
    directory = toy_run(**options, microbatches=4, workers=2, profile=True, mesh="data=1")
    assert steps_of(directory, "train") == [1, 8, 16, 20]
    assert steps_of(directory, "eval") == [7, 14, 20] and sizes == [24]
    assert directory.checkpoint_steps() == [6, 12, 18, 20]
    assert parts == [4] and seen == [2]
    assert list((directory.path / "profile").rglob("*.xplane.pb"))
    assert "as data=1" in directory.log.read_text()


def test_max_skipped(corpus_path, tmp_path, monkeypatch, toy_run):
    recipe = toys.recipe(objective=toys.NextWord(explodes=10 * 8))  # from step 11 on
    options = tiny.options(corpus_path, tmp_path / "run", log_every=1, max_skipped=3, checkpoint_every=4)
    said = r"step 13: .* not finite in the last 3 updates.*--schedule.peak \(now 0.01\)"
    with pytest.raises(UserError, match=said):
        run(recipe, options)
    directory = RunDirectory(tmp_path / "run")
    assert [entry.get("skipped_updates") for entry in read_metrics(directory, "train")][-4:] == [None, 1, 2, 3]
    good, bad = tiny.final_state(directory.path, 8), tiny.final_state(directory.path, 12)
    assert good.opt_state[0].count == 8 and bad.opt_state[0].count == 10 and list(bad.skipped) == [2, 2]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(bad))
    with pytest.raises(UserError, match="step 13: .* not finite in the last 3 updates"):
        run(recipe, options)  # the count goes on where the checkpoint left it
    with pytest.raises(UserError, match="step 15: .* not finite in the last 5 updates"):
        run(recipe, dataclasses.replace(options, max_skipped=5))


@pytest.mark.parametrize("field, value", [("dtype", "bfloat16"), ("depth", "scan"), ("remat", "full")])
def test_the_program_can_be_chosen(field, value, tmp_path):
    options = tiny.options(tmp_path, tmp_path)
    chosen = chosen_program(tiny.bert(), dataclasses.replace(options, **{field: value}))
    assert getattr(chosen, field) == value != getattr(chosen_program(tiny.bert(), options), field)
