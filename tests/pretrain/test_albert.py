"""ALBERT goes from a Hugging Face folder to a run and back, and learns the order of sentences."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
import transformers

from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from models.core.program import Program
from pretrain.commands.export import export_run
from pretrain.commands.run import run
from pretrain.huggingface.config import config_from
from pretrain.recipe import Phase
from pretrain.schedules import Schedule
from pretrain.training.assembly import assemble, initial_params, initial_state
from pretrain.training.step import train_step
from tests.pretrain import reference, tiny


def test_a_folder_of_hugging_face_trains_and_its_export_loads_there(corpus_path, tmp_path):
    config = dataclasses.replace(tiny.ALBERT, vocab_size=Corpus(corpus_path).vocab_size)
    reference.torch_model(config, "model").save_pretrained(tmp_path / "theirs")
    recipe = tiny.albert(steps=20)
    assert run(recipe, tiny.options(corpus_path, tmp_path / "run", init_from=str(tmp_path / "theirs"))) == 0
    export_run(tmp_path / "run", tmp_path / "ours")
    model, info = transformers.AlbertForPreTraining.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info.values()), info
    before = transformers.AlbertForPreTraining.from_pretrained(tmp_path / "theirs")
    for (name, trained), (_, start) in zip(model.named_parameters(), before.named_parameters(), strict=True):
        moved = float((trained - start).abs().max())
        assert 0 < moved < 0.1 or name.endswith("attention.key.bias"), (name, moved)


def test_groups_of_several_layers_are_refused_by_name(tmp_path):
    transformers.AlbertConfig(inner_group_num=2).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="config.json has inner_group_num=2, needed is 1"):
        config_from(tmp_path)


def test_a_field_that_two_others_need_is_missing_once(tmp_path):
    transformers.AlbertConfig().save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    del fields["num_hidden_groups"]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UserError, match="config.json lacks num_hidden_groups; add"):
        config_from(tmp_path)


@pytest.mark.slow
def test_the_order_of_200_pairs_is_learned_within_400_steps(corpus_path):
    recipe = tiny.albert(phases=(Phase(1.0, 32, 200),), schedule=Schedule(peak=3e-3, warmup=0.1), steps=400)
    corpus = Corpus(corpus_path)
    recipe = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, vocab_size=corpus.vocab_size))
    batch = recipe.objective.examples(corpus, "train", recipe.phases[0], seed=0).batch(0, np.arange(200))
    assembly = assemble(recipe, Program())
    state, frozen = initial_state(assembly, jax.jit(functools.partial(initial_params, assembly))(), 0)
    step = jax.jit(train_step(recipe, assembly.model, assembly.optimizer, {}))
    for _ in range(recipe.steps):
        state, metrics = step(state, frozen, batch)
    assert float(metrics.counts["sentence_order_total"]) > 150
    assert recipe.objective.report(metrics.counts)["sentence_order_accuracy"] > 0.95
