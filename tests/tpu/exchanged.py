"""What devices read of each other's rows, in a process with 8 simulated devices; prints JSON. For test_exchange.py.

Arguments: 'positions', 'attention', 'bytes' or 'softmax', then meshes; attention KIND:MESH by KINDS here.
"""

import dataclasses
import functools
import json
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from models.attention import sparse
from models.attention.exchange import routed
from models.attention.mask import Mask
from models.attention.patterns.pattern import Pattern, on_host
from models.blocks.positions import gather_positions
from models.core.sharding import placed_by
from pretrain.objectives import blocked_softmax
from tests.models.test_sparse import Kind, random_case
from tests.tpu.simulated import QUICK
from tpu import hlo
from tpu.collectives import collectives
from tpu.mesh import make_mesh, parse_mesh
from tpu.rules import activation_rules

ROWS, LENGTH, WIDTH, READ, VOCAB = 8, 64, 16, 10, 128
BIGBIRD = Pattern("bigbird", block=8)
LONG, HEADS, HEAD_DIM = 4096, 4, 8
AROUND = tuple(range(-5, 6))  # over more than one neighbour, where a part has 4 blocks
KINDS = {
    "bigbird": Kind(128, 4, columns=(0, 31), rows=(0, 31), drawn=3, heads=2, rate=0.2),
    "longformer": Kind(128, 4, AROUND, reach=True, heads=2, globals=3, rate=0.1),
    "repeats": Kind(128, 4, (-1, 0, 3), columns=(5,), rows=(9, 10), drawn=4, heads=1),
    "causal": Kind(128, 4, (-9, -1, 0), columns=(3,), rows=(30,), drawn=2, heads=2, causal=True, rate=0.3),
    "ranked": Kind(128, 4, columns=(7,), rows=(8,), drawn=1, heads=2, globals=2, ranked=True),
}


def rules_of(text):
    number = math.prod(int(part.partition("=")[2]) for part in text.split(","))
    return activation_rules(make_mesh(parse_mesh(text, number), jax.devices()[:number]))


def errors(one, other):
    return jax.tree.map(lambda a, b: float(np.abs(np.asarray(a) - np.asarray(b)).max()), one, other)


def moved(program):
    """[kind, elements, bytes] of what devices exchange."""
    found = [c for c in collectives(hlo.parse(program.as_text())) if c.group > 1]
    return [[c.kind, math.prod(array.dims), array.bytes] for c in found for array in c.arrays]


def positions(text):
    """Of chosen positions and their gradient: the largest error, and what devices exchange."""
    rng, rules = np.random.default_rng(0), rules_of(text)
    x, weights = (jnp.asarray(rng.normal(size=(ROWS, n, WIDTH)), jnp.float32) for n in (LENGTH, READ))
    chosen = jnp.asarray(rng.integers(0, LENGTH, (ROWS, READ)))

    def read(rules, x, chosen, weights):
        with placed_by(rules):
            values, pull = jax.vjp(lambda x: gather_positions(x, chosen), x)
            return values, pull(weights)[0]

    placed = jax.device_put(x, NamedSharding(rules.mesh, rules.spec(("batch", "length", "heads"), x.shape)))
    program = _compiled(functools.partial(read, rules), placed, chosen, weights)
    return {"errors": errors(program(placed, chosen, weights), read(None, x, chosen, weights)), "moved": moved(program)}


def attention(text):
    """Of a pattern's outputs and gradients: the largest error."""
    name, _, text = text.partition(":")
    q, k, v, mask, noise, weights = random_case(KINDS[name], 0)
    rules, real = rules_of(text), np.asarray(mask.segments > 0)

    def both(rules, q, k, v, mask, noise, weights):
        with placed_by(rules):
            attend = lambda *qkv: sparse.attention(*qkv, mask, dropout_rate=KINDS[name].rate, noise=noise)
            outputs, pull = jax.vjp(attend, q, k, v)
            return outputs * real[..., None, None], pull(weights)

    inputs = q, k, v, mask, noise, weights
    expected = _compiled(functools.partial(both, None), *inputs)(*inputs)
    with placed_by(rules):
        inputs = q, k, v, _routed(mask, q.shape[2]), noise, weights
    return {"errors": errors(_compiled(functools.partial(both, rules), *inputs)(*inputs), expected)}


def exchanged(text):
    """What devices exchange for the outputs and gradients of BigBird's attention."""
    rules = rules_of(text)
    x = jnp.zeros((1, LONG, HEADS, HEAD_DIM), jnp.float32)
    with placed_by(rules):
        blocks = routed(on_host(BIGBIRD, 1, HEADS, LONG), HEADS, LONG)
    mask = Mask(jnp.ones((1, LONG), jnp.int32), blocks=jax.tree.map(lambda array: jnp.asarray(array[0]), blocks))

    def both(q, k, v, mask):
        with placed_by(rules):
            attend = lambda *qkv: sparse.attention(*qkv, mask, dropout_rate=0.0, noise=None)
            outputs, pull = jax.vjp(attend, q, k, v)
            return outputs, pull(outputs)

    placed = jax.device_put(x, NamedSharding(rules.mesh, rules.spec(("batch", "length", "heads", None), x.shape)))
    return {"moved": moved(_compiled(both, placed, placed, placed, mask))}


def softmax(text):
    """Of the softmax in blocks and its gradients: the largest error; [kind, whether for each block, elements] of what
    devices exchange."""
    rng, rules = np.random.default_rng(0), rules_of(text)
    blocked_softmax.LOGITS = 8 * VOCAB  # several blocks on each device
    hidden, table = (rng.normal(size=(*n, WIDTH)).astype(np.float32) for n in ((ROWS, LENGTH), (VOCAB,)))
    targets, weights = rng.integers(0, VOCAB, (ROWS, LENGTH)), rng.random((1, ROWS, LENGTH))
    rest = (jnp.zeros(VOCAB), jnp.asarray(targets, jnp.int32), jnp.asarray(weights, jnp.float32))

    def both(rules, hidden, table):
        with placed_by(rules):
            return jax.value_and_grad(lambda *factors: blocked_softmax.softmax_sums(*factors, *rest).nats[0], (0, 1))(
                hidden, table
            )

    axes = ("batch", "length", None), ("vocab", None)
    shardings = [
        NamedSharding(rules.mesh, rules.spec(names, x.shape)) for names, x in zip(axes, (hidden, table), strict=True)
    ]
    placed = jax.device_put((hidden, table), tuple(shardings))
    program = _compiled(functools.partial(both, rules), *placed)
    expected = jax.jit(functools.partial(both, None))(hidden, table)
    moved = [c for c in collectives(hlo.parse(program.as_text())) if c.group > 1]
    found = [[c.kind, "while" in c.source, math.prod(array.dims)] for c in moved for array in c.arrays]
    return {"errors": jax.tree.leaves(errors(program(*placed), expected)), "moved": found}


def _routed(mask, heads):
    """A mask of one layer with the routes that the mesh in force needs."""
    of_layers = jax.tree.map(lambda array: np.asarray(array)[None], mask.blocks)
    blocks = routed(of_layers, heads, mask.segments.shape[1])
    return dataclasses.replace(mask, blocks=jax.tree.map(lambda array: jnp.asarray(array[0]), blocks))


def _compiled(function, *arguments):
    return jax.jit(function).lower(*arguments).compile(compiler_options=QUICK)


if __name__ == "__main__":
    what = {"positions": positions, "attention": attention, "bytes": exchanged, "softmax": softmax}[sys.argv[1]]
    print(json.dumps({text: what(text) for text in sys.argv[2:]}))
