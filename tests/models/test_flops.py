"""The FLOPs that a family states are those that torch counts in transformers' models."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from models.attention.patterns.pattern import Pattern
from models.families import albert, bert, electra, transformer_xl
from tests.pretrain import reference

SHARED = {"vocab_size": 1003, "positions": 64}
BERT = dataclasses.replace(bert.FAMILY.sizes["tiny"], **SHARED)
# FLOPs of one position of a BERT layer, but for its key and value, in rows of 32
QUERY = 2 * (2 * BERT.width**2 + 2 * BERT.width * BERT.feed_forward) + 2 * 2 * 32 * BERT.width
XL = dataclasses.replace(transformer_xl.FAMILY.sizes["tiny"], vocab_size=1003, memory=20)
ALBERT = dataclasses.replace(albert.FAMILY.sizes["tiny"], pair_head=False, **SHARED)
ELECTRA = dataclasses.replace(electra.FAMILY.sizes["tiny"], **SHARED)

SHAPE = SimpleNamespace(batch_size=3, length=32)


def torch_flops(model, rows, length):
    tokens = torch.zeros(rows, length, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=tokens)
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "family, config",
    [
        (bert.FAMILY, BERT),
        (bert.FAMILY, dataclasses.replace(BERT, pair_head=False)),
        (albert.FAMILY, ALBERT),
        (electra.FAMILY, ELECTRA),  # the generator's and the discriminator's
    ],
)
def test_flops_are_those_that_torch_counts(family, config):
    expected = sum(torch_flops(reference.torch_model(config, part), 3, 32) for part in family.hf)
    if config is BERT:  # ours computes the first position once for each head
        expected += 3 * QUERY
    assert family.flops(config, SHAPE, predictions=32) == expected


@pytest.mark.parametrize("cutoffs", [(), (100, 400)])
def test_transformer_xl_is_a_causal_xlnet_and_its_softmax(cutoffs):
    config = dataclasses.replace(XL, cutoffs=cutoffs)
    model = transformers.XLNetModel(
        transformers.XLNetConfig(
            vocab_size=8, d_model=config.width, n_layer=config.depth, n_head=config.heads,
            d_inner=config.feed_forward, attn_type="uni", ff_activation="relu",
        )
    )  # fmt: skip
    tokens, memory = torch.zeros(3, 32, dtype=torch.long), torch.zeros(config.memory, 3, config.width)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=tokens, mems=[memory] * config.depth)
    rows = cutoffs[0] + len(cutoffs) if cutoffs else config.vocab_size
    softmax = 2 * 3 * 32 * config.width * rows
    assert transformer_xl.FAMILY.flops(config, SHAPE, predictions=32) == counter.get_total_flops() + softmax


def test_fewer_predictions_save_logits_and_queries_of_the_last_layer():
    fewer = bert.FAMILY.flops(BERT, SHAPE, predictions=5)
    head = 2 * BERT.width * (BERT.width + BERT.vocab_size)
    assert bert.FAMILY.flops(BERT, SHAPE, predictions=32) - fewer == 3 * 27 * (head + QUERY)
    tower, width = ELECTRA.generator, ELECTRA.embedding
    query = 2 * (2 * tower.width**2 + 2 * tower.width * tower.feed_forward) + 2 * 2 * 32 * tower.width
    saved = electra.FAMILY.flops(ELECTRA, SHAPE, predictions=32) - electra.FAMILY.flops(ELECTRA, SHAPE, predictions=5)
    assert saved == 3 * 27 * (2 * width * (tower.width + ELECTRA.vocab_size) + query)


@pytest.mark.parametrize("module, config", [(albert, ALBERT), (bert, BERT), (electra, ELECTRA)])
def test_of_a_sparse_pattern_the_visible_pairs_count(module, config):
    """Blocks of 4: of the 8, rows 0 and 7 see 8, of the others 2 see 5 and 4 see 6; the last layer's at 8 of 32."""
    sparse = dataclasses.replace(config, pattern=Pattern("bigbird", block=4, random=1))
    saved = module.FAMILY.flops(config, SHAPE, predictions=8) - module.FAMILY.flops(sparse, SHAPE, predictions=8)
    of_layer = 4 * 3 * (32 * 32 - 16 * (2 * 8 + 2 * 5 + 4 * 6))  # FLOPs of a layer's products, by its width
    if module is electra:
        assert saved == pytest.approx(of_layer * (64 * (1 + 8 / 32) + 128 * 2))
    else:
        read = 8 + int(config.pair_head)
        assert saved == pytest.approx(of_layer * config.width * (1 + read / 32))
