"""Which keys a query sees, without a dense [batch, queries, keys] array: causal, prefix, permutation and packed rows.

`visible` says it densely: for plain attention in both forms, for cuDNN's, which takes masks in no other way, and for
tests. No other kernel makes such an array.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from models.attention.distances import by_key
from models.attention.patterns.blocks import Blocks, counts
from models.blocks.positions import gather_positions
from models.core.sharding import constrain

PAIRS = "query_key_pairs"  # scope of the products of all queries with all keys, also where the mask hides a key


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mask:
    """A query sees a key where all that is given here lets it.

    segments: i32[batch, keys]; a query sees the keys of its own; 0 is padding, seen by no real token.
    ranks, thresholds: i32[batch, keys], i32[batch, queries] or None; a query sees the keys whose rank is below its
        threshold. With positions for ranks: position + 1 is causal, the prefix's length for its own queries a prefix.
    queries: i32[batch, queries], the queries' segments; None where the queries are the keys.
    after: i32[batch, queries], of chosen queries: how many keys come after the one that each query is; None where the
        queries are the last keys, all of them in turn.
    blocks: of a sparse pattern, by which a query sees few blocks of keys; None where it sees all. The queries are then
        the keys, all of them.
    bias: f32[batch or 1, heads, queries, keys] or None, added to the scores.
    distances: f32[heads, queries + keys - 1] or None, added to the scores of all rows by how far a key is from a query:
        to those of query i and key j the number queries - 1 - i + j.
    globals: i32[batch, n] or None; the positions of tokens that see all and that all see, whatever the blocks are;
        -1 for none, no position twice.
    itself: whether queries see themselves whatever their rank.
    globals_apart: whether something else gives what global tokens see, so that attention may give any numbers there.
    causal: whether a query sees no key after itself; static, so that a kernel skips what nobody sees.
    whole: whether queries are never cut over a mesh, as those of a short target are not.

    Of queries that see nothing attention is zeros.
    """

    segments: Array
    ranks: Array | None = None
    thresholds: Array | None = None
    queries: Array | None = None
    after: Array | None = None
    blocks: Blocks | None = None
    globals: Array | None = None
    bias: Array | None = None
    distances: Array | None = None
    itself: bool = dataclasses.field(default=False, metadata={"static": True})
    globals_apart: bool = dataclasses.field(default=False, metadata={"static": True})
    causal: bool = dataclasses.field(default=False, metadata={"static": True})
    whole: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def query_segments(self) -> Array:
        """i32[batch, queries], the queries' segments."""
        return self.segments if self.queries is None else self.queries

    @property
    def blind(self) -> bool:
        """Whether there may be queries that see nothing; others see themselves."""
        return self.ranks is not None or (self.queries is not None and self.after is None)

    @property
    def biased(self) -> bool:
        """Whether something is added to the scores."""
        return self.bias is not None or self.distances is not None

    @property
    def axis(self) -> str | None:
        """The name of the queries' axis for the mesh, None where they are not the whole length."""
        return "length" if self.after is None and not self.whole else None


def chosen(mask: Mask, slots: Array) -> Mask:
    """A whole row's mask for its queries at slots i32[batch, n] alone."""
    at = lambda array: None if array is None else gather_positions(array, slots)
    thresholds, queries = at(mask.thresholds), at(mask.query_segments)
    after, bias = mask.query_segments.shape[1] - 1 - slots, bias_of(mask)
    if bias is not None:
        bias = jnp.take_along_axis(bias, slots[:, None, :, None], axis=2)
    return dataclasses.replace(mask, thresholds=thresholds, queries=queries, after=after, bias=bias, distances=None)


def remembering(memory: Array, row: Mask) -> Mask:
    """A row's mask whose keys are a memory of these segments i32[batch, memory], below all ranks, then the row's."""
    lowest = jnp.full_like(memory, jnp.iinfo(jnp.int32).min)
    ranks = None if row.ranks is None else jnp.concatenate([lowest, row.ranks], axis=1)
    segments = jnp.concatenate([memory, row.segments], axis=1)
    return dataclasses.replace(row, segments=segments, ranks=ranks, queries=row.query_segments)


def bias_of(mask: Mask) -> Array | None:
    """What is added to the scores: f32[batch or 1, heads, queries, keys]."""
    if mask.distances is None:
        return mask.bias
    bias = constrain(by_key(mask.distances, mask.segments.shape[1]), None, "heads", mask.axis, None)
    return bias if mask.bias is None else mask.bias + bias


def visible(mask: Mask) -> Array:
    """Which keys each query sees: bool[batch, heads or 1, queries, keys]."""
    of_queries = lambda array: jnp.expand_dims(array, (1, 3))
    of_keys = lambda array: jnp.expand_dims(array, (1, 2))
    seen = of_queries(mask.query_segments) == of_keys(mask.segments)
    if mask.ranks is not None:
        reached = of_keys(mask.ranks) < of_queries(mask.thresholds)
        seen &= reached | _themselves(mask, jnp.equal) if mask.itself else reached
    if mask.causal:
        seen &= _themselves(mask, jnp.less_equal)
    if mask.blocks is not None:
        seen &= times(mask) > 0
    return seen


def times(mask: Mask) -> Array:
    """How often a pattern's blocks and global tokens name each key for each query, whatever else the mask says:
    i32[batch or 1, heads or 1, length, length]."""
    length = mask.segments.shape[1]
    named = counts(mask.blocks, length)[None]
    if mask.globals is None:
        return named
    global_tokens = is_global(mask.globals, length)
    return jnp.where(global_tokens[:, None, :, None] | global_tokens[:, None, None, :], 1, named)


def is_global(positions: Array, length: int) -> Array:
    """Which tokens of a row `Mask.globals` names: bool[batch, length]."""
    return (positions[:, :, None] == jnp.arange(length)).any(1)


def only_of_seen(mixed: Array, seen: Array) -> Array:
    """mixed [batch, queries, heads, head_dim], zeros where a query sees nothing.

    Of no visible key a softmax makes equal shares of all, which would tell a prediction its own token.
    """
    return jnp.where(seen.any(axis=-1).swapaxes(1, 2)[..., None], mixed, 0)


def _themselves(mask: Mask, compare) -> Array:
    """bool[batch or 1, 1, queries, keys]: how a key's number compares with that of the key that a query is."""
    n, keys = mask.query_segments.shape[1], mask.segments.shape[1]
    positions = jnp.arange(keys - n, keys)[None] if mask.after is None else keys - 1 - mask.after
    return compare(jnp.arange(keys), positions[:, None, :, None])
