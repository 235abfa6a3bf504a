"""What we export, transformers loads whole; what transformers saves, we load whole, or say what is wrong."""

import dataclasses
import json
import logging
import shutil
from collections import Counter

import jax
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from data_pipelines import pieces, tokenizers
from data_pipelines.errors import UserError
from models.core.parameters import leaves
from models.families.albert import AlbertConfig
from models.families.bert import BertConfig
from models.families.electra import ElectraConfig, Tower
from models.families.registry import FAMILIES, family_of
from models.families.transformer_xl import TransformerXLConfig
from models.families.xlnet import XLNetConfig
from pretrain.huggingface.config import config_from
from pretrain.huggingface.export import config_fields, export
from pretrain.huggingface.load import check_vocabulary, load
from pretrain.huggingface.tensors import architecture, tensors
from tests.models.shapes import parameter_shapes
from tests.pretrain import reference, toys

pytestmark = pytest.mark.second_tier()

TEXTS = ["the quick brown fox jumps over the lazy dog", "a corpus of small texts, for tests only", "naïve words"] * 5
QUESTIONS = ["the lazy corpus", "Quick! naïve fox?", "日本 unknown"]


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus") / "tokenizer"
    tokenizer = tokenizers.train(TEXTS, vocab_size=150)
    tokenizers.save(tokenizers.Made(tokenizer, tokenizers.special_ids(tokenizer, {}, folder), {}), folder)
    return folder


@pytest.fixture(scope="session")
def configs(tokenizer_path):
    vocab_size = len((tokenizer_path / "vocab.txt").read_text("utf-8").splitlines())
    assert vocab_size % 128, "the tests need padding rows"
    shared = {"vocab_size": vocab_size, "positions": 32, "dropout": 0.2}
    bert = BertConfig(width=16, depth=2, heads=2, feed_forward=24, **shared)
    return {
        "pretraining": bert,
        "masked": dataclasses.replace(bert, pair_head=False),
        "electra": ElectraConfig(
            embedding=16, discriminator=Tower(16, 2, 2, 24), generator=Tower(8, 2, 1, 12), **shared
        ),
        "albert": AlbertConfig(embedding=8, width=16, depth=2, heads=2, feed_forward=24, **shared),
        "albert groups": AlbertConfig(
            embedding=8, width=16, depth=4, heads=2, feed_forward=24, groups=2, sharing="attention", **shared
        ),
        "xlnet": XLNetConfig(vocab_size=vocab_size, width=16, depth=2, heads=2, feed_forward=24, dropout=0.2),
    }


def random_params(config, seed=0):
    rng = np.random.default_rng(seed)
    shapes = parameter_shapes(config)
    return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), shapes)


def without_padding(params, config):
    """Flat parameters without the vocabulary's padding rows."""
    vocab = {parameter.path for parameter in family_of(config).parameters(config) if "vocab" in parameter.axes}
    return {path: leaf[: config.vocab_size] if path in vocab else leaf for path, leaf in leaves(params)}


def load_like(source, config, tokenizer_path):
    return load(source, config, parameter_shapes(config), tokenizer_path)


@pytest.fixture
def exported(configs, tokenizer_path, tmp_path):
    """kind -> the folder of an export."""

    def write(kind):
        folder = tmp_path / kind
        export(random_params(configs[kind]), configs[kind], tokenizer_path, folder)
        return folder

    return write


LOADERS = [
    ("pretraining", "", "BertForPreTraining"),
    ("pretraining", "", "AutoModelForPreTraining"),
    ("masked", "", "BertForMaskedLM"),
    ("masked", "", "AutoModelForMaskedLM"),
    ("albert", "", "AlbertForPreTraining"),
    ("albert", "", "AutoModelForPreTraining"),
    ("albert groups", "", "AlbertForPreTraining"),
    ("electra", "", "ElectraForPreTraining"),
    ("electra", "", "AutoModelForPreTraining"),
    ("electra", "generator", "ElectraForMaskedLM"),
    ("electra", "generator", "AutoModelForMaskedLM"),
    ("xlnet", "", "XLNetLMHeadModel"),
    ("xlnet", "", "AutoModelForPreTraining"),
    ("xlnet", "", "AutoModelForCausalLM"),
]


@pytest.mark.parametrize(("kind", "part", "loader"), LOADERS)
def test_exports_load_with_no_missing_and_no_unexpected_tensor(exported, kind, part, loader):
    folder = exported(kind) / part
    model, info = getattr(transformers, loader).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    assert model.dtype == torch.float32
    assert type(model).__name__ == json.loads((folder / "config.json").read_text())["architectures"][0]


HEADS = [
    ("pretraining", "cls."),
    ("albert", ("predictions.", "sop_classifier.")),
    ("electra", "discriminator_predictions."),
    ("xlnet", "lm_loss."),
]


@pytest.mark.parametrize(("kind", "heads"), HEADS)
def test_the_bare_encoder_loads_and_only_the_heads_are_left_over(exported, kind, heads):
    _, info = transformers.AutoModel.from_pretrained(exported(kind), output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    assert all(name.startswith(heads) for name in info["unexpected_keys"])


@pytest.mark.parametrize("kind", ["pretraining", "masked", "albert", "albert groups", "electra", "xlnet"])
def test_export_then_load_gives_the_same_bits_and_zero_padding(exported, configs, tokenizer_path, kind):
    config = configs[kind]
    loaded = load_like(exported(kind), config, tokenizer_path)
    before, after = without_padding(random_params(config), config), without_padding(loaded, config)
    assert before.keys() == after.keys()
    for path, leaf in before.items():
        np.testing.assert_array_equal(leaf, after[path], err_msg=path)
    assert any(leaf.shape != before[path].shape for path, leaf in leaves(loaded))
    for path, leaf in leaves(loaded):
        assert not leaf[len(before[path]) :].any()


@pytest.mark.parametrize("kind", ["pretraining", "masked", "albert", "electra", "xlnet"])
def test_load_then_export_gives_the_same_bits(configs, tokenizer_path, tmp_path, kind):
    config = configs[kind]
    parts = family_of(config).hf
    models = {part: reference.torch_model(config, part) for part in parts}
    if kind == "electra":
        models["generator"].electra.embeddings.load_state_dict(models["discriminator"].electra.embeddings.state_dict())
    params = reference.to_ours(models, config, tmp_path)
    export(params, config, tokenizer_path, tmp_path / "out")
    for part, model in parts.items():
        original = load_file(tmp_path / part / "model.safetensors")
        ours = load_file(tmp_path / "out" / model.folder / "model.safetensors")
        assert original.keys() == ours.keys()
        for name, tensor in original.items():
            assert tensor.dtype == ours[name].dtype == np.float32
            np.testing.assert_array_equal(tensor, ours[name], err_msg=name)


@pytest.mark.parametrize(("kind", "part"), [("pretraining", ""), ("electra", ""), ("electra", "generator")])
def test_the_exported_tokenizer_gives_the_corpus_ids(exported, tokenizer_path, kind, part):
    folder = exported(kind) / part
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours, special, _ = tokenizers.load(tokenizer_path)
    for text in QUESTIONS:
        assert theirs(text)["input_ids"] == ours.encode(text).ids
    pair = theirs(*QUESTIONS[:2])
    assert pair["input_ids"] == ours.encode(*QUESTIONS[:2]).ids
    assert pair["token_type_ids"] == ours.encode(*QUESTIONS[:2]).type_ids
    assert theirs.mask_token_id == special["mask"]
    assert theirs.model_max_length == 32
    assert json.loads((folder / "config.json").read_text())["pad_token_id"] == theirs.pad_token_id == special["pad"]


@pytest.mark.parametrize("kind", ["pretraining", "masked", "albert", "albert groups", "electra", "xlnet"])
def test_the_config_is_read_from_the_folder(exported, configs, kind):
    assert config_from(exported(kind)) == configs[kind]


def test_the_config_that_transformers_wrote_is_read(configs, tmp_path):
    reference.torch_model(configs["masked"], "model").save_pretrained(tmp_path)
    assert config_from(tmp_path) == configs["masked"]


def test_the_parts_may_lie_in_two_folders(exported, configs, tokenizer_path, tmp_path):
    folder = exported("electra")
    shutil.move(folder / "generator", tmp_path / "elsewhere")
    source = f"discriminator={folder},generator={tmp_path / 'elsewhere'}"
    loaded = load_like(source, configs["electra"], tokenizer_path)
    expected = without_padding(random_params(configs["electra"]), configs["electra"])
    for path, leaf in without_padding(loaded, configs["electra"]).items():
        np.testing.assert_array_equal(leaf, expected[path])


OWN = {"transformer-xl"}  # which transformers has no class for
SIZES = [(name, size) for name in sorted(FAMILIES.keys() - OWN) for size in FAMILIES[name].sizes]


@pytest.mark.parametrize(("name", "size"), SIZES)
def test_every_published_size_has_the_tensors_that_transformers_has(name, size):
    config = FAMILIES[name].sizes[size]
    zeros = jax.tree.map(lambda leaf: np.broadcast_to(np.float32(0), leaf.shape), parameter_shapes(config))
    for part in FAMILIES[name].hf:
        cls = getattr(transformers, architecture(config, part))
        with torch.device("meta"):
            model = cls(cls.config_class(**config_fields(config, part, {})))
        theirs = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        assert {name: tensor.shape for name, tensor in tensors(zeros, config, part).items()} == theirs


def test_dropout_may_differ_from_the_folder(exported, configs, tokenizer_path):
    config = dataclasses.replace(configs["masked"], dropout=0.0, attention_dropout=0.3, init_std=0.01)
    load_like(exported("masked"), config, tokenizer_path)


def test_sharded_weights_load(configs, tokenizer_path, tmp_path):
    model = reference.torch_model(configs["masked"], "model")
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    loaded = load_like(tmp_path, configs["masked"], tokenizer_path)
    expected = model.cls.predictions.transform.dense.weight.detach().numpy().T
    np.testing.assert_array_equal(loaded["predictions"]["dense"]["kernel"], expected)


def rewrite(folder, change):
    """Apply change(tensors) to the dict of a folder's tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_legacy_norm_names_load(exported, configs, tokenizer_path):
    folder = exported("pretraining")

    def rename(tensors):
        for name in list(tensors):
            old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
            tensors[old] = tensors.pop(name)

    before = load_like(folder, configs["pretraining"], tokenizer_path)
    rewrite(folder, rename)
    after = load_like(folder, configs["pretraining"], tokenizer_path)
    jax.tree.map(np.testing.assert_array_equal, before, after)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_weights_load_as_float32(configs, tokenizer_path, tmp_path, dtype):
    model = reference.torch_model(configs["masked"], "model").to(dtype)
    model.save_pretrained(tmp_path)
    loaded = load_like(tmp_path, configs["masked"], tokenizer_path)
    expected = model.bert.embeddings.position_embeddings.weight.detach().float().numpy()
    assert loaded["embeddings"]["positions"].dtype == np.float32
    np.testing.assert_array_equal(loaded["embeddings"]["positions"], expected)


def test_a_tied_tensor_stored_twice_or_only_under_its_other_name_loads(exported, configs, tokenizer_path):
    folder, config = exported("masked"), configs["masked"]
    table, decoder = "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"
    before = load_like(folder, config, tokenizer_path)
    rewrite(folder, lambda tensors: tensors.update({decoder: tensors[table]}))
    jax.tree.map(np.testing.assert_array_equal, before, load_like(folder, config, tokenizer_path))
    rewrite(folder, lambda tensors: tensors.pop(table))
    jax.tree.map(np.testing.assert_array_equal, before, load_like(folder, config, tokenizer_path))


def test_buffers_and_the_heads_of_another_class_are_left_out_with_a_note(exported, configs, tokenizer_path, caplog):
    folder = exported("pretraining")
    rewrite(folder, lambda tensors: tensors.update({"bert.embeddings.position_ids": np.arange(32)[None]}))
    with caplog.at_level(logging.WARNING):
        load_like(folder, configs["masked"], tokenizer_path)
    for name in ("position_ids", "bert.pooler.dense.weight", "cls.seq_relationship.bias"):
        assert name in caplog.text


def test_a_bare_trunk_starts_its_heads_anew_only_where_that_is_asked_for(configs, tokenizer_path, tmp_path, caplog):
    config, start = configs["pretraining"], random_params(configs["pretraining"], seed=1)
    theirs = reference.torch_model(config, "model")
    theirs.bert.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"has no bert\.embeddings"):
        load_like(tmp_path, config, tokenizer_path)
    with caplog.at_level(logging.WARNING):
        loaded = load(tmp_path, config, parameter_shapes(config), tokenizer_path, start=lambda: start)
    assert "cls.predictions.bias" in caplog.text and "start anew" in caplog.text and "pooler" not in caplog.text
    jax.tree.map(np.testing.assert_array_equal, loaded["predictions"], start["predictions"])
    jax.tree.map(np.testing.assert_array_equal, loaded["pair"], start["pair"])
    expected = theirs.bert.encoder.layer[1].output.dense.weight.detach().numpy().T
    np.testing.assert_array_equal(loaded["layers"]["feed_forward"]["down"]["kernel"][1], expected)


def test_another_head_is_left_out_and_a_trunk_never_starts_anew(exported, configs, tokenizer_path, caplog):
    folder, config = exported("masked"), configs["pretraining"]
    rewrite(folder, lambda tensors: tensors.update({"classifier.weight": np.zeros((3, 16), np.float32)}))
    start = lambda: random_params(config, seed=1)
    with caplog.at_level(logging.WARNING):
        load(folder, config, parameter_shapes(config), tokenizer_path, start)
    assert "left out classifier.weight" in caplog.text
    assert "cls.seq_relationship.weight" in caplog.text and "bert.pooler.dense.weight" in caplog.text
    rewrite(folder, lambda tensors: tensors.pop("bert.encoder.layer.0.output.dense.weight"))
    with pytest.raises(UserError, match=r"has no bert\.encoder\.layer\.0\.output\.dense\.weight"):
        load(folder, config, parameter_shapes(config), tokenizer_path, start)


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
    config = dataclasses.replace(configs["masked"], width=32, positions=64, norm_epsilon=1e-5)
    parts = (
        "model.width is 16 there and 32 here",
        "model.positions is 32 there and 64 here",
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
    _, model = pieces.learn(Counter({"fox": 2, "the": 1}), "unigram", 12, pieces.FLAVOURS["albert"])
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "AlbertTokenizer"}')
    (folder / "spiece.model").write_bytes(model)
    tokenizers.save(tokenizers.load(folder), tmp_path / "same")
    check_vocabulary(folder, tmp_path / "same")
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
    edit_config(folder, model_type="gpt2")
    known = "bert, electra, transformer-xl, xlnet"
    expect_load_error(folder, configs["pretraining"], tokenizer_path, "model_type='gpt2'", known)
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


def test_exporting_again_replaces_the_whole_folder(exported, configs, tokenizer_path):
    folder = exported("electra")
    export(random_params(configs["masked"], seed=1), configs["masked"], tokenizer_path, folder)
    assert not (folder / "generator").exists()
    tensors = load_file(folder / "model.safetensors")
    expected = random_params(configs["masked"], seed=1)["embeddings"]["positions"]
    np.testing.assert_array_equal(tensors["bert.embeddings.position_embeddings.weight"], expected)
    assert [entry.name for entry in folder.parent.iterdir()] == [folder.name]


@pytest.mark.parametrize("foreign", ["thesis.tex", "generator/notes.txt"])
def test_a_folder_with_other_things_in_it_is_never_replaced(exported, configs, tokenizer_path, foreign):
    folder = exported("electra")
    (folder / foreign).write_text("precious")
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match=foreign.split("/")[-1]):
        export(random_params(configs["electra"], seed=1), configs["electra"], tokenizer_path, folder)
    assert (folder / foreign).read_text() == "precious"
    assert (folder / "model.safetensors").read_bytes() == before


def test_a_folder_that_is_not_an_export_is_never_replaced(configs, tokenizer_path, tmp_path):
    (tmp_path / "vocab.txt").write_text("mine")
    with pytest.raises(UserError, match="export --to"):
        export(random_params(configs["masked"]), configs["masked"], tokenizer_path, tmp_path)
    assert (tmp_path / "vocab.txt").read_text() == "mine"


def test_a_failing_export_leaves_the_earlier_one(exported, configs, tokenizer_path, monkeypatch):
    folder = exported("electra")
    before = (folder / "model.safetensors").read_bytes()

    def full(tensors, path, metadata):
        if "generator" in str(path):
            raise OSError(28, "No space left on device")
        save_file(tensors, path, metadata)

    monkeypatch.setattr("pretrain.huggingface.export.save_file", full)
    with pytest.raises(UserError, match="No space left"):
        export(random_params(configs["electra"], seed=1), configs["electra"], tokenizer_path, folder)
    assert (folder / "model.safetensors").read_bytes() == before
    assert [entry.name for entry in folder.parent.iterdir()] == [folder.name]
