"""Our BERT computes what transformers' torch BERT computes: logits, losses, every gradient."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from models.core.program import Program
from models.families.bert import FAMILY
from models.families.registry import family_of
from pretrain.objectives.inputs import inputs_of
from pretrain.objectives.masked_language_model import MaskedLanguageModel
from pretrain.objectives.objective import Moment
from tests.pretrain import reference

TINY = dataclasses.replace(FAMILY.sizes["tiny"], vocab_size=1003, positions=64, dropout=0.0, attention_dropout=0.0)
BASE = dataclasses.replace(FAMILY.sizes["base"], dropout=0.0, attention_dropout=0.0)


# What the label of pairs and their logits are called in transformers
NEXT = ("next_sentence_label", "seq_relationship_logits")
PAIR = {"bert": NEXT, "big_bird": NEXT, "albert": ("sentence_order_label", "sop_logits")}


def torch_outputs(model, config, batch):
    """(loss, token logits [batch, length, vocab], pair logits or None)."""
    if config.pair_head:
        label, logits = PAIR[model.config.model_type]
        labels = {"labels": reference.token_labels(batch), label: reference.pair_labels(batch)}
        out = model(**reference.torch_inputs(batch), **labels)
        return out.loss, out.prediction_logits, out[logits]
    inputs = reference.torch_inputs(batch, types=config.types)
    out = model(**inputs, labels=reference.token_labels(batch))
    return out.loss, out.logits, None


def our_loss(config, program, train):
    """(params, batch) -> loss, as the train step forms it."""
    model_type = family_of(config).hf["model"].constants["model_type"]
    of_order = config.pair_head and PAIR[model_type] != NEXT
    objective = MaskedLanguageModel(next_sentence=config.pair_head and not of_order, sentence_order=of_order)
    model = family_of(config).module(config, program)

    def loss(params, batch):
        keys = np.ones((len(batch["tokens"]), 2), np.uint32)
        sums, _, _ = objective.loss(model, params, batch, {}, Moment(keys, train))
        weights = objective.weights(batch)
        return sum(c * sums[term] / weights[term] for term, c in objective.coefficients(0).items())

    return loss


def our_logits(params, config, batch):
    model = family_of(config).module(config, reference.FLOAT32)
    slots = jnp.pad(batch["prediction_positions"], ((0, 0), (1, 0)))
    hidden = model.apply({"params": params}, inputs_of(model, batch), None, slots, method="encode")
    pairs = model.apply({"params": params}, hidden[:, 0], method="pair_logits") if config.pair_head else None
    return model.apply({"params": params}, hidden[:, 1:], method="token_logits"), pairs


def check(config, tmp_path, logit_bound, gradient_bound, batch, settings, model=None, unread=()):
    """Compare logits once, and loss and gradients for every (program, train).

    model: the torch model, by default one in evaluation mode.   unread: tensors that no loss depends on.
    """
    model = model or reference.torch_model(config, "model")
    params = reference.to_ours({"model": model}, config, tmp_path)
    loss, token_logits, pair_logits = torch_outputs(model, config, batch)
    loss.backward()
    theirs = reference.torch_gradients(model)

    tokens, pairs = jax.jit(our_logits, static_argnums=1)(params, config, batch)
    rows = np.arange(len(batch["tokens"]))[:, None]
    expected = token_logits.detach().numpy()[rows, batch["prediction_positions"]]
    tokens = np.asarray(tokens).reshape(*expected.shape[:2], -1)
    np.testing.assert_allclose(tokens[..., : config.vocab_size], expected, rtol=0, atol=logit_bound)
    assert (tokens[..., config.vocab_size :] == -np.inf).all()
    if config.pair_head:
        np.testing.assert_allclose(pairs, pair_logits.detach().numpy(), rtol=0, atol=logit_bound)

    for program, train in settings:
        value, gradients = jax.jit(jax.value_and_grad(our_loss(config, program, train)))(params, batch)
        assert abs(float(value) - loss.item()) <= logit_bound, (program, train)
        reference.assert_gradients_equal(gradients, theirs, config, "model", gradient_bound, unread)
        reference.assert_padding_rows_untouched(gradients, config)


PROGRAMS = {
    "scan": (Program(depth="scan"), True),
    "evaluation": (Program(depth="scan"), False),
    "unroll": (Program(depth="unroll"), True),
    "scan, remat dots": (Program(depth="scan", remat="dots"), True),
    "unroll, remat full": (Program(depth="unroll", remat="full"), True),
}


def test_tiny_equals_torch_however_it_is_compiled(tmp_path):
    check(TINY, tmp_path, 1e-5, 2e-5, reference.random_batch(TINY, seed=1), PROGRAMS.values())


def test_tiny_without_pair_head_equals_torch(tmp_path):
    config = dataclasses.replace(TINY, pair_head=False)
    check(config, tmp_path, 1e-5, 2e-5, reference.random_batch(config, seed=2), [PROGRAMS["scan"]])


@pytest.mark.parametrize("activation", ["relu", "gelu_new"])
def test_other_activations_give_torch_logits(activation, tmp_path):
    config = dataclasses.replace(TINY, activation=activation)
    check(config, tmp_path, 1e-5, 2e-5, reference.random_batch(config, seed=3), [])


@pytest.mark.slow
def test_base_equals_torch(tmp_path):
    batch = reference.random_batch(BASE, seed=4, rows=4, length=64, slots=10)
    check(BASE, tmp_path, 1e-4, 5e-5, batch, [PROGRAMS["scan"]])


def test_a_padding_token_changes_no_prediction(tmp_path):
    params = reference.to_ours({"model": reference.torch_model(TINY, "model")}, TINY, tmp_path)
    batch = reference.random_batch(TINY, seed=5)
    padded = dict(batch, tokens=np.where(batch["segments"] == 0, 77, batch["tokens"]))
    assert torch.any(torch.from_numpy(padded["tokens"] != batch["tokens"]))
    for one, other in zip(our_logits(params, TINY, batch), our_logits(params, TINY, padded), strict=True):
        np.testing.assert_array_equal(one, other)
