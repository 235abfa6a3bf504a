"""The adaptive softmax's losses are torch's, however many blocks it takes; the softmax in blocks has the plain one's
sums and gradients, and never holds the logits of all tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from pretrain.objectives import blocked_softmax, cross_entropy
from pretrain.objectives.blocked_softmax import softmax_sums
from pretrain.objectives.cross_entropy import adaptive_cross_entropy

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
    monkeypatch.setattr(cross_entropy, "BLOCK", block)
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


ROWS, LENGTH, VOCAB, REAL = 3, 11, 40, 37
RNG = np.random.default_rng(0)
FACTORS = np.array([0.3, -0.7], np.float32)  # of the two sets of weights
BIAS = np.where(np.arange(VOCAB) < REAL, RNG.normal(size=VOCAB), -np.inf).astype(np.float32)
TARGETS = RNG.integers(0, REAL, (ROWS, LENGTH)).astype(np.int32)
WEIGHTS = RNG.random((2, ROWS, LENGTH)).astype(np.float32)
HIDDEN = RNG.normal(size=(ROWS, LENGTH, WIDTH)).astype(np.float32)
TABLE = RNG.normal(size=(VOCAB, WIDTH)).astype(np.float32)


def ours(hidden, table, bias, z_loss, smoothing):
    sums = softmax_sums(hidden, table, bias, TARGETS, WEIGHTS, z_loss, smoothing=smoothing)
    return FACTORS @ sums.nats, sums


def plain(hidden, table, bias, z_loss, smoothing):
    logits = jnp.einsum("rlw,vw->rlv", hidden, table) + bias
    normaliser = jax.nn.logsumexp(logits, axis=-1)
    nats = normaliser - jnp.take_along_axis(logits, TARGETS[..., None], -1)[..., 0]
    hits, squares = logits.argmax(-1) == TARGETS, normaliser**2
    excess = (normaliser - logits[..., :REAL].mean(-1) - nats) * (smoothing > 0)
    sums = [jnp.tensordot(WEIGHTS, figure, 2) for figure in (nats, hits, squares, excess)]
    return FACTORS @ (sums[0] + z_loss * sums[2] + smoothing * sums[3]), tuple(sums)


@pytest.mark.parametrize(("z_loss", "smoothing"), [(0.0, 0.0), (0.1, 0.2)])
@pytest.mark.parametrize("logits", [2**26, 4 * ROWS * VOCAB], ids=["one block", "blocks of which the last is shorter"])
def test_sums_and_gradients_are_the_plain_ones(monkeypatch, logits, z_loss, smoothing):
    monkeypatch.setattr(blocked_softmax, "LOGITS", logits)
    gradients = lambda f: jax.jit(
        lambda *factors: jax.value_and_grad(lambda *a: f(*a, z_loss, smoothing), (0, 1, 2), has_aux=True)(*factors)
    )
    (_, sums), found = gradients(ours)(HIDDEN, TABLE, BIAS)
    (_, expected_sums), expected = gradients(plain)(HIDDEN, TABLE, BIAS)
    undifferentiated = softmax_sums(HIDDEN, TABLE, BIAS, TARGETS, WEIGHTS, z_loss, smoothing=smoothing)
    for mine, alone, theirs in zip(sums[:4], undifferentiated[:4], expected_sums, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)
        np.testing.assert_allclose(alone, theirs, rtol=1e-6)
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-6)
    logits = torch.from_numpy((HIDDEN @ TABLE.T + BIAS)[..., :REAL].reshape(-1, REAL))
    targets = torch.from_numpy(TARGETS.reshape(-1)).long()
    losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing)
    smoothed = sums.nats + smoothing * sums.excess
    np.testing.assert_allclose(smoothed, WEIGHTS.reshape(2, -1) @ losses.numpy(), rtol=1e-6)


@pytest.mark.parametrize("differentiated", [False, True])
def test_the_logits_of_all_tokens_are_never_in_memory(monkeypatch, differentiated):
    rows, length, vocab = 4, 64, 1024
    monkeypatch.setattr(blocked_softmax, "LOGITS", rows * length * vocab // 16)
    loss = lambda hidden, table: softmax_sums(hidden, table, jnp.zeros(vocab), *of_tokens).nats[0]
    of_tokens = jnp.zeros((rows, length), jnp.int32), jnp.ones((1, rows, length))
    program = jax.jit(jax.value_and_grad(loss, (0, 1)) if differentiated else loss)
    compiled = program.lower(jnp.zeros((rows, length, WIDTH)), jnp.zeros((vocab, WIDTH))).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < rows * length * vocab * 4 / 4
