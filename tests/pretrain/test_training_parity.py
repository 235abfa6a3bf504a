"""A hundred steps of our train step follow torch's optimisers on transformers' models, loss by loss."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from transformers.optimization import Adafactor

from models.core.program import Program
from pretrain.objectives.sequence_to_sequence import SequenceToSequence
from pretrain.optimizers import Optimizer
from pretrain.recipe import Phase, Recipe
from pretrain.schedules import Schedule
from pretrain.training.assembly import assemble
from pretrain.training.step import given_in, initial_state, train_step
from tests.contract import cases
from tests.pretrain import reference

CASE = cases.CASES["bert"]
STEPS, RATE, DECAY = 100, 1e-3, 0.1
OPTIMIZER = Optimizer(decay=DECAY, clip=0.0)


def test_losses_follow_torch_adamw_for_a_hundred_steps(tmp_path):
    model = reference.torch_model(CASE.model, "model")
    params, adamw = (
        reference.to_ours({"model": model}, CASE.model, tmp_path),
        reference.torch_adamw(model, OPTIMIZER, RATE),
    )

    schedule = Schedule("constant", peak=RATE, warmup=0.0)
    phases = (Phase(1.0, cases.LENGTH, 8),)
    recipe = Recipe("parity", "", CASE.model, CASE.objective, OPTIMIZER, schedule, phases, STEPS)
    assembly = assemble(recipe, reference.FLOAT32)
    ours, given = jax.jit(train_step(assembly, {})), given_in(recipe, 0)
    state, _ = initial_state(assembly, jax.tree.map(jax.numpy.asarray, params))
    losses = []
    for step in range(STEPS):
        batch = reference.random_batch(CASE.model, seed=100 + step, length=cases.LENGTH)
        labels = {"labels": reference.token_labels(batch), "next_sentence_label": reference.pair_labels(batch)}
        loss = model(**reference.torch_inputs(batch), **labels).loss
        adamw.zero_grad()
        loss.backward()
        adamw.step()
        state, metrics = ours(state, {}, batch, given)
        losses.append((float(metrics.loss), loss.item()))
    found, expected = np.array(losses).T
    assert (np.abs(found - expected) / np.abs(expected)).max() <= 1e-5
    assert expected[-10:].mean() < expected[:10].mean() - 0.1  # it did learn


def in_double_precision(monkeypatch):
    """What is float32 elsewhere, in both libraries: norms, softmax, compute and update."""
    monkeypatch.setattr(jnp, "float32", jnp.float64)
    monkeypatch.setattr(Program, "compute", np.dtype("float64"))
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def test_t5_follows_transformers_adafactor_for_a_hundred_steps(tmp_path, monkeypatch):
    """In double precision: at Adafactor's rate, the last bits of float32 become the fourth figure in 50 steps."""
    case, rows = cases.CASES["t5"], 8
    model, phase = reference.torch_model(case.model, "model"), case.of(cases.LENGTH, rows)
    params = reference.to_ours({"model": model}, case.model, tmp_path)
    optimizer = Optimizer("adafactor", decay=0.0, clip=0.0)
    schedule = Schedule("constant", peak=2.0**-7, warmup=0.0)  # a number that float32 has exactly
    recipe = Recipe("parity", "", case.model, SequenceToSequence(), optimizer, schedule, (phase,), STEPS)
    model = model.double()
    adafactor = Adafactor(model.parameters(), lr=schedule.peak, relative_step=False, scale_parameter=True)
    losses = []
    with jax.enable_x64(True):
        in_double_precision(monkeypatch)
        assembly = assemble(recipe, reference.FLOAT32)
        ours, given = jax.jit(train_step(assembly, {})), given_in(recipe, 0)
        state, _ = initial_state(assembly, jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), params))
        for step in range(STEPS):
            batch = targets_of(reference.random_batch(case.model, seed=100 + step, length=cases.LENGTH), phase)
            tensors = {name: torch.from_numpy(batch[name]).long() for name in batch}
            loss = model(
                input_ids=tensors["tokens"],
                attention_mask=tensors["segments"],
                decoder_input_ids=tensors["decoder_tokens"],
                labels=tensors["targets"],
            ).loss
            adafactor.zero_grad()
            loss.backward()
            adafactor.step()
            state, metrics = ours(state, {}, batch, given)
            losses.append((float(metrics.loss), loss.item()))
    found, expected = np.array(losses).T
    assert (np.abs(found - expected) / expected).max() <= 1e-10
    assert expected[-10:].mean() < expected[:10].mean() - 0.1  # it did learn


def targets_of(batch, phase):
    """Inputs and as targets the first of their tokens, backwards."""
    tokens, segments = batch["tokens"], (batch["segments"] > 0).astype(np.int32)
    targets = tokens[:, : phase.target_length][:, ::-1].copy()
    given = np.pad(targets[:, :-1], ((0, 0), (1, 0)))
    real = np.ones_like(targets)
    found = {"tokens": tokens, "segments": segments, "decoder_tokens": given, "decoder_segments": real}
    return found | {"targets": targets, "weights": real.astype(np.float64)}
