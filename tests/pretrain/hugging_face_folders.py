"""Small models of every kind as folders that Hugging Face reads; the fixtures are those of conftest.py."""

import dataclasses

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from data_pipelines.tokenizers import pieces, stored
from data_pipelines.tokenizers.training import Training
from models.attention.patterns.pattern import Pattern
from models.blocks.heads import CLASSIFIER, PAIR, POOLER, TOKENS
from models.core.parameters import leaves
from models.families.albert import AlbertConfig
from models.families.bart import BartConfig
from models.families.bert import BertConfig
from models.families.bigbird import BigBirdConfig
from models.families.ctrl import CTRLConfig
from models.families.deberta import DebertaConfig, DebertaV3Config
from models.families.distilbert import DistilBertConfig
from models.families.electra import ElectraConfig, Tower
from models.families.ernie import ErnieConfig
from models.families.gpt import GPTConfig
from models.families.gpt2 import GPT2Config
from models.families.longformer import LongformerConfig
from models.families.mobilebert import MobileBertConfig
from models.families.modernbert import ModernBertConfig, ModernBertDecoderConfig
from models.families.registry import family_of
from models.families.roberta import RobertaConfig
from models.families.t5 import MT5Config, T5Config
from models.families.transformer import TransformerConfig
from models.families.unilm import UniLMConfig
from models.families.xlnet import XLNetConfig
from pretrain.huggingface.export import export
from pretrain.huggingface.load import load
from tests.data_pipelines.tokenizers.trained import train
from tests.models.shapes import parameter_shapes

TEXTS = [
    "the quick brown fox jumps over the lazy dog",
    "a corpus of small texts, for tests only",
    "naïve words which very quickly become judgements",
] * 5
QUESTIONS = ["the lazy corpus", "Quick! naïve fox?", "日本 unknown"]
TOKENIZERS = {
    "wordpiece": ("wordpiece", Training(150)),
    **{name: ("sentencepiece-unigram", Training(42, specials=name)) for name in pieces.FLAVOURS},
    "roberta": ("bpe", Training(300)),
    "ctrl": ("character-bpe", Training(300, specials="ctrl")),
    "gpt": ("character-bpe", Training(300, specials="gpt")),
    "gpt2": ("bpe", Training(300, specials="gpt2")),
}
SIZES = {"width": 16, "depth": 2, "heads": 2, "feed_forward": 24, "dropout": 0.2}
SHORT = SIZES | {"positions": 32}
TOWERS = {"discriminator": Tower(16, 2, 2, 24), "generator": Tower(8, 2, 1, 12)}
BIGBIRD = BigBirdConfig(pattern=Pattern("bigbird", block=4, random=2), positions=64, **SIZES)
LONGFORMER = LongformerConfig(pattern=Pattern("longformer", block=128, windows=(4, 8)), positions=64, **SIZES)
NEAR = SHORT | {"depth": 4, "pattern": Pattern("longformer", windows=(6,))}
NARROW = {"embedding": 16, "bottleneck": 12, "reads": "narrow", "norm": "layer", "stacked": 1} | SHORT
DECODERS = {"ctrl": CTRLConfig, "gpt": GPTConfig, "gpt2": GPT2Config}
MODELS = {  # kind -> (config, tokenizer)
    "pretraining": (BertConfig(**SHORT), "wordpiece"),
    "masked": (BertConfig(**SHORT), "wordpiece"),
    "classes": (BertConfig(**SHORT), "wordpiece"),
    "electra": (ElectraConfig(positions=32, embedding=16, dropout=0.2, **TOWERS), "wordpiece"),
    "albert": (AlbertConfig(embedding=8, **SHORT), "wordpiece"),
    "albert groups": (
        AlbertConfig(embedding=8, groups=2, sharing="attention", **SHORT | {"depth": 4}),
        "wordpiece",
    ),
    "deberta": (DebertaConfig(buckets=8, furthest=20, **SHORT), "deberta"),
    "deberta plain": (DebertaConfig(enhanced_decoder=False, **SHORT), "deberta"),
    "deberta classes": (DebertaConfig(**SHORT), "deberta"),
    "deberta v3": (DebertaV3Config(generator_depth=1, **SHORT), "deberta"),
    "distilbert": (DistilBertConfig(**SHORT), "wordpiece"),
    "mobilebert": (MobileBertConfig(embedding=8, bottleneck=12, **SHORT), "wordpiece"),
    "mobilebert narrow": (MobileBertConfig(**NARROW), "wordpiece"),
    "unilm": (UniLMConfig(**SHORT), "wordpiece"),
    "ernie": (ErnieConfig(**SHORT), "wordpiece"),
    "xlnet": (XLNetConfig(**SIZES), "wordpiece"),
    "roberta": (RobertaConfig(**SHORT), "roberta"),
    "roberta pairs": (RobertaConfig(**SHORT), "roberta"),
    "bigbird": (BIGBIRD, "wordpiece"),
    "bigbird masked": (BIGBIRD, "wordpiece"),
    "longformer": (LONGFORMER, "roberta"),
    "modernbert": (ModernBertConfig(**NEAR), "roberta"),
    "modernbert-decoder": (ModernBertDecoderConfig(**NEAR), "roberta"),
    **{name: (config(**SHORT | {"feed_forward": 64}), name) for name, config in DECODERS.items()},
    "t5": (T5Config(decoder_depth=1, head_dim=6, **SIZES), "t5"),
    "t5 untied": (T5Config(decoder_depth=1, tied=False, gated=True, activation="gelu_new", **SIZES), "t5"),
    "mt5": (MT5Config(decoder_depth=1, **SIZES), "t5"),
    "bart": (BartConfig(decoder_depth=1, **SHORT), "roberta"),
    "transformer": (TransformerConfig(decoder_depth=1, **SHORT), "t5"),
}
# Kind -> its heads, where they are not those of its family's paper
HEADS = {
    "masked": (TOKENS,),
    "classes": (POOLER, CLASSIFIER),
    "bigbird masked": (TOKENS, POOLER),
    "deberta classes": (CLASSIFIER,),
    "roberta pairs": (TOKENS, POOLER, PAIR),
}


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory):
    """Kind of tokenizer -> its folder."""
    folder = tmp_path_factory.mktemp("tokenizers")
    for name, (kind, training) in TOKENIZERS.items():
        stored.save(train(kind, TEXTS, training), folder / name)
    return {name: folder / name for name in TOKENIZERS}


@pytest.fixture(scope="session")
def tokenizer_path(tokenizers):
    """That of most kinds of models."""
    return tokenizers["wordpiece"]


@pytest.fixture(scope="session")
def configs(tokenizers):
    """Kind of model -> its config with the size of its tokenizer's vocabulary."""
    found = {kind: fitting(config, tokenizers[name]) for kind, (config, name) in MODELS.items()}
    assert all(config.vocab_size % 128 for config in found.values()), "the tests need padding rows"
    return found


def fitting(config, tokenizer):
    """A config with the size of a tokenizer's vocabulary."""
    return dataclasses.replace(config, vocab_size=stored.load(tokenizer).tokenizer.get_vocab_size())


def random_params(config, seed=0, kind=None):
    rng = np.random.default_rng(seed)
    shapes = parameter_shapes(config, HEADS.get(kind))
    draw = lambda leaf: np.round(2**10 * rng.normal(size=leaf.shape)) / 2**10  # so that sums of two are exact
    return jax.tree.map(lambda leaf: draw(leaf).astype(np.float32), shapes)


def without_padding(params, config):
    """Flat parameters without the vocabulary's padding rows."""
    vocab = {parameter.path for parameter in family_of(config).every_parameter(config) if "vocab" in parameter.axes}
    return {path: leaf[: config.vocab_size] if path in vocab else leaf for path, leaf in leaves(params)}


def load_like(source, config, tokenizer_path, kind=None):
    return load(source, config, parameter_shapes(config, HEADS.get(kind)), tokenizer_path)


@pytest.fixture
def exported(tokenizers, tmp_path):
    """kind -> the folder of an export; tokenizer: another than its own.   changes: of its config."""

    def write(kind, tokenizer=None, **changes):
        folder, path = tmp_path / kind, tokenizers[tokenizer or MODELS[kind][1]]
        config = dataclasses.replace(fitting(MODELS[kind][0], path), **changes)
        export(random_params(config, kind=kind), config, path, folder)
        return folder

    return write


def rewrite(folder, change):
    """Apply change(tensors) to the dict of a folder's tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
