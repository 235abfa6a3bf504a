"""What is wrong with a Hugging Face folder is said in one line that names it."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

from data_pipelines.errors import UserError
from models.families.electra import Tower
from pretrain.huggingface.export import export
from tests.pretrain import reference, toys
from tests.pretrain.hugging_face_folders import HEADS, MODELS, load_like, rewrite


def expect_load_error(folder, config, tokenizer_path, *parts, kind=None):
    with pytest.raises(UserError) as error:
        load_like(folder, config, tokenizer_path, kind)
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message


def edit_config(folder, **fields):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def exchange_words(folder):
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["the"], vocab["fox"] = vocab["fox"], vocab["the"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def with_tensor(name, *shape, part=""):
    """What puts a tensor of zeros into a folder's weights."""
    zeros = np.zeros(shape, np.float32)
    return lambda folder: rewrite(folder / part, lambda tensors: tensors.update({name: zeros}))


def biased(folder):
    rewrite(folder, lambda tensors: tensors.update(final_logits_bias=np.float32([[0, 1]])))


def without(name):
    return lambda folder: rewrite(folder, lambda tensors: tensors.pop(name))


def with_bytes(name):
    return lambda folder: (folder / name).write_bytes(b"\x00\x01{")


def with_fields(part="", **fields):
    return lambda folder: edit_config(folder / part, **fields)


def untied(folder):
    rewrite(folder, lambda tensors: tensors.update({DECODER: 0 * tensors["bert.embeddings.word_embeddings.weight"]}))


DENSE, DECODER = "bert.encoder.layer.1.output.dense.weight", "cls.predictions.decoder.weight"
NORM = "electra.embeddings.LayerNorm.bias"
DIFFERENT = {"width": 32, "positions": 16, "norm_epsilon": 1e-5}
KNOWN = "gpt2, longformer, mobilebert, modernbert, modernbert-decoder, mt5, roberta, t5, marian, transformer-xl, xlnet"
# kind of the folder, what is done to it, config (a kind, changes of the folder's own, or one), what is said
WRONG = {
    "every differing field, with the cure": (
        "masked", None, DIFFERENT, "model.width is 16 there and 32 here", "model.positions is 32 there and 16 here",
        "model.norm_epsilon is 1e-12 there and 1e-05 here", "--model.width 16", "--model.positions 32",
    ),
    "a tower of another size": ("electra", None, {"generator": Tower(8, 3, 1, 12)}, "--model.generator.depth 2"),
    "other words": ("masked", exchange_words, {}, "'fox'", "--tokenizer {folder}"),
    "more words": ("masked", None, {"vocab_size": 99}, "model.vocab_size", "--tokenizer"),
    "a head that is missing, and the class that has it": (
        "masked", None, "pretraining", "cls.seq_relationship.weight", "BertForMaskedLM", "BertForPreTraining",
    ),
    "an unexpected tensor": ("masked", with_tensor("another.weight", 2, 16), {}, "another.weight"),
    "a softmax that was saved as if it were tied": (
        "t5 untied", without("lm_head.weight"), {}, "has no lm_head.weight; transformers 5 saves none", "clone()",
    ),
    "more layers than weights": ("t5", with_fields(num_layers=3), {"depth": 3}, "has no encoder.block.2."),
    "fewer layers than weights": ("t5", with_fields(num_layers=1), {"depth": 1}, "has encoder.block.1.", "lacks"),
    "a tensor that is lost": ("masked", without(DENSE), {}, f"has no {DENSE}; copy it again"),
    "another shape": ("masked", with_tensor(DENSE, 16, 25), {}, DENSE, "(16, 25)", "(16, 24)"),
    "a bias of the logits": ("bart", biased, {}, "final_logits_bias is not zero"),
    "an untied head": ("masked", untied, {}, DECODER, "ties"),
    "parts with different embeddings": ("electra", with_tensor(NORM, 16, part="generator"), {}, NORM, "discriminator"),
    "parts that disagree in a field": (
        "electra", with_fields("generator", embedding_size=8), {}, "model.embedding is 16", "8",
    ),
    "a part that is missing": (
        "electra", lambda folder: shutil.rmtree(folder / "generator"), {},
        "{folder}/generator: is no folder",
    ),
    "a pickle": (
        "masked", lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"), {},
        "pytorch_model.bin", "transformers",
    ),
    "damaged weights": ("masked", with_bytes("model.safetensors"), {}, "model.safetensors"),
    "a damaged config": ("masked", with_bytes("config.json"), {}, "config"),
    "no config": ("masked", lambda folder: (folder / "config.json").unlink(), {}, "has no config.json; give a folder"),
    "a damaged tokenizer": ("masked", with_bytes("tokenizer.json"), {}, "tokenizer"),
    "another family": ("masked", None, "electra", "'bert'", "'electra'"),
    "a family that there is not": ("pretraining", with_fields(model_type="gptj"), {}, "model_type='gptj'", KNOWN),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_said_in_one_line(exported, configs, tokenizers, wrong):
    kind, damage, config, *said = WRONG[wrong]
    folder = exported(kind)
    if damage:
        damage(folder)
    if isinstance(config, dict):
        config = dataclasses.replace(configs[kind], **config)
    kind, config = (config, configs[config]) if isinstance(config, str) else (kind, config)
    tokenizer = tokenizers[MODELS[kind][1]]
    expect_load_error(folder, config, tokenizer, *(part.format(folder=folder) for part in said), kind=kind)


def test_another_vocabulary_in_vocab_txt_is_an_error(exported, configs, tokenizer_path):
    folder = exported("masked")
    (folder / "tokenizer.json").unlink()
    load_like(folder, configs["masked"], tokenizer_path, "masked")
    words = (folder / "vocab.txt").read_text("utf-8")
    (folder / "vocab.txt").write_text(words.replace("\nfox\n", "\nwolf\n"), "utf-8")
    expect_load_error(folder, configs["masked"], tokenizer_path, "prepare the corpus with --tokenizer")


def test_sharded_weights_load_beside_a_tokenizer_and_missing_shards_are_named(configs, tokenizer_path, tmp_path):
    model = reference.torch_model(configs["masked"], "model", heads=HEADS["masked"])
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    without = (
        "has no tokenizer.json, vocab.txt, spiece.model or vocab.json to compare with the corpus's tokenizer; write"
    )
    expect_load_error(tmp_path, configs["masked"], tokenizer_path, without, kind="masked")
    shutil.copytree(tokenizer_path, tmp_path, dirs_exist_ok=True)
    loaded = load_like(tmp_path, configs["masked"], tokenizer_path, "masked")
    expected = model.cls.predictions.transform.dense.weight.detach().numpy().T
    np.testing.assert_array_equal(loaded["predictions"]["dense"]["kernel"], expected)
    _, shard, *_ = sorted(tmp_path.glob("model-*.safetensors"))
    shard.unlink()
    expect_load_error(tmp_path, configs["masked"], tokenizer_path, shard.name, kind="masked")


SOURCES = {
    "nowhere": "nowhere: is no folder",
    "generator=a": "discriminator=DIR",
    "teacher=a,generator=b": "'teacher'",
    "discriminator=a,generator=b": "b: is no folder",
    "discriminator=gs://b/a,generator=gs://b/b": "gs://b/a: parts are read from local folders",
}


@pytest.mark.parametrize(("source", "expected"), SOURCES.items())
def test_sources_that_do_not_exist_or_are_incomplete(exported, configs, tokenizer_path, monkeypatch, source, expected):
    folder = exported("electra")
    monkeypatch.chdir(folder.parent)
    folder.rename("a")
    expect_load_error(source, configs["electra"], tokenizer_path, expected)


def test_exporting_a_model_without_a_form_for_it_is_an_error(tokenizer_path, tmp_path, monkeypatch):
    toys.register(monkeypatch)
    with pytest.raises(UserError, match="bag models have no Hugging Face class; give --init-from the run"):
        export({}, toys.BagConfig(), tokenizer_path, tmp_path / "there")
    assert not (tmp_path / "there").exists()
