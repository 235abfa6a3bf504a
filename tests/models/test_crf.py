"""The conditional random field beside all paths, counted one by one, and beside pytorch-crf."""

import itertools

import jax
import numpy as np
import pytest
import torch
from torchcrf import CRF

from models.blocks.crf import Transitions, best_path, log_likelihood

LENGTHS, LABELS = np.array([5, 1, 3, 4]), 3
MASK = np.arange(5) < LENGTHS[:, None]


@pytest.fixture(scope="module")
def drawn():
    """(transitions, scores f32[rows, words, labels], labels i32[rows, words], NONE behind a row's words)."""
    rng = np.random.default_rng(0)
    made = [rng.normal(size=shape).astype(np.float32) for shape in ((LABELS,), (LABELS,), (LABELS, LABELS))]
    scores = rng.normal(size=(*MASK.shape, LABELS)).astype(np.float32)
    return Transitions(*made), scores, np.where(MASK, rng.integers(0, LABELS, MASK.shape), -1)


def total(transitions, scores, path):
    """Of one row, by the definition."""
    between = sum(transitions.between[pair] for pair in itertools.pairwise(path))
    own = sum(scores[at, label] for at, label in enumerate(path))
    return transitions.start[path[0]] + own + between + transitions.end[path[-1]]


def test_probability_and_best_path_are_those_of_all_paths(drawn):
    transitions, scores, labels = drawn
    found = jax.jit(log_likelihood)(transitions, scores, labels, MASK)
    best = jax.jit(best_path)(transitions, scores, MASK)
    for row, length in enumerate(LENGTHS):
        paths = [*itertools.product(range(LABELS), repeat=length)]
        totals = np.array([total(transitions, scores[row].astype(np.float64), path) for path in paths])
        own = totals[paths.index(tuple(labels[row, :length]))]
        assert found[row] == pytest.approx(own - np.log(np.exp(totals).sum()), abs=1e-5)
        assert tuple(best[row, :length].tolist()) == paths[totals.argmax()]


def test_likelihood_gradients_and_paths_are_pytorch_crfs(drawn):
    transitions, scores, labels = drawn
    theirs, tensor = CRF(LABELS, batch_first=True), lambda array: torch.from_numpy(np.array(array))
    for name, array in zip(("start_transitions", "end_transitions", "transitions"), transitions, strict=True):
        getattr(theirs, name).data = tensor(array)
    given = tensor(scores).requires_grad_()
    expected = theirs(given, tensor(np.maximum(labels, 0)), tensor(MASK))
    expected.backward()
    of = lambda transitions, scores: log_likelihood(transitions, scores, labels, MASK).sum()
    found, (ours, of_scores) = jax.jit(jax.value_and_grad(of, (0, 1)))(transitions, scores)
    assert float(found) == pytest.approx(expected.item(), rel=1e-5)
    gradients = [theirs.start_transitions.grad, theirs.end_transitions.grad, theirs.transitions.grad, given.grad]
    for one, other in zip((*ours, of_scores), gradients, strict=True):
        assert np.linalg.norm(one - other.numpy()) <= 2e-5 * np.linalg.norm(other)
    paths = jax.jit(best_path)(transitions, scores, MASK).tolist()
    assert [path[:length] for path, length in zip(paths, LENGTHS, strict=True)] == theirs.decode(given, tensor(MASK))


def test_a_row_without_words_counts_nothing(drawn):
    transitions, scores, labels = drawn
    empty = np.zeros_like(MASK)
    of = lambda transitions, scores: log_likelihood(transitions, scores, labels, empty).sum()
    value, gradients = jax.jit(jax.value_and_grad(of, (0, 1)))(transitions, scores)
    assert value == 0 and not any(leaf.any() for leaf in jax.tree.leaves(gradients))
