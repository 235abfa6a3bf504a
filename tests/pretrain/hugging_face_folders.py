"""Small models of every kind as folders that Hugging Face reads; the fixtures are those of conftest.py."""

import dataclasses

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from data_pipelines.tokenizers import stored
from data_pipelines.tokenizers.table import train
from data_pipelines.tokenizers.training import Training
from models.core.parameters import leaves
from models.families.albert import AlbertConfig
from models.families.bert import BertConfig
from models.families.electra import ElectraConfig, Tower
from models.families.registry import family_of
from models.families.xlnet import XLNetConfig
from pretrain.huggingface.export import export
from pretrain.huggingface.load import load
from tests.models.shapes import parameter_shapes

TEXTS = ["the quick brown fox jumps over the lazy dog", "a corpus of small texts, for tests only", "naïve words"] * 5
QUESTIONS = ["the lazy corpus", "Quick! naïve fox?", "日本 unknown"]


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus") / "tokenizer"
    stored.save(train("wordpiece", TEXTS, Training(150)), folder)
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


def rewrite(folder, change):
    """Apply change(tensors) to the dict of a folder's tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
