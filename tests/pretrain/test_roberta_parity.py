"""Our RoBERTa computes what transformers' torch RoBERTa computes: logits, loss, every gradient, padding included."""

import dataclasses

import numpy as np
import pytest
import torch
import transformers

from models.blocks.embeddings import padded_vocab
from models.core.parameters import count
from models.families.roberta import FAMILY
from pretrain.huggingface.export import config_fields
from tests.models.shapes import parameter_shapes
from tests.pretrain import reference
from tests.pretrain.test_bert_parity import PROGRAMS, check

TINY = dataclasses.replace(FAMILY.sizes["tiny"], vocab_size=1003, positions=64, dropout=0.0, attention_dropout=0.0)
BASE = dataclasses.replace(FAMILY.sizes["base"], dropout=0.0, attention_dropout=0.0)


def test_tiny_equals_torch(tmp_path):
    batch = reference.random_batch(TINY, seed=1)
    assert (batch["tokens"] == 1).any(), "torch counts positions of what is no padding"
    check(TINY, tmp_path, 1e-5, 2e-5, batch, [PROGRAMS["scan"]])


def test_rows_as_long_as_there_are_positions_give_torch_logits(tmp_path):
    config = dataclasses.replace(TINY, positions=32)
    check(config, tmp_path, 1e-5, 2e-5, reference.random_batch(config, seed=2), [])


def test_two_types_and_another_activation_give_torch_logits(tmp_path):
    config = dataclasses.replace(TINY, types=2, activation="relu")
    check(config, tmp_path, 1e-5, 2e-5, reference.random_batch(config, seed=3), [])


@pytest.mark.slow
def test_base_equals_torch(tmp_path):
    batch = reference.random_batch(BASE, seed=4, rows=4, length=64, slots=10)
    check(BASE, tmp_path, 1e-4, 5e-5, batch, [PROGRAMS["scan"]])


@pytest.mark.parametrize(("size", "millions"), [("base", 124.7), ("large", 355.4)])
def test_the_published_sizes_have_hugging_face_s_numbers_of_parameters(size, millions):
    config = FAMILY.sizes[size]
    with torch.device("meta"):
        theirs = transformers.RobertaForMaskedLM(transformers.RobertaConfig(**config_fields(config, "model", {})))
    padding = (padded_vocab(config.vocab_size) - config.vocab_size) * (config.width + 1)
    ours = count(parameter_shapes(config)) - padding
    assert ours == sum(parameter.numel() for parameter in theirs.parameters())
    assert np.round(ours / 1e6, 1) == millions
