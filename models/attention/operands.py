"""Inputs of attention besides hidden states: a layer's projections, and the arrays of relative attention."""

from typing import NamedTuple

from jax import Array

from models.blocks.dense import Affine

LANES = 128  # numbers in a TPU register's row


class Projections(NamedTuple):
    """A layer's projections [width, heads * head_dim], heads side by side; output is [heads * head_dim, width]."""

    query: Affine
    key: Affine
    value: Affine
    output: Affine


class Context(NamedTuple):
    """What queries attend to, heads side by side.   k, v: [batch, memory + length, width].   r: [batch or 1, distances,
    width], the keys of the distances."""

    k: Array
    v: Array
    r: Array


class Types(NamedTuple):
    """Types for scores by type: i32[batch, n] of the queries, i32[batch, memory + length] of the keys."""

    queries: Array
    keys: Array


class Biases(NamedTuple):
    """Biases of a query for each kind of score, f32[heads * head_dim] each: content and position are u and v of Dai et
    al. 2019; `type` is for scores by type (Yang et al. 2019, section 2.5), whose keys for 'same' and 'other' type are
    `types` [2, heads * head_dim]."""

    content: Array
    position: Array
    type: Array | None = None
    types: Array | None = None
