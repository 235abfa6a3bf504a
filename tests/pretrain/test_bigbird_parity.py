"""Our BigBird computes what transformers' torch BigBird computes: logits, losses, every gradient.

Its blocks are read from the torch model as it runs and given to ours as a pattern: in evaluation the first block in
place of each drawn one, in training what NumPy draws after it was seeded with the layer's number.
"""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention

from models.attention.patterns import pattern as patterns
from models.attention.patterns.blocks import Blocks
from models.attention.patterns.pattern import Pattern
from models.families.bigbird import FAMILY
from tests.models.shapes import parameter_shapes
from tests.pretrain import reference
from tests.pretrain.test_bert_parity import PROGRAMS, check

SIZES = {"vocab_size": 1003, "width": 64, "feed_forward": 96, "heads": 2, "dropout": 0.0, "attention_dropout": 0.0}
SMALL = Pattern("bigbird", block=4, random=2)
TINY = dataclasses.replace(FAMILY.sizes["tiny"], positions=64, pattern=SMALL, **SIZES)
seeds = itertools.count(1)
POOLER = ("bert.pooler.weight", "bert.pooler.bias")


def adopt(model, batch, monkeypatch):
    """Make the blocks that a torch model draws for such rows those of our pattern -> i32[depth, heads, n - 2, r]."""
    read, make_mask = [], BigBirdBlockSparseAttention._create_rand_mask_from_inputs

    def recorded(from_mask, to_mask, drawn, *rest):
        read.append(drawn[0].numpy())
        return make_mask(from_mask, to_mask, drawn, *rest)

    monkeypatch.setattr(BigBirdBlockSparseAttention, "_create_rand_mask_from_inputs", staticmethod(recorded))
    with torch.no_grad():
        model(**reference.torch_inputs(batch))
    monkeypatch.setattr(BigBirdBlockSparseAttention, "_create_rand_mask_from_inputs", staticmethod(make_mask))
    drawn = np.stack(read)

    def blocks(pattern, depth, heads, number):
        ends = (0, number - 1)
        padded = np.pad(drawn, [(0, 0), (0, 0), (1, 1), (0, 0)], constant_values=-1).astype(np.int32)
        assert padded.shape == (depth, heads, number, pattern.random)
        return Blocks(padded, block=pattern.block, offsets=(-1, 0, 1), columns=ends, rows=ends)

    theirs = patterns.PATTERNS["bigbird"]._replace(blocks=blocks)
    monkeypatch.setitem(patterns.PATTERNS, "bigbird", theirs)
    return drawn


def long_batch(config, seed, rows, length, slots=6):
    """Ragged rows, of which the first has no padding: in it the row's last block is global."""
    batch = reference.random_batch(config, seed, rows, length, slots)
    tokens = np.random.default_rng(seed).integers(5, config.vocab_size, length).astype(np.int32)
    batch["tokens"][0] = np.where(batch["segments"][0] > 0, batch["tokens"][0], tokens)
    batch["segments"][0] = 1
    return batch


def check_theirs(config, tmp_path, monkeypatch, batch, settings, train, bounds=(1e-5, 2e-5)):
    # For what JAX has compiled this is another pattern than that of the test before.
    config = dataclasses.replace(config, pattern=dataclasses.replace(config.pattern, seed=next(seeds)))
    parameter_shapes(config)  # kept: there are no such blocks for the short rows that it takes
    model = reference.torch_model(config, "model").train(train)
    drawn = adopt(model, batch, monkeypatch)
    check(config, tmp_path, *bounds, batch, settings, model, () if config.pair_head else POOLER)
    return drawn


@pytest.mark.parametrize("length", [64, 61], ids=["whole blocks", "a short last block"])
@pytest.mark.parametrize("train", [False, True], ids=["evaluation", "training"])
def test_tiny_equals_torch(train, length, tmp_path, monkeypatch):
    batch = long_batch(TINY, seed=1, rows=4, length=length)
    drawn = check_theirs(TINY, tmp_path, monkeypatch, batch, [PROGRAMS["scan"]], train)
    assert drawn.shape == (2, 2, 14, 2)
    assert drawn.any() == train


def test_tiny_without_pair_head_equals_torch_which_has_a_pooler_all_the_same(tmp_path, monkeypatch):
    config = dataclasses.replace(TINY, pair_head=False)
    batch = long_batch(config, seed=2, rows=4, length=64)
    check_theirs(config, tmp_path, monkeypatch, batch, [PROGRAMS["unroll"]], train=True)


@pytest.mark.parametrize(
    "length", [1024, pytest.param(3072, marks=pytest.mark.slow), pytest.param(4096, marks=pytest.mark.slow)]
)
def test_the_paper_s_lengths_whose_blocks_are_drawn_in_another_way_give_torch_logits(length, tmp_path, monkeypatch):
    pattern = Pattern("bigbird", block=64, random=3)
    config = dataclasses.replace(TINY, positions=4096, pattern=pattern)
    batch = long_batch(config, seed=3, rows=2, length=length)
    drawn = check_theirs(config, tmp_path, monkeypatch, batch, [], train=True)
    assert drawn.shape[2:] == (length // 64 - 2, 3)
    assert (drawn == length // 64 - 1).any() == (length == 1024)  # there the last, global one counts twice


@pytest.mark.slow
def test_base_equals_torch(tmp_path, monkeypatch):
    pattern = Pattern("bigbird", block=16, random=3)
    config = dataclasses.replace(FAMILY.sizes["base"], dropout=0.0, attention_dropout=0.0, pattern=pattern)
    batch = long_batch(config, seed=4, rows=2, length=200, slots=10)
    check_theirs(config, tmp_path, monkeypatch, batch, [PROGRAMS["scan"]], train=True, bounds=(1e-4, 5e-5))


def give_ours(config, length, monkeypatch):
    """Make the torch model's layers read the blocks of our pattern."""
    blocks = patterns.blocks_of(config.pattern, config.depth, config.heads, length)
    layers = iter(list(blocks.drawn) * 2)
    draw = lambda self, **sizes: list(np.asarray(next(layers))[:, 1:-1])
    monkeypatch.setattr(BigBirdBlockSparseAttention, "_bigbird_block_rand_mask_with_head", draw)


def test_torch_with_our_drawn_blocks_is_ours(tmp_path, monkeypatch):
    """Our pattern as it is, which the torch model is given in place of its own."""
    config = dataclasses.replace(TINY, pattern=Pattern("bigbird", block=4, random=2))
    give_ours(config, 64, monkeypatch)
    check(config, tmp_path, 1e-5, 2e-5, long_batch(config, seed=5, rows=4, length=64), [PROGRAMS["scan"]])
