"""Layers of which some see the whole row and others a window around each token, with rotary positions of a base of
their own (Warner et al. 2024, arXiv:2412.13663, section 2.1.2).

The first layer and every `PERIOD`-th one after it are global. The first has no norm before its attention, since
embeddings have one.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from models.attention.kernels.kernel import Attention
from models.attention.mask import Mask
from models.attention.multi_head import MultiHeadAttention, attention_of
from models.attention.patterns.pairs import pairs
from models.attention.patterns.pattern import DENSE, blocks_of
from models.attention.rotary import Turns, turns_of
from models.blocks.feed_forward import FeedForward
from models.blocks.layer import LayerSizes, layer_sizes
from models.blocks.stack import stack
from models.core.family import Shape
from models.core.noise import site
from models.core.parameters import Noise
from models.core.program import Program

PERIOD = 3
GLOBAL, LOCAL = "global", "local"  # kinds of layers
HIDDEN = -1e30  # is added to the scores of cached keys beyond the window


class View(NamedTuple):
    """What a kind of layers sees.   filled: number of cached tokens, None without a cache."""

    mask: Mask
    turns: Turns
    filled: Array | None = None


def views(config, mask: Mask, filled: Array | None = None) -> dict[str, View]:
    """Return the views of both kinds of layers.   filled: how many tokens a cache has before the queries."""
    length, near = mask.query_segments.shape[1], config.pattern
    positions = jnp.arange(length)[None] + (0 if filled is None else filled)
    turns = functools.partial(turns_of, positions, config.width // config.heads)
    local = mask
    if near.name != DENSE and filled is None:
        blocks = blocks_of(near, 1, config.heads, length, mask.causal)
        local = dataclasses.replace(mask, blocks=jax.tree.map(lambda array: array[0], blocks))
    elif near.name != DENSE:
        distance = positions[..., None] - jnp.arange(mask.segments.shape[1])
        local = dataclasses.replace(mask, bias=jnp.where(distance > near.windows[0] // 2, HIDDEN, 0.0)[:, None])
    return {GLOBAL: View(mask, turns(config.global_base), filled), LOCAL: View(local, turns(config.local_base), filled)}


class Layer(nn.Module):
    """A layer as `stack` calls it.   kind: a key of the views.   normed: whether x is normalised already.
    state: the layer's cached keys and values."""

    sizes: LayerSizes
    program: Program
    kind: str
    normed: bool = False

    def setup(self):
        self.attention = MultiHeadAttention(self.sizes, self.program, pre_norm=True, normed=self.normed)
        self.feed_forward = FeedForward(self.sizes._replace(dropout=0.0), self.program.compute, pre_norm=True)

    def __call__(
        self, x: Array, seen: Mapping[str, View], noise: Noise, state: Any = None, slots: Array | None = None
    ) -> tuple[Array, Any]:
        mask, turns, filled = seen[self.kind]
        if filled is not None:
            x, new = self.attention.extend(x, mask, filled, state, turns)
            return self.feed_forward(x, noise, None), new
        x = self.attention(x, mask, noise, slots, turns=turns)
        return self.feed_forward(x, noise, "length" if slots is None else None), None


class Part(nn.Module):
    """A stack of its own, with the arguments of `stack`."""

    @nn.compact
    def __call__(self, *arguments):
        return stack(self, *arguments)


def through(
    parent: nn.Module,
    config,
    x: Array,
    seen: Mapping[str, View],
    noise: Noise,
    program: Program,
    slots: Array | None = None,
    cached: Any = None,
) -> tuple[Array, Any]:
    """Run all layers: x [rows, length, width] -> (like x, or only the positions `slots` i32[rows, n]; the cached keys
    and values with those of x, or None without a cache)."""
    of = lambda rows: jax.tree.map(lambda array: array[rows], cached)
    layer = functools.partial(Layer, layer_sizes(config), program, parent=None)
    last = slots if config.depth == 1 else None
    alone = [layer(GLOBAL, normed=True)], 1, x, seen, site(noise, 0), program, last, of(slice(1))
    x, new = Part(parent=parent, name="first")(*alone)
    if config.depth == 1:
        return x, new
    pattern = [layer(LOCAL)] * (PERIOD - 1) + [layer(GLOBAL)]
    x, more = stack(parent, pattern, config.depth - 1, x, seen, site(noise, 1), program, slots, of(slice(1, None)))
    return x, jax.tree.map(lambda *parts: jnp.concatenate(parts), new, more)


def attentions(config, shape: Shape, memory: int) -> list[Attention]:
    """Return the attentions that a kernel may compute: of an encoder not that of the last layer, which is computed at
    few positions."""
    if config.depth == 1 and not config.causal:
        return []
    of = functools.partial(attention_of, layer_sizes(config), shape.length, config.causal)
    blocks = blocks_of(config.pattern, 1, config.heads, shape.length, config.causal)
    return [of(), *[of(blocks=blocks)] * (blocks is not None and config.depth > 1)]


def seen_by_pattern(config, shape: Shape) -> float:
    """Return the share of (query, key) pairs that local layers see; documents in a row are ignored."""
    return float(pairs(config.pattern, 1, config.heads, shape.length, causal=config.causal)[0]) / shape.length**2


def seen(config, shape: Shape) -> float:
    """Return the same for global layers."""
    return (shape.length + 1) / (2 * shape.length) if config.causal else 1.0
