"""Classify texts by one linear layer on a frozen model's mean hidden states (Dathathri et al. 2020, section 4.3)."""

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
PENALTY = 1e-3  # on squared weights, for states of variance 1
STEPS = 1000


class Discriminator(NamedTuple):
    """kernel: f32[width, labels].   bias: f32[labels].   model: `fingerprint` of the model whose states it reads.
    step: step of that model; None if unknown."""

    labels: list[str]
    kernel: np.ndarray
    bias: np.ndarray
    model: str
    step: int | None


def means(model: nn.Module, params: Params, texts: Sequence[np.ndarray], mesh: Mesh) -> np.ndarray:
    """Compute the mean hidden state of each text: f32[texts, width].   texts: i32[tokens] each."""

    result = np.zeros((len(texts), model.config.width), np.float32)
    for chosen, hidden in hidden_states(model, params, texts, mesh):
        lengths = np.array([len(texts[index]) for index in chosen])[:, None]
        real = jnp.arange(hidden.shape[1]) < lengths
        states = hidden[: len(chosen)].astype(jnp.float32)
        result[chosen] = jnp.sum(states, axis=1, where=real[..., None]) / np.maximum(lengths, 1)
    return result


def fit(states: np.ndarray, labels: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Fit a penalized multinomial regression of labels i64[texts] on states f32[texts, width] -> (kernel f32[width,
    number], bias f32[number]). The problem is convex; Nesterov's accelerated gradient needs no tuned learning rate."""
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
    """Hash parameters, to tell trained models apart."""
    digest = hashlib.sha256()
    for path, leaf in leaves(params):
        digest.update(path.encode() + np.asarray(leaf[..., :64], np.float32).tobytes())
    return digest.hexdigest()[:16]


def load(folder: Path, params: Params) -> Discriminator:
    """Read a discriminator; UserError if there is none, or if it belongs to another model than `params`."""
    path = folder / FILE
    try:
        fields = json.loads(path.read_text())
        kernel, bias = np.array(fields["kernel"], np.float32), np.array(fields["bias"], np.float32)
        loaded = Discriminator([*fields["labels"]], kernel, bias, fields["model"], fields.get("step"))
    except OSError as error:
        raise UserError(f"--discriminator {folder}: {FILE} cannot be read ({error.strerror}); train one") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"--discriminator {folder}: {FILE} is damaged ({error!r}); train it again") from None
    if loaded.model != fingerprint(params):
        of_step, cure = "", "train it on this run"
        if loaded.step is not None:
            of_step, cure = f" at step {loaded.step}", f"give --step {loaded.step} if it was of this run, else {cure}"
        raise UserError(f"--discriminator {folder}: was trained on another model{of_step}; {cure}")
    return loaded
