"""Prompts continued in one compiled loop, token by token, with a state of what was read: by one text each, or by beam
search as transformers has it: a prompt's texts of the best log probability, divided by a power of their length."""

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

WORST = -1e9  # of what is there to fill places up
NOTHING = -1  # in place of a token


class Texts(NamedTuple):
    """Rows that are being written.

    tokens: i32[rows, max_tokens], of which `written` stand.   done: bool[rows], whether a stop token stands.
    lengths: i32[rows], tokens with the prompt's.   read: the model's state of all but the last token.
    """

    tokens: Array
    written: Array
    done: Array
    lengths: Array
    read: Any


class Beams(NamedTuple):
    """The texts that a prompt may still get, best first, those that have ended, and what is known of all.

    tokens: i32[prompts, beams, max_tokens], of which `written` stand.   scores: their log probabilities, f32[prompts,
    beams].   ended: i32[prompts, beams, max_tokens].   worth: their scores by length, f32[prompts, beams]; WORST where
    there is none yet.   hopeful: bool[prompts], whether one may still become better.   going: bool[].
    lengths: i32[prompts * beams], tokens with the prompt's.
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
    """To continue left-padded prompts: (params, tokens and segments i32[rows, places], noise u32[rows, 2]) ->
    i32[rows, texts of each, max_tokens]; what follows a stop token means nothing.

    params: of the model, or `ready` to be read by tokens.
    """

    def write(params: Params, tokens: Array, segments: Array, noise: Array) -> Array:
        params = apart(model, params)
        with placed_by(activation_rules(mesh)), matmul_precision(model.program.dtype):
            first = read(model, params, tokens, segments, decoding.max_tokens)
            begun = begun_texts(model, tokens, segments)
            if decoding.beams > 1:
                return search(model, decoding, params, first, *begun)
            following = functools.partial(next_logits, model, params)
            return write_texts(decoding, first, following, *begun, noise)[:, None]

    return jax.jit(write, compiler_options=small_product_options(mesh))


def begun_texts(model: nn.Module, tokens: Array, segments: Array) -> tuple[Array, Array]:
    """Left-padded texts that are continued: the prompts themselves, i32[rows, places] both, or of a model whose encoder
    reads these the token that begins its decoder's."""
    if not isinstance(model, EncoderDecoder):
        return tokens, segments
    start = jnp.full((len(tokens), 1), model.start, jnp.int32)
    return start, jnp.ones_like(start)


def write_texts(
    decoding: Decoding, first: tuple[Array, Any], following: Callable, tokens: Array, segments: Array, noise: Array
) -> Array:
    """Texts i32[rows, max_tokens] after left-padded ones, tokens and segments i32[rows, places].

    first: logits f32[rows, vocab] after them, and what is known of them.   following: (a further token i32[rows, 1],
    lengths i32[rows] of the texts before it, what is known of these) -> the same after it.
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

    def goes_on(texts: Texts) -> Array:
        return (texts.written < decoding.max_tokens) & ~texts.done.all()

    logits, known = first
    rows, prompts = len(tokens), without_padding(tokens, segments)
    empty = jnp.zeros((rows, decoding.max_tokens), jnp.int32)
    texts = Texts(empty, jnp.int32(0), jnp.zeros(rows, bool), segments.sum(1), known)
    return jax.lax.while_loop(goes_on, step, add(texts, logits)).tokens


def search(
    model: nn.Module, decoding: Decoding, params: Params, first: tuple[Array, Any], tokens: Array, segments: Array
) -> Array:
    """Left-padded prompts, tokens and segments i32[prompts, places] -> i32[prompts, beams, max_tokens], best first;
    what follows a stop token means nothing. params: as of `apart`.   first: as of `write_texts`."""

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
    """One token to each, by logits f32[prompts * beams, vocab].   before: i32[prompts * beams, places], the prompts."""
    prompts, number = beams.scores.shape
    texts = beams.tokens.reshape(prompts * number, -1)
    log_probabilities = unrepeated(jax.nn.log_softmax(logits), decoding, before, texts, beams.written)
    sums = beams.scores[..., None] + log_probabilities.reshape(prompts, number, -1)
    # Of all that may follow at least `number` do not end there: each beam has so many stop tokens.
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
    """Of each prompt some: array [prompts, n, ...], index i32[prompts, m] -> [prompts, m, ...]."""
    return jnp.take_along_axis(array, index.reshape(*index.shape, *(1,) * (array.ndim - 2)), axis=1)


def without_padding(tokens: Array, segments: Array) -> Array:
    """Left-padded texts i32[rows, places] with NOTHING for padding."""
    return jnp.where(segments > 0, tokens, NOTHING)


def unrepeated(logits: Array, decoding: Decoding, prompts: Array, texts: Array, written: Array) -> Array:
    """Logits or log probabilities f32[rows, vocab], less for tokens that stand in prompts or texts, and -inf for those
    that would end an n-gram which does.

    prompts: i32[rows, places], as of `without_padding`.   texts: i32[rows, n], of which `written` stand.
    """
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
    """Which tokens end an n-gram of a size in texts i32[rows, places] before `end` that begins as the last one would
    which stands there then, bool[rows, vocab]; with a size of 1 all that stand.   shape: of what comes back."""
    if size > texts.shape[1]:
        return jnp.zeros(shape, bool)
    begun = jax.lax.dynamic_slice_in_dim(texts, end - size + 1, size - 1, axis=1)
    ends = texts[:, size - 1 :]
    same = (ends != NOTHING) & (jnp.arange(size - 1, texts.shape[1]) < end)
    for place in range(size - 1):
        same &= texts[:, place : place + ends.shape[1]] == begun[:, place, None]
    return jnp.zeros(shape, bool).at[jnp.arange(len(texts))[:, None], ends].max(same)


def likeliest(logits: Array, top_k: int, top_p: float) -> Array:
    """Logits f32[rows, vocab], -inf for tokens that are not among the likeliest; of equal ones all or none."""
    if top_k:
        kept = jax.lax.top_k(logits, top_k)[0]  # descending
        logits = jnp.where(logits < kept[:, -1:], -jnp.inf, logits)
    elif top_p < 1:
        kept = -jnp.sort(-logits)
    if top_p < 1:
        shares = jax.nn.softmax(kept)
        before = jnp.cumsum(shares, axis=-1) - shares  # of likelier tokens
        last = jnp.maximum((before < top_p).sum(-1, keepdims=True), 1) - 1
        logits = jnp.where(logits < jnp.take_along_axis(kept, last, 1), -jnp.inf, logits)
    return logits


def choose(logits: Array, noise: Array, decoding: Decoding) -> Array:
    """logits f32[rows, vocab], noise u32[rows, 2] -> tokens i32[rows]."""
    if decoding.sample:
        logits = likeliest(logits / decoding.temperature, decoding.top_k, decoding.top_p)
        logits += gumbel(noise, logits.shape[1:])
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def read(model: nn.Module, params: Params, tokens: Array, segments: Array, more: int) -> tuple[Array, Any]:
    """Left-padded prompts -> (logits f32[rows, vocab] after each, a state of them with room for `more` tokens).

    params: as of `apart`.
    """
    return _logits(model, params, "begin", of_texts(tokens, segments), more)


def next_logits(model: nn.Module, params: Params, last: Array, lengths: Array, state: Any) -> tuple[Array, Any]:
    """Of one more token i32[rows, 1] in texts of these lengths i32[rows] -> (logits f32[rows, vocab], the state).

    params: as of `apart`.
    """
    if model.program.depth == "unroll" and isinstance(state, Cache):
        state = _each_array(jnp.stack, state)
    return _logits(model, params, "advance", of_next(last, lengths), state)


def of_texts(tokens: Array, segments: Array) -> Inputs:
    """What a model is given of left-padded texts, i32[rows, places] both."""
    return {"tokens": tokens, "segments": segments, "positions": jnp.maximum(jnp.cumsum(segments, axis=1) - 1, 0)}


def of_next(tokens: Array, lengths: Array) -> Inputs:
    """What it is given of one more token in texts of these lengths i32[rows]: i32[rows, 1], or a distribution of it
    f32[rows, 1, padded vocab] as `token_rows` takes it."""
    positions = lengths[:, None]
    return {"tokens": tokens, "segments": jnp.ones_like(positions), "positions": positions}


def apart(model: nn.Module, params: Params) -> Params:
    """Parameters for a loop over tokens: of an unrolled program a list of the layers', as a cache is that `read` gives,
    with matrices as [out, in] for `turned_weights`. Those that are so already stay.

    A loop that holds them stacked would cut every layer's out of the stack again for every token, which on a CPU copies
    all weights and the cache; stacked inside it and cut at once, nothing is copied.
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
    """The parameters with each of their stacks of layers changed."""
    below = lambda name, tree: change(tree) if name == LAYERS else _each_stack(change, tree)
    return {name: below(name, tree) if isinstance(tree, dict | list) else tree for name, tree in params.items()}


def _each_array(change: Callable, cache: Cache) -> Cache:
    """The cache with its keys and values changed, and those of its context."""
    context = cache.context and _each_array(change, cache.context)
    return cache._replace(keys=change(cache.keys), values=change(cache.values), context=context)


# A model's parameters as its `program` reads them: who has these writes again and again without laying them out anew,
# and may let go of those they were made of. On CPUs they are copies, elsewhere mostly the same.
ready = jax.jit(apart, static_argnums=0)


def _turned(layer: Params) -> Params:
    return jax.tree.map(lambda leaf: leaf.T if leaf.ndim == 2 else leaf, layer)


def _logits(model: nn.Module, params: Params, method: str, inputs: Inputs, before: Any) -> tuple[Array, Any]:
    """params: as of `apart`.   before: what the method takes beside inputs."""
    unrolled, few = model.program.depth == "unroll", inputs["tokens"].size < FEW_ROWS
    if unrolled:
        params = _each_stack(lambda of: jax.tree.map(lambda *rows: jnp.stack(rows), *map(_turned, of)), params)
    with turned_weights() if unrolled and few else contextlib.nullcontext():
        hidden, state = model.apply({"params": params}, inputs, before, method=method)
        logits = model.apply({"params": params}, hidden[:, -1:], method="token_logits")
    if unrolled and isinstance(state, Cache):
        state = _each_array(jnp.unstack, state)
    return logits, state
