"""Our Longformer computes what transformers' torch Longformer computes: logits, losses, every gradient."""

import dataclasses

import jax
import numpy as np
import pytest

from models.attention.patterns.pattern import Pattern
from models.families.longformer import FAMILY
from pretrain.huggingface.tensors import tensors
from tests.models.shapes import parameter_shapes
from tests.pretrain import reference
from tests.pretrain.test_bert_parity import PROGRAMS, check

SIZES = {"vocab_size": 1003, "width": 64, "feed_forward": 96, "heads": 8, "dropout": 0.0, "attention_dropout": 0.0}
SIZES |= {"init_std": 0.06}  # or the gradients of global tokens' projections would be rounding
WINDOWS = Pattern("longformer", block=4, windows=(4, 12))
TINY = dataclasses.replace(FAMILY.sizes["tiny"], positions=64, pattern=WINDOWS, **SIZES)


def batch_of(config, seed, length, chosen):
    """Ragged rows; of each row another number of tokens is global, the first `chosen` of them, the last none.

    One of each is predicted: what it sees in the last layer is not read otherwise.
    """
    batch = reference.random_batch(config, seed, rows=4, length=length)
    rng, rows = np.random.default_rng(seed), []
    for real, predicted, number in zip(
        batch["segments"].sum(1), batch["prediction_positions"][:, 0], (chosen, chosen // 2, 1, 0), strict=True
    ):
        others = rng.permutation(np.delete(np.arange(real), predicted))
        tokens = np.append(predicted, others)[:number]
        rows.append(np.pad(tokens, (0, chosen - number), constant_values=-1))
    return batch | {"globals": np.array(rows, np.int32)}


# With 9 and fewer of this width and these heads keys and values of all tokens are not made, with more they are.
@pytest.mark.parametrize(("length", "chosen"), [(64, 3), (48, 12), (61, 3)], ids=["few", "many", "no whole window"])
def test_tiny_equals_torch_whichever_tokens_of_a_row_are_global(length, chosen, tmp_path):
    check(TINY, tmp_path, 1e-5, 2e-5, batch_of(TINY, 1, length, chosen), [PROGRAMS["scan"]])


@pytest.mark.parametrize("attention", ["dense", "blocked"])
def test_both_forms_equal_torch(attention, tmp_path):
    program = dataclasses.replace(reference.FLOAT32, attention=attention)
    check(TINY, tmp_path, 1e-5, 2e-5, batch_of(TINY, 2, 64, 3), [(program, True)])


def test_without_global_tokens_it_equals_torch_and_their_projections_are_not_trained(tmp_path):
    unread = [name for name in tensors(zeros(TINY), TINY, "model") if "_global" in name]
    assert len(unread) == 2 * 6
    batch = reference.random_batch(TINY, seed=3, rows=4, length=64)
    check(TINY, tmp_path, 1e-5, 2e-5, batch, [PROGRAMS["scan"]], unread=unread)


def zeros(config):
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), parameter_shapes(config))


@pytest.mark.slow
def test_base_equals_torch(tmp_path):
    windows = Pattern("longformer", windows=(64,) * 6 + (128,) * 6)
    config = dataclasses.replace(FAMILY.sizes["base"], dropout=0.0, attention_dropout=0.0, pattern=windows)
    check(config, tmp_path, 1e-4, 5e-5, batch_of(config, 4, 200, 2), [PROGRAMS["scan"]])
