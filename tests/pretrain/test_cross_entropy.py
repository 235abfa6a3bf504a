"""The adaptive softmax's loss is torch's, and its pieces make one distribution."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import torch

from pretrain.objectives.cross_entropy import clustered_cross_entropy

VOCABULARY, CUTOFFS, WIDTH = 23, (6, 11, 17), 8


def pieces_of(torch_module, hidden):
    """(head, tails) of torch's module as arrays: what a model computes."""
    weights = [layer.weight.detach().numpy() for layer in torch_module.tail.modules() if hasattr(layer, "weight")]
    tails = [hidden @ down.T @ up.T for down, up in zip(weights[::2], weights[1::2], strict=True)]
    return hidden @ torch_module.head.weight.detach().numpy().T, *tails


def test_losses_and_gradients_are_torchs():
    torch.manual_seed(0)
    theirs = torch.nn.AdaptiveLogSoftmaxWithLoss(WIDTH, VOCABULARY, CUTOFFS, div_value=2.0)
    hidden = torch.randn(40, WIDTH, requires_grad=True)
    targets = torch.randint(0, VOCABULARY, (40,))
    losses = -theirs(hidden, targets).output
    losses.sum().backward()

    ours = lambda x: clustered_cross_entropy(pieces_of(theirs, x), jnp.asarray(targets.numpy()), CUTOFFS)
    x = jnp.asarray(hidden.detach().numpy())
    np.testing.assert_allclose(ours(x), losses.detach().numpy(), atol=2e-6)
    np.testing.assert_allclose(jax.grad(lambda x: ours(x).sum())(x), hidden.grad.numpy(), atol=5e-6)


def test_all_tokens_together_have_probability_one():
    rng = np.random.default_rng(0)
    head = rng.standard_normal((1, CUTOFFS[0] + len(CUTOFFS)))
    tails = [rng.standard_normal((1, end - start)) for start, end in pairwise((*CUTOFFS, VOCABULARY))]
    logits = [jnp.repeat(jnp.asarray(piece, jnp.float32), VOCABULARY, axis=0) for piece in (head, *tails)]
    probabilities = np.exp(-clustered_cross_entropy(logits, jnp.arange(VOCABULARY), CUTOFFS))
    np.testing.assert_allclose(probabilities.sum(), 1.0, rtol=1e-5)
