"""Prompts continued in one compiled loop, token by token, with a state of what was read."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from models.core.noise import fold
from models.core.parameters import Params
from models.core.sharding import placed_by
from pretrain.generation.beams import search
from pretrain.generation.choice import choose, first_seen, penalised, with_seen
from pretrain.generation.reading import apart, next_logits, read
from pretrain.generation.settings import Decoding
from tpu.rules import activation_rules
from tpu.xla import matmul_precision, small_product_options


class Texts(NamedTuple):
    """Rows that are being written.

    tokens: i32[rows, max_tokens], of which `written` stand.   done: bool[rows], whether a stop token stands.
    lengths: i32[rows], tokens with the prompt's.   seen: bool[rows, vocab], which of them stand; None if nobody asks.
    read: the model's state of all but the last token.
    """

    tokens: Array
    written: Array
    done: Array
    lengths: Array
    seen: Array | None
    read: Any


@functools.cache
def program(model: nn.Module, decoding: Decoding, mesh: Mesh) -> Callable[[Params, Array, Array, Array], Array]:
    """To continue left-padded prompts: (params, tokens and segments i32[rows, places], noise u32[rows, 2]) ->
    i32[rows, texts of each, max_tokens]; what follows a stop token means nothing.

    params: of the model, or `ready` to be read by tokens.
    """

    def write(params: Params, tokens: Array, segments: Array, noise: Array) -> Array:
        params = apart(model, params)
        with placed_by(activation_rules(mesh)), matmul_precision(model.program.dtype):
            if decoding.beams > 1:
                return search(model, decoding, params, tokens, segments)
            first = read(model, params, tokens, segments, decoding.max_tokens)
            following = functools.partial(next_logits, model, params)
            return write_texts(decoding, first, following, tokens, segments, noise)[:, None]

    return jax.jit(write, compiler_options=small_product_options(mesh))


# A model's parameters as its `program` reads them: who has these writes again and again without laying them out anew,
# and may let go of those they were made of. On CPUs they are copies, elsewhere mostly the same.
ready = jax.jit(apart, static_argnums=0)


def write_texts(
    decoding: Decoding, first: tuple[Array, Any], following: Callable, tokens: Array, segments: Array, noise: Array
) -> Array:
    """Texts i32[rows, max_tokens] after left-padded prompts.

    first: logits f32[rows, vocab] after them, and what is known of them.   following: (a further token i32[rows, 1],
    lengths i32[rows] of the texts before it, what is known of these) -> the same after it.
    """
    stop = jnp.array(decoding.stop, jnp.int32)

    def add(texts: Texts, logits: Array) -> Texts:
        logits = penalised(logits, texts.seen, decoding.repetition_penalty)
        new = choose(logits, fold(noise, texts.written), decoding)
        written = jax.lax.dynamic_update_slice_in_dim(texts.tokens, new[:, None], texts.written, axis=1)
        seen = None if texts.seen is None else with_seen(texts.seen, new[:, None], True)
        done = texts.done | jnp.isin(new, stop)
        return texts._replace(tokens=written, written=texts.written + 1, done=done, seen=seen)

    def step(texts: Texts) -> Texts:
        last = jax.lax.dynamic_slice_in_dim(texts.tokens, texts.written - 1, 1, axis=1)
        logits, read = following(last, texts.lengths, texts.read)
        return add(texts._replace(lengths=texts.lengths + 1, read=read), logits)

    def goes_on(texts: Texts) -> Array:
        return (texts.written < decoding.max_tokens) & ~texts.done.all()

    logits, known = first
    rows = len(tokens)
    empty = jnp.zeros((rows, decoding.max_tokens), jnp.int32)
    seen = first_seen(logits.shape, tokens, segments, decoding)
    texts = Texts(empty, jnp.int32(0), jnp.zeros(rows, bool), segments.sum(1), seen, known)
    return jax.lax.while_loop(goes_on, step, add(texts, logits)).tokens
