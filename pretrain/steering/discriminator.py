"""A discriminator of texts: one linear layer on the mean of a frozen model's hidden states (Dathathri et al. 2020,
section 4.3), trained on labelled texts."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from data_pipelines.errors import UserError
from models.core.family import Inputs
from models.core.parameters import Params, leaves
from models.core.sharding import placed_by
from pretrain.prompting.batches import batches
from tpu.rules import activation_rules
from tpu.xla import compiler_options, matmul_precision

FILE = "discriminator.json"
PENALTY = 1e-3  # on squares of weights, for states of variance 1
STEPS = 1000


class Discriminator(NamedTuple):
    """kernel: f32[width, labels].   bias: f32[labels].   model: the `fingerprint` of the one whose states it reads.
    step: the updates that it had; None where that was not written down.
    """

    labels: list[str]
    kernel: np.ndarray
    bias: np.ndarray
    model: str
    step: int | None


def means(model: nn.Module, params: Params, texts: Sequence[np.ndarray], mesh: Mesh) -> np.ndarray:
    """The mean hidden state of each text's tokens: f32[texts, width].   texts: i32[tokens] each."""

    def mean(params: Params, inputs: Inputs) -> Array:
        with placed_by(activation_rules(mesh)), matmul_precision(model.program.dtype):
            hidden = model.apply({"params": params}, inputs, method="decode").astype(jnp.float32)
            real = inputs["segments"] > 0
            return jnp.sum(hidden, axis=1, where=real[..., None]) / jnp.maximum(real.sum(1, keepdims=True), 1)

    mean, found = jax.jit(mean, compiler_options=compiler_options(mesh)), np.zeros((len(texts), model.config.width))
    for chosen, inputs in batches(texts, model.config.positions, mesh):
        found[chosen] = np.asarray(mean(params, inputs))[: len(chosen)]
    return found.astype(np.float32)


def fit(states: np.ndarray, labels: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
    """kernel f32[width, number] and bias f32[number] of the likeliest labels i64[texts] given states f32[texts, width],
    with a small penalty: a convex problem, solved by Nesterov's accelerated gradients, which need no rate chosen."""
    middle, spread = states.mean(0, dtype=np.float64), states.std(0, dtype=np.float64) + 1e-6
    x = np.column_stack([(states - middle) / spread, np.ones(len(states))])
    penalty = PENALTY * (np.arange(x.shape[1]) < x.shape[1] - 1)[:, None]
    steepest = 0.5 * np.linalg.eigvalsh(x.T @ x / len(x))[-1] + PENALTY
    target = np.eye(number)[labels]
    weights = before = np.zeros((x.shape[1], number))
    for step in range(STEPS):
        ahead = weights + step / (step + 3) * (weights - before)
        scores = x @ ahead
        shares = np.exp(scores - scores.max(1, keepdims=True))
        shares /= shares.sum(1, keepdims=True)
        gradient = x.T @ (shares - target) / len(x) + penalty * ahead
        before, weights = weights, ahead - gradient / steepest
    kernel = weights[:-1] / spread[:, None]
    return kernel.astype(np.float32), (weights[-1] - middle @ kernel).astype(np.float32)


def hits(states: np.ndarray, labels: np.ndarray, kernel: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Which texts it tells: bool[texts]."""
    return (states @ kernel + bias).argmax(1) == labels


def fingerprint(params: Params) -> str:
    """Tells trained models apart."""
    found = hashlib.sha256()
    for path, leaf in leaves(params):
        found.update(path.encode() + np.asarray(leaf[..., :64], np.float32).tobytes())
    return found.hexdigest()[:16]


def written(discriminator: Discriminator) -> str:
    """As JSON."""
    return json.dumps(
        {**discriminator._asdict(), "kernel": discriminator.kernel.tolist(), "bias": discriminator.bias.tolist()}
    )


def load(folder: Path, params: Params) -> Discriminator:
    """UserError where there is none, or one of another model."""
    path = folder / FILE
    try:
        said = json.loads(path.read_text())
        kernel, bias = np.array(said["kernel"], np.float32), np.array(said["bias"], np.float32)
        found = Discriminator([*said["labels"]], kernel, bias, said["model"], said.get("step"))
    except OSError as error:
        raise UserError(f"--discriminator {folder}: {FILE} cannot be read ({error.strerror}); make one first") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"--discriminator {folder}: {FILE} is damaged ({error!r}); train it anew") from None
    if found.model != fingerprint(params):
        of_step, cure = "", "train it on this run"
        if found.step is not None:
            of_step, cure = f" of step {found.step}", f"give --step {found.step} if it is of this run, else {cure}"
        raise UserError(f"--discriminator {folder}: reads the states of a model{of_step}, not of this one; {cure}")
    return found
