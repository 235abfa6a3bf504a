"""What models may count on in rows of every layout."""

import numpy as np
import pytest

from data_pipelines.batches import make_examples
from tests.data_pipelines.corpora import epoch
from tests.data_pipelines.layouts import LAYOUTS, written


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return written(tmp_path_factory.mktemp("corpus") / "c")


@pytest.mark.parametrize("name", [name for name in LAYOUTS if not name.startswith(("stream", "permuted"))])
def test_padding_is_at_the_end_so_that_a_token_s_place_in_the_row_is_its_position(name, corpus):
    real = epoch(make_examples(LAYOUTS[name], corpus, "train", 8, seed=0))["segments"] > 0
    assert not real.all() and real[:, 0].all()
    assert not (np.diff(real.astype(int), axis=1) > 0).any()
