"""Splash attention (TPU), or `row_attention` where a row fits on the chip."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash_kernel
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask

from models.attention.kernels import row_attention
from models.attention.kernels.kernel import Attention, Kernel, cuts, of_bias, of_dropout, of_length, of_ranks
from models.attention.layouts import HEADS_FIRST, Mixing
from models.attention.mask import Mask
from models.attention.operands import LANES
from models.core.parameters import Noise
from models.core.program import KEPT
from models.core.sharding import current_rules

BLOCKS = (512, 256, 128)


def mixing(attention: Attention) -> Mixing:
    """Return how to compute an attention: by `row_attention` if it fits, else by splash attention."""
    if row_attention.fits(attention):
        return row_attention.mixing(attention)
    return Mixing(HEADS_FIRST, splash)


def splash(
    q: Array, k: Array, v: Array, mask: Mask, *, dropout_rate: float = 0.0, noise: Noise = None, interpret: bool = False
) -> Array:
    """Compute splash attention (TPU): q [batch, heads, queries, head_dim], k, v [batch, heads, keys, head_dim] -> like
    q. It reads segments and `causal` of the mask.

    There is no dropout (`_obstacles` refuses it). Lengths are multiples of 128. On a mesh each device attends with its
    rows, heads and queries to all keys of these rows.
    interpret: run as plain operations, on any platform.
    """

    def attend(q: Array, k: Array, v: Array, queries: Array, keys: Array) -> Array:
        heads, length, width = q.shape[1], q.shape[2], q.shape[3]
        head_mask = splash_mask.CausalMask if mask.causal else splash_mask.FullMask  # causal: skips hidden blocks
        kernel = splash_kernel.make_splash_mha(
            splash_mask.MultiHeadMask([head_mask((length, k.shape[2]))] * heads),
            block_sizes=_blocks(length, k.shape[2]),
            head_shards=1,
            q_seq_shards=1,
            residual_checkpoint_name=KEPT,
            interpret=interpret,
        )
        return jax.vmap(kernel)(q * width**-0.5, k, v, splash_kernel.SegmentIds(queries, keys))

    rules = current_rules()
    if rules is not None:
        local = rules.spec(("batch", "heads", "length", None), q.shape)
        whole = rules.spec(("batch", "heads", None, None), k.shape)
        ids = (
            rules.spec(("batch", "length"), mask.query_segments.shape),
            rules.spec(("batch", None), mask.segments.shape),
        )
        specs = local, whole, whole, *ids
        attend = jax.shard_map(attend, mesh=rules.mesh, in_specs=specs, out_specs=local, check_vma=False)
    mixed = attend(q, k, v, mask.query_segments, mask.segments)
    if mask.blind:
        seen = (mask.query_segments[:, :, None] == mask.segments[:, None, :]).any(-1)
        mixed = jnp.where(seen[:, None, :, None], mixed, 0)
    return mixed


def _blocks(queries: int, keys: int) -> splash_kernel.BlockSizes:
    """Return the largest blocks that divide both sequences; the kernel's default of 128 leaves the matrix units idle.
    Positions are the minor axis, because a head's 64 numbers would be padded to 128 in memory."""
    q, kv = (next(size for size in BLOCKS if length % size == 0) for length in (queries, keys))
    sizes = dict.fromkeys(("block_q", "block_q_dkv"), q)
    sizes |= dict.fromkeys(("block_kv", "block_kv_compute", "block_kv_dkv", "block_kv_dkv_compute"), kv)
    minor = dict.fromkeys(("q_layout", "k_layout", "v_layout"), splash_kernel.QKVLayout.SEQ_MINOR)
    return splash_kernel.BlockSizes(**sizes, **minor, use_fused_bwd_kernel=True)


def _obstacles(attention: Attention) -> list[str]:
    length, (cut, _) = attention.length, cuts(attention)
    obstacles, by_rows = of_ranks(attention), row_attention.obstacles(attention)
    if attention.by_distance or not by_rows:  # only `row_attention` has such a bias, and dropout
        return obstacles + by_rows + ([] if attention.by_distance else of_bias(attention))
    obstacles += of_bias(attention) + of_length(attention)
    if attention.dropout > 0:
        without = " or ".join(of_dropout(attention))
        obstacles += [f"{why}, or {without}" for why in by_rows if why not in obstacles]
    if length % LANES == 0 and length // cut % LANES:
        obstacles.append(f"--mesh sequence={cut} cuts length={length} into parts that are no multiple of {LANES}")
    if cut > 1 and attention.causal:
        obstacles.append(f"--mesh sequence={cut} cuts rows of a causal mask: leave sequence out")
    return obstacles


KERNEL = Kernel("splash", "self", ("tpu",), _obstacles, mixing, unrolled=24)
