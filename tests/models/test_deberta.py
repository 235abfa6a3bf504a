"""DeBERTa: buckets as in transformers, attention in blocks by its definition, what each part of the model reads."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

from models.attention import disentangled, distances
from models.attention.disentangled import Buckets, Context, attend_chosen, attend_row, bucket_of, reached
from models.attention.mask import Mask
from models.blocks.heads import CLASSIFIER, TOKENS
from models.blocks.positions import gather_positions
from models.core.parameters import leaves
from models.core.program import Program
from models.families.registry import FAMILIES
from pretrain.huggingface.load import load
from pretrain.objectives.objective import Moment, initialise
from pretrain.optimizers import BELOW
from tests.contract import cases
from tests.models.programs import equations
from tests.models.shapes import parameter_shapes, random_params
from tests.pretrain import reference

HEADS, HEAD_DIM = 2, 4
CONFIG = dataclasses.replace(cases.CASES["deberta-v2"].model, init_std=0.3)
V3 = cases.CASES["deberta-v3"]


@pytest.mark.parametrize("number, furthest", [(256, 512), (8, 20), (4, 16), (64, 128), (32, 512), (256, 1024)])
def test_every_distance_has_transformers_bucket(number, furthest):
    distances = np.arange(-2 * furthest, 2 * furthest + 1)
    theirs = make_log_bucket_position(torch.from_numpy(distances), number, furthest).long() + number
    found = bucket_of(distances, Buckets(number, furthest))
    np.testing.assert_array_equal(found, theirs.clamp(0, 2 * number - 1).numpy())
    of_row = bucket_of(np.arange(-16, 17), Buckets(number, furthest))
    assert reached(17, Buckets(number, furthest)) == slice(of_row.min(), of_row.max() + 1)


def operands(length, rows, buckets):
    """(queries, context, mask) of three rows with two segments and padding, the buckets' embeddings in `rows` rows."""
    rng = np.random.default_rng(length)
    draw = lambda *shape: jnp.asarray(rng.normal(size=(*shape, HEADS, HEAD_DIM)), jnp.float32)
    of_row = reached(length, buckets)
    tables = (draw(rows, of_row.stop - of_row.start) for _ in range(2))
    ends = np.array([[length // 3, length], [length // 2, length - 2], [1, length // 2]])
    segments = np.zeros((3, length), np.int32)
    for row, (first, second) in enumerate(ends):
        segments[row, :second], segments[row, :first] = 2, 1
    return draw(3, length), Context(draw(3, length), draw(3, length), *tables), Mask(jnp.asarray(segments))


@pytest.mark.parametrize("length, rows", [(7, 1), (24, 1), (24, 3), (21, 1), (80, 3)])
def test_blocks_of_queries_attend_as_the_definition_says(length, rows, monkeypatch):
    """Of one block, of whole ones, of a short last one, and of many, whose probabilities are not kept."""
    monkeypatch.setattr(disentangled, "BLOCK", 8)
    buckets, every = Buckets(8, 40), jnp.broadcast_to(jnp.arange(length), (3, length))
    q, context, mask = operands(length, rows, buckets)
    weights = jnp.asarray(np.random.default_rng(1).normal(size=q.shape), jnp.float32)
    off = {"dropout_rate": 0.0, "noise": None}

    def of(attend, **more):
        mixed = lambda q, context: attend(q, context, mask, buckets, **more, **off)
        weighted = lambda q, context: (mixed(q, context) * weights).sum()
        return jax.jit(lambda *given: (mixed(*given), jax.grad(weighted, (0, 1))(*given)))(q, context)

    by_blocks, by_definition = of(attend_row), of(attend_chosen, slots=every)
    for found, expected in zip(*map(jax.tree.leaves, (by_blocks, by_definition)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-6)


def test_of_a_long_row_nothing_is_in_memory_for_all_pairs():
    length, buckets = 2048, Buckets(256, 512)
    q, context, mask = jax.eval_shape(lambda: operands(length, 1, buckets))

    def loss(q, context, mask):
        return attend_row(q, context, mask, buckets, dropout_rate=0.1, noise=jnp.zeros((3, 2), jnp.uint32)).sum()

    traced = jax.make_jaxpr(jax.grad(loss, (0, 1)))(q, context, mask)
    largest = max(result.aval.size for equation in equations(traced.jaxpr) for result in equation.outvars)
    assert 0 < largest <= 3 * HEADS * length * length // 4


def hidden_of(config, heads, params, batch, slots=None):
    model = FAMILIES["deberta-v2"].module(config, reference.FLOAT32, heads)
    return model.apply({"params": params}, batch, None, slots, method="encode")


def test_tokens_alone_are_read_by_the_enhanced_mask_decoder():
    """What tasks read is the last layer's output, at chosen positions as in the whole row."""
    params, batch = random_params(CONFIG), cases.batch(cases.CASES["deberta-v2"])
    slots = np.array([[0, 3], [5, 1], [2, 2], [7, 0]])
    whole = hidden_of(CONFIG, (), params, batch)
    np.testing.assert_allclose(
        hidden_of(CONFIG, (CLASSIFIER,), params, batch, slots), gather_positions(whole, slots), rtol=1e-4, atol=1e-5
    )
    np.testing.assert_array_equal(hidden_of(CONFIG, (TOKENS,), params, batch), whole)
    decoded = hidden_of(CONFIG, (TOKENS,), params, batch, slots)
    assert np.abs(decoded - gather_positions(whole, slots)).max() > 0.1


def test_packed_segments_are_those_of_transformers_with_the_mask_written_out(tmp_path):
    config = dataclasses.replace(CONFIG, enhanced_decoder=False)
    model = reference.torch_model(config, "model", heads=())
    model.save_pretrained(tmp_path)
    params = load(tmp_path, config, parameter_shapes(config, ()), tmp_path)
    batch = reference.random_batch(config, 0, rows=4, length=24)
    segments = np.where(batch["segments"] > 0, 1 + batch["types"], 0).astype(np.int32)
    seen = torch.from_numpy((segments[:, :, None] == segments[:, None]) & (segments[:, None] > 0)).long()
    embedded = model.embeddings(torch.from_numpy(batch["tokens"]).long())
    expected = model.encoder(embedded, seen).last_hidden_state.detach().numpy()
    found = hidden_of(config, (), params, batch | {"segments": segments})
    real = segments > 0
    np.testing.assert_allclose(found[real], expected[real], rtol=1e-5, atol=1e-5)


def test_buckets_have_dropout_for_each_row(monkeypatch):
    drawn = []

    def record(x, rate, keys):
        drawn.append((rate, x.shape))
        return x

    config = dataclasses.replace(CONFIG, dropout=0.3, attention_dropout=0.2)
    batch = cases.batch(cases.CASES["deberta-v2"])
    model = FAMILIES["deberta-v2"].module(config, Program())
    noisy = lambda params: model.apply({"params": params}, batch, cases.noise(cases.ROWS), method="encode")
    shapes = parameter_shapes(config, ())
    for module in (disentangled, distances):
        monkeypatch.setattr(module, "dropout", record)
    jax.eval_shape(noisy, shapes)
    rows, width = reached(cases.LENGTH, Buckets(config.buckets, config.furthest)), config.width
    table = (cases.ROWS, rows.stop - rows.start, width)
    scores = (cases.ROWS, config.heads, cases.LENGTH, cases.LENGTH)
    assert {*drawn} == {(0.3, table), (0.2, scores), (0.3, (cases.ROWS, cases.LENGTH, width))}


def test_the_detectors_gradient_reaches_differences_alone_which_begin_at_zero():
    """He et al. 2021b, section 3.3."""
    model, batch = FAMILIES["deberta-v3"].module(V3.model, reference.FLOAT32), cases.batch(V3)

    def terms(params):
        found = V3.objective.loss(model, params, batch, {}, Moment(cases.noise(cases.ROWS), True))[0]
        return jnp.stack([found[name].sum for name in ("discriminator", "generator")])

    gradients = jax.jit(lambda params, of: jax.vjp(terms, params)[1](of)[0])
    of_detector, of_generator = (dict(leaves(gradients(cases.params(V3), of))) for of in np.eye(2, dtype=np.float32))
    for path in of_detector:
        assert of_detector[path].any() != path.startswith("generator/"), path
        assert path.startswith("generator/") or not of_generator[path].any(), path
    fresh = initialise(jax.random.key(0), model, V3.objective.spec(V3.of(16, 2)))
    differences = fresh["discriminator"]["embeddings"]["tokens"]
    assert not differences.any() and fresh["generator"]["embeddings"]["tokens"].any()


def test_embeddings_of_buckets_are_below_the_first_layer():
    """Where rates fall from layer to layer."""
    below = {path for path, _ in leaves(parameter_shapes(CONFIG, (TOKENS,))) if BELOW & {*path.split("/")}}
    norms = (f"{norm}/{name}" for norm in ("embeddings/norm", "encoder/buckets_norm") for name in ("bias", "scale"))
    assert below == {"embeddings/tokens", "encoder/buckets", *norms}


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"buckets": 7}, "model.buckets=7, furthest=20: buckets must be even"),
        ({"buckets": 64}, "furthest=20: buckets must be even, and the furthest distance above half"),
        ({"furthest": 0}, "model.furthest=0: must be at least 1"),
        ({"heads": 3}, "model.width=16 is not a multiple of model.heads=3"),
    ],
)
def test_sizes_that_do_not_fit_are_said(wrong, said):
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(CONFIG, **wrong)
    with pytest.raises(ValueError, match="model.generator_depth=0: must be"):
        dataclasses.replace(V3.model, generator_depth=0)
