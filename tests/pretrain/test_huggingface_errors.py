"""What is wrong with a Hugging Face folder is said in one line that names it."""

import dataclasses
import json
import shutil
from collections import Counter

import numpy as np
import pytest

from data_pipelines.errors import UserError
from data_pipelines.tokenizers import pieces, stored
from models.families.electra import Tower
from models.families.gpt2 import GPT2Config
from models.families.registry import FAMILIES, family_of
from models.families.transformer_xl import TransformerXLConfig
from pretrain.huggingface.config import config_from
from pretrain.huggingface.export import config_fields, export
from pretrain.huggingface.load import check_vocabulary
from tests.pretrain import reference, toys
from tests.pretrain.hugging_face_folders import load_like, rewrite


def expect_load_error(folder, config, tokenizer_path, *parts):
    with pytest.raises(UserError) as error:
        load_like(folder, config, tokenizer_path)
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message


def edit_config(folder, **fields):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def test_every_differing_field_is_listed_with_both_values_and_the_cure(exported, configs, tokenizer_path):
    config = dataclasses.replace(configs["masked"], width=32, positions=16, norm_epsilon=1e-5)
    parts = (
        "model.width is 16 there and 32 here",
        "model.positions is 32 there and 16 here",
        "model.norm_epsilon is 1e-12 there and 1e-05 here",
        "--model.width 16",
        "--model.positions 32",
    )
    expect_load_error(exported("masked"), config, tokenizer_path, *parts)


def test_a_tower_of_another_size_is_named_by_its_field(exported, configs, tokenizer_path):
    config = dataclasses.replace(configs["electra"], generator=Tower(8, 3, 1, 12))
    expect_load_error(exported("electra"), config, tokenizer_path, "--model.generator.depth 2")


@pytest.mark.parametrize("kind", ["masked", "albert", "electra", "xlnet"])
def test_every_architecture_field_is_compared(exported, configs, tokenizer_path, kind):
    other = {"hidden_act": "relu", "ff_activation": "relu", "layer_norm_eps": 1e-3}
    other |= {"sharing": "none", "sharing_groups": 2}
    folder = exported(kind)
    for model in family_of(configs[kind]).hf.values():
        original = json.loads((folder / model.folder / "config.json").read_text())
        for name, place in model.fields.items():
            path = getattr(place, "path", place)
            edit_config(folder / model.folder, **{name: other.get(name) or original[name] * 2})
            expect_load_error(folder, configs[kind], tokenizer_path, f"model.{path} is ")
            edit_config(folder / model.folder, **original)


@pytest.mark.parametrize("kind", ["gpt2", "masked", "electra"])
def test_a_setting_with_which_the_class_computes_otherwise_is_an_error(exported, configs, tmp_path, kind):
    """What the family does compute may be said, or not."""
    if kind == "gpt2":
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "config.json").write_text(json.dumps(config_fields(GPT2Config(), "model", {})))
    folder = tmp_path / kind if kind == "gpt2" else exported(kind)
    config = config_from(folder)
    part = list(family_of(config).hf.values())[-1]
    assert part.assumed
    for name, value in part.assumed.items():
        edit_config(folder / part.folder, **{name: "relative_key" if value == "absolute" else not value})
        with pytest.raises(UserError, match=rf"{kind}.*: config.json has {name}=.*; give the folder of .* {value!r}$"):
            config_from(folder)
        edit_config(folder / part.folder, **{name: value})
        assert config_from(folder) == config


@pytest.mark.parametrize(("family", "name"), [("gpt", "afn"), ("gpt2", "activation_function")])
def test_an_activation_that_there_is_not_is_an_error(tmp_path, family, name):
    fields = config_fields(FAMILIES[family].config(), "model", {})
    (tmp_path / "config.json").write_text(json.dumps(fields | {name: "silu"}))
    with pytest.raises(UserError, match="model.activation='silu': use one of .*; give another folder"):
        config_from(tmp_path)


def test_another_vocabulary_is_an_error(exported, configs, tokenizer_path):
    folder = exported("masked")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["the"], vocab["fox"] = vocab["fox"], vocab["the"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    expect_load_error(folder, configs["masked"], tokenizer_path, "'fox'", f"--tokenizer {folder}")


def test_another_vocabulary_in_vocab_txt_is_an_error(exported, configs, tokenizer_path):
    folder = exported("masked")
    (folder / "tokenizer.json").unlink()
    load_like(folder, configs["masked"], tokenizer_path)
    words = (folder / "vocab.txt").read_text("utf-8")
    (folder / "vocab.txt").write_text(words.replace("\nfox\n", "\nwolf\n"), "utf-8")
    expect_load_error(folder, configs["masked"], tokenizer_path, "prepare the corpus with --tokenizer")


def test_another_vocabulary_in_a_spiece_model_is_an_error(tmp_path, exported, configs, tokenizer_path):
    folder = exported("masked")
    for name in ("tokenizer.json", "vocab.txt", "special_tokens_map.json"):
        (folder / name).unlink()
    _, model = pieces.learn_pieces(Counter({"fox": 2, "the": 1}), "unigram", 12, pieces.FLAVOURS["albert"])
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "AlbertTokenizer"}')
    (folder / "spiece.model").write_bytes(model)
    stored.save(stored.load(folder), tmp_path / "same")
    check_vocabulary(folder, tmp_path / "same", configs["masked"], configs["masked"])
    expect_load_error(folder, configs["masked"], tokenizer_path, "prepare the corpus with --tokenizer")


def test_a_vocabulary_of_another_size_says_to_prepare_with_that_tokenizer(exported, configs, tokenizer_path):
    config = dataclasses.replace(configs["masked"], vocab_size=99)
    expect_load_error(exported("masked"), config, tokenizer_path, "model.vocab_size", "--tokenizer")


def test_missing_tensors_are_named_with_the_class_that_has_them(exported, configs, tokenizer_path):
    parts = ("cls.seq_relationship.weight", "BertForMaskedLM", "BertForPreTraining")
    expect_load_error(exported("masked"), configs["pretraining"], tokenizer_path, *parts)


def test_unexpected_tensors_are_named(exported, configs, tokenizer_path):
    folder = exported("masked")
    rewrite(folder, lambda tensors: tensors.update({"classifier.weight": np.zeros((2, 16), np.float32)}))
    expect_load_error(folder, configs["masked"], tokenizer_path, "classifier.weight")


def test_a_tensor_of_another_shape_is_named_with_both_shapes(exported, configs, tokenizer_path):
    folder = exported("masked")
    name = "bert.encoder.layer.1.output.dense.weight"
    rewrite(folder, lambda tensors: tensors.update({name: np.zeros((16, 25), np.float32)}))
    expect_load_error(folder, configs["masked"], tokenizer_path, name, "(16, 25)", "(16, 24)")


def test_an_untied_head_is_an_error(exported, configs, tokenizer_path):
    folder, name = exported("masked"), "cls.predictions.decoder.weight"
    table = np.zeros((configs["masked"].vocab_size, 16), np.float32)
    rewrite(folder, lambda tensors: tensors.update({name: table}))
    expect_load_error(folder, configs["masked"], tokenizer_path, name, "ties")


def test_parts_with_different_embeddings_are_an_error(exported, configs, tokenizer_path):
    folder = exported("electra")
    name = "electra.embeddings.LayerNorm.bias"
    rewrite(folder / "generator", lambda tensors: tensors.update({name: np.zeros(16, np.float32)}))
    expect_load_error(folder, configs["electra"], tokenizer_path, name, "discriminator")


def test_parts_that_disagree_in_a_field_are_an_error(exported, configs, tokenizer_path):
    folder = exported("electra")
    edit_config(folder / "generator", embedding_size=8)
    expect_load_error(folder, configs["electra"], tokenizer_path, "model.embedding is 16", "8")


def test_torch_pickles_are_not_read(exported, configs, tokenizer_path):
    folder = exported("masked")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    expect_load_error(folder, configs["masked"], tokenizer_path, "pytorch_model.bin", "transformers")


def test_missing_shards_are_named(configs, tokenizer_path, tmp_path):
    reference.torch_model(configs["masked"], "model").save_pretrained(tmp_path, max_shard_size="10KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    expect_load_error(tmp_path, configs["masked"], tokenizer_path, shard.name)


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_damaged_file_is_named(exported, configs, tokenizer_path, file):
    folder = exported("masked")
    (folder / file).write_bytes(b"\x00\x01{")
    expect_load_error(folder, configs["masked"], tokenizer_path, file.removesuffix(".json"))


SOURCES = {
    "nowhere": "config.json",
    "generator=a": "discriminator=DIR",
    "teacher=a,generator=b": "'teacher'",
    "discriminator=a,generator=b": "config.json",
}


@pytest.mark.parametrize(("source", "expected"), SOURCES.items())
def test_sources_that_do_not_exist_or_are_incomplete(exported, configs, tokenizer_path, monkeypatch, source, expected):
    folder = exported("electra")
    monkeypatch.chdir(folder.parent)
    folder.rename("a")
    expect_load_error(source, configs["electra"], tokenizer_path, expected)


def test_an_export_without_its_generator_names_the_missing_folder(exported, configs, tokenizer_path):
    folder = exported("electra")
    shutil.rmtree(folder / "generator")
    expect_load_error(folder, configs["electra"], tokenizer_path, str(folder / "generator"), "config.json")


def test_a_model_of_another_kind_is_an_error(exported, configs, tokenizer_path):
    expect_load_error(exported("masked"), configs["electra"], tokenizer_path, "'bert'", "'electra'")
    folder = exported("pretraining")
    edit_config(folder, model_type="gptj")
    known = "openai-gpt, gpt2, longformer, roberta, transformer-xl, xlnet"
    expect_load_error(folder, configs["pretraining"], tokenizer_path, "model_type='gptj'", known)
    expect_load_error(exported("masked"), TransformerXLConfig(), tokenizer_path, "'bert'", "'transformer-xl'")


def test_exporting_a_model_without_a_form_for_it_is_an_error(tokenizer_path, tmp_path, monkeypatch):
    toys.register(monkeypatch)
    with pytest.raises(UserError, match="bag has no form as a Hugging Face folder; read weights from the run"):
        export({}, toys.BagConfig(), tokenizer_path, tmp_path / "there")
    assert not (tmp_path / "there").exists()


def test_a_config_without_a_needed_field_or_with_an_impossible_value_is_an_error(exported, configs, tokenizer_path):
    folder = exported("masked")
    edit_config(folder, hidden_act="silu")
    expect_load_error(folder, configs["masked"], tokenizer_path, "model.activation='silu'")
    (folder / "config.json").write_text('{"model_type": "bert", "hidden_size": 16}')
    expect_load_error(folder, configs["masked"], tokenizer_path, "num_hidden_layers")
