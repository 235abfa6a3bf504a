"""Our XLNet computes what transformers' XLNet computes: logits, losses, memories, every gradient."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from models.blocks.memory import Memory
from models.core.program import Program
from models.families.xlnet import FAMILY
from pretrain.objectives.inputs import inputs_of
from tests.pretrain import reference

TINY = dataclasses.replace(FAMILY.sizes["tiny"], vocab_size=1003, dropout=0.0, attention_dropout=0.0)
BASE = dataclasses.replace(FAMILY.sizes["base"], vocab_size=31990, dropout=0.0, attention_dropout=0.0)
SCAN, TIGHT = Program(depth="scan"), (1e-5, 2e-5)
PROGRAMS = [SCAN, Program(depth="unroll"), Program(remat="dots"), Program(depth="unroll", remat="full")]


def random_batch(config, seed, rows=4, length=24, slots=5, padded=True):
    """Rows of three types, some padded, in an order of their own; the first in the order is never predicted."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(length // 2, length + 1, rows) if padded else np.full(rows, length)
    ranks = np.argsort(rng.random((rows, length)), axis=1).astype(np.int32)
    thresholds = ranks + 1
    positions, targets = np.zeros((2, rows, slots), np.int32)
    weights = np.zeros((rows, slots), np.float32)
    for row in range(rows):
        real = np.flatnonzero(np.arange(length) < lengths[row])
        ranks[row, real[ranks[row, real].argmin()]] = -1  # sees itself, and so all see something
        n = rng.integers(1, slots + 1)
        chosen = np.sort(rng.choice(real[ranks[row, real] >= 0], n, replace=False))
        positions[row, :n], weights[row, :n] = chosen, 1
        targets[row, :n] = rng.integers(0, config.vocab_size, n)
        thresholds[row, chosen] = ranks[row, chosen]
    segments = (np.arange(length) < lengths[:, None]).astype(np.int32)
    return {
        "tokens": rng.integers(0, config.vocab_size, (rows, length)).astype(np.int32),
        "types": np.sort(rng.integers(0, 3, (rows, length)), axis=1).astype(np.int32),
        "segments": segments,
        "ranks": ranks,
        "thresholds": thresholds.astype(np.int32),
        "reversed": np.zeros(rows, np.int32),
        "prediction_positions": positions,
        "prediction_targets": targets,
        "prediction_weights": weights,
    }


def random_memory(config, seed, rows, length):
    hidden = np.random.default_rng(seed).normal(size=(config.depth, rows, length, config.width)).astype(np.float32)
    return Memory(hidden, np.ones((rows, length), np.int32))


def torch_outputs(model, batch, memory, causal):
    """(loss, logits [batch, n, vocab], new memories)."""
    tensor = lambda array: torch.from_numpy(np.array(array))
    hidden = batch["ranks"][:, None, :] >= batch["thresholds"][:, :, None]
    chosen = batch["prediction_positions"][..., None] == np.arange(batch["tokens"].shape[1])
    masks = {"perm_mask": tensor(hidden).float(), "attention_mask": tensor(batch["segments"] > 0).float()}
    targets, used = batch["prediction_targets"], batch["prediction_weights"] > 0
    chosen &= used[..., None]  # several slots at one position would be added up
    out = model(
        input_ids=tensor(batch["tokens"]).long(),
        token_type_ids=tensor(batch["types"]).long(),
        target_mapping=tensor(chosen).float(),
        mems=[tensor(layer.swapaxes(0, 1)) for layer in memory.hidden] if memory.segments.size else None,
        labels=tensor(np.where(used, targets, -100)).long(),
        use_mems=True,
        **({} if causal else masks),
    )
    return out.loss, out.logits, out.mems


def check(config, folder, batch, memory, *, reuse=None, attn_type="bi", bi_data=False, program=SCAN, bounds=TIGHT):
    """Compare logits, loss, memories and gradients; bounds: of values, of gradients."""
    model = reference.torch_model(config, "model")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("_bias", "seg_embed")):
                parameter += 0.1 * torch.randn_like(parameter)
    transformer = model.transformer
    transformer.attn_type, transformer.bi_data, transformer.reuse_len = attn_type, bi_data, reuse
    transformer.mem_len = memory.segments.shape[1] or 1
    params = reference.to_ours({"model": model}, config, folder)
    loss, expected, mems = torch_outputs(model, batch, memory, attn_type == "uni")
    loss.backward()

    def our_loss(params):
        module = FAMILY.module(config, program)
        inputs = (inputs_of(module, batch), memory, batch["prediction_positions"], reuse)
        hidden, new = module.apply({"params": params}, *inputs, method="query")
        logits = module.apply({"params": params}, hidden, method="token_logits")
        targets, weights = batch["prediction_targets"].reshape(-1), batch["prediction_weights"].reshape(-1)
        losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], axis=1)[:, 0]
        return (losses * weights).sum() / weights.sum(), (logits, new)

    (value, (logits, new)), gradients = jax.jit(jax.value_and_grad(our_loss, has_aux=True))(params)
    used = batch["prediction_weights"].reshape(-1) > 0
    logits, expected = np.asarray(logits)[used], expected.detach().numpy().reshape(len(used), -1)[used]
    np.testing.assert_allclose(logits[:, : config.vocab_size], expected, rtol=0, atol=bounds[0])
    assert (logits[:, config.vocab_size :] == -np.inf).all()
    assert abs(float(value) - loss.item()) <= bounds[0]
    if memory.segments.size:
        theirs = np.stack([mem.detach().numpy().swapaxes(0, 1) for mem in mems])
        real = np.asarray(new.segments) > 0
        assert real.any()
        np.testing.assert_allclose(np.asarray(new.hidden)[:, real], theirs[:, real], rtol=0, atol=bounds[0])
    reference.assert_gradients_equal(gradients, reference.torch_gradients(model), config, "model", bounds[1])
    reference.assert_padding_rows_untouched(gradients, config)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: f"{program.depth}-{program.remat}")
def test_tiny_equals_torch_however_it_is_compiled(program, tmp_path):
    batch, memory = random_batch(TINY, 1), random_memory(TINY, 2, 4, 12)
    check(TINY, tmp_path, batch, memory, program=program)


def test_tiny_without_memory_equals_torch(tmp_path):
    check(TINY, tmp_path, random_batch(TINY, 3), random_memory(TINY, 0, 4, 0))


def test_the_leading_positions_alone_are_remembered(tmp_path):
    batch, memory = random_batch(TINY, 4), random_memory(TINY, 5, 4, 12)
    check(TINY, tmp_path, batch, memory, reuse=8)


def test_backward_rows_equal_torchs_second_half_of_the_batch(tmp_path):
    batch = random_batch(TINY, 6) | {"reversed": np.array([0, 0, 1, 1], np.int32)}
    check(TINY, tmp_path, batch, random_memory(TINY, 7, 4, 12), bi_data=True)


def test_the_causal_order_equals_torchs_other_attention_type(tmp_path):
    batch = random_batch(TINY, 8, padded=False)
    ranks = np.broadcast_to(np.arange(24, dtype=np.int32), (4, 24))
    batch |= {"ranks": ranks, "thresholds": ranks + 1}
    check(TINY, tmp_path, batch, random_memory(TINY, 9, 4, 12), attn_type="uni")


@pytest.mark.slow
def test_base_equals_torch(tmp_path):
    batch, memory = random_batch(BASE, 10, rows=2, length=64, slots=11), random_memory(BASE, 11, 2, 32)
    check(BASE, tmp_path, batch, memory, bounds=(1e-4, 5e-5))
