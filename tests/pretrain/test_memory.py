"""What models remember between batches: it goes on over stops, reaches evaluation, and ends where it is asked to."""

import dataclasses
import io

import jax
import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file

from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.prepare.command import prepare
from data_pipelines.prepare.options import Prepare
from models.core.parameters import leaves
from models.core.program import Program
from pretrain.__main__ import main
from pretrain.huggingface.config import config_from
from pretrain.huggingface.load import load
from pretrain.recipe import Phase, resolve
from pretrain.schedules import Schedule
from pretrain.storage import checkpoints
from pretrain.storage.journal import read_metrics
from pretrain.storage.run_directory import RunDirectory
from pretrain.training.assembly import assemble, initial_params
from pretrain.training.evaluate import Evaluator
from pretrain.training.opened import restore
from pretrain.training.placement import stages
from pretrain.training.run import run
from tests.models.shapes import parameter_shapes
from tests.pretrain import tiny
from tests.texts import write_texts
from tpu.mesh import choose_mesh

MODEL = dataclasses.replace(tiny.TRANSFORMER_XL, width=16, feed_forward=16)


def recipe(memory=16, steps=8, **objective):
    made = tiny.transformer_xl(model=dataclasses.replace(MODEL, memory=memory), steps=steps)
    constant = Schedule("constant", peak=1e-3, warmup=0.0)  # knows no total
    return dataclasses.replace(made, schedule=constant, objective=dataclasses.replace(made.objective, **objective))


def stage(of):
    return stages(assemble(of, Program()), choose_mesh(None, jax.devices()))[0]


@pytest.fixture(scope="module")
def whole(corpus_path, tmp_path_factory):
    """The work directory of a Transformer-XL after 8 steps."""
    workdir = tmp_path_factory.mktemp("memory") / "run"
    assert run(recipe(), tiny.options(corpus_path, workdir, checkpoint_every=4)) == 0
    return workdir


def test_a_stopped_run_goes_on_with_its_memory_bit_for_bit(whole, corpus_path, tmp_path):
    for steps in (4, 8):
        run(recipe(steps=steps), tiny.options(corpus_path, tmp_path / "run"))
    state, halfway = tiny.final_state(whole), tiny.final_state(whole, 4)
    assert tiny.equal(tiny.final_state(tmp_path / "run"), state)
    assert state.carry["hidden"].shape == (1, 8, 16, 16) and (state.carry["segments"] == 1).all()
    assert not np.array_equal(halfway.carry["hidden"], state.carry["hidden"])


def test_evaluation_remembers_as_much_as_it_is_told_and_no_longer_than_a_document_where_memory_is_reset(corpus_path):
    params = initial_params(assemble(recipe(), Program()))

    def loss(**objective):
        return Evaluator(stage(recipe(**objective)), Corpus(corpus_path), 64)(params, {}, 0)["lm_loss"]

    in_training = loss()
    assert loss(evaluation_memory=16) == in_training
    assert len({in_training, loss(evaluation_memory=0), loss(reset=True)}) == 3


def test_figures_are_perplexity_and_accuracy_beside_the_unigrams(whole, capsys):
    (figures,) = read_metrics(RunDirectory(whole), "eval")
    assert figures["perplexity"] == pytest.approx(np.exp(figures["lm_loss"]), rel=1e-5)
    assert 0 < figures["lm_accuracy"] < 1
    assert main(["eval", str(whole), "--memory", "64"]) == 0
    said = capsys.readouterr().out
    assert "unigram" in said and "perplexity" in said
    assert f"{figures['lm_loss']:.4f}" not in said  # another memory, another loss
    assert main(["eval", str(whole), "--memory", "-1"]) == 2
    assert "error: --memory -1: must be at least 0" in capsys.readouterr().err


def test_an_adaptive_softmax_takes_words_by_falling_frequency_alone(corpus_path, tmp_path):
    source = write_texts(tmp_path / "texts", documents=200, seed=0)
    options = Prepare((f"text:{source}",), tmp_path / "words", tokenizer="wordlevel", heldout=0.1, processes=1)
    prepare(options, Console(file=io.StringIO()))
    words = Corpus(tmp_path / "words")
    with_cutoffs = lambda *cutoffs: tiny.transformer_xl(model=dataclasses.replace(MODEL, cutoffs=cutoffs))
    resolve(with_cutoffs(words.vocab_size // 3, words.vocab_size // 2), words)
    with pytest.raises(UserError, match=r"tokens from \d+ on are more frequent .* --tokenizer wordlevel"):
        run(with_cutoffs(40, 100), tiny.options(corpus_path, tmp_path / "other"))  # WordPiece: characters first
    assert not (tmp_path / "other").exists()


def test_reading_a_run_leaves_memory_and_moments_in_the_file(whole, monkeypatch):
    asked, load = [], checkpoints.load
    monkeypatch.setattr(
        "pretrain.training.opened.load_state", lambda folder, like: asked.append(like) or load(folder, like)
    )
    restored = restore(RunDirectory(whole))
    assert restored.step == 8 and tiny.equal(restored.params, tiny.final_state(whole).params)
    left = jax.tree.leaves((asked[0].carry, asked[0].opt_state))
    assert len(left) > 2 and all(leaf is checkpoints.NOT_READ for leaf in left)


def test_a_model_without_a_class_at_hugging_face_has_an_export_of_its_own(whole, corpus_path, tmp_path):
    out = tmp_path / "out"
    assert main(["export", str(whole), "--to", str(out)]) == 0
    params, config = dict(leaves(tiny.final_state(whole).params)), RunDirectory(whole).read_recipe().model
    stored = load_file(out / "model.safetensors")
    assert stored.keys() == params.keys()
    assert config_from(out) == config
    loaded = dict(leaves(load(out, config, parameter_shapes(config), Corpus(corpus_path).tokenizer_path)))
    for path, array in params.items():
        rows = slice(config.vocab_size if path.startswith("cluster_0") else None)
        np.testing.assert_array_equal(stored[path], array[rows], err_msg=path)
        np.testing.assert_array_equal(loaded[path][rows], array[rows], err_msg=path)


@pytest.mark.parametrize(
    "make, phase, said",
    [
        (tiny.xlnet, Phase(1.0, 12, 8), "length 12 leaves no room .* reuse_len 8"),
        (tiny.xlnet, Phase(1.0, 32, 7), "7 rows in a lane are not a multiple of 2"),
        (tiny.transformer_xl, Phase(1.0, 32, 10**6), "too few for a batch of 1000000 rows of 32"),
    ],
)
def test_streams_that_do_not_fit_are_said_before_anything_is_written(make, phase, said, corpus_path, tmp_path):
    with pytest.raises(UserError, match=said):
        run(make(phases=(phase,)), tiny.options(corpus_path, tmp_path / "run"))
    assert not (tmp_path / "run").exists()
