"""A discriminator of texts: one linear layer on the mean of a frozen model's hidden states (Dathathri et al. 2020,
section 4.3), trained on labelled texts."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from data_pipelines.errors import UserError
from models.core.parameters import Params, leaves
from pretrain.prompting.asking import hidden_states

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

    found = np.zeros((len(texts), model.config.width), np.float32)
    for chosen, hidden in hidden_states(model, params, texts, mesh):
        lengths = np.array([len(texts[index]) for index in chosen])[:, None]
        real = jnp.arange(hidden.shape[1]) < lengths
        states = hidden[: len(chosen)].astype(jnp.float32)
        found[chosen] = jnp.sum(states, axis=1, where=real[..., None]) / np.maximum(lengths, 1)
    return found


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


def fingerprint(params: Params) -> str:
    """Tells trained models apart."""
    found = hashlib.sha256()
    for path, leaf in leaves(params):
        found.update(path.encode() + np.asarray(leaf[..., :64], np.float32).tobytes())
    return found.hexdigest()[:16]


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
