"""Rotary positions, and layers that see windows beside layers that see rows."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.modernbert.modeling_modernbert import apply_rotary_pos_emb

from models.attention import parts
from models.attention.kernels import pattern_kernel, row_attention, splash
from models.attention.layouts import HEADS_APART, HEADS_BESIDE, HEADS_FIRST, INTERLEAVED
from models.attention.local_global import GLOBAL, LOCAL, views
from models.attention.mask import Mask, chosen, visible
from models.attention.multi_head import plain_form
from models.attention.operands import Projections
from models.attention.patterns.pattern import Pattern
from models.attention.plain import PLAIN
from models.attention.plain import attention as dense
from models.attention.rotary import turned, turns_of
from models.blocks.dense import Affine
from models.blocks.positions import gather_positions
from models.families.modernbert import ModernBertConfig, ModernBertDecoderConfig
from models.families.registry import FAMILIES
from pretrain.recipe import Phase
from pretrain.recipes.registry import RECIPES
from pretrain.training.step import model_flops
from tests.contract import cases, torch_reference
from tests.contract.test_contract import check

ROWS, LENGTH, WIDTH, HEADS = 2, 128, 256, 4


def test_queries_and_keys_turn_as_in_transformers():
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, ROWS, 5, HEADS, 16)).astype(np.float32)
    positions = np.array([[0, 1, 2, 700, 8000]])
    speeds = 1.0 / (10_000.0 ** (torch.arange(0, 16, 2).float() / 16))
    angles = torch.cat([torch.from_numpy(positions)[..., None].float() * speeds] * 2, -1)
    first = lambda x: torch.from_numpy(x).transpose(1, 2)
    expected = apply_rotary_pos_emb(first(q), first(k), angles.cos(), angles.sin())
    turns = turns_of(jnp.asarray(positions), 16, 10_000.0)
    found = HEADS_APART.turn((q, k, q), turns, turns)
    for ours, theirs in zip(found, expected, strict=False):
        np.testing.assert_allclose(ours, theirs.transpose(1, 2), atol=2e-3 if positions.max() > 8e3 else 1e-3)
        np.testing.assert_allclose(ours[:, :3], theirs.transpose(1, 2)[:, :3], atol=1e-6)
    assert found[2] is q


@pytest.mark.parametrize("width", [256, 96], ids=["whole registers", "parts of one"])
def test_bfloat16_turns_as_float32_does_up_to_its_rounding(width):
    """A product exchanges the halves of a head where registers are full."""
    rng, head_dim = np.random.default_rng(0), 32
    x, g = jnp.asarray(rng.normal(size=(2, ROWS, 5, width)), jnp.bfloat16)
    turns = turns_of(jnp.arange(5)[None], head_dim, 10.0)
    found, back = jax.vjp(lambda x: turned(x, turns, head_dim), x)
    wide, wide_back = jax.vjp(lambda x: _by_definition(x, turns, head_dim), x.astype(jnp.float32))
    for one, other in [(found, wide), (back(g)[0], wide_back(g.astype(jnp.float32))[0])]:
        assert one.dtype == jnp.bfloat16
        np.testing.assert_array_equal(one, other.astype(jnp.bfloat16))


def _by_definition(x, turns, head_dim):
    heads = x.reshape(*x.shape[:-1], -1, head_dim)
    cosines, sines = (array[..., None, :] for array in turns)
    return (heads * cosines + jnp.roll(heads, head_dim // 2, -1) * sines).reshape(x.shape)


def draw(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(0, 0.1, shape).astype(np.float32))


def projected(layout, x, weights):
    """Operands with rotary positions."""
    turns = turns_of(jnp.arange(LENGTH)[None], WIDTH // HEADS, 100.0)
    return layout.turn(layout.operands(x, x, weights, HEADS, jnp.float32), turns, turns)


def apart(layout, operands):
    """Queries, keys and values [batch, length, heads, head_dim] of operands in any layout."""
    if layout is INTERLEAVED:
        (products,), _ = operands
        operands = products.reshape(ROWS, LENGTH, -1, 3, 128).swapaxes(2, 3).reshape(ROWS, LENGTH, 3, -1)
        operands = (operands[:, :, 0], operands[:, :, 1], operands[:, :, 2])
    if layout is HEADS_FIRST:
        return tuple(x.swapaxes(1, 2) for x in operands)
    return tuple(x.reshape(ROWS, LENGTH, HEADS, -1) for x in operands)


@pytest.mark.parametrize("layout", [HEADS_BESIDE, HEADS_FIRST, INTERLEAVED], ids=["beside", "first", "interleaved"])
def test_the_operands_of_every_kernel_turn_as_those_of_plain_operations(layout):
    weights = Projections(*(Affine(draw(WIDTH, WIDTH + number), None) for number in range(3)), None)
    weights = Projections(*(Affine(of.kernel[:, :WIDTH], None) for of in weights[:3]), None)
    x = draw(ROWS, LENGTH, WIDTH)
    found, expected = apart(layout, projected(layout, x, weights)), projected(HEADS_APART, x, weights)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


KERNELS = {
    "row": (INTERLEAVED, functools.partial(row_attention.by_rows, head_dim=WIDTH // HEADS, interpret=True), GLOBAL),
    "splash": (HEADS_FIRST, functools.partial(splash.splash, interpret=True), GLOBAL),
    "pattern": (HEADS_BESIDE, functools.partial(pattern_kernel.by_kernel, heads=HEADS, interpret=True), LOCAL),
}
SLOW = [(kernel, causal) for kernel in KERNELS for causal in (False, True)]


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "causal"), SLOW)
def test_every_kernel_computes_with_rotary_positions_what_plain_operations_compute(kernel, causal):
    """In values and gradients, of packed rows with padding."""
    layout, attend, kind = KERNELS[kernel]
    weights = Projections(*(Affine(draw(WIDTH, WIDTH + number)[:, :WIDTH], None) for number in range(4)))
    segments = jnp.asarray(np.repeat([[1, 2, 3, 0], [1, 1, 1, 1]], LENGTH // 4, axis=1).astype(np.int32))
    config = ModernBertConfig(width=WIDTH, heads=HEADS, pattern=Pattern("longformer", block=64, windows=(32,)))
    mask = views(config, Mask(segments, causal=causal))[kind].mask

    def output(how, x, weights):
        layout, attend = how
        mixed = attend(*projected(layout, x, weights), mask, dropout_rate=0.0, noise=None)
        y = jnp.where(segments[..., None] > 0, layout.output(mixed, weights.output, jnp.float32), 0)
        return jnp.sum(y**2), y

    def both(how):
        return jax.jit(jax.value_and_grad(functools.partial(output, how), (0, 1), has_aux=True))

    x = 10 * draw(ROWS, LENGTH, WIDTH)
    found, expected = both((layout, attend))(x, weights), both((HEADS_APART, dense))(x, weights)
    np.testing.assert_allclose(found[0][1], expected[0][1], rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(jax.tree.leaves(found[1]), jax.tree.leaves(expected[1]), strict=True):
        assert np.linalg.norm(ours - theirs) <= 2e-5 * np.linalg.norm(theirs)


@pytest.mark.parametrize("causal", [False, True])
def test_long_rows_are_computed_part_by_part(causal, monkeypatch):
    """In values and gradients; what a part cannot have is computed as a whole."""
    monkeypatch.setattr(parts, "PART", 32)
    q, k, v = (10 * draw(ROWS, LENGTH, HEADS, 16 + number)[..., :16] for number in range(3))
    segments = jnp.asarray(np.repeat([[1, 2, 3, 0], [1, 1, 1, 1]], LENGTH // 4, axis=1).astype(np.int32))
    mask = Mask(segments, causal=causal)

    def both(attend):
        loss = lambda *of: jnp.sum(jnp.sin(attend(*of, mask, dropout_rate=0.0, noise=None)))
        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(q, k, v)

    assert "scan" in str(jax.make_jaxpr(lambda q: parts.attention(q, k, v, mask, dropout_rate=0.0, noise=None))(q))
    for ours, theirs in zip(jax.tree.leaves(both(parts.attention)), jax.tree.leaves(both(dense)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    slots = jnp.asarray(np.random.default_rng(0).integers(0, LENGTH, (ROWS, 40)))
    few = gather_positions(q, slots), k, v, chosen(mask, slots)
    ours, theirs = (attend(*few, dropout_rate=0.0, noise=None) for attend in (parts.attention, dense))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    keys = np.arange(2 * ROWS, dtype=np.uint32).reshape(-1, 2)
    dropped = [attend(q, k, v, mask, dropout_rate=0.5, noise=keys) for attend in (parts.attention, dense)]
    np.testing.assert_array_equal(*dropped)
    far = Mask(jnp.ones((1, parts.LONGEST + 1), jnp.int32))
    assert plain_form("xla", far) is parts.IN_PARTS and plain_form("dense", far) is PLAIN is plain_form("xla", mask)


def packed(name):
    """The contract's case with rows of several documents, and padding at the end of one."""
    case, length = cases.CASES[name], cases.LENGTH
    batch = cases.batch(case)
    segments = np.repeat(
        [[1, 1, 1, 2, 2, 2], [1, 2, 2, 2, 3, 3], [1, 1, 1, 1, 1, 1], [1, 1, 2, 2, 2, 0]], length // 6, 1
    )
    weights = batch["prediction_weights"] * (np.take_along_axis(segments, batch["prediction_positions"], 1) > 0)
    real = (segments > 0).astype(np.float32)
    return case, batch | {"segments": segments.astype(np.int32), "prediction_weights": weights, "weights": real}


@pytest.mark.parametrize("name", ["modernbert", "modernbert-decoder"])
def test_packed_documents_have_the_loss_and_gradients_of_transformers_with_a_mask_written_out(name, monkeypatch):
    case, batch = packed(name)
    model = torch_reference.with_parameters(case, "model")
    tokens = torch.from_numpy(batch["tokens"]).long()
    segments, place = batch["segments"], np.arange(cases.LENGTH)
    same = (segments[:, :, None] == segments[:, None]) & (segments > 0)[:, None]
    distance, half = place[:, None] - place, model.config.local_attention // 2
    causal = name == "modernbert-decoder"
    near = (distance >= 0) & (distance < half) if causal else abs(distance) <= half
    seen = {"full_attention": same & ((distance >= 0) | (not causal)), "sliding_attention": same & near}
    lowest = torch.finfo(torch.float32).min
    masks = {kind: torch.where(torch.from_numpy(of)[:, None], 0.0, lowest) for kind, of in seen.items()}
    logits = model(tokens, attention_mask=masks).logits
    if causal:
        targets, weights = torch.from_numpy(batch["targets"]).long(), torch.from_numpy(batch["weights"])
    else:
        at = torch.from_numpy(batch["prediction_positions"]).long()
        logits = torch.take_along_dim(logits, at[..., None], 1)
        targets = torch.from_numpy(batch["prediction_targets"]).long()
        weights = torch.from_numpy(batch["prediction_weights"])
    losses = torch.nn.functional.cross_entropy(logits.mT, targets, reduction="none")
    loss = (losses * weights).sum() / weights.sum()
    loss.backward()
    monkeypatch.setattr(cases, "batch", lambda case: batch)
    check(case, loss.item(), torch_reference.our_gradients(case, {"model": model}))


def test_local_layers_are_computed_in_blocks_and_count_their_windows():
    """In rows of 512 tokens a window of 6 costs next to nothing."""
    phase = Phase(1.0, 512, 2)
    recipe = lambda **changes: dataclasses.replace(
        RECIPES["modernbert-tiny"],
        model=dataclasses.replace(cases.CASES["modernbert"].model, **changes),
        phases=(phase,),
    )
    near, whole = (model_flops(recipe(**of), phase) for of in ({}, {"pattern": Pattern()}))
    pairs = 2 * 7 * 512 - 2 * (1 + 2 + 3 + 3 + 2 + 1)  # of two local layers; at the ends some are missing
    hidden = 3 * 4 * phase.batch_size * 16 * (2 * 512**2 - (pairs))
    assert whole - near == pytest.approx(hidden)


def test_a_layer_sees_as_far_as_its_window():
    """Through one local layer a token 3 away is seen, one 4 away is not; a decoder's window has one token less."""
    for config, seen in ((ModernBertConfig, [-3, 3]), (ModernBertDecoderConfig, [-2, 0])):
        half = 3 if config is ModernBertConfig else 2
        model = config(width=16, heads=2, pattern=Pattern("longformer", block=4, windows=(2 * half,)))
        mask = Mask(jnp.ones((1, 24), jnp.int32), causal=model.causal)
        visible_keys = np.flatnonzero(visible(views(model, mask)[LOCAL].mask)[0, 0, 12]) - 12
        assert [visible_keys.min(), visible_keys.max()] == seen


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"depth": 12}, "model.depth=12: must be one more than a multiple of 3; use 10 or 13"),
        ({"width": 12, "heads": 4}, "model.heads=4: a head's 3 numbers must be even"),
        ({"pattern": Pattern("bigbird")}, "model.pattern.name='bigbird': local layers have one window"),
        ({"pattern": Pattern("longformer", windows=(4, 8))}, "local layers have one window"),
        ({"local_base": 0.0}, "model.local_base=0.0: must be above 0"),
    ],
)
def test_what_no_such_layer_has_is_refused(changes, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        dataclasses.replace(FAMILIES["modernbert"].sizes["tiny"], **changes)
