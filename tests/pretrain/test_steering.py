"""Steered text (PPLM): one step in torch with transformers' GPT-2 gives the same, and strengths do what they say."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import torch
from transformers import DynamicCache

from data_pipelines.errors import UserError
from models.core.program import Program
from models.families.registry import FAMILIES
from pretrain.generation.decoding import generate
from pretrain.generation.settings import Decoding, Steering
from pretrain.steering import loop
from pretrain.steering.loop import Aim
from tests.contract import cases, torch_reference
from tests.pretrain.test_generation import eloquent

CASE = cases.CASES["gpt2"]
WORDS = [7, 20, 31, 48, 77]
STRONG = Steering(step_size=0.2)
PROMPTS = [[9, 33, 71, 14, 5, 62], [50], [12, 80, 13], [44, 8]]
NEW = 6
GREEDY = Decoding(max_tokens=NEW)


@pytest.fixture(scope="module")
def gpt2():
    model, params = eloquent("gpt2")
    return FAMILIES["gpt2"].module(model.config, Program(depth="scan")), params


@pytest.fixture(scope="module")
def torch_gpt2(gpt2):
    return torch_reference.with_parameters(CASE, "model", gpt2[1]).eval()


BAG = np.isin(np.arange(128), WORDS)
LABEL = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32), np.zeros(3, np.float32), np.int32(2)
AIMS = {"words": Aim(BAG), "discriminator": Aim(None, LABEL), "both": Aim(BAG, LABEL)}


def forward(model, past, **what):
    """Torch: one or several further tokens -> (logits and hidden state of the last, keys and values by layer)."""
    out = model.transformer(past_key_values=DynamicCache(past or None), use_cache=True, **what)
    hidden = out.last_hidden_state[0, -1]
    return model.lm_head(hidden), hidden, [(layer.keys, layer.values) for layer in out.past_key_values.layers]


def gradient_step(model, ids, past, delta, plain, aim, steering, norms):
    """Equation 3 of Dathathri et al. 2020 with the loss of its program -> (delta, norms)."""
    delta = [tuple(array.clone().requires_grad_() for array in layer) for layer in delta]
    changed = [(keys + dk, values + dv) for (keys, values), (dk, dv) in zip(past, delta, strict=True)]
    logits, hidden, _ = forward(model, changed, input_ids=ids[:, -1:])
    p, total = torch.softmax(logits, -1), 0.0
    if aim.words is not None:
        total = total - torch.log(p[WORDS].sum())
    if aim.discriminator is not None:
        kernel, bias, label = (torch.from_numpy(np.array(array)) for array in aim.discriminator)
        mixture = (p @ model.transformer.wte.weight)[None, None]
        _, ahead, _ = forward(model, plain["past"], inputs_embeds=mixture)
        mean = (plain["hidden"] + hidden.detach() + ahead) / (ids.shape[1] + 1)
        total = total + torch.nn.functional.cross_entropy(mean @ kernel + bias, label.long())
    total = total + steering.kl_scale * (p * (p / plain["p"]).log()).sum()
    gradients = iter(torch.autograd.grad(total, [array for layer in delta for array in layer]))
    new = []
    for index, layer in enumerate(delta):
        own = [next(gradients) for _ in layer]
        for gradient in own:
            gradient[:, :, : max(gradient.shape[2] - steering.window, 0) if steering.window else 0] = 0
        norm = torch.sqrt(sum((gradient**2).sum() for gradient in own))
        norms[index] = norm if aim.discriminator else max(norms[index], norm)
        rate = steering.step_size / norms[index] ** steering.gamma
        new.append(tuple((array - rate * g).detach() for array, g in zip(layer, own, strict=True)))
    return new, norms


def steered_text(model, prompt, aim, steering, new=NEW):
    """Torch: the likeliest tokens after a prompt, and the distribution of each."""
    ids, norms, said = torch.tensor([prompt]), [torch.tensor(0.0)] * 2, []
    with torch.no_grad():
        past = forward(model, None, input_ids=ids[:, :-1])[2] if len(prompt) > 1 else []
    for _ in range(new):
        with torch.no_grad():
            logits, _, plain_past = forward(model, None, input_ids=ids)
            states = model.transformer(ids).last_hidden_state[0, :-1].sum(0)
        plain = {"p": torch.softmax(logits, -1), "past": plain_past, "hidden": states}
        delta = [tuple(torch.zeros_like(array) for array in layer) for layer in past]
        for _ in range(steering.iterations if past else 0):
            delta, norms = gradient_step(model, ids, past, delta, plain, aim, steering, norms)
        changed = [(keys + dk, values + dv) for (keys, values), (dk, dv) in zip(past, delta, strict=True)]
        with torch.no_grad():
            logits, _, past = forward(model, changed, input_ids=ids[:, -1:])
        fused = torch.softmax(logits, -1) ** steering.fusion * plain["p"] ** (1 - steering.fusion)
        said.append((fused / fused.sum()).numpy())
        ids = torch.cat([ids, fused.argmax()[None, None]], dim=1)
    return ids[0, len(prompt) :].tolist(), np.stack(said)


def written(gpt2, aim, steering, decoding=GREEDY):
    texts = generate(*gpt2, PROMPTS, decoding, seed=3, program=loop.steered_program(aim, steering))
    return [text for (text,) in texts]


def distribution(gpt2, aim, steering, prompt, given):
    """p of the tokens `given` after the prompt, one after the other: [given, vocab]."""
    model, params = gpt2
    following = jax.jit(functools.partial(loop._following, model, params, aim, steering, 1.0))
    # Padding in front, as in a batch with longer prompts
    tokens, segments = (
        np.pad([row], ((0, 0), (3, 0))).astype(np.int32) for row in (prompt[:-1], [1] * len(prompt[:-1]))
    )
    read = jax.jit(functools.partial(loop._read, model, params, more=NEW + 1))(tokens, segments)
    said = []
    for length, token in enumerate([prompt[-1], *given[:-1]], len(prompt) - 1):
        fused, read = following(np.array([[token]], np.int32), np.array([length], np.int32), read)
        said.append(jax.nn.softmax(fused[0])[: model.config.vocab_size])
    return np.stack(said)


STRENGTHS = {
    "words": STRONG,
    "discriminator": dataclasses.replace(STRONG, iterations=2, window=3),
    "both": dataclasses.replace(STRONG, gamma=1.0, kl_scale=0.5, fusion=0.6, window=2),
}


@pytest.mark.parametrize("name", AIMS)
def test_distributions_are_those_of_the_same_equations_in_torch(gpt2, torch_gpt2, name):
    text, expected = steered_text(torch_gpt2, PROMPTS[0], AIMS[name], STRENGTHS[name])
    found = distribution(gpt2, AIMS[name], STRENGTHS[name], PROMPTS[0], text)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_texts_of_prompts_of_different_length_are_those_of_torch_one_by_one(gpt2, torch_gpt2):
    by = lambda steering: [steered_text(torch_gpt2, prompt, AIMS["words"], steering)[0] for prompt in PROMPTS]
    assert written(gpt2, AIMS["words"], STRONG) == by(STRONG) != by(dataclasses.replace(STRONG, iterations=0))


def test_with_steps_of_no_size_what_is_drawn_is_unsteered(gpt2):
    drawn = Decoding(max_tokens=NEW, sample=True, top_k=40)
    steering = dataclasses.replace(STRONG, step_size=0.0)
    assert written(gpt2, AIMS["words"], steering, drawn) == [
        text for (text,) in generate(*gpt2, PROMPTS, drawn, seed=3)
    ]


def test_what_cannot_be_steered_is_one_line(gpt2):
    with pytest.raises(UserError, match="--beams 2: steering works without beam search only; leave --beams out"):
        written(gpt2, AIMS["words"], STRONG, dataclasses.replace(GREEDY, beams=2))
    with pytest.raises(UserError, match="transformer-xl has no keys to steer; use a gpt2"):
        written(eloquent("transformer-xl"), AIMS["words"], STRONG)
    with pytest.raises(UserError, match="--steering.fusion 2: must be in"):
        Steering(fusion=2)


def test_a_gradient_too_small_to_have_a_norm_moves_nothing_and_no_power_of_a_norm_is_lost():
    found = loop.rates(Steering(step_size=0.02, gamma=2.0), np.array([0.0, 1e-22, 0.5], np.float32))
    np.testing.assert_allclose(found, [0, 0.02 / 1e-30, 0.08], rtol=1e-5)
    with pytest.raises(UserError, match="--steering.gamma 2.5: must be at least 0 and at most 2"):
        Steering(gamma=2.5)
