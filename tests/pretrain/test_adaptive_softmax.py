"""The adaptive softmax's loss is torch's, however many blocks it takes, and its pieces make one distribution."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from pretrain.objectives import adaptive_softmax
from pretrain.objectives.adaptive_softmax import adaptive_cross_entropy

VOCABULARY, CUTOFFS, WIDTH = 23, (6, 11, 17), 8


def arrays(theirs, read):
    """torch's (head, ((projection, table), ...)) as arrays: of its weights, or of their gradients."""
    weights = [read(layer.weight).numpy() for layer in theirs.tail.modules() if hasattr(layer, "weight")]
    return read(theirs.head.weight).numpy(), tuple(zip(weights[::2], weights[1::2], strict=True))


def loss(weights, hidden, targets):
    head, tails = weights
    pieces = [(hidden @ down.T, table, jnp.zeros(len(table))) for down, table in tails]
    return adaptive_cross_entropy(hidden @ head.T, pieces, targets, CUTOFFS)


@pytest.mark.parametrize("block", [3, 256])
@pytest.mark.parametrize("highest", [VOCABULARY, 8], ids=["all clusters", "two clusters without targets"])
def test_losses_and_gradients_are_torchs(block, highest, monkeypatch):
    monkeypatch.setattr(adaptive_softmax, "BLOCK", block)
    torch.manual_seed(0)
    theirs = torch.nn.AdaptiveLogSoftmaxWithLoss(WIDTH, VOCABULARY, CUTOFFS, div_value=2.0)
    hidden = torch.randn(40, WIDTH, requires_grad=True)
    targets, factors = torch.randint(0, highest, (40,)), torch.rand(40)
    for parameter in theirs.parameters():
        parameter.grad = torch.zeros_like(parameter)
    losses = -theirs(hidden, targets).output
    (losses * factors).sum().backward()

    weights = arrays(theirs, lambda w: w.detach())
    inputs = (jnp.asarray(hidden.detach().numpy()), jnp.asarray(targets.numpy()))
    np.testing.assert_allclose(loss(weights, *inputs), losses.detach().numpy(), atol=2e-6)
    weighted = jax.jit(jax.grad(lambda w, x: (loss(w, x, inputs[1]) * factors.numpy()).sum(), argnums=(0, 1)))
    ours = weighted(weights, inputs[0])
    expected = (arrays(theirs, lambda w: w.grad), hidden.grad.numpy())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=5e-6), ours, expected)


def test_all_tokens_together_have_probability_one():
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    hidden = jnp.repeat(draw(1, WIDTH), VOCABULARY, axis=0)
    sizes = [end - start for start, end in pairwise((*CUTOFFS, VOCABULARY))]
    padded = lambda size: jnp.pad(draw(size), (0, 3), constant_values=-jnp.inf)
    tails = [(hidden, draw(size + 3, WIDTH), padded(size)) for size in sizes]
    head = hidden @ draw(WIDTH, CUTOFFS[0] + len(CUTOFFS))
    probabilities = np.exp(-adaptive_cross_entropy(head, tails, jnp.arange(VOCABULARY), CUTOFFS))
    np.testing.assert_allclose(probabilities.sum(), 1.0, rtol=1e-5)
