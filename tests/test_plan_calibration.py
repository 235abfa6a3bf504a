"""The layers that are compared with published runs have the published layers' FLOPs."""

import pytest

from benchmarks.plan_calibration import RUNS
from pretrain.commands.planning import parse_plan

GATED = {  # width, feed-forward, width of the keys, layers
    "32B": (8192, 28672, 8192, 32),
    "Llama2-70B": (8192, 28672, 1024, 80),
    "Llama3.1-8B": (4096, 14336, 1024, 32),
}


@pytest.mark.parametrize("name", RUNS)
def test_layers_have_the_published_products(name):
    recipe, target = parse_plan(RUNS[name].arguments.split())
    width, gated, keys, depth = GATED[name.partition(" on ")[0]]
    model = recipe.model
    assert (model.width, model.depth, model.width // model.heads) == (width, depth, 128)
    ours = 4 * width**2 + 2 * width * model.feed_forward
    assert ours == 2 * width**2 + 2 * width * keys + 3 * width * gated
    assert target.topology.partition(":")[0] in name and 0 < RUNS[name].measured * RUNS[name].again < 1
