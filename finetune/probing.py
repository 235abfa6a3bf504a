"""Linear probes: classifiers on a layer's hidden states (Alain & Bengio 2016; Liu et al. 2019)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree

from finetune.inside import are_special, layer_states, looked
from finetune.rows import Rows
from finetune.sentences import NONE
from pretrain.training.opened import Opened


def word_states(opened: Opened, rows: Rows) -> np.ndarray:
    """Return f32[words, depth + 1, width], a frozen model's hidden states at the first piece of each word, in row
    order."""
    is_word, found = rows.of_tokens["words"] != NONE, None
    before = np.cumsum(is_word)  # number of words up to each token
    for numbers, states in looked(opened, rows, layer_states):
        found = _room(found, before[-1], states)
        for row, number in enumerate(numbers):
            at = np.flatnonzero(is_word[rows.starts[number] : rows.starts[number + 1]])
            found[before[rows.starts[number] + at] - 1] = states[:, row, at].swapaxes(0, 1)
    return found


def text_states(opened: Opened, rows: Rows) -> np.ndarray:
    """Return f32[rows, depth + 1, width], the mean of a frozen model's hidden states over each row's tokens that are
    not special; zeros if there are none."""
    counts, found = ~are_special(opened.tokenizer, rows.tokens), None
    for numbers, states in looked(opened, rows, layer_states):
        found = _room(found, len(rows), states)
        for row, number in enumerate(numbers):
            at = np.flatnonzero(counts[rows.starts[number] : rows.starts[number + 1]])
            found[number] = states[:, row, at].sum(1) / max(1, len(at))
    return found


def _room(found: np.ndarray | None, number: int, states: np.ndarray) -> np.ndarray:
    """Return an array for the states of `number` words or texts, allocated at the first batch [layers, ..., width]."""
    return np.empty((number, states.shape[0], states.shape[-1]), np.float32) if found is None else found


def side_by_side(states: np.ndarray, layers: int) -> np.ndarray:
    """Concatenate the last layers (Devlin et al. 2019, table 7): [n, depth + 1, width] -> [n, 1, layers * width]."""
    return states[:, -layers:].reshape(len(states), 1, -1)


class Probe(NamedTuple):
    """mix: f32[layers], logits of the layers' shares in the input.   kernel: f32[width, classes].
    bias: f32[classes]."""

    mix: Array
    kernel: Array
    bias: Array

    def scores(self, states: Array) -> Array:
        """Return f32[words, classes] for states f32[words, layers, width]. Several layers are combined by ELMo's scalar
        mix (Peters et al. 2018, equation 1); the kernel includes its factor, so that the penalty applies to both."""
        read = jnp.einsum("l,nlw->nw", jax.nn.softmax(self.mix), states)
        return read @ self.kernel + self.bias


def fit(states: np.ndarray, labels: np.ndarray, classes: int, penalty: float = 1.0, steps: int = 300) -> Probe:
    """Fit logistic regression by L-BFGS: minimize the summed cross-entropy of labels i32[words] plus half the penalty
    times the squared norm of the kernel, as in scikit-learn."""
    from scipy.optimize import minimize

    states, labels = jnp.asarray(states), jnp.asarray(labels)
    _, layers, width = states.shape
    begin = Probe(np.zeros(layers), np.zeros((width, classes)), np.zeros(classes))
    flat, whole = ravel_pytree(begin)

    def loss(at: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = _loss(whole(jnp.asarray(at, jnp.float32)), states, labels, penalty)
        return float(value), np.asarray(ravel_pytree(gradient)[0], np.float64)

    found = minimize(loss, np.asarray(flat), jac=True, method="L-BFGS-B", options={"maxiter": steps})
    return jax.device_get(whole(jnp.asarray(found.x, jnp.float32)))


@jax.jit
@jax.value_and_grad
def _loss(probe: Probe, states: Array, labels: Array, penalty: float) -> Array:
    likely = jnp.take_along_axis(jax.nn.log_softmax(probe.scores(states)), labels[:, None], axis=1)
    return -likely.mean() + penalty / (2 * len(labels)) * jnp.square(probe.kernel).sum()


def standardised(train: np.ndarray, *others: np.ndarray) -> None:
    """Standardize each dimension of each layer in place, with mean and deviation of the training words."""
    mean, deviation = train.mean(0), train.std(0) + 1e-6
    for states in (train, *others):
        states -= mean
        states /= deviation


def predicted(probe: Probe, states: np.ndarray) -> np.ndarray:
    """Return the likeliest classes i64[words]."""
    return np.asarray(probe.scores(states)).argmax(1)
