"""What RoBERTa exports, transformers loads whole, with its tokenizer; what transformers saves, we load whole."""

import dataclasses
import io
import logging

import numpy as np
import pytest
import torch
import transformers
from rich.console import Console
from safetensors.numpy import load_file

from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.prepare.command import prepare
from data_pipelines.prepare.options import Prepare
from data_pipelines.tokenizers import stored
from data_pipelines.tokenizers.table import train
from data_pipelines.tokenizers.training import Training
from models.families.roberta import RobertaConfig
from pretrain.huggingface.config import config_from
from pretrain.huggingface.export import export
from pretrain.huggingface.load import load
from pretrain.huggingface.tokenizer_fit import misfits
from pretrain.recipe import resolve
from pretrain.recipes.registry import RECIPES
from tests.models.shapes import parameter_shapes
from tests.pretrain import reference
from tests.pretrain.hugging_face_folders import QUESTIONS, TEXTS, load_like, random_params, without_padding
from tests.texts import write_texts

VOCABULARY = 300
MASKED = RobertaConfig(VOCABULARY, 32, width=16, depth=2, heads=2, feed_forward=24, dropout=0.2)
PAIRS = dataclasses.replace(MASKED, pair_head=True)


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus") / "tokenizer"
    made = train("bpe", TEXTS, Training(VOCABULARY))
    assert made.tokenizer.get_vocab_size() == VOCABULARY
    assert misfits(MASKED, made) == []
    stored.save(made, folder)
    return folder


@pytest.fixture
def exported(tokenizer_path, tmp_path):
    def write(config):
        export(random_params(config), config, tokenizer_path, tmp_path / "export")
        return tmp_path / "export"

    return write


@pytest.mark.parametrize("loader", ["RobertaForMaskedLM", "AutoModelForMaskedLM", "AutoModelForPreTraining"])
def test_an_export_loads_with_no_missing_and_no_unexpected_tensor(exported, loader):
    model, info = getattr(transformers, loader).from_pretrained(exported(MASKED), output_loading_info=True)
    assert not any(info.values()), info
    assert type(model).__name__ == "RobertaForMaskedLM" and model.dtype == torch.float32


@pytest.mark.parametrize(
    "loader, left", [("AutoModel", ("lm_head.", "pair.")), ("RobertaForMaskedLM", ("pair.", "roberta.pooler."))]
)
def test_of_a_model_with_the_pair_head_all_else_loads_and_the_export_says_so(exported, caplog, loader, left):
    with caplog.at_level(logging.WARNING):
        folder = exported(PAIRS)
    assert "in a RobertaForPreTraining there is no head for pairs, as there is no such class" in caplog.text
    _, info = getattr(transformers, loader).from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"]
    assert all(name.startswith(left) for name in info["unexpected_keys"])


@pytest.mark.parametrize("config", [MASKED, PAIRS], ids=["masked", "pairs"])
def test_export_then_load_gives_the_same_bits_and_the_same_config(exported, tokenizer_path, config):
    folder = exported(config)
    assert config_from(folder) == config
    before = without_padding(random_params(config), config)
    after = without_padding(load_like(folder, config, tokenizer_path), config)
    assert before.keys() == after.keys()
    for path, leaf in before.items():
        np.testing.assert_array_equal(leaf, after[path], err_msg=path)


def test_load_then_export_gives_the_same_bits_also_of_the_positions_that_no_token_reads(tokenizer_path, tmp_path):
    params = reference.to_ours({"model": reference.torch_model(MASKED, "model")}, MASKED, tmp_path)
    assert config_from(tmp_path / "model") == MASKED
    export(params, MASKED, tokenizer_path, tmp_path / "out")
    theirs, ours = (load_file(tmp_path / folder / "model.safetensors") for folder in ("model", "out"))
    assert theirs.keys() == ours.keys()
    positions = "roberta.embeddings.position_embeddings.weight"
    assert theirs[positions].shape == (34, 16) and theirs[positions][0].any()
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(tensor, ours[name], err_msg=name)


@pytest.mark.parametrize("files", ["tokenizer.json", "vocab.json and merges.txt"])
def test_the_exported_tokenizer_gives_the_corpus_ids(exported, tokenizer_path, files):
    folder = exported(MASKED)
    if files != "tokenizer.json":
        (folder / "tokenizer.json").unlink()
    theirs, (ours, special, _) = transformers.AutoTokenizer.from_pretrained(folder), stored.load(tokenizer_path)
    assert isinstance(theirs, transformers.RobertaTokenizer)
    for texts in (*([text] for text in QUESTIONS), QUESTIONS[:2]):
        assert theirs(*texts)["input_ids"] == ours.encode(*texts).ids
    assert (theirs.cls_token_id, theirs.pad_token_id, theirs.sep_token_id, theirs.mask_token_id) == (0, 1, 2, 4)
    assert theirs.mask_token_id == special["mask"] and theirs.model_max_length == 32


def test_an_export_fills_masks_also_in_padded_batches(exported):
    pipeline = transformers.pipeline("fill-mask", model=str(exported(MASKED)), device=-1)
    answers = pipeline(["the<mask> fox", "a corpus of small<mask> for the lazy dog"], batch_size=2)
    alone = pipeline("the<mask> fox")
    assert [answer["token"] for answer in answers[0]] == [answer["token"] for answer in alone]


def test_a_folder_with_another_vocabulary_in_two_files_is_refused(exported, tokenizer_path, tmp_path):
    folder, other = exported(MASKED), tmp_path / "other"
    stored.save(train("bpe", ["quite another text"] * 3, Training(VOCABULARY)), other)
    (folder / "tokenizer.json").unlink()
    load_like(folder, MASKED, tokenizer_path)
    with pytest.raises(UserError, match="prepare the corpus with --tokenizer"):
        load_like(folder, MASKED, other)


def test_a_model_that_counts_positions_from_another_id_is_refused(exported, tokenizer_path):
    folder = exported(MASKED)
    file = folder / "config.json"
    file.write_text(file.read_text().replace('"pad_token_id": 1', '"pad_token_id": 0'))
    with pytest.raises(UserError, match="config.json has pad_token_id=0, needed is 1"):
        load_like(folder, MASKED, tokenizer_path)


def test_a_corpus_whose_padding_has_another_id_is_refused_before_training(corpus_path, tmp_path):
    recipe = RECIPES["roberta-tiny"]
    recipe = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, types=2))
    said = "--corpus .*: its tokenizer has pad_token_id=0, a 'roberta' model has 1; prepare it with --tokenizer bpe"
    with pytest.raises(UserError, match=said):
        resolve(recipe, Corpus(corpus_path))
    source = write_texts(tmp_path / "texts", documents=40, seed=0)
    options = Prepare((f"text:{source}",), tmp_path / "corpus", tokenizer="bpe", vocab_size=300, processes=1)
    prepare(options, Console(file=io.StringIO()))
    assert resolve(RECIPES["roberta-tiny"], Corpus(tmp_path / "corpus")).model.types == 1


def test_a_bare_encoder_of_transformers_starts_its_head_anew(tokenizer_path, tmp_path):
    theirs, start = reference.torch_model(MASKED, "model"), random_params(MASKED, seed=1)
    theirs.roberta.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"has no lm_head\..* start them anew with --init-heads-anew"):
        load_like(tmp_path, MASKED, tokenizer_path)
    loaded = load(tmp_path, MASKED, parameter_shapes(MASKED), tokenizer_path, start=lambda: start)
    np.testing.assert_array_equal(loaded["predictions"]["bias"], start["predictions"]["bias"])
    positions = theirs.roberta.embeddings.position_embeddings.weight.detach().numpy()
    np.testing.assert_array_equal(loaded["embeddings"]["positions"], positions[2:])


def test_positions_are_copied_on_behind_the_two_rows_that_no_token_reads(tokenizer_path, tmp_path):
    theirs = reference.torch_model(MASKED, "model")
    longer = dataclasses.replace(MASKED, positions=72)
    export(reference.to_ours({"model": theirs}, longer, tmp_path), longer, tokenizer_path, tmp_path / "out")
    positions = theirs.roberta.embeddings.position_embeddings.weight.detach().numpy()[2:]
    stored = load_file(tmp_path / "out" / "model.safetensors")["roberta.embeddings.position_embeddings.weight"]
    np.testing.assert_array_equal(stored[2:], np.concatenate([positions, positions, positions[:8]]))
    loaded = transformers.AutoModel.from_pretrained(tmp_path / "out")
    assert loaded.config.max_position_embeddings == 74
