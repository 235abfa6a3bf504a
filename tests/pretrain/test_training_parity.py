"""A hundred steps of our train step follow torch's AdamW on transformers' models, loss by loss."""

import dataclasses

import jax
import numpy as np
import pytest
import torch

from models.core.noise import row_keys
from models.families.registry import FAMILIES, family_of
from pretrain.optimizers import Optimizer, transformation
from pretrain.recipe import Phase, Recipe
from pretrain.schedules import Schedule
from pretrain.training.step import new_state, train_step
from tests.contract import cases
from tests.pretrain import reference

STEPS, RATE, DECAY, SEED = 100, 1e-3, 0.1, 7
STILL = {"dropout": 0.0, "attention_dropout": 0.0}
# Wider: rounding grows from step to step, and more so the smaller a model is
ELECTRA = dataclasses.replace(FAMILIES["electra"].sizes["tiny"], vocab_size=1003, positions=64, **STILL)
CASES = cases.CASES | {"electra": cases.CASES["electra"]._replace(model=ELECTRA)}
OPTIMIZER = Optimizer(decay=DECAY, clip=0.0)


def of_pairs(models, params, batch, step):
    labels = {"labels": reference.token_labels(batch), "next_sentence_label": reference.pair_labels(batch)}
    return models["model"](**reference.torch_inputs(batch), **labels).loss


def electra():
    """On the tokens that our generator samples in this step."""
    draw = jax.jit(reference.sampled, static_argnums=1)

    def loss(models, params, batch, step):
        keys = row_keys(SEED, step, np.arange(len(batch["tokens"])))
        made = draw(params, CASES["electra"].model, batch, keys)
        return reference.electra_loss(models, batch, *map(np.asarray, made))

    return loss


LOSSES = {"bert": of_pairs, "electra": electra()}


def torch_adamw(models):
    """torch's AdamW, by which exactly matrices decay."""
    parameters = list(dict.fromkeys(parameter for model in models.values() for parameter in model.parameters()))
    groups = [
        {"params": [p for p in parameters if (p.ndim >= 2) == matrices], "weight_decay": DECAY if matrices else 0.0}
        for matrices in (True, False)
    ]
    return torch.optim.AdamW(groups, lr=RATE, betas=(OPTIMIZER.b1, OPTIMIZER.b2), eps=OPTIMIZER.epsilon)


@pytest.mark.parametrize("name", ["bert", pytest.param("electra", marks=pytest.mark.slow)])
def test_losses_follow_torch_adamw_for_a_hundred_steps(name, tmp_path):
    case = CASES[name]
    models = {part: reference.torch_model(case.model, part) for part in family_of(case.model).hf}
    if name == "electra":
        generator, embeddings = models["generator"], models["discriminator"].electra.embeddings
        generator.electra.embeddings.load_state_dict(embeddings.state_dict())
    params = reference.to_ours(models, case.model, tmp_path)
    if name == "electra":
        generator.electra.embeddings = embeddings
        generator.generator_lm_head.weight = embeddings.word_embeddings.weight
    adamw = torch_adamw(models)

    schedule = Schedule("constant", peak=RATE, warmup=0.0)
    phases = (Phase(1.0, cases.LENGTH, 8),)
    recipe = Recipe("parity", "", case.model, case.objective, OPTIMIZER, schedule, phases, STEPS, seed=SEED)
    optimizer = transformation(OPTIMIZER, family_of(case.model).parameters(case.model))
    ours = jax.jit(train_step(recipe, family_of(case.model).module(case.model, reference.FLOAT32), optimizer, {}))
    state = new_state(jax.tree.map(jax.numpy.asarray, params), optimizer, {})
    losses = []
    for step in range(STEPS):
        batch = reference.random_batch(case.model, seed=100 + step, length=cases.LENGTH)
        loss = LOSSES[name](models, state.params, batch, step)
        adamw.zero_grad()
        loss.backward()
        adamw.step()
        state, metrics = ours(state, {}, batch)
        losses.append((float(metrics.loss), loss.item()))
    found, expected = np.array(losses).T
    assert (np.abs(found - expected) / np.abs(expected)).max() <= 1e-5
    assert expected[-10:].mean() < expected[:10].mean() - 0.1  # it did learn
