"""A hundred steps of our train step follow torch's AdamW on transformers' models, loss by loss."""

import jax
import numpy as np
import pytest
import torch

from models.core.noise import row_keys
from models.families.bert import FAMILY as BERT
from models.families.electra import FAMILY as ELECTRA
from models.families.gpt2 import FAMILY as GPT2
from pretrain.objectives.masked_language_model import MaskedLanguageModel
from pretrain.objectives.next_token_prediction import NextTokenPrediction
from pretrain.objectives.replaced_token_detection import ReplacedTokenDetection
from pretrain.optimizers import Optimizer, transformation
from pretrain.recipe import Phase, Recipe
from pretrain.schedules import Schedule
from pretrain.training.step import new_state, train_step
from tests.pretrain import reference, test_decoder_parity
from tests.pretrain.test_bert_parity import TINY as TINY_BERT
from tests.pretrain.test_bert_parity import torch_outputs
from tests.pretrain.test_electra_parity import TINY as TINY_ELECTRA
from tests.pretrain.test_electra_parity import sampled, torch_losses, torch_towers

STEPS, RATE, DECAY, BOUND = 100, 1e-3, 0.1, 1e-5
OPTIMIZER = Optimizer(decay=DECAY, clip=0.0)


def recipe(config, objective):
    schedule = Schedule("constant", peak=RATE, warmup=0.0)
    return Recipe("parity", "", config, objective, OPTIMIZER, schedule, (Phase(1.0, 32, 8),), STEPS, seed=7)


def batches(config, draw=reference.random_batch):
    return [draw(config, seed=100 + step) for step in range(STEPS)]


def our_losses(family, config, objective, params, optimizer, steps=STEPS, before_step=lambda *_: None, of=batches):
    """The loss before each update, f64[steps]; before_step(step, params, batch) is called before it.

    of: config -> the batches."""
    run = recipe(config, objective)
    step = jax.jit(train_step(run, family.module(config, reference.FLOAT32), optimizer, {}))
    state = new_state(jax.tree.map(jax.numpy.asarray, params), optimizer, {})
    losses = []
    for index, batch in enumerate(of(config)[:steps]):
        before_step(index, state.params, batch)
        state, metrics = step(state, {}, batch)
        losses.append(float(metrics.loss))
    return np.array(losses)


def torch_adamw(models, decayed):
    """torch's AdamW over the distinct parameters of the models; decayed(parameter) says which decay."""
    parameters = list(dict.fromkeys(parameter for model in models for parameter in model.parameters()))
    groups = [
        {"params": [p for p in parameters if decayed(p) == yes], "weight_decay": DECAY if yes else 0.0}
        for yes in (True, False)
    ]
    return torch.optim.AdamW(groups, lr=RATE, betas=(OPTIMIZER.b1, OPTIMIZER.b2), eps=OPTIMIZER.epsilon)


def update(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """(our initial parameters, torch's losses) from the same weights."""
    model = reference.torch_model(TINY_BERT, "model")
    params = reference.to_ours({"model": model}, TINY_BERT, tmp_path_factory.mktemp("bert"))
    optimizer = torch_adamw([model], decayed=lambda p: p.ndim >= 2)
    losses = [update(optimizer, torch_outputs(model, TINY_BERT, batch)[0]) for batch in batches(TINY_BERT)]
    return params, np.array(losses)


def relative(ours, theirs):
    return np.abs(ours - theirs) / np.abs(theirs)


def test_bert_follows_torch_adamw_for_a_hundred_steps(bert):
    params, theirs = bert
    optimizer = transformation(OPTIMIZER, BERT.parameters(TINY_BERT))
    ours = our_losses(BERT, TINY_BERT, MaskedLanguageModel(), params, optimizer)
    assert relative(ours, theirs).max() <= BOUND
    assert theirs[-10:].mean() < theirs[:10].mean() - 0.5  # it did learn


def test_decaying_biases_and_norms_too_would_be_noticed(bert, monkeypatch):
    params, theirs = bert
    monkeypatch.setattr("pretrain.optimizers.decays", lambda parameter: True)
    optimizer = transformation(OPTIMIZER, BERT.parameters(TINY_BERT))
    ours = our_losses(BERT, TINY_BERT, MaskedLanguageModel(), params, optimizer, steps=20)
    assert relative(ours, theirs[:20]).max() > 10 * BOUND


def test_electra_follows_torch_adamw_for_a_hundred_steps(tmp_path):
    towers = torch_towers(TINY_ELECTRA)
    params = reference.to_ours(towers, TINY_ELECTRA, tmp_path)
    generator, discriminator = towers["generator"], towers["discriminator"]
    generator.electra.embeddings = discriminator.electra.embeddings
    generator.generator_lm_head.weight = discriminator.electra.embeddings.word_embeddings.weight
    adamw = torch_adamw(towers.values(), decayed=lambda p: p.ndim >= 2)
    draw = jax.jit(sampled, static_argnums=1)
    theirs = []

    def follow(step, params, batch):
        """The torch step on the tokens that our generator samples in this step."""
        keys = row_keys(recipe(TINY_ELECTRA, None).seed, step, np.arange(len(batch["tokens"])))
        _, corrupted, originals = map(np.asarray, draw(params, TINY_ELECTRA, batch, keys))
        outputs = torch_losses(towers, batch, corrupted, originals)
        theirs.append(update(adamw, outputs[1].loss + 50.0 * outputs[0].loss))

    optimizer = transformation(OPTIMIZER, ELECTRA.parameters(TINY_ELECTRA))
    ours = our_losses(ELECTRA, TINY_ELECTRA, ReplacedTokenDetection(), params, optimizer, before_step=follow)
    assert relative(ours, np.array(theirs)).max() <= BOUND


def test_gpt2_follows_torch_adamw_for_a_hundred_steps(tmp_path):
    config, drawn = test_decoder_parity.TINY["gpt2"], lambda config: batches(config, test_decoder_parity.decoder_batch)
    model = reference.torch_model(config, "model")
    params = reference.to_ours({"model": model}, config, tmp_path)
    adamw = torch_adamw([model], decayed=lambda p: p.ndim >= 2)
    theirs = np.array([update(adamw, test_decoder_parity.torch_outputs(model, batch)[0]) for batch in drawn(config)])
    optimizer = transformation(OPTIMIZER, GPT2.parameters(config))
    ours = our_losses(GPT2, config, NextTokenPrediction(), params, optimizer, of=drawn)
    assert relative(ours, theirs).max() <= BOUND
    assert theirs[-10:].mean() < theirs[:10].mean() - 0.5  # it did learn
