"""Weights to start from are of the same model, whichever way they come, and reach the devices in parts."""

import dataclasses
import logging
import re
import shutil

import jax
import numpy as np
import pytest

from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from models.attention.patterns.pattern import Pattern
from models.blocks.heads import TOKENS
from models.families.registry import family_of
from pretrain.huggingface.export import export
from pretrain.huggingface.load import load
from pretrain.objectives.masked_language_model import MaskedLanguageModel
from pretrain.storage import run_directory
from pretrain.storage.run_directory import flat
from pretrain.training import start
from pretrain.training.start import load_weights
from tests.models.shapes import parameter_shapes
from tests.pretrain import tiny
from tests.pretrain.fields import other, replaced

ON_FOUR_DEVICES = """
import sys
from pathlib import Path
import jax
from pretrain.training import start
from pretrain.training import run as runs
from tests.pretrain import tiny

corpus, source, workdir = map(Path, sys.argv[1:])
given, jit, read, restore = [], jax.jit, [], start.restore

def recorded(function, **more):
    def call(*arguments):
        given.append(arguments)
        return jitted(*arguments)
    jitted = jit(function, **more)
    return call if "_first_state" in function.__qualname__ else jitted

jax.jit = recorded
start.restore = lambda *of, **more: read.append(restore(*of, **more)) or read[-1]
runs.train, runs.trace = lambda run, state, carried: (state, 0), lambda stages, names: None
runs.run(tiny.bert(), tiny.options(corpus, workdir, mesh="fsdp=4", init_from=str(source)))
assert [restored.mesh.size for restored in read] == [1]
((_, weights, teachers),) = given
assert teachers == {}
held = {device: 0 for device in jax.devices()}
for leaf in jax.tree.leaves(weights):
    for shard in leaf.addressable_shards:
        held[shard.device] += shard.data.nbytes
share = max(held.values()) / sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
assert 1 / 4 < share < 1 / 3, share  # vectors, positions and types are whole everywhere
assert tiny.equal(weights, read[0].params)
"""


@pytest.fixture
def begin(corpus_path):
    """(recipe, work directory, options) -> the parameters of a run that ends before it trains."""
    return lambda recipe, workdir, **options: tiny.begun(recipe, tiny.options(corpus_path, workdir, **options))


@pytest.mark.slow
def test_a_device_is_given_its_part_of_the_weights_alone(begin, corpus_path, tmp_path):
    begin(tiny.bert(), tmp_path / "source")
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    command = ["-c", ON_FOUR_DEVICES, corpus_path, tmp_path / "source", tmp_path / "run"]
    process = tiny.start(program=command, **environment)
    _, err = process.communicate(timeout=400)
    assert process.returncode == 0, err[-3000:]


TOKENS_ALONE = MaskedLanguageModel(next_sentence=False)
MAKE = (tiny.albert, tiny.bert, tiny.electra, tiny.etc, tiny.transformer_xl, tiny.xlnet)
RECIPES = {recipe.name: recipe for recipe in (make() for make in MAKE)}
VALUES = {"vocab_size": 194, "positions": 16, "types": 1, "pattern": Pattern("longformer", block=8, windows=(4,))}
# No weight depends on them
FREE = {"dropout", "attention_dropout", "init_std", "memory", "pattern", "block", "window", "labels"}
FIELDS = [
    (name, path)
    for name, recipe in RECIPES.items()
    for path in sorted({re.sub(r"^pattern\..*", "pattern", path) for path in flat(dataclasses.asdict(recipe.model))})
]


@pytest.fixture(scope="module")
def sources(corpus_path, tmp_path_factory):
    """Family -> (a run's work directory, an export or None)."""
    corpus, found = Corpus(corpus_path), {}
    for name, recipe in RECIPES.items():
        run, folder = tmp_path_factory.mktemp(name) / "run", None
        run_directory.start(recipe, {"": corpus}, tiny.options(corpus_path, run))
        if family_of(recipe.model).hf:
            folder = run.parent / "export"
            zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), parameter_shapes(recipe.model))
            export(zeros, recipe.model, corpus.tokenizer_path, folder)
        found[name] = run, folder
    return found


@pytest.mark.parametrize("name, path", FIELDS)
def test_every_field_is_free_or_refused_from_a_run_and_from_a_folder(name, path, sources, corpus_path, monkeypatch):
    def restored(*_, **__):
        raise UserError("what else is checked is alike")

    monkeypatch.setattr(start, "restore", restored)
    (run, folder), corpus, free, ours = sources[name], Corpus(corpus_path), path in FREE, RECIPES[name].model
    value = VALUES.get(path) or other(path, flat(dataclasses.asdict(ours))[path])
    model = replaced(ours, path, value)
    shapes = parameter_shapes(ours)
    with pytest.raises(UserError) as refused:
        load_weights("--init-from", str(run), model, shapes, corpus)
    assert (f"model.{path} is " in str(refused.value)) != free
    assert ("what else is checked is alike" in str(refused.value)) == free
    if folder is None:
        return
    if free:
        load(folder, model, shapes, corpus.tokenizer_path)
    else:
        with pytest.raises(UserError, match=f"model.{path} is "):
            load(folder, model, shapes, corpus.tokenizer_path)


def test_a_head_that_a_run_lacks_is_refused_and_one_too_many_left_out(begin, corpus_path, tmp_path, caplog):
    corpus, without = Corpus(corpus_path), parameter_shapes(tiny.BERT, (TOKENS,))
    begin(tiny.bert(), tmp_path / "with")
    with caplog.at_level(logging.WARNING):
        params = load_weights("--init-from", str(tmp_path / "with"), tiny.BERT, without, corpus)
    assert "ignored pair/bias, pair/kernel, pooler/bias, pooler/kernel" in caplog.text
    assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, without)
    run_directory.start(tiny.bert(objective=TOKENS_ALONE), {"": corpus}, tiny.options(corpus_path, tmp_path / "run"))
    with pytest.raises(UserError, match="has no pair/bias, pair/kernel, pooler/bias, pooler/kernel; give the recipe"):
        load_weights("--init-from", str(tmp_path / "run"), tiny.BERT, parameter_shapes(tiny.BERT), corpus)


def test_a_head_that_a_run_lacks_starts_anew_where_that_is_asked_for(begin, tmp_path, caplog):
    source = begin(tiny.bert(objective=TOKENS_ALONE, seed=1), tmp_path / "run")
    after = begin(tiny.bert(), tmp_path / "next", init_from=str(tmp_path / "run"), init_heads_anew=True)
    assert "these start from random weights: pair/bias, pair/kernel, pooler/bias, pooler/kernel" in caplog.text
    assert tiny.equal({name: after[name] for name in source}, source)
    assert np.abs(after["pair"]["kernel"]).max() > 0
    for folder in (tmp_path / "next" / "checkpoints").iterdir():
        shutil.rmtree(folder)  # as killed before the first one
    caplog.clear()
    assert tiny.equal(begin(tiny.bert(), tmp_path / "next"), after)
    assert "these start from random weights: pair/bias" in caplog.text
