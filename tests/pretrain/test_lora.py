"""Low-rank products beside matrices."""

import dataclasses

import jax
import numpy as np
import pytest

from data_pipelines.errors import UserError
from models.core.parameters import leaves, nest
from pretrain.lora import Lora, merged
from pretrain.recipe import check, from_json, to_json
from pretrain.training.assembly import assemble, initial_params, parameter_shapes
from tests.pretrain import tiny

RECIPE = tiny.bert(lora=Lora(rank=4, targets=("attention/key", "feed_forward/up")), frozen=("layers",))


def test_a_product_is_added_to_its_matrix_and_begins_as_nothing():
    params = initial_params(assemble(RECIPE))
    plain = {name: leaf for name, leaf in params.items() if name != "lora"}
    assert tiny.equal(merged(params), plain) and merged(plain) is plain
    rng = np.random.default_rng(0)
    params = nest({path: rng.normal(size=leaf.shape) for path, leaf in leaves(params)})
    before, after = dict(leaves(params)), dict(leaves(merged(params)))
    changed = {path for path in after if not np.array_equal(after[path], before[path])}
    assert changed == {"layers/attention/key/kernel", "layers/feed_forward/up/kernel"}
    for path in changed:
        down, up = (before[f"lora/{path}/{name}"] for name in ("down", "up"))
        assert down.shape[-1] == up.shape[-2] == 4
        np.testing.assert_allclose(after[path], before[path] + 16 / 4 * (down @ up), rtol=1e-5, atol=1e-5)


def test_a_recipe_with_products_is_itself_after_json_and_a_target_that_is_none_is_named():
    assert from_json(to_json(RECIPE)) == RECIPE and "lora" not in to_json(tiny.bert())
    with pytest.raises(UserError, match="lora.targets: no matrix's path ends with attention/queries"):
        check(dataclasses.replace(RECIPE, lora=Lora(targets=("attention/queries",))))
    assert jax.tree.leaves(parameter_shapes(RECIPE)["lora"])[0].dtype == np.float32
