"""What attention computes with besides hidden states: the weights of a layer, and relative attention's arrays."""

from typing import NamedTuple

from jax import Array

from models.blocks.dense import Affine


class Projections(NamedTuple):
    """A layer's projections [width, heads * head_dim], the heads side by side, and from there back to the width."""

    query: Affine
    key: Affine
    value: Affine
    output: Affine


class Context(NamedTuple):
    """What queries attend to, heads side by side: k, v [batch, memory + length, width], r [batch or 1, distances,
    width], the keys of the distances."""

    k: Array
    v: Array
    r: Array


class Types(NamedTuple):
    """For the scores by types: i32[batch, n] of the queries, i32[batch, memory + length] of the keys."""

    queries: Array
    keys: Array


class Biases(NamedTuple):
    """What is added to a query for each kind of score, f32[heads * head_dim] each: u and v of Dai et al. 2019; for
    types (Yang et al. 2019, section 2.5) also `type`, and `types` [2, heads * head_dim], the keys of 'same' and
    'other'."""

    content: Array
    position: Array
    type: Array | None = None
    types: Array | None = None
