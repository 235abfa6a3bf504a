"""Structured attention masks (causal, prefix, permutation, packed rows), without a dense [batch, queries, keys] array.

`visible` makes the dense array for plain attention in both forms, for cuDNN, which takes no other masks, and for tests;
no other kernel needs it.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from models.attention.distances import by_key
from models.attention.patterns.blocks import Blocks, counts
from models.blocks.positions import gather_positions
from models.core.sharding import constrain

PAIRS = "query_key_pairs"  # scope of the products of all queries with all keys, including pairs that the mask hides
OF_PATTERN = "of_a_pattern"  # scope inside of it, under a sparse pattern


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mask:
    """A query sees a key if every condition below allows it. The output of queries that see nothing is zeros.

    segments: i32[batch, keys]; a query sees the keys of its own segment; 0 is padding, which real tokens do not see.
    ranks, thresholds: i32[batch, keys], i32[batch, queries] or None; a query sees the keys whose rank is below its
        threshold. With positions as ranks, the threshold position + 1 gives a causal mask; the prefix's length, for
        queries in the prefix, a prefix mask.
    queries: i32[batch, queries], the queries' segments; None if the queries are the keys.
    after: i32[batch, queries], for queries at chosen positions: how many keys come after each query's own key; None if
        the queries are the last keys, in order.
    blocks: of a sparse pattern, by which a query sees few blocks of keys, or None for full attention. With blocks the
        queries are all of the keys.
    bias: f32[batch or 1, heads, queries, keys] or None, added to the scores.
    distances: f32[heads, queries + keys - 1] or None, added to the scores of all rows by distance: the entry
        queries - 1 - i + j to the score of query i and key j.
    globals: i32[batch, n] or None, the positions of tokens that see all tokens and that all see, whatever the blocks;
        -1 for none; no position twice.
    itself: whether queries see themselves whatever their rank.
    globals_apart: whether other code computes the output of global tokens, so that attention may return anything there.
    causal: whether a query sees no key after itself; static, so that kernels skip hidden blocks.
    whole: whether the mesh never cuts the queries, such as those of a short target.
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
        """Whether some queries may see nothing; if not, every query sees at least itself."""
        return self.ranks is not None or (self.queries is not None and self.after is None)

    @property
    def biased(self) -> bool:
        """Whether something is added to the scores."""
        return self.bias is not None or self.distances is not None

    @property
    def axis(self) -> str | None:
        """Logical axis of the queries for the mesh; None if they are not the whole length."""
        return "length" if self.after is None and not self.whole else None


def chosen(mask: Mask, slots: Array) -> Mask:
    """Reduce a whole row's mask to its queries at slots i32[batch, n]."""
    at = lambda array: None if array is None else gather_positions(array, slots)
    thresholds, queries = at(mask.thresholds), at(mask.query_segments)
    after, bias = mask.query_segments.shape[1] - 1 - slots, bias_of(mask)
    if bias is not None:
        bias = jnp.take_along_axis(bias, slots[:, None, :, None], axis=2)
    return dataclasses.replace(mask, thresholds=thresholds, queries=queries, after=after, bias=bias, distances=None)


def remembering(memory: Array, row: Mask) -> Mask:
    """Extend a row's mask by a memory before the row's keys.   memory: i32[batch, memory], its segments; its ranks are
    below all others."""
    lowest = jnp.full_like(memory, jnp.iinfo(jnp.int32).min)
    ranks = None if row.ranks is None else jnp.concatenate([lowest, row.ranks], axis=1)
    segments = jnp.concatenate([memory, row.segments], axis=1)
    return dataclasses.replace(row, segments=segments, ranks=ranks, queries=row.query_segments)


def bias_of(mask: Mask) -> Array | None:
    """Return the sum of all biases of the scores, f32[batch or 1, heads, queries, keys], or None."""
    if mask.distances is None:
        return mask.bias
    bias = constrain(by_key(mask.distances, mask.segments.shape[1]), None, "heads", mask.axis, None)
    return bias if mask.bias is None else mask.bias + bias


def pairs_scope(mask: Mask) -> str:
    """Return the scope of a mask's products of queries and keys, by which they are counted."""
    return PAIRS if mask.blocks is None else f"{PAIRS}/{OF_PATTERN}"


def visible(mask: Mask) -> Array:
    """Return which keys each query sees, bool[batch, heads or 1, queries, keys]."""
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
    """Return how often the pattern's blocks and global tokens name each key for each query, ignoring the rest of the
    mask: i32[batch or 1, heads or 1, length, length]."""
    length = mask.segments.shape[1]
    named = counts(mask.blocks, length)[None]
    if mask.globals is None:
        return named
    global_tokens = is_global(mask.globals, length)
    return jnp.where(global_tokens[:, None, :, None] | global_tokens[:, None, None, :], 1, named)


def is_global(positions: Array, length: int) -> Array:
    """Return which tokens of a row `Mask.globals` names, bool[batch, length]."""
    return (positions[:, :, None] == jnp.arange(length)).any(1)


def only_of_seen(mixed: Array, seen: Array) -> Array:
    """Set mixed [batch, queries, heads, head_dim] to zero where a query sees nothing.
    Without a visible key, a softmax weights all keys equally, which would leak the token that is to be predicted."""
    return jnp.where(seen.any(axis=-1).swapaxes(1, 2)[..., None], mixed, 0)


def _themselves(mask: Mask, compare) -> Array:
    """Compare each key's index with the index of the query's own key -> bool[batch or 1, 1, queries, keys]."""
    n, keys = mask.query_segments.shape[1], mask.segments.shape[1]
    positions = jnp.arange(keys - n, keys)[None] if mask.after is None else keys - 1 - mask.after
    return compare(jnp.arange(keys), positions[:, None, :, None])
