"""Our ALBERT computes what transformers' torch ALBERT computes: logits, losses, every gradient."""

import dataclasses

import numpy as np
import pytest
import torch
import transformers

from models.blocks.embeddings import padded_vocab
from models.core.parameters import count, leaves
from models.families.albert import FAMILY, SHARING
from pretrain.huggingface.export import config_fields
from tests.models.shapes import parameter_shapes
from tests.pretrain import reference
from tests.pretrain.test_bert_parity import PROGRAMS, check

TINY = dataclasses.replace(FAMILY.sizes["tiny"], vocab_size=1003, positions=64, embedding=32, width=64, feed_forward=96)
GROUPS = dataclasses.replace(TINY, depth=4, groups=2)


@pytest.mark.parametrize(("config", "program"), [(TINY, "scan"), (GROUPS, "unroll")], ids=["one group", "two groups"])
def test_tiny_equals_torch(config, program, tmp_path):
    check(config, tmp_path, 1e-5, 2e-5, reference.random_batch(config, seed=1), [PROGRAMS[program]])


def test_tiny_without_pair_head_gives_torch_logits(tmp_path):
    config = dataclasses.replace(TINY, pair_head=False)
    check(config, tmp_path, 1e-5, 2e-5, reference.random_batch(config, seed=2), [])


def test_layers_that_share_nothing_give_torch_logits_with_a_group_each(tmp_path):
    config = dataclasses.replace(TINY, sharing="none")
    check(config, tmp_path, 1e-5, 2e-5, reference.random_batch(config, seed=3), [])


@pytest.mark.slow
def test_base_equals_torch(tmp_path):
    config = FAMILY.sizes["base"]
    batch = reference.random_batch(config, seed=4, rows=4, length=64, slots=10)
    check(config, tmp_path, 1e-4, 5e-5, batch, [PROGRAMS["scan"]])


def parameters_of(config):
    """Without the vocabulary's padding rows, in the embeddings and in the head's bias."""
    padding = (padded_vocab(config.vocab_size) - config.vocab_size) * (config.embedding + 1)
    return count(parameter_shapes(config)) - padding


# Millions, as AlbertForPreTraining has them: the trunk with its pooler and both heads, tied weights counted once
MILLIONS = {"base": 11.8, "large": 17.8, "xlarge": 59.0, "xxlarge": 223.2}


@pytest.mark.parametrize("size", MILLIONS)
def test_the_published_sizes_have_hugging_face_s_numbers_of_parameters(size):
    config = FAMILY.sizes[size]
    with torch.device("meta"):
        fields = config_fields(config, "model", {})
        theirs = transformers.AlbertForPreTraining(transformers.AlbertConfig(**fields))
    assert parameters_of(config) == sum(parameter.numel() for parameter in theirs.parameters())
    assert round(parameters_of(config) / 1e6, 1) == MILLIONS[size]


def test_narrow_embeddings_save_seven_of_eight_parameters():
    """A vocabulary of 30,000 at a width of 1,024, as itself and through a width of 128."""
    config = FAMILY.sizes["large"]
    shapes = dict(leaves(parameter_shapes(config)))
    table, projection = shapes["embeddings/tokens"].shape, shapes["project/kernel"].shape
    assert config.vocab_size * config.width == 30_720_000
    assert config.vocab_size * table[1] + np.prod(projection) == 3_971_072


def test_what_is_shared_is_there_once_for_each_group():
    rows = lambda config: {
        path.split("/")[1]: leaf.shape[0] for path, leaf in leaves(parameter_shapes(config)["layers"], "layers/")
    }
    for sharing, blocks in SHARING.items():
        config = dataclasses.replace(GROUPS, sharing=sharing)
        assert rows(config) == {block: 2 if block in blocks else 4 for block in ("attention", "feed_forward")}
