"""What models remember between batches: it goes on over stops, reaches evaluation, and ends where it is asked to."""

import dataclasses
import io

import jax
import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.prepare.command import prepare
from data_pipelines.prepare.options import Prepare
from models.core.parameters import leaves
from models.core.program import Program
from pretrain.__main__ import main
from pretrain.commands.run import run
from pretrain.huggingface.config import config_from
from pretrain.huggingface.load import load
from pretrain.recipe import Phase
from pretrain.storage import stored_state
from pretrain.storage.journal import read_metrics
from pretrain.storage.run_directory import RunDirectory
from pretrain.training.assembly import assemble, initial_params
from pretrain.training.evaluate import Evaluator
from pretrain.training.placement import stages
from pretrain.training.restore import restore
from tests.models.shapes import parameter_shapes
from tests.pretrain import tiny
from tests.texts import write_texts
from tpu.mesh import choose_mesh


@pytest.fixture(scope="module")
def trained(corpus_path, tmp_path_factory):
    """The work directory of a Transformer-XL after 20 steps."""
    workdir = tmp_path_factory.mktemp("memory") / "run"
    assert run(tiny.transformer_xl(), tiny.options(corpus_path, workdir)) == 0
    return workdir


def evaluated(corpus_path, params, **objective):
    recipe = tiny.transformer_xl()
    recipe = dataclasses.replace(recipe, objective=dataclasses.replace(recipe.objective, **objective))
    mesh = choose_mesh(None, jax.devices())
    return Evaluator(stages(assemble(recipe, Program()), mesh)[0], Corpus(corpus_path), 64)(params, {}, 0)


@pytest.mark.parametrize("recipe", [tiny.transformer_xl, pytest.param(tiny.xlnet, marks=pytest.mark.slow)])
def test_a_stopped_run_goes_on_with_its_memory_bit_for_bit(recipe, corpus_path, tmp_path):
    constant = dataclasses.replace(recipe().schedule, name="constant", warmup=0.0)  # knows no total
    for workdir, stops in (("stopped", (10, 20)), ("whole", (20,))):
        for steps in stops:
            run(recipe(steps=steps, schedule=constant), tiny.options(corpus_path, tmp_path / workdir))
    stopped, whole = (tiny.final_state(tmp_path / workdir) for workdir in ("stopped", "whole"))
    assert tiny.equal(stopped, whole)
    halfway = tiny.final_state(tmp_path / "whole", 10).carry
    assert whole.carry["hidden"].shape == (2, 8, 16, 32) and (whole.carry["segments"] == 1).all()
    assert not np.array_equal(halfway["hidden"], whole.carry["hidden"])


def test_without_memory_nothing_is_carried(corpus_path, tmp_path):
    recipe = tiny.transformer_xl(model=dataclasses.replace(tiny.TRANSFORMER_XL, memory=0), steps=5)
    assert run(recipe, tiny.options(corpus_path, tmp_path / "run")) == 0
    assert tiny.final_state(tmp_path / "run").carry == {}


def test_evaluation_remembers_as_much_as_it_is_told(corpus_path):
    params = initial_params(assemble(tiny.transformer_xl(), Program()))
    losses = {
        memory: evaluated(corpus_path, params, evaluation_memory=memory)["lm_loss"] for memory in (None, 0, 16, 64)
    }
    assert losses[None] == losses[16]  # as in training
    assert len(set(losses.values())) == 3


def test_memory_ends_with_the_document_when_it_is_reset(corpus_path):
    params = initial_params(assemble(tiny.transformer_xl(), Program()))
    kept, reset = (evaluated(corpus_path, params, reset=reset)["lm_loss"] for reset in (False, True))
    assert kept != reset


def test_figures_are_perplexity_and_accuracy_beside_the_unigrams(trained, capsys):
    (figures,) = read_metrics(RunDirectory(trained), "eval")
    assert figures["perplexity"] == pytest.approx(np.exp(figures["lm_loss"]), rel=1e-5)
    assert 0 < figures["lm_accuracy"] < 1
    assert main(["eval", str(trained), "--memory", "64"]) == 0
    said = capsys.readouterr().out
    assert "unigram" in said and "perplexity" in said
    assert f"{figures['lm_loss']:.4f}" not in said  # another memory, another loss


def test_evaluation_memory_is_checked(trained, capsys):
    assert main(["eval", str(trained), "--memory", "-1"]) == 2
    assert "error: --memory -1: must be at least 0" in capsys.readouterr().err


def test_an_adaptive_softmax_trains_on_words_by_falling_frequency(corpus_path, tmp_path):
    source = write_texts(tmp_path / "texts", documents=200, seed=0)
    options = Prepare((f"text:{source}",), tmp_path / "words", tokenizer="wordlevel", heldout=0.1, processes=1)
    prepare(options, Console(file=io.StringIO()))
    size = Corpus(tmp_path / "words").vocab_size
    model = dataclasses.replace(tiny.TRANSFORMER_XL, vocab_size=size, cutoffs=(size // 3, size // 2), divisor=2)
    assert run(tiny.transformer_xl(model=model), tiny.options(tmp_path / "words", tmp_path / "run")) == 0
    losses = [entry["loss"] for entry in read_metrics(RunDirectory(tmp_path / "run"), "train")]
    assert losses[-1] < losses[0] - 0.05
    model = dataclasses.replace(model, vocab_size=195, cutoffs=(40, 100))  # WordPiece: characters first
    with pytest.raises(UserError, match=r"the tokens from \d+ on are more frequent .* --tokenizer wordlevel"):
        run(tiny.transformer_xl(model=model), tiny.options(corpus_path, tmp_path / "other"))
    assert not (tmp_path / "other").exists()


def test_reading_a_run_leaves_memory_and_moments_in_the_file(trained, monkeypatch):
    asked, load = [], stored_state.load
    monkeypatch.setattr("pretrain.training.restore.load", lambda folder, like: asked.append(like) or load(folder, like))
    restored = restore(RunDirectory(trained))
    assert restored.step == 20 and tiny.equal(restored.params, tiny.final_state(trained).params)
    left = jax.tree.leaves((asked[0].carry, asked[0].opt_state))
    assert len(left) > 2 and all(leaf is stored_state.NOT_READ for leaf in left)


def test_a_model_without_a_class_at_hugging_face_has_an_export_of_its_own(trained, corpus_path, tmp_path):
    out = tmp_path / "out"
    assert main(["export", str(trained), "--to", str(out)]) == 0
    params, config = dict(leaves(tiny.final_state(trained).params)), RunDirectory(trained).read_recipe().model
    stored = load_file(out / "model.safetensors")
    assert stored.keys() == params.keys()
    assert config_from(out) == config
    loaded = dict(leaves(load(out, config, parameter_shapes(config), Corpus(corpus_path).tokenizer_path)))
    for path, array in params.items():
        rows = slice(config.vocab_size if path.startswith("cluster_0") else None)
        np.testing.assert_array_equal(stored[path], array[rows], err_msg=path)
        np.testing.assert_array_equal(loaded[path][rows], array[rows], err_msg=path)


def test_an_xlnet_trains_evaluates_and_exports(corpus_path, tmp_path, capsys):
    assert run(tiny.xlnet(steps=60), tiny.options(corpus_path, tmp_path / "run")) == 0
    losses = [entry["plm_loss"] for entry in read_metrics(RunDirectory(tmp_path / "run"), "train")]
    assert losses[-1] < losses[0] - 0.5
    assert main(["eval", str(tmp_path / "run")]) == 0
    assert "plm accuracy" in capsys.readouterr().out
    assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "hf")]) == 0
    _, found = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(found.values())


@pytest.mark.parametrize(
    "recipe, phase, said",
    [
        (tiny.xlnet, Phase(1.0, 12, 8), "length 12 leaves no room .* reuse_len 8"),
        (tiny.xlnet, Phase(1.0, 32, 7), "7 rows are odd"),
        (tiny.xlnet, Phase(1.0, 800, 2), "its held-out split is shorter than a row of 800"),
        (tiny.xlnet, Phase(1.0, 32, 10**6), "too few for a batch of 1000000 rows of 32"),
        (tiny.transformer_xl, Phase(1.0, 32, 10**6), "too few for a batch of 1000000 rows of 32"),
    ],
)
def test_streams_that_do_not_fit_are_said_before_anything_is_written(recipe, phase, said, corpus_path, tmp_path):
    with pytest.raises(UserError, match=said):
        run(recipe(phases=(phase,)), tiny.options(corpus_path, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("recipe", [tiny.transformer_xl, pytest.param(tiny.xlnet, marks=pytest.mark.slow)])
def test_a_memory_in_bfloat16_is_read_and_gone_on_with_in_float32(recipe, corpus_path, tmp_path):
    """As after a run on a TPU, on a machine without one."""
    workdir = tmp_path / "run"
    run(recipe(steps=5), tiny.options(corpus_path, workdir, dtype="bfloat16"))
    carry = tiny.final_state(workdir).carry
    assert carry["hidden"].dtype == np.float32 and carry["hidden"].any()
    assert main(["eval", str(workdir)]) == 0
    assert run(recipe(steps=10), tiny.options(corpus_path, workdir, dtype="float32")) == 0


def test_a_memory_ends_with_its_phase(corpus_path, tmp_path):
    """Of the same shape or not: the rows of the next phase do not continue these."""
    longer = tiny.transformer_xl(model=dataclasses.replace(tiny.TRANSFORMER_XL, memory=64), steps=4)
    longer = dataclasses.replace(longer, phases=(Phase(0.75, 32, 8), Phase(0.25, 16, 8)))
    run(longer, tiny.options(corpus_path, tmp_path / "longer", checkpoint_every=3))
    segments = tiny.final_state(tmp_path / "longer").carry["segments"]
    assert (segments[:, -16:] == 1).all() and not segments[:, :-16].any()


def test_training_goes_on_from_another_run_with_another_memory(corpus_path, trained, tmp_path):
    recipe = tiny.transformer_xl(model=dataclasses.replace(tiny.TRANSFORMER_XL, memory=24), steps=2)
    assert run(recipe, tiny.options(corpus_path, tmp_path / "next", init_from=str(trained))) == 0
    assert tiny.final_state(tmp_path / "next").carry["hidden"].shape == (2, 8, 24, 32)
