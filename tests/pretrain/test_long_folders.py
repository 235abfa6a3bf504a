"""What BigBird and Longformer export, transformers loads whole; what it computes otherwise, the log says."""

import dataclasses
import json
import logging
import re

import numpy as np
import pytest
import torch
import transformers

from data_pipelines.tokenizers import stored
from data_pipelines.tokenizers.table import train
from data_pipelines.tokenizers.training import Training
from models.attention.patterns.pattern import Pattern
from models.families.bert import BertConfig
from models.families.bigbird import BigBirdConfig
from models.families.longformer import LongformerConfig
from pretrain.huggingface.config import config_from
from pretrain.huggingface.export import export
from tests.pretrain.hugging_face_folders import TEXTS, load_like, random_params, without_padding

SIZES = {"width": 16, "depth": 2, "heads": 2, "feed_forward": 24, "positions": 64, "dropout": 0.2}
FEW = Pattern("bigbird", block=4, random=2)
BIGBIRD = BigBirdConfig(150, pattern=FEW, **SIZES)
LONGFORMER = LongformerConfig(300, pattern=Pattern("longformer", block=128, windows=(4, 8)), **SIZES)
MODELS = {
    "BigBirdForPreTraining": BIGBIRD,
    "BigBirdForMaskedLM": dataclasses.replace(BIGBIRD, pair_head=False),
    "LongformerForMaskedLM": LONGFORMER,
}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """Kind of tokenizer -> its folder."""
    folder = tmp_path_factory.mktemp("tokenizers")
    for kind, size in (("wordpiece", 150), ("bpe", 300)):
        stored.save(train(kind, TEXTS, Training(size)), folder / kind)
    return folder


def path_of(tokenizers, config):
    return tokenizers / ("bpe" if isinstance(config, LongformerConfig) else "wordpiece")


@pytest.fixture
def exported(tokenizers, tmp_path):
    def write(config):
        export(random_params(config), config, path_of(tokenizers, config), tmp_path / "export")
        return tmp_path / "export"

    return write


@pytest.mark.parametrize("name", MODELS)
def test_exports_load_with_no_missing_and_no_unexpected_tensor(exported, name):
    folder = exported(MODELS[name])
    model, info = getattr(transformers, name).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    assert json.loads((folder / "config.json").read_text())["architectures"] == [name] and model.dtype == torch.float32
    tokens = transformers.AutoTokenizer.from_pretrained(folder)("the quick brown fox", return_tensors="pt")
    model(**tokens)


@pytest.mark.parametrize("name", MODELS)
def test_export_then_load_gives_the_same_bits_and_the_same_config(exported, tokenizers, name):
    config = MODELS[name]
    folder = exported(config)
    assert config_from(folder) == config
    before = without_padding(random_params(config), config)
    for path, leaf in without_padding(load_like(folder, config, path_of(tokenizers, config)), config).items():
        np.testing.assert_array_equal(leaf, before[path], err_msg=path)


def said(exported, caplog, config):
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        exported(config)
    return [record.getMessage() for record in caplog.records if " in a " in record.getMessage()]


WIDE = dataclasses.replace(FEW, window=5)
DILATED = dataclasses.replace(LONGFORMER.pattern, dilations=(1, 2))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (BIGBIRD, "BigBirdForPreTraining other blocks are drawn .*; rows of up to 36 tokens have dense attention"),
        (dataclasses.replace(BIGBIRD, pattern=WIDE), "is BigBird's, with a window of 3 blocks and 2 global ones"),
        (dataclasses.replace(BIGBIRD, pattern=Pattern()), None),
        (LONGFORMER, None),
        (dataclasses.replace(LONGFORMER, pattern=DILATED), "LongformerForMaskedLM windows are not dilated"),
        (dataclasses.replace(LONGFORMER, pattern=FEW), "is Longformer's, not model.pattern.name=bigbird"),
        (BertConfig(150, pattern=FEW, **SIZES), "all tokens see all, whatever model.pattern.name=bigbird says"),
        (BertConfig(150, **SIZES), None),
    ],
)
def test_what_transformers_computes_otherwise_is_said_in_one_line(exported, caplog, config, expected):
    found = said(exported, caplog, config)
    assert len(found) == (expected is not None)
    assert expected is None or re.search(expected, found[0])
