"""Our ELECTRA computes what transformers' two torch models compute, and its joint gradient is the sum of theirs."""

import dataclasses

import jax
import numpy as np
import pytest
import torch

from models.core.noise import fold
from models.core.program import Program
from models.families.electra import FAMILY
from pretrain.objectives.inputs import inputs_of
from pretrain.objectives.objective import Moment
from pretrain.objectives.replaced_token_detection import (
    SAMPLING_NOISE,
    ReplacedTokenDetection,
    sample,
    write_predictions,
)
from tests.pretrain import reference

TINY = dataclasses.replace(FAMILY.sizes["tiny"], vocab_size=1003, positions=64, dropout=0.0, attention_dropout=0.0)
BASE = dataclasses.replace(FAMILY.sizes["base"], dropout=0.0, attention_dropout=0.0)


def torch_towers(config):
    """Discriminator and generator with equal embeddings, as two separate models."""
    towers = {part: reference.torch_model(config, part, seed) for seed, part in enumerate(FAMILY.hf)}
    embeddings = towers["discriminator"].electra.embeddings.state_dict()
    towers["generator"].electra.embeddings.load_state_dict(embeddings)
    return towers


def sampled(params, config, batch, keys):
    """(generator logits, the tokens that the discriminator sees, the original tokens)."""
    module = FAMILY.module(config, reference.FLOAT32)
    inputs = (inputs_of(module, batch), batch["prediction_positions"])
    logits = module.apply({"params": params}, *inputs, method="generate")
    guesses = sample(logits, fold(keys, SAMPLING_NOISE), batch["prediction_positions"].shape)
    originals = write_predictions(batch["tokens"], batch, batch["prediction_targets"])
    return logits, write_predictions(originals, batch, guesses), originals


def our_loss(config, program, train=True, factors=(1.0, 50.0)):
    """(params, batch, keys) -> (generator and discriminator loss by their factors, {term: mean loss})."""
    objective = ReplacedTokenDetection()
    model = FAMILY.module(config, program)

    def loss(params, batch, keys):
        sums, _, _ = objective.loss(model, params, batch, {}, Moment(keys, train))
        weights = objective.weights(batch)
        terms = {term: sums[term] / weights[term] for term in sums}
        return factors[0] * terms["generator"] + factors[1] * terms["discriminator"], terms

    return loss


def torch_losses(towers, batch, corrupted, originals):
    """Outputs of the torch towers: ElectraForPreTraining's on the corrupted tokens, ElectraForMaskedLM's."""
    replaced = torch.from_numpy((corrupted != originals).astype(np.float32))
    discriminator = towers["discriminator"](**reference.torch_inputs(batch, corrupted), labels=replaced)
    generator = towers["generator"](**reference.torch_inputs(batch), labels=reference.token_labels(batch))
    return discriminator, generator


def summed_gradients(towers, weight):
    """Part -> tensor name -> gradient of generator loss + weight * discriminator loss, embeddings summed."""
    gradients = {part: reference.torch_gradients(tower) for part, tower in towers.items()}
    gradients["discriminator"] = {name: weight * g for name, g in gradients["discriminator"].items()}
    shared = [name for name in gradients["generator"] if name.startswith("electra.embeddings.")]
    for name in shared:
        total = gradients["generator"][name] + gradients["discriminator"][name]
        gradients["generator"][name] = gradients["discriminator"][name] = total
    return gradients


def check(config, tmp_path, loss_bound, gradient_bound, batch, settings):
    towers = torch_towers(config)
    params = reference.to_ours(towers, config, tmp_path)
    keys = np.arange(2 * len(batch["tokens"]), dtype=np.uint32).reshape(-1, 2)
    logits, corrupted, originals = map(np.asarray, jax.jit(sampled, static_argnums=1)(params, config, batch, keys))
    discriminator, generator = torch_losses(towers, batch, corrupted, originals)
    replaced = corrupted != originals
    assert 0 < replaced.sum() <= batch["prediction_weights"].sum()

    rows = np.arange(len(corrupted))[:, None]
    expected = generator.logits.detach().numpy()[rows, batch["prediction_positions"]].reshape(-1, config.vocab_size)
    np.testing.assert_allclose(logits[:, : config.vocab_size], expected, rtol=0, atol=loss_bound)
    module = FAMILY.module(config, reference.FLOAT32)
    apply = lambda params, x, method: module.apply({"params": params}, x, method=method)
    score = jax.jit(lambda params, inputs: apply(params, apply(params, inputs, "encode"), "token_scores"))
    scores = score(params, inputs_of(module, batch) | {"tokens": corrupted})
    real = batch["segments"] > 0
    np.testing.assert_allclose(scores[real], discriminator.logits.detach().numpy()[real], rtol=0, atol=loss_bound)

    discriminator.loss.backward()
    generator.loss.backward()
    theirs = summed_gradients(towers, weight=50.0)
    for program, train in settings:
        gradient = jax.jit(jax.grad(our_loss(config, program, train), has_aux=True))
        gradients, terms = gradient(params, batch, keys)
        assert abs(float(terms["generator"]) - generator.loss.item()) <= loss_bound
        assert abs(float(terms["discriminator"]) - discriminator.loss.item()) <= loss_bound
        for part in FAMILY.hf:
            reference.assert_gradients_equal(gradients, theirs[part], config, part, gradient_bound)
        reference.assert_padding_rows_untouched(gradients, config)


def test_tiny_equals_the_two_torch_models(tmp_path):
    settings = [(Program(depth="scan"), True), (Program(depth="unroll"), False)]
    check(TINY, tmp_path, 1e-5, 2e-5, reference.random_batch(TINY, seed=1), settings)


@pytest.mark.slow
def test_base_equals_the_two_torch_models(tmp_path):
    batch = reference.random_batch(BASE, seed=2, rows=4, length=64, slots=10)
    check(BASE, tmp_path, 1e-4, 5e-5, batch, [(Program(depth="scan"), True)])


def test_the_discriminator_moves_the_generator_only_through_the_shared_embeddings(tmp_path):
    params = reference.to_ours(torch_towers(TINY), TINY, tmp_path)
    batch = reference.random_batch(TINY, seed=3)
    keys = np.ones((len(batch["tokens"]), 2), np.uint32)
    loss = our_loss(TINY, reference.FLOAT32, factors=(0.0, 1.0))
    gradients, _ = jax.jit(jax.grad(loss, has_aux=True))(params, batch, keys)
    assert not any(leaf.any() for leaf in jax.tree.leaves(gradients["generator"]))
    assert all(leaf.any() for leaf in jax.tree.leaves(gradients["embeddings"]))
