"""A hundred steps of our train step follow torch's AdamW on transformers' BERT, loss by loss."""

import jax
import numpy as np
import torch

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


def torch_adamw(model):
    """torch's AdamW, by which exactly matrices decay."""
    groups = [
        {"params": [p for p in model.parameters() if (p.ndim >= 2) == matrices], "weight_decay": decay}
        for matrices, decay in ((True, DECAY), (False, 0.0))
    ]
    return torch.optim.AdamW(groups, lr=RATE, betas=(OPTIMIZER.b1, OPTIMIZER.b2), eps=OPTIMIZER.epsilon)


def test_losses_follow_torch_adamw_for_a_hundred_steps(tmp_path):
    model = reference.torch_model(CASE.model, "model")
    params, adamw = reference.to_ours({"model": model}, CASE.model, tmp_path), torch_adamw(model)

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
