"""What the contract does not show of MobileBERT: packed rows, and sizes that do not fit together."""

import dataclasses

import jax
import numpy as np
import pytest

from models.core.program import Program
from models.families.mobilebert import MobileBertConfig
from models.families.registry import FAMILIES
from tests.contract import cases

CASE = cases.CASES["mobilebert"]


def test_two_texts_in_a_row_are_read_as_each_alone():
    """No token reads a neighbour of the other text."""
    model = FAMILIES["mobilebert"].module(CASE.model, Program(), ("predictions", "pair"))
    tokens = np.random.default_rng(0).integers(5, 100, (1, 20)).astype(np.int32)
    row = {"tokens": tokens, "types": 0 * tokens, "segments": 0 * tokens + 1, "positions": np.arange(20)[None]}
    first, second = slice(None, 12), slice(12, None)
    packed = row | {"segments": 1 + (np.arange(20)[None] >= 12).astype(np.int32)}
    encode = jax.jit(lambda inputs: model.apply({"params": cases.params(CASE)}, inputs, method="encode"))
    alone = [encode({name: array[:, part] for name, array in row.items()}) for part in (first, second)]
    np.testing.assert_allclose(encode(packed), np.concatenate(alone, axis=1), atol=2e-6)
    assert np.abs(encode(row) - encode(packed)).max() > 1e-3


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"reads": "all"}, "model.reads='all': use one of shared, narrow, hidden"),
        ({"norm": "rms"}, "model.norm='rms': use one of affine, layer"),
        ({"bottleneck": 130}, "model.bottleneck=130 is not a multiple of model.heads=4"),
        ({"embedding": 513}, "model.embedding=513: must be at most model.width=512"),
        ({"stacked": 0}, "model.stacked=0: must be at least 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(fields, said):
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(MobileBertConfig(), **fields)
