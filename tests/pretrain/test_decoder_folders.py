"""What decoders export, transformers loads whole, with its tokenizer, in one file or several; what transformers saves
and what was published with GPT-2, we load."""

import dataclasses
import json
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file

from data_pipelines.tokenizers import stored
from data_pipelines.tokenizers.table import train
from data_pipelines.tokenizers.training import Training
from models.families.registry import FAMILIES
from pretrain.huggingface import shards
from pretrain.huggingface.config import config_from
from pretrain.huggingface.export import export
from pretrain.huggingface.tensors import architecture, tensors
from tests.pretrain import reference
from tests.pretrain.hugging_face_folders import QUESTIONS, TEXTS, load_like, random_params, rewrite, without_padding

SMALL = {"positions": 32, "width": 16, "depth": 2, "heads": 2, "feed_forward": 64, "dropout": 0.2}
TOKENIZERS = {"ctrl": ("character-bpe", "ctrl"), "gpt": ("character-bpe", "gpt"), "gpt2": ("bpe", "gpt2")}
END = "<|endoftext|>"


@pytest.fixture(scope="module")
def tokenizer_paths(tmp_path_factory):
    """Family -> the folder of a tokenizer of its kind."""
    folders = {name: tmp_path_factory.mktemp(name) for name in TOKENIZERS}
    for name, (kind, specials) in TOKENIZERS.items():
        stored.save(train(kind, TEXTS, Training(300, specials=specials)), folders[name])
    return folders


@pytest.fixture
def model(tokenizer_paths):
    """Family -> (config, parameters, the tokenizer's folder)."""

    def make(name):
        size = stored.load(tokenizer_paths[name]).tokenizer.get_vocab_size()
        config = dataclasses.replace(FAMILIES[name].sizes["tiny"], vocab_size=size, **SMALL)
        return config, random_params(config), tokenizer_paths[name]

    return make


def in_several_files(monkeypatch):
    monkeypatch.setattr(shards, "LIMIT", 8000)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformers_loads_an_export_in_several_files_whole(model, tmp_path, monkeypatch, name, dtype):
    config, params, tokenizer = model(name)
    in_several_files(monkeypatch)
    export(params, config, tokenizer, tmp_path / "out", dtype)
    assert (tmp_path / "out" / shards.INDEX).exists() and not (tmp_path / "out" / shards.WHOLE).exists()
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    assert type(loaded).__name__ == architecture(config, "model") and str(loaded.dtype) == f"torch.{dtype}"
    theirs = dict(loaded.named_parameters())
    ours = tensors(params, config, "model")
    assert set(ours) == set(theirs)
    for key, tensor in ours.items():
        np.testing.assert_array_equal(theirs[key].detach().float(), tensor.array().astype(jnp.dtype(dtype)))


@pytest.mark.parametrize("name", TOKENIZERS)
def test_its_tokenizer_gives_the_corpus_s_ids_and_its_config_names_them(model, tmp_path, name):
    config, params, tokenizer = model(name)
    export(params, config, tokenizer, tmp_path / "out")
    ours, theirs = stored.load(tokenizer), transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in (*TEXTS, *QUESTIONS):
        assert theirs(text)["input_ids"] == ours.tokenizer.encode(text).ids
    told = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert told.bos_token_id == told.eos_token_id == ours.special["eod"] == theirs.convert_tokens_to_ids(END)
    assert theirs.eos_token == END and told.pad_token_id is None and theirs.model_max_length == 32


@pytest.mark.parametrize("name", TOKENIZERS)
def test_an_export_loads_here_with_the_same_bits_and_the_same_config(model, tmp_path, monkeypatch, name):
    config, params, tokenizer = model(name)
    in_several_files(monkeypatch)
    export(params, config, tokenizer, tmp_path / "out")
    assert config_from(tmp_path / "out") == config
    again = without_padding(load_like(tmp_path / "out", config, tokenizer), config)
    jax.tree.map(np.testing.assert_array_equal, again, without_padding(params, config))


def test_a_smaller_export_leaves_no_file_of_a_larger_one(model, tmp_path, monkeypatch):
    config, params, tokenizer = model("gpt2")
    with monkeypatch.context() as patch:
        in_several_files(patch)
        export(params, config, tokenizer, tmp_path / "out")
    export(params, config, tokenizer, tmp_path / "out")
    assert [file.name for file in (tmp_path / "out").glob("model*")] == [shards.WHOLE]


@pytest.mark.parametrize("name", ["gpt", "gpt2"])
def test_a_folder_as_it_was_published_loads(model, tmp_path, name):
    """A bare trunk, masks beside its weights, and no width inside the feed-forward block."""
    config, _, tokenizer = model(name)
    whole = reference.torch_model(config, "model")
    whole.save_pretrained(tmp_path / "whole")
    whole.transformer.save_pretrained(tmp_path / "bare")
    said = json.loads((tmp_path / "bare" / "config.json").read_text())
    said.pop("n_inner", None)
    (tmp_path / "bare" / "config.json").write_text(json.dumps(said))
    rewrite(tmp_path / "bare", lambda stored: stored.update({"h.1.attn.bias": np.ones((1, 1, 32, 32), np.float32)}))
    assert not any(key.startswith("transformer.") for key in load_file(tmp_path / "bare" / shards.WHOLE))
    ours = [load_like(tmp_path / folder, config, tokenizer) for folder in ("whole", "bare")]
    jax.tree.map(np.testing.assert_array_equal, *ours)


def test_no_more_than_one_file_s_tensors_are_copied_at_a_time(model, tmp_path):
    """In bfloat16, where all are."""
    config, _, _ = model("gpt2")
    config = dataclasses.replace(config, width=64, feed_forward=256, depth=8)
    stored_tensors = tensors(random_params(config), config, "model")
    said = tmp_path / "config.json"
    said.write_text("{}")
    total = sum(tensor.array().nbytes for tensor in stored_tensors.values()) // 2
    tracemalloc.start()
    shards.write(stored_tensors, tmp_path, jnp.dtype("bfloat16"), said, total // 10)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(list(tmp_path.glob("model-*"))) >= 10 and peak < 1.7 * total / 10, peak / total
