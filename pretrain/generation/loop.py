"""Continue prompts in one compiled loop, token by token, with cached states: one text each, or beam search as in
transformers, where texts are ranked by log probability divided by a power of their length."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from models.attention.cache import Cache
from models.blocks.cpu import FEW_ROWS, turned_weights
from models.core.family import Inputs
from models.core.noise import fold, gumbel
from models.core.parameters import LAYERS, Params
from models.core.sharding import placed_by
from pretrain.generation.settings import Decoding
from pretrain.objectives.protocols import EncoderDecoder
from tpu.rules import activation_rules
from tpu.xla import matmul_precision, small_product_options

WORST = -1e9  # score of empty places
NOTHING = -1  # token of empty places


class Texts(NamedTuple):
    """Rows being generated.

    tokens: i32[rows, max_tokens], the first `written` valid.   done: bool[rows].   lengths: i32[rows], with the prompt.
    read: the model's state after all but the last token.
    """

    tokens: Array
    written: Array
    done: Array
    lengths: Array
    read: Any


class Beams(NamedTuple):
    """State of a beam search: the open beams of each prompt, best first, and its best finished texts.

    tokens: i32[prompts, beams, max_tokens], open beams, the first `written` valid.   scores: f32[prompts, beams], their
    log probabilities.   ended: i32[prompts, beams, max_tokens], finished texts.   worth: f32[prompts, beams], their
    length-normalised scores, WORST for empty places.   hopeful: bool[prompts], whether a better text may still come.
    going: bool[], whether the search continues.   lengths: i32[prompts * beams], tokens including the prompt.
    state: the model's state of the open beams.
    """

    tokens: Array
    scores: Array
    ended: Array
    worth: Array
    written: Array
    hopeful: Array
    going: Array
    lengths: Array
    state: Any


@functools.cache
def program(model: nn.Module, decoding: Decoding, mesh: Mesh) -> Callable[[Params, Array, Array, Array], Array]:
    """Compile the continuation of left-padded prompts: (params, or those of `ready`; tokens and segments i32[rows,
    places]; noise u32[rows, 2]) -> i32[rows, texts per row, max_tokens], meaningless after a stop token."""

    def write(params: Params, tokens: Array, segments: Array, noise: Array) -> Array:
        params = unstacked(model, params)
        with placed_by(activation_rules(mesh)), matmul_precision(model.program.dtype):
            first = read(model, params, tokens, segments, decoding.max_tokens)
            texts = first_texts(model, tokens, segments)
            if decoding.beams > 1:
                return search(model, decoding, params, first, *texts)
            following = functools.partial(next_logits, model, params)
            return write_texts(decoding, first, following, *texts, noise)[:, None]

    return jax.jit(write, compiler_options=small_product_options(mesh))


def first_texts(model: nn.Module, tokens: Array, segments: Array) -> tuple[Array, Array]:
    """Return (tokens, segments) i32[rows, places] of texts to continue: prompts, or an encoder-decoder's start."""
    if not isinstance(model, EncoderDecoder):
        return tokens, segments
    start = jnp.full((len(tokens), 1), model.start, jnp.int32)
    return start, jnp.ones_like(start)


def write_texts(
    decoding: Decoding, first: tuple[Array, Any], following: Callable, tokens: Array, segments: Array, noise: Array
) -> Array:
    """Generate texts i32[rows, max_tokens] after left-padded ones, tokens and segments i32[rows, places].

    first: (logits f32[rows, vocab] after the given texts, state).   following: (next token i32[rows, 1], lengths
    i32[rows] of the texts before it, state) -> (logits, state) after it.
    """
    stop = jnp.array(decoding.stop, jnp.int32)

    def add(texts: Texts, logits: Array) -> Texts:
        logits = unrepeated(logits, decoding, prompts, texts.tokens, texts.written)
        new = choose(logits, fold(noise, texts.written), decoding)
        written = jax.lax.dynamic_update_slice_in_dim(texts.tokens, new[:, None], texts.written, axis=1)
        done = texts.done | jnp.isin(new, stop)
        return texts._replace(tokens=written, written=texts.written + 1, done=done)

    def step(texts: Texts) -> Texts:
        last = jax.lax.dynamic_slice_in_dim(texts.tokens, texts.written - 1, 1, axis=1)
        logits, read = following(last, texts.lengths, texts.read)
        return add(texts._replace(lengths=texts.lengths + 1, read=read), logits)

    def unfinished(texts: Texts) -> Array:
        return (texts.written < decoding.max_tokens) & ~texts.done.all()

    logits, state = first
    rows, prompts = len(tokens), without_padding(tokens, segments)
    empty = jnp.zeros((rows, decoding.max_tokens), jnp.int32)
    texts = Texts(empty, jnp.int32(0), jnp.zeros(rows, bool), segments.sum(1), state)
    return jax.lax.while_loop(unfinished, step, add(texts, logits)).tokens


def search(
    model: nn.Module, decoding: Decoding, params: Params, first: tuple[Array, Any], tokens: Array, segments: Array
) -> Array:
    """Search from left-padded prompts, tokens and segments i32[prompts, places] -> i32[prompts, beams, max_tokens],
    best first; tokens after a stop token are meaningless.   params: from `unstacked`.   first: as in `write_texts`."""

    def step(beams: Beams) -> Beams:
        last = jax.lax.dynamic_slice_in_dim(beams.tokens, beams.written - 1, 1, axis=2).reshape(-1, 1)
        logits, state = next_logits(model, params, last, beams.lengths, beams.state)
        return add(beams._replace(lengths=beams.lengths + 1, state=state), logits)

    (logits, state), prompts = first, len(tokens)
    of_beams = jnp.repeat(jnp.arange(prompts), decoding.beams)
    add = functools.partial(_add, model, decoding, without_padding(tokens, segments)[of_beams])
    empty = jnp.zeros((prompts, decoding.beams, decoding.max_tokens), jnp.int32)
    worst = jnp.full(empty.shape[:2], WORST)
    beams = Beams(
        empty,
        worst.at[:, 0].set(0),
        empty,
        worst,
        written=jnp.int32(0),
        hopeful=jnp.ones(prompts, bool),
        going=jnp.bool(True),
        lengths=segments.sum(1)[of_beams],
        state=model.take(state, of_beams),
    )
    return jax.lax.while_loop(lambda beams: beams.going, step, add(beams, logits[of_beams])).ended


def _add(model: nn.Module, decoding: Decoding, before: Array, beams: Beams, logits: Array) -> Beams:
    """Extend the beams by one token.   before: prompts i32[rows, places].   logits: f32[rows, vocab], of all beams."""
    prompts, number = beams.scores.shape
    texts = beams.tokens.reshape(prompts * number, -1)
    log_probabilities = unrepeated(jax.nn.log_softmax(logits), decoding, before, texts, beams.written)
    sums = beams.scores[..., None] + log_probabilities.reshape(prompts, number, -1)
    # So many candidates that at least `number` do not end: each beam has len(stop) that do.
    candidates = number * max(2, 1 + len(decoding.stop))
    scores, index = jax.lax.top_k(sums.reshape(prompts, -1), candidates)
    parent, new = jnp.divmod(index, sums.shape[-1])
    tokens = _of_each(beams.tokens, parent).at[:, :, beams.written].set(new)
    written = beams.written + 1
    ends = jnp.isin(new, jnp.array(decoding.stop, jnp.int32)) | (written == decoding.max_tokens)

    by_length = written.astype(jnp.float32) ** decoding.length_penalty
    counts = ends & (jnp.arange(candidates) < number) & beams.hopeful[:, None]
    worth = jnp.concatenate([beams.worth, jnp.where(counts, scores / by_length, WORST)], axis=1)
    worth, best = jax.lax.top_k(worth, number)
    ended = _of_each(jnp.concatenate([beams.ended, tokens], axis=1), best)

    scores, best = jax.lax.top_k(jnp.where(ends, scores + WORST, scores), number)
    rows = (jnp.arange(prompts)[:, None] * number + _of_each(parent, best)).reshape(-1)
    if decoding.early_stopping == "never" and decoding.length_penalty > 0:
        by_length = float(decoding.max_tokens) ** decoding.length_penalty
    better = (scores[:, 0] / by_length > worth[:, -1]) & (decoding.early_stopping is not True)
    hopeful = beams.hopeful & ((worth[:, -1] == WORST) | better)
    return Beams(
        _of_each(tokens, best),
        scores,
        ended,
        worth,
        written,
        hopeful,
        going=hopeful.any() & ~ends.all(),
        lengths=beams.lengths,
        state=model.take(beams.state, rows),
    )


def _of_each(array: Array, index: Array) -> Array:
    """Gather within each prompt: array [prompts, n, ...], index i32[prompts, m] -> [prompts, m, ...]."""
    return jnp.take_along_axis(array, index.reshape(*index.shape, *(1,) * (array.ndim - 2)), axis=1)


def without_padding(tokens: Array, segments: Array) -> Array:
    """Replace the padding of texts i32[rows, places] by NOTHING."""
    return jnp.where(segments > 0, tokens, NOTHING)


def unrepeated(logits: Array, decoding: Decoding, prompts: Array, texts: Array, written: Array) -> Array:
    """Apply the repetition penalty to logits or log probabilities f32[rows, vocab], and forbid repeated n-grams by
    -inf.   prompts: i32[rows, places], from `without_padding`.   texts: i32[rows, n], the first `written` valid."""
    penalty, size = decoding.repetition_penalty, decoding.no_repeat_ngram_size
    if penalty == 1 and not size:
        return logits
    whole, end = jnp.concatenate([prompts, texts], axis=1), prompts.shape[1] + written
    if penalty != 1:
        worse = jnp.where(logits < 0, logits * penalty, logits / penalty)
        logits = jnp.where(repeating(whole, end, 1, logits.shape), worse, logits)
    if size:
        logits = jnp.where(repeating(whole, end, size, logits.shape), -jnp.inf, logits)
    return logits


def repeating(texts: Array, end: Array, size: int, shape: tuple[int, int]) -> Array:
    """Find the tokens that, written at `end`, would repeat an n-gram of `size` tokens of texts i32[rows, places] ->
    bool[rows, vocab] of the given shape. With size 1 these are all tokens before `end`."""
    if size > texts.shape[1]:
        return jnp.zeros(shape, bool)
    prefix = jax.lax.dynamic_slice_in_dim(texts, end - size + 1, size - 1, axis=1)
    ends = texts[:, size - 1 :]
    same = (ends != NOTHING) & (jnp.arange(size - 1, texts.shape[1]) < end)
    for place in range(size - 1):
        same &= texts[:, place : place + ends.shape[1]] == prefix[:, place, None]
    return jnp.zeros(shape, bool).at[jnp.arange(len(texts))[:, None], ends].max(same)


def likeliest(logits: Array, top_k: int, top_p: float) -> Array:
    """Set logits f32[rows, vocab] outside of top_k and top_p to -inf; equal logits are treated alike."""
    if top_k:
        kept = jax.lax.top_k(logits, top_k)[0]  # descending
        logits = jnp.where(logits < kept[:, -1:], -jnp.inf, logits)
    elif top_p < 1:
        kept = -jnp.sort(-logits)
    if top_p < 1:
        shares = jax.nn.softmax(kept)
        before = jnp.cumsum(shares, axis=-1) - shares  # total of likelier tokens
        last = jnp.maximum((before < top_p).sum(-1, keepdims=True), 1) - 1
        logits = jnp.where(logits < jnp.take_along_axis(kept, last, 1), -jnp.inf, logits)
    return logits


def choose(logits: Array, noise: Array, decoding: Decoding) -> Array:
    """Choose tokens i32[rows] by logits f32[rows, vocab] and noise u32[rows, 2]."""
    if decoding.sample:
        logits = likeliest(logits / decoding.temperature, decoding.top_k, decoding.top_p)
        logits += gumbel(noise, logits.shape[1:])
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def read(model: nn.Module, params: Params, tokens: Array, segments: Array, more: int) -> tuple[Array, Any]:
    """Read left-padded prompts, by params of `unstacked` -> (logits f32[rows, vocab] after each, a state with room)."""
    return _logits(model, params, "begin", of_texts(tokens, segments), more)


def next_logits(model: nn.Module, params: Params, last: Array, lengths: Array, state: Any) -> tuple[Array, Any]:
    """Read one more token i32[rows, 1] of texts with lengths i32[rows] -> (logits f32[rows, vocab], new state).
    params: from `unstacked`."""
    if model.program.depth == "unroll" and isinstance(state, Cache):
        state = _each_array(jnp.stack, state)
    return _logits(model, params, "advance", of_next(last, lengths), state)


def of_texts(tokens: Array, segments: Array) -> Inputs:
    """Make model inputs of left-padded texts: tokens and segments i32[rows, places]."""
    return {"tokens": tokens, "segments": segments, "positions": jnp.maximum(jnp.cumsum(segments, axis=1) - 1, 0)}


def of_next(tokens: Array, lengths: Array) -> Inputs:
    """Make model inputs of one more token in texts with lengths i32[rows]: i32[rows, 1], or a distribution over tokens
    f32[rows, 1, padded vocab], as in `token_rows`."""
    positions = lengths[:, None]
    return {"tokens": tokens, "segments": jnp.ones_like(positions), "positions": positions}


def unstacked(model: nn.Module, params: Params) -> Params:
    """Prepare parameters for a loop over tokens: for an unrolled program, turn stacks of layers into lists, like the
    cache from `read`, and transpose matrices to [out, in] for `turned_weights`. Prepared parameters stay as they are.

    A loop that carries stacks would slice every layer out of them for every token, which on a CPU copies all weights
    and the cache. Stacking inside the loop and unstacking at once copies nothing.
    """
    if model.program.depth == "scan":
        return params

    def cut(layers: Params | list[Params]) -> list[Params]:
        if isinstance(layers, list):
            return layers
        leaves, structure = jax.tree.flatten(layers)
        each = [structure.unflatten(layer) for layer in zip(*map(jnp.unstack, leaves), strict=True)]
        return jax.lax.optimization_barrier([_turned(layer) for layer in each])

    return _each_stack(cut, params)


def _each_stack(change: Callable, params: Params) -> Params:
    """Apply a change to each stack of layers."""
    below = lambda name, tree: change(tree) if name == LAYERS else _each_stack(change, tree)
    return {name: below(name, tree) if isinstance(tree, dict | list) else tree for name, tree in params.items()}


def _each_array(change: Callable, cache: Cache) -> Cache:
    """Apply a change to the keys and values of a cache and of its context."""
    context = cache.context and _each_array(change, cache.context)
    return cache._replace(keys=change(cache.keys), values=change(cache.values), context=context)


# Prepares a model's parameters for `program` once, for many calls. On CPUs the result is a copy, so that the original
# can be freed; elsewhere it mostly shares memory.
ready = jax.jit(unstacked, static_argnums=0)


def _turned(layer: Params) -> Params:
    return jax.tree.map(lambda leaf: leaf.T if leaf.ndim == 2 else leaf, layer)


def _logits(model: nn.Module, params: Params, method: str, inputs: Inputs, before: Any) -> tuple[Array, Any]:
    """Call a method of the model -> (logits f32[rows, vocab] at the last token, state).   params: from `unstacked`.
    before: the method's second argument."""
    unrolled, few = model.program.depth == "unroll", inputs["tokens"].size < FEW_ROWS
    if unrolled:
        params = _each_stack(lambda layers: jax.tree.map(lambda *rows: jnp.stack(rows), *map(_turned, layers)), params)
    with turned_weights() if unrolled and few else contextlib.nullcontext():
        hidden, state = model.apply({"params": params}, inputs, before, method=method)
        logits = model.apply({"params": params}, hidden[:, -1:], method="token_logits")
    if unrolled and isinstance(state, Cache):
        state = _each_array(jnp.unstack, state)
    return logits, state
