"""What we export, transformers loads whole; what transformers saves, we load whole."""

import dataclasses
import json
import logging
import math
import shutil

import flax.linen as nn
import jax
import numpy as np
import pytest
import torch
import transformers
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from data_pipelines.errors import UserError
from data_pipelines.tokenizers import stored
from models.blocks.heads import CLASSIFIER
from models.core.parameters import leaves
from models.core.program import Program
from models.families.registry import FAMILIES
from pretrain.huggingface.config import config_from
from pretrain.huggingface.export import config_fields, export
from pretrain.huggingface.load import load
from pretrain.huggingface.tensors import architecture, tensors
from tests.models.shapes import parameter_shapes
from tests.pretrain import reference
from tests.pretrain.hugging_face_folders import (
    HEADS,
    MODELS,
    QUESTIONS,
    TEXTS,
    load_like,
    random_params,
    rewrite,
    without_padding,
)

LOADERS = [  # kind, part, another class that loads it beside the one that it names
    ("pretraining", "", "AutoModelForPreTraining"),
    ("masked", "", "AutoModelForMaskedLM"),
    ("classes", "", "AutoModelForSequenceClassification"),
    ("albert", "", "AutoModelForPreTraining"),
    ("albert groups", "", None),
    ("electra", "", "AutoModelForPreTraining"),
    ("electra", "generator", "AutoModelForMaskedLM"),
    ("ernie", "", "AutoModelForPreTraining"),
    ("deberta", "", "AutoModelForMaskedLM"),
    ("deberta plain", "", None),
    ("deberta classes", "", "AutoModelForSequenceClassification"),
    ("deberta v3", "", "AutoModel"),
    ("deberta v3", "generator", "AutoModelForMaskedLM"),
    ("distilbert", "", "AutoModelForMaskedLM"),
    ("mobilebert", "", "AutoModelForPreTraining"),
    ("mobilebert narrow", "", "AutoModelForPreTraining"),
    ("unilm", "", "AutoModelForMaskedLM"),
    ("xlnet", "", "AutoModelForPreTraining"),
    ("xlnet", "", "AutoModelForCausalLM"),
    ("roberta", "", "AutoModelForMaskedLM"),
    ("roberta", "", "AutoModelForPreTraining"),
    ("bigbird", "", None),
    ("bigbird masked", "", None),
    ("longformer", "", None),
    ("t5", "", "AutoModelForSeq2SeqLM"),
    ("t5 untied", "", "T5ForConditionalGeneration"),
    ("mt5", "", "AutoModelForSeq2SeqLM"),
    ("bart", "", "AutoModelForSeq2SeqLM"),
    ("transformer", "", "AutoModelForSeq2SeqLM"),
]


@pytest.mark.parametrize(("kind", "part", "loader"), LOADERS)
def test_exports_load_with_no_missing_and_no_unexpected_tensor_and_run(exported, kind, part, loader):
    folder = exported(kind) / part
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    text = transformers.AutoTokenizer.from_pretrained(folder)("the quick brown fox", return_tensors="pt")
    for each in filter(None, (name, loader)):
        model, info = getattr(transformers, each).from_pretrained(folder, output_loading_info=True)
        assert not any(info.values()), info
        assert model.dtype == torch.float32 and type(model).__name__ == name
    model(**text, **({"decoder_input_ids": text["input_ids"]} if model.config.is_encoder_decoder else {}))


@pytest.mark.parametrize("kind", MODELS)
def test_export_then_load_gives_the_same_config_the_same_bits_and_zero_padding(exported, configs, tokenizers, kind):
    config, folder = configs[kind], exported(kind)
    assert config_from(folder) == config
    loaded = load_like(folder, config, tokenizers[MODELS[kind][1]], kind)
    before, after = without_padding(random_params(config, kind=kind), config), without_padding(loaded, config)
    assert before.keys() == after.keys()
    for path, leaf in before.items():
        np.testing.assert_array_equal(leaf, after[path], err_msg=path)
    assert any(leaf.shape != before[path].shape for path, leaf in leaves(loaded))
    for path, leaf in leaves(loaded):
        assert not leaf[len(before[path]) :].any()


WITHOUT = "vocab.json and merges.txt"  # instead of tokenizer.json
TOKENIZING = ["pretraining", "electra", "electra/generator", "roberta", f"roberta, {WITHOUT}"]
TOKENIZING += ["deberta", "deberta v3/generator", "bart", "ctrl", "gpt", "gpt2"]


@pytest.mark.parametrize("of", TOKENIZING)
def test_the_exported_tokenizer_gives_the_corpus_ids_and_the_config_names_its_own(exported, tokenizers, of):
    kind, *part = of.removesuffix(f", {WITHOUT}").split("/")
    folder = exported(kind).joinpath(*part)
    if of.endswith(WITHOUT):
        (folder / "tokenizer.json").unlink()
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours, special, _ = stored.load(tokenizers[MODELS[kind][1]])
    for texts in [*([text] for text in (*TEXTS, *QUESTIONS)), *([QUESTIONS[:2]] if "mask" in special else [])]:
        assert theirs(*texts)["input_ids"] == ours.encode(*texts).ids
    told = transformers.AutoConfig.from_pretrained(folder)
    assert theirs.model_max_length == 32 and told.pad_token_id == theirs.pad_token_id
    if "mask" in special:
        assert (theirs.mask_token_id, theirs.pad_token_id) == (special["mask"], special["pad"])
    else:
        assert told.pad_token_id is None and theirs.eos_token == "<|endoftext|>"
        assert told.bos_token_id == told.eos_token_id == theirs.eos_token_id == special["eod"]
    if kind == "pretraining":
        assert theirs(*QUESTIONS[:2])["token_type_ids"] == ours.encode(*QUESTIONS[:2]).type_ids
    if kind == "roberta":
        assert isinstance(theirs, transformers.RobertaTokenizer)
        assert (theirs.cls_token_id, theirs.pad_token_id, theirs.sep_token_id, theirs.mask_token_id) == (0, 1, 2, 4)


def test_the_parts_may_lie_in_two_folders(exported, configs, tokenizer_path, tmp_path):
    folder = exported("electra")
    shutil.move(folder / "generator", tmp_path / "elsewhere")
    source = f"discriminator={folder},generator={tmp_path / 'elsewhere'}"
    loaded = load_like(source, configs["electra"], tokenizer_path)
    expected = without_padding(random_params(configs["electra"]), configs["electra"])
    for path, leaf in without_padding(loaded, configs["electra"]).items():
        np.testing.assert_array_equal(leaf, expected[path])


def test_a_discriminator_is_exported_with_whole_embeddings_and_its_head_beside(exported, configs, tmp_path):
    folder, config = exported("deberta v3"), configs["deberta v3"]
    params, stored = random_params(config), load_file(folder / "model.safetensors")
    tables = [params[part]["embeddings"]["tokens"] for part in ("generator", "discriminator")]
    table = stored["deberta.embeddings.word_embeddings.weight"]
    np.testing.assert_array_equal(table, sum(tables)[: config.vocab_size])
    head = load_file(folder / "mask_predictions.safetensors")
    assert head["mask_predictions.classifer.weight"].shape == (1, config.width) and len(head) == 6
    assert not head.keys() & stored.keys()
    shutil.move(folder / "generator", tmp_path / "elsewhere")
    assert config_from(folder) == config.encoder("discriminator")


@pytest.mark.parametrize(
    "field, value, said",
    [
        ("conv_kernel_size", 3, "has conv_kernel_size=3, but needs 0"),
        ("pos_att_type", "c2p", "has pos_att_type='c2p'; give another folder"),
        ("position_biased_input", True, "has position_biased_input=True, but needs False"),
        ("enhanced_decoder", False, "model.enhanced_decoder is False there and True here"),
    ],
)
def test_another_deberta_is_refused(exported, configs, tokenizers, field, value, said):
    file = exported("deberta") / "config.json"
    fields = json.loads(file.read_text())
    assert fields["pos_att_type"] == ["p2c", "c2p"] and fields["legacy"] is False
    file.write_text(json.dumps(fields | {"pos_att_type": "p2c|c2p", "max_relative_positions": -1, "legacy": True}))
    assert config_from(file.parent) == dataclasses.replace(configs["deberta"], furthest=32)
    file.write_text(json.dumps(fields | {field: value}))
    with pytest.raises(UserError, match=said):
        load_like(file.parent, configs["deberta"], tokenizers["deberta"])


def test_a_legacy_head_of_a_deberta_is_said(configs, tmp_path):
    fields = config_fields(configs["deberta plain"], "model", ("predictions",), {}) | {"legacy": True}
    transformers.DebertaV2ForMaskedLM(transformers.DebertaV2Config(**fields)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="legacy head has other names; make the model with"):
        load_like(tmp_path, configs["deberta plain"], tmp_path)


# Millions of parameters, those that are tied counted once; None where no paper says them
PUBLISHED = {
    "albert base": 11.8, "albert large": 17.8, "albert xlarge": 59.0, "albert xxlarge": 223.2, "bart large": 406.3,
    "bert base": None, "bigbird base": None,
    "ctrl base": 1638.0, "distilbert base": None, "electra base": None, "ernie base": None, "mobilebert base": None,
    "gpt base": 116.5, "gpt2 small": 124.4,
    "gpt2 xl": 1557.6, "longformer base": None, "roberta base": 124.7, "roberta large": 355.4,
    "t5 base": None, "transformer base": None, "xlnet base": None,
}  # fmt: skip


@pytest.mark.parametrize("of", PUBLISHED)
def test_a_published_size_has_the_tensors_that_transformers_has(of):
    family, size = of.split()
    config = FAMILIES[family].sizes[size]
    zeros = jax.tree.map(lambda leaf: np.broadcast_to(np.float32(0), leaf.shape), parameter_shapes(config))
    for part in FAMILIES[family].hf:
        cls = getattr(transformers, architecture(config, part, zeros))
        with torch.device("meta"):
            model = cls(cls.config_class(**config_fields(config, part, zeros, {})))
        trained = ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)
        theirs = {name: tuple(parameter.shape) for name, parameter in trained}
        assert {name: tensor.shape for name, tensor in tensors(zeros, config, part).items()} == theirs
        number = round(sum(map(math.prod, theirs.values())) / 1e6, 1)
        assert PUBLISHED[of] in (number, None)


def with_old_norms(tensors):
    for name in list(tensors):
        old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        tensors[old] = tensors.pop(name)


TABLE, DECODER = "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"
WRITTEN_OTHERWISE = {
    "legacy names of norms": with_old_norms,
    "a tied tensor twice": lambda tensors: tensors.update({DECODER: tensors[TABLE]}),
    "a tied tensor under its other name": lambda tensors: tensors.update({DECODER: tensors.pop(TABLE)}),
}


@pytest.mark.parametrize("how", WRITTEN_OTHERWISE)
def test_weights_that_are_written_otherwise_load(exported, configs, tokenizer_path, how):
    folder, config = exported("masked"), configs["masked"]
    before = load_like(folder, config, tokenizer_path, "masked")
    rewrite(folder, WRITTEN_OTHERWISE[how])
    jax.tree.map(np.testing.assert_array_equal, before, load_like(folder, config, tokenizer_path, "masked"))


@pytest.mark.parametrize("kind", ["t5 untied", "mt5"])
def test_what_transformers_has_loaded_and_saved_is_the_same_model(exported, configs, tmp_path, kind):
    """Though it then says that embeddings and softmax have the same weights."""
    folder, config = exported(kind), configs[kind]
    transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).save_pretrained(tmp_path / "theirs")
    assert json.loads((tmp_path / "theirs" / "config.json").read_text())["tie_word_embeddings"]
    before, after = (load_like(of, config, of) for of in (folder, tmp_path / "theirs"))
    jax.tree.map(np.testing.assert_array_equal, before, after)


def test_a_classifier_of_rows_is_that_of_transformers(configs, tmp_path):
    config, heads = configs["classes"], HEADS["classes"]
    theirs = reference.torch_model(config, "model", heads=heads)
    theirs.save_pretrained(tmp_path)
    ours, params = (
        FAMILIES["bert"].module(config, Program(), heads),
        load_like(tmp_path, config, tmp_path, "classes"),
    )
    tokens = np.arange(5, 29, dtype=np.int32).reshape(2, 12)
    inputs = {"tokens": tokens, "types": np.zeros_like(tokens), "segments": np.ones_like(tokens)}
    logits = nn.apply(lambda model: model.apply_head(CLASSIFIER, model.encode(inputs)[:, 0]), ours)({"params": params})
    expected = theirs(input_ids=torch.from_numpy(tokens).long()).logits.detach().numpy()
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-6)


def test_a_model_whose_heads_no_class_has_is_not_exported(configs, tokenizer_path, tmp_path):
    assert FAMILIES["bert"].heads_with(("predictions", CLASSIFIER)) == ("predictions", CLASSIFIER, "pooler")
    config = configs["pretraining"]
    params = {name: array for name, array in random_params(config).items() if name != "pair"}
    with pytest.raises(UserError, match=r"no class has this model's heads \(predictions, pooler\)"):
        export(params, config, tokenizer_path, tmp_path / "out")


def test_half_precision_weights_load_as_float32(configs, tmp_path):
    model = reference.torch_model(configs["masked"], "model", heads=HEADS["masked"]).to(torch.float16)
    model.save_pretrained(tmp_path)
    loaded = load_like(tmp_path, configs["masked"], tmp_path, "masked")
    expected = model.bert.embeddings.position_embeddings.weight.detach().float().numpy()
    assert loaded["embeddings"]["positions"].dtype == np.float32
    np.testing.assert_array_equal(loaded["embeddings"]["positions"], expected)


def test_a_bare_trunk_starts_its_heads_anew_only_where_that_is_asked_for(configs, tmp_path, caplog):
    config, start = configs["pretraining"], random_params(configs["pretraining"], seed=1)
    theirs = reference.torch_model(config, "model")
    theirs.bert.save_pretrained(tmp_path)
    said = r"has no cls\.predictions\..* start them anew with --init-heads-anew"
    with pytest.raises(UserError, match=said) as error:
        load_like(tmp_path, config, tmp_path)
    assert "bert." not in str(error.value)
    with caplog.at_level(logging.WARNING):
        loaded = load(tmp_path, config, parameter_shapes(config), tmp_path, start=lambda: start)
    assert (
        "cls.predictions.bias" in caplog.text
        and "start from random weights" in caplog.text
        and "pooler" not in caplog.text
    )
    jax.tree.map(np.testing.assert_array_equal, loaded["predictions"], start["predictions"])
    jax.tree.map(np.testing.assert_array_equal, loaded["pair"], start["pair"])
    expected = theirs.bert.encoder.layer[1].output.dense.weight.detach().numpy().T
    np.testing.assert_array_equal(loaded["layers"]["feed_forward"]["down"]["kernel"][1], expected)


def test_a_head_that_is_a_part_of_the_module_starts_anew_too(configs, tmp_path):
    config, start = configs["xlnet"], random_params(configs["xlnet"], seed=1)
    reference.torch_model(config, "model").transformer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"has no lm_loss\.bias.*start them anew with --init-heads-anew"):
        load_like(tmp_path, config, tmp_path)
    loaded = load(tmp_path, config, parameter_shapes(config), tmp_path, start=lambda: start)
    np.testing.assert_array_equal(loaded["bias"][: config.vocab_size], start["bias"][: config.vocab_size])


def test_another_head_is_left_out_and_a_trunk_never_starts_anew(exported, configs, tokenizer_path, caplog):
    folder, config = exported("masked"), configs["pretraining"]
    more = {"classifier.weight": np.zeros((3, 16), np.float32), "bert.embeddings.position_ids": np.arange(32)[None]}
    rewrite(folder, lambda tensors: tensors.update(more))
    start = lambda: random_params(config, seed=1)
    with caplog.at_level(logging.WARNING):
        load(folder, config, parameter_shapes(config), tokenizer_path, start)
    assert "ignored bert.embeddings.position_ids, classifier.weight" in caplog.text
    assert "cls.seq_relationship.weight" in caplog.text and "bert.pooler.dense.weight" in caplog.text
    rewrite(folder, lambda tensors: tensors.pop("bert.encoder.layer.0.output.dense.weight"))
    with pytest.raises(UserError, match=r"has no bert\.encoder\.layer\.0\.output\.dense\.weight"):
        load(folder, config, parameter_shapes(config), tokenizer_path, start)


@pytest.mark.parametrize("foreign", ["thesis.tex", "generator/notes.txt", "model-best.safetensors"])
def test_a_folder_with_other_things_in_it_is_never_replaced(exported, configs, tokenizer_path, foreign):
    folder = exported("electra")
    (folder / foreign).write_text("precious")
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match=foreign.split("/")[-1]):
        export(random_params(configs["electra"], seed=1), configs["electra"], tokenizer_path, folder)
    assert (folder / foreign).read_text() == "precious"
    assert (folder / "model.safetensors").read_bytes() == before


def test_neither_another_run_s_export_nor_a_folder_that_looks_like_one_is_replaced(configs, tokenizer_path, tmp_path):
    folder, config = tmp_path / "out", configs["masked"]
    write = lambda run: export(random_params(config), config, tokenizer_path, folder, run=run)
    write("one")
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match="out: holds another run's export; give a new folder, or remove this one"):
        write("other")
    write("one")
    (folder / "export.json").unlink()  # as what somebody downloaded
    with pytest.raises(UserError, match="out: holds config.json but no export.json: it is no export"):
        write("one")
    assert (folder / "model.safetensors").read_bytes() == before


def test_a_failing_export_leaves_the_earlier_one(exported, configs, tokenizer_path, monkeypatch):
    folder = exported("electra")
    before = (folder / "model.safetensors").read_bytes()

    def full(tensors, path, metadata):
        if "generator" in str(path):
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        save_file(tensors, path, metadata)

    monkeypatch.setattr("pretrain.huggingface.export.save_file", full)
    with pytest.raises(UserError, match="No space left"):
        export(random_params(configs["electra"], seed=1), configs["electra"], tokenizer_path, folder)
    assert (folder / "model.safetensors").read_bytes() == before
    assert [entry.name for entry in folder.parent.iterdir()] == [folder.name]
