"""A linear-chain conditional random field (Lafferty et al. 2001), which adds scores of label transitions to the scores
that each word gives its labels.

Scores are f32[rows, words, labels] with a mask bool[rows, words]; padding is at the end of a row.
"""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from models.core.family import Head
from models.core.parameters import Noise, Parameter, parameter

CRF = "crf"  # the name of the head


class Transitions(NamedTuple):
    """Scores of a path's transitions.

    start, end: f32[labels], of the first and the last label.   between: f32[labels, labels], from a label to the next
    one.
    """

    start: Array
    end: Array
    between: Array


class Crf(nn.Module):
    """The transitions as parameters. They start at zero, so that at first each word has its own likeliest label."""

    labels: int

    @nn.compact
    def __call__(self, hidden: Array, noise: Noise = None) -> Transitions:
        """Return the transitions; hidden is not read."""
        make = lambda name, *shape: parameter(self, name, nn.initializers.zeros, shape)
        n = self.labels
        return Transitions(make("start_bias", n), make("end_bias", n), make("kernel", n, n))


def crf_head() -> Head:
    """Return the head with the transitions, which no Hugging Face class has."""
    axes = {"start_bias": ("label",), "end_bias": ("label",), "kernel": ("label", "label")}
    rows = (Parameter(f"{CRF}/{name}", of, {}) for name, of in axes.items())
    return Head(CRF, lambda c, _: Crf(len(c.labels) or 2), tuple(rows))


def log_likelihood(transitions: Transitions, scores: Array, labels: Array, mask: Array) -> Array:
    """Return f32[rows], the log-probability of the labels i32[rows, words]; 0 for a row without words."""
    start, end, between = transitions
    labels, weights = jnp.where(mask, labels, 0), mask.astype(scores.dtype)
    last = jnp.take_along_axis(labels, jnp.maximum(mask.sum(1, keepdims=True) - 1, 0), axis=1)[:, 0]
    own = jnp.take_along_axis(scores, labels[:, :, None], axis=2)[:, :, 0]
    path = start[labels[:, 0]] + end[last] + (own * weights).sum(1)
    path += (between[labels[:, :-1], labels[:, 1:]] * weights[:, 1:]).sum(1)

    def forward(before: Array, word: tuple[Array, Array]) -> tuple[Array, None]:
        """before: [rows, labels], the log of the sum over all paths that end in each label."""
        scores, is_word = word
        after = jax.nn.logsumexp(before[:, :, None] + between, axis=1) + scores
        return jnp.where(is_word[:, None], after, before), None

    sums, _ = jax.lax.scan(forward, start + scores[:, 0], _words_first(scores, mask))
    return jnp.where(mask[:, 0], path - jax.nn.logsumexp(sums + end, axis=1), 0.0)


def best_path(transitions: Transitions, scores: Array, mask: Array) -> Array:
    """Return the likeliest labels i32[rows, words] (Viterbi 1967); padding repeats the row's last label."""
    start, end, between = transitions
    every = jnp.arange(scores.shape[2])

    def forward(before: Array, word: tuple[Array, Array]) -> tuple[Array, Array]:
        scores, is_word = word
        paths = before[:, :, None] + between  # [rows, from, to]
        after = jnp.where(is_word[:, None], paths.max(1) + scores, before)
        return after, jnp.where(is_word[:, None], paths.argmax(1), every)

    best, came_from = jax.lax.scan(forward, start + scores[:, 0], _words_first(scores, mask))

    def back(label: Array, came_from: Array) -> tuple[Array, Array]:
        return jnp.take_along_axis(came_from, label[:, None], axis=1)[:, 0], label

    first, later = jax.lax.scan(back, (best + end).argmax(1), came_from, reverse=True)
    return jnp.concatenate([first[None], later]).T.astype(jnp.int32)


def _words_first(scores: Array, mask: Array) -> tuple[Array, Array]:
    """Return scores and mask of all words but the first, [words - 1, rows, ...]."""
    return scores[:, 1:].swapaxes(0, 1), mask[:, 1:].T
