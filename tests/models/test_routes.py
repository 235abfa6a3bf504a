"""Drawn blocks find their way: what devices send each other is what the table names, once."""

import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from models.attention.patterns.pattern import Pattern, blocks_of
from models.attention.patterns.routes import routes
from models.core.sharding import placed_by
from tpu.mesh import AXES
from tpu.rules import activation_rules

DEPTH, HEADS, NUMBER, DRAWN = 2, 4, 24, 3


def table(heads):
    """Blocks drawn with repetitions, some of them none."""
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, NUMBER, (DEPTH, heads, NUMBER, DRAWN), dtype=np.int32)
    drawn[rng.random(drawn.shape) < 0.2] = -1
    return drawn


@pytest.mark.parametrize("parts, groups, heads", [(2, 1, HEADS), (4, 2, HEADS), (8, 4, HEADS), (4, 2, 1)])
def test_each_block_is_found_where_it_was_sent(parts, groups, heads):
    drawn = table(heads)
    made, own, of_group = routes(drawn, HEADS, parts, groups), NUMBER // parts, HEADS // groups
    for layer, head, row, column in np.argwhere(np.broadcast_to(drawn, (DEPTH, HEADS, NUMBER, DRAWN)) >= 0):
        sender, index = divmod(made.place[layer, head, row, column], made.send.shape[-1])
        unit = made.send[layer, head // of_group, sender, row // own, index]
        found = head // of_group * of_group + unit // own, sender * own + unit % own
        assert found == (head, drawn[layer, head % heads, row, column])


def test_as_much_is_sent_as_the_device_that_asks_another_for_most_names():
    drawn, parts = table(HEADS), 4
    own, named = NUMBER // parts, []
    for layer in range(DEPTH):
        for reader in range(parts):
            asked = {(head, block) for head in range(HEADS) for block in drawn[layer, head][own * reader :][:own].flat}
            named += [sum(block // own == sender for _, block in asked) for sender in range(parts)]
    assert routes(drawn, HEADS, parts, 1).send.shape == (DEPTH, 1, parts, parts, max(named))


def test_routes_are_made_where_a_mesh_cuts_rows_alone_and_never_inside_of_blocks():
    pattern = Pattern("bigbird", block=8)

    def blocks(length, cut):
        mesh = AbstractMesh((1, 2, 1, cut, 2), AXES, axis_types=(AxisType.Auto,) * len(AXES))
        with placed_by(activation_rules(mesh)):
            return blocks_of(pattern, DEPTH, HEADS, length)

    assert blocks(128, 1).routes is None and blocks_of(pattern, DEPTH, HEADS, 128).routes is None
    assert blocks(128, 4).routes.send.shape[:4] == (DEPTH, 2, 4, 4)
    with pytest.raises(ValueError, match="sequence=4 cuts rows of 144 .* no multiple of model.pattern.block=8: .* 32"):
        blocks(144, 4)
    with pytest.raises(ValueError, match="sequence=4 does not divide length, which is 130"):
        blocks(130, 4)
