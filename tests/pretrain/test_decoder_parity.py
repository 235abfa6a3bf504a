"""Our decoders compute what transformers' torch decoders compute: logits, loss, every gradient."""

import dataclasses

import jax
import numpy as np
import pytest
import torch
import transformers

from models.blocks.embeddings import padded_vocab
from models.core.parameters import count
from models.core.program import Program
from models.families.registry import FAMILIES, family_of
from pretrain.huggingface.export import config_fields
from pretrain.huggingface.tensors import architecture
from pretrain.objectives.inputs import inputs_of
from pretrain.objectives.next_token_prediction import NextTokenPrediction
from pretrain.objectives.objective import Moment
from tests.models.shapes import parameter_shapes
from tests.pretrain import reference


def still(family, size, **changes):
    """A size without dropout."""
    return dataclasses.replace(FAMILIES[family].sizes[size], dropout=0.0, attention_dropout=0.0, **changes)


TINY = {name: still(name, "tiny", vocab_size=1003, positions=64) for name in ("ctrl", "gpt", "gpt2")}


def decoder_batch(config, seed, rows=8, length=32):
    """Rows of texts of several lengths; the last token of each has no next one."""
    batch = reference.random_batch(config, seed, rows, length)
    after = np.pad(batch["tokens"], ((0, 0), (0, 1)))[:, 1:]
    real = np.pad(batch["segments"], ((0, 0), (0, 1)))[:, 1:]
    chosen = {name: batch[name] for name in ("tokens", "segments")}
    return chosen | {"targets": after * real, "weights": real.astype(np.float32)}


def torch_outputs(model, batch):
    """(loss, logits [batch, length, vocab]); transformers moves the labels itself."""
    labels = np.where(batch["segments"] > 0, batch["tokens"], -100)
    tokens, mask, labels = (torch.from_numpy(a).long() for a in (batch["tokens"], batch["segments"], labels))
    out = model(tokens, attention_mask=mask, labels=labels)
    return out.loss, out.logits


def our_loss(config, program):
    """(params, batch) -> loss, as the train step forms it."""
    objective, model = NextTokenPrediction(), family_of(config).module(config, program)

    def loss(params, batch):
        keys = np.ones((len(batch["tokens"]), 2), np.uint32)
        sums, _, _ = objective.loss(model, params, batch, {}, Moment(keys, True))
        return sums["lm"] / objective.weights(batch)["lm"]

    return loss


def our_logits(params, config, batch):
    model = family_of(config).module(config, reference.FLOAT32)
    hidden = model.apply({"params": params}, inputs_of(model, batch), method="decode")
    return model.apply({"params": params}, hidden, method="token_logits")


def check(config, tmp_path, logit_bound, gradient_bound, batch, programs):
    """Compare logits once, and loss and gradients for every program."""
    model = reference.torch_model(config, "model")
    params = reference.to_ours({"model": model}, config, tmp_path)
    loss, logits = torch_outputs(model, batch)
    loss.backward()
    theirs, expected = reference.torch_gradients(model), logits.detach().numpy()
    real = batch["segments"] > 0
    ours = np.asarray(jax.jit(our_logits, static_argnums=1)(params, config, batch)).reshape(*real.shape, -1)
    np.testing.assert_allclose(ours[real][:, : config.vocab_size], expected[real], rtol=0, atol=logit_bound)
    assert (ours[..., config.vocab_size :] == -np.inf).all()
    for program in programs:
        value, gradients = jax.jit(jax.value_and_grad(our_loss(config, program)))(params, batch)
        assert abs(float(value) - loss.item()) <= logit_bound, program
        reference.assert_gradients_equal(gradients, theirs, config, "model", gradient_bound)
        reference.assert_padding_rows_untouched(gradients, config)


@pytest.mark.parametrize("name", TINY)
def test_tiny_equals_torch(name, tmp_path):
    check(TINY[name], tmp_path, 1e-5, 2e-5, decoder_batch(TINY[name], seed=1), [Program(depth="scan")])


def test_another_activation_gives_torch_logits(tmp_path):
    config = dataclasses.replace(TINY["gpt"], activation="relu")
    check(config, tmp_path, 1e-5, 2e-5, decoder_batch(config, seed=2), [])


# CTRL of two layers and a smaller vocabulary: 1.6 billion parameters do not fit into memory twice
PUBLISHED = {
    "ctrl": still("ctrl", "base", depth=2, vocab_size=5003),
    "gpt": still("gpt", "base"),
    "gpt2": still("gpt2", "small"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_size_equals_torch(name, tmp_path):
    batch = decoder_batch(PUBLISHED[name], seed=3, rows=2, length=64)
    check(PUBLISHED[name], tmp_path, 1e-4, 5e-5, batch, [Program(depth="scan")])


MILLIONS = {("ctrl", "base"): 1638.0, ("gpt", "base"): 116.5, ("gpt2", "small"): 124.4, ("gpt2", "xl"): 1557.6}


@pytest.mark.parametrize("name, size", MILLIONS)
def test_the_published_sizes_have_hugging_face_s_numbers_of_parameters(name, size):
    config = FAMILIES[name].sizes[size]
    cls = getattr(transformers, architecture(config, "model"))
    with torch.device("meta"):
        theirs = cls(cls.config_class(**config_fields(config, "model", {})))
    padding = (padded_vocab(config.vocab_size) - config.vocab_size) * (config.width + (name == "ctrl"))
    ours = count(parameter_shapes(config)) - padding
    assert ours == sum(parameter.numel() for parameter in theirs.parameters())
    assert round(ours / 1e6, 1) == MILLIONS[name, size]
