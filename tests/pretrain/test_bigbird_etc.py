"""BigBird-ETC as a user meets it: it trains, evaluates, exports in our own names and goes on from there; what cannot be
is said in one line."""

import dataclasses

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from models.blocks.embeddings import padded_vocab
from models.core.parameters import count, leaves
from models.core.program import Program
from models.families.etc import FAMILY
from pretrain.__main__ import main
from pretrain.huggingface.config import config_from
from pretrain.huggingface.load import load
from pretrain.objectives.masked_language_model import MaskedLanguageModel
from pretrain.recipe import check
from pretrain.storage.journal import read_metrics
from pretrain.storage.run_directory import RunDirectory
from pretrain.training.run import run
from tests.contract.cases import CASES
from tests.contract.test_contract import arguments, loss_of
from tests.models.shapes import parameter_shapes
from tests.pretrain import tiny
from tests.pretrain.fields import replaced


@pytest.mark.parametrize(
    ("size", "vocab_size", "millions"), [("base", 30522, 166), ("large", 50265, 558)], ids=["base", "large"]
)
def test_published_sizes_have_the_parameters_that_etc_without_sharing_has(size, vocab_size, millions):
    """Ainslie et al. 2020, table 2: the base model with BERT's vocabulary, the large one with RoBERTa's."""
    config = dataclasses.replace(FAMILY.sizes[size], vocab_size=vocab_size)
    padding = (padded_vocab(vocab_size) - vocab_size) * (config.width + 1)
    assert round((count(parameter_shapes(config)) - padding) / 1e6) == millions


@pytest.mark.slow
def test_it_trains_evaluates_and_has_an_export_of_its_own(corpus_path, tmp_path):
    workdir, out = tmp_path / "run", tmp_path / "out"
    assert run(tiny.etc(), tiny.options(corpus_path, workdir)) == 0
    losses = [entry["mlm_loss"] for entry in read_metrics(RunDirectory(workdir), "train")]
    assert losses[-1] < losses[0]
    assert "mlm_accuracy" in read_metrics(RunDirectory(workdir), "eval")[-1]
    assert main(["export", str(workdir), "--to", str(out)]) == 0
    params, config = dict(leaves(tiny.final_state(workdir).params)), RunDirectory(workdir).read_recipe().model
    stored = load_file(out / "model.safetensors")
    assert stored.keys() == params.keys() and config_from(out) == config
    loaded = dict(leaves(load(out, config, parameter_shapes(config), Corpus(corpus_path).tokenizer_path)))
    for path, array in params.items():
        rows = slice(config.vocab_size if path in ("embeddings/tokens", "predictions/bias") else None)
        np.testing.assert_array_equal(stored[path], array[rows], err_msg=path)
        np.testing.assert_array_equal(loaded[path][rows], array[rows], err_msg=path)


def test_attention_takes_the_form_that_is_named():
    case = CASES["bigbird-etc"]
    text = lambda name: str(jax.make_jaxpr(loss_of(case, Program(attention=name), True))(*arguments(case)))
    assert text("xla") == text("blocked") != text("dense")


PLAIN = MaskedLanguageModel(layout="packed-sentences", next_sentence=False)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("phases.0.globals", 33, r"^phases\.0\.globals=33 with length=32: must be from 1 to 32"),
        ("model.window", 4, "model.window=4: must be odd; use 3 or 5"),
        ("model.block", 10**6, "model.block=1000000 is longer than a row"),
        ("objective.layout", "segment-pairs", "objective.layout='segment-pairs': has no global tokens; use packed-"),
        ("objective", PLAIN, "its rows do not fit EtcConfig: global_of is missing; global_segments is missing"),
    ],
)
def test_what_cannot_be_is_one_line_before_anything_is_compiled(field, value, said):
    check(tiny.etc())
    with pytest.raises((UserError, ValueError), match=said):
        check(replaced(tiny.etc(), field, value))


def test_the_picture_has_the_global_tokens_beside_the_row(tmp_path, capsys):
    assert main(["pattern", "bigbird-etc-tiny", "--out", str(tmp_path / "pattern.png")]) == 0
    assert (
        "plus 32 global tokens outside the row that attend to all tokens and that all tokens attend to"
        in capsys.readouterr().out
    )
