"""Beam search as transformers has it (with early_stopping=False): a prompt's texts of the best log probability, divided
by a power of their length."""

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from models.core.parameters import Params
from pretrain.generation.choice import first_seen, penalised, with_seen
from pretrain.generation.reading import next_logits, read
from pretrain.generation.settings import Decoding

WORST = -1e9  # of what is there to fill places up


class Beams(NamedTuple):
    """The texts that a prompt may still get, best first, those that have ended, and what is known of all.

    tokens: i32[prompts, beams, max_tokens], of which `written` stand.   scores: their log probabilities, f32[prompts,
    beams].   ended: i32[prompts, beams, max_tokens].   worth: their scores by length, f32[prompts, beams]; WORST where
    there is none yet.   hopeful: bool[prompts], whether one may still become better.   going: bool[].
    lengths: i32[prompts * beams], tokens with the prompt's.   seen: bool[prompts * beams, vocab] or None.
    """

    tokens: Array
    scores: Array
    ended: Array
    worth: Array
    written: Array
    hopeful: Array
    going: Array
    lengths: Array
    seen: Array | None
    state: Any


def search(model: nn.Module, decoding: Decoding, params: Params, tokens: Array, segments: Array) -> Array:
    """Left-padded prompts, tokens and segments i32[prompts, places] -> i32[prompts, beams, max_tokens], best first;
    what follows a stop token means nothing. params: as of `apart`."""

    def step(beams: Beams) -> Beams:
        last = jax.lax.dynamic_slice_in_dim(beams.tokens, beams.written - 1, 1, axis=2).reshape(-1, 1)
        logits, state = next_logits(model, params, last, beams.lengths, beams.state)
        return add(beams._replace(lengths=beams.lengths + 1, state=state), logits)

    add = functools.partial(_add, model, decoding)
    logits, state = read(model, params, tokens, segments, decoding.max_tokens)
    prompts = len(tokens)
    of_beams = jnp.repeat(jnp.arange(prompts), decoding.beams)
    seen = first_seen(logits.shape, tokens, segments, decoding)
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
        seen=None if seen is None else seen[of_beams],
        state=model.take(state, of_beams),
    )
    return jax.lax.while_loop(lambda beams: beams.going, step, add(beams, logits[of_beams])).ended


def _add(model: nn.Module, decoding: Decoding, beams: Beams, logits: Array) -> Beams:
    """One token to each, by logits f32[prompts * beams, vocab]."""
    prompts, number = beams.scores.shape
    log_probabilities = penalised(jax.nn.log_softmax(logits), beams.seen, decoding.repetition_penalty)
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
    seen = None if beams.seen is None else with_seen(beams.seen[rows], _of_each(new, best).reshape(-1, 1), True)
    hopeful = beams.hopeful & ((worth[:, -1] == WORST) | (scores[:, 0] / by_length > worth[:, -1]))
    return Beams(
        _of_each(tokens, best),
        scores,
        ended,
        worth,
        written,
        hopeful,
        going=hopeful.any() & ~ends.all(),
        lengths=beams.lengths,
        seen=seen,
        state=model.take(beams.state, rows),
    )


def _of_each(array: Array, index: Array) -> Array:
    """Of each prompt some: array [prompts, n, ...], index i32[prompts, m] -> [prompts, m, ...]."""
    return jnp.take_along_axis(array, index.reshape(*index.shape, *(1,) * (array.ndim - 2)), axis=1)
