"""The FLOPs that a family states are those that torch counts in transformers' models."""

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from models import bert, electra
from tests.pretrain import reference

SHARED = {"vocab_size": 1003, "positions": 64}
BERT = dataclasses.replace(bert.FAMILY.sizes["tiny"], **SHARED)
# FLOPs of one position of a BERT layer, but for its key and value, in rows of 32
QUERY = 2 * (2 * BERT.width**2 + 2 * BERT.width * BERT.feed_forward) + 2 * 2 * 32 * BERT.width
ELECTRA = dataclasses.replace(electra.FAMILY.sizes["tiny"], **SHARED)


def torch_flops(model, rows, length):
    tokens = torch.zeros(rows, length, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=tokens)
    return counter.get_total_flops()


@pytest.mark.parametrize("pair_head", [True, False])
def test_bert(pair_head):
    config = dataclasses.replace(BERT, pair_head=pair_head)
    expected = torch_flops(reference.torch_model(config, "model"), 3, 32)
    if pair_head:  # ours computes the first position once for each head
        expected += 3 * QUERY
    assert bert.FAMILY.flops(config, 3, 32, predictions=32) == expected


def test_electra_is_its_generator_and_its_discriminator():
    expected = sum(torch_flops(reference.torch_model(ELECTRA, part), 3, 32) for part in electra.FAMILY.hf)
    assert electra.FAMILY.flops(ELECTRA, 3, 32, predictions=32) == expected


def test_fewer_predictions_save_logits_and_queries_of_the_last_layer():
    fewer = bert.FAMILY.flops(BERT, 3, 32, predictions=5)
    head = 2 * BERT.width * (BERT.width + BERT.vocab_size)
    assert bert.FAMILY.flops(BERT, 3, 32, predictions=32) - fewer == 3 * 27 * (head + QUERY)
