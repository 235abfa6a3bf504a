"""Each loss between a student and its teacher, and its gradient, beside the same equation in torch."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional

from data_pipelines.examples.layout import Feature
from finetune.inside import attention_shares
from models.attention.patterns.pattern import Pattern
from models.core.inside import HIDDEN, PROJECTED, of_layers
from models.core.program import Program
from models.families.modernbert import ModernBertConfig
from models.families.registry import family_of
from pretrain.objectives import blocked_softmax, matching
from pretrain.objectives.blocked_softmax import Soft, softmax_sums
from pretrain.objectives.distillation import CausalDistillation
from pretrain.objectives.matching import (
    CROSS_ENTROPY,
    KL,
    MEASURES,
    Match,
    Side,
    Tokens,
    _scores,
    denominator,
    largest,
    soft,
    teacher_layers,
    total,
)
from pretrain.objectives.objective import initialise, inputs_of
from tests.pretrain import reference, tiny

ROWS, LENGTH, VOCAB, HEADS, SLOTS = 3, 7, 11, 2, 4
DEPTHS, WIDTHS = (2, 4), (6, 10)  # of the student and its teacher
SEGMENTS = np.array([[1, 1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0, 0]], np.int32)
WEIGHTS = np.array([1, 1, 1, 0] * ROWS, np.float32)
CASES = [Match(of, by) for of, measures in MEASURES.items() for by in measures]
CASES += [Match("logits", "kl", temperature=8.0), Match("attention", "kl", layers="1:4 2:1")]
CASES += [Match("values", "kl", layers="top", relation_heads=1)]


def side(rng, depth, width):
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    logits = draw(ROWS * SLOTS, VOCAB)
    logits[:, -2:] = -np.inf  # padding of the vocabulary
    projected = tuple(draw(depth, ROWS, LENGTH, HEADS, width // HEADS) for _ in range(3))
    return Side(draw(depth + 1, ROWS, LENGTH, width), projected, logits)


def expected(match, ours, theirs, projection):
    """The mean of a loss in torch."""
    t = lambda x: torch.tensor(np.asarray(x)) if not isinstance(x, torch.Tensor) else x
    if match.of == "logits":
        a, b = (t(x)[WEIGHTS > 0][:, :-2] for x in (ours.logits, theirs.logits))
        if match.by == "mse":
            return functional.mse_loss(a, b)
        return match.temperature**2 * divergence(a / match.temperature, b / match.temperature, match.by)
    pairs = [(0, 0)] if match.of == "embeddings" else match.pairs(*DEPTHS)
    if match.collection == HIDDEN:
        student = [t(x) @ projection if match.projects else t(x) for x in ours.hidden]
        teacher = [t(x) for x in theirs.hidden]
        before, found = (0, 0), []
        for pair in pairs:
            found.append(of_states(match.by, student, teacher, before, pair))
            before = pair
        return sum(found)
    return sum(
        of_layer(match, [t(x[i - 1]) for x in ours.projected], [t(x[j - 1]) for x in theirs.projected])
        for i, j in pairs
    )


def divergence(a, b, by):
    if by == "kl":
        return functional.kl_div(a.log_softmax(-1), b.log_softmax(-1), log_target=True, reduction="batchmean")
    return functional.cross_entropy(a, b.softmax(-1))


def of_states(by, student, teacher, before, pair):
    real = torch.tensor(SEGMENTS > 0)
    a, b = student[pair[0]], teacher[pair[1]]
    if by == "mse":
        return functional.mse_loss(a[real], b[real])
    if by == "cosine":
        return functional.cosine_embedding_loss(a[real], b[real], torch.ones(int(real.sum())))
    losses = []
    for row in range(ROWS):
        cut = lambda x, row=row: x[row][real[row]]
        if by == "flow":
            flow = lambda first, then, cut=cut: cut(first).T @ cut(then) / len(cut(then))
            losses.append(functional.mse_loss(flow(student[before[0]], a), flow(teacher[before[1]], b)))
        else:  # the definition of MMD, with the kernel of two neurons' activations
            ours, theirs = (functional.normalize(cut(x), dim=0).T for x in (a, b))
            kernel = lambda x, y: ((x @ y.T) ** 2).mean()
            losses.append(kernel(ours, ours) + kernel(theirs, theirs) - 2 * kernel(ours, theirs))
    return sum(losses) / ROWS


def of_layer(match, ours, theirs):
    """Token by token: what a query sees are the tokens of its segment."""
    place = {"queries": 0, "keys": 1, "values": 2}.get(match.of)
    squares, losses = [], []
    for row in range(ROWS):
        for query in np.flatnonzero(SEGMENTS[row]):
            seen = SEGMENTS[row] == SEGMENTS[row, query]
            scores = []
            for q, k, v in (ours, theirs):
                q, k = (q, k) if place is None else ((q, k, v)[place],) * 2
                q, k = q[row, query], k[row][seen]
                if match.relation_heads:
                    q, k = q.reshape(match.relation_heads, -1), k.reshape(len(k), match.relation_heads, -1)
                scores.append(torch.einsum("hd,khd->hk", q, k) / q.shape[-1] ** 0.5)
            if match.by == "mse":
                a, b = scores if match.of == "scores" else (x.softmax(-1) for x in scores)
                squares.append(((a - b) ** 2).mean(0))
            else:
                losses.append(divergence(*scores, match.by))
    return torch.cat(squares).mean() if squares else sum(losses) / len(losses)


@pytest.mark.parametrize("match", CASES, ids=lambda match: f"{match.name}-{match.layers}-{match.temperature}")
def test_a_loss_and_its_gradient_are_torchs(match):
    rng = np.random.default_rng(0)
    ours, theirs = (side(rng, *sizes) for sizes in zip(DEPTHS, WIDTHS, strict=True))
    projection = rng.normal(size=WIDTHS).astype(np.float32)
    tokens = Tokens(jnp.asarray(SEGMENTS), jnp.asarray(WEIGHTS), causal=False)

    def mean(ours, projection):
        return total(match, ours, theirs, tokens, match.temperature, projection) / denominator(match, tokens)

    found, gradients = jax.jit(jax.value_and_grad(mean, argnums=(0, 1)))(ours, projection)
    leaves = jax.tree.map(lambda x: torch.tensor(x, requires_grad=True), (ours, projection))
    wanted = expected(match, *leaves[:1], theirs, leaves[1])
    wanted.backward()
    np.testing.assert_allclose(found, wanted.item(), rtol=1e-5)
    for one, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(leaves), strict=True):
        other = np.zeros(other.shape) if other.grad is None else other.grad.numpy()
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("by", [KL, CROSS_ENTROPY])
def test_a_constant_in_the_logits_costs_no_digits_and_rows_without_any_are_zero(by):
    drawn = np.random.default_rng(0).integers(-40, 40, (2, 5, VOCAB))
    ours, theirs = drawn.astype(np.float32) / 16  # exact also beside 4096
    theirs[0] = -np.inf
    of = jax.value_and_grad(lambda ours, theirs: soft(ours, theirs, by, 2.0).sum())
    wanted, found = of(ours, theirs), of(ours + 4096, theirs - 4096)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7), found, wanted)
    assert soft(ours, theirs, by, 2.0)[0] == 0 and not wanted[1][0].any()


@pytest.mark.parametrize("at_once", [1, 40, 2**26], ids=["a position", "some", "all"])
def test_logits_of_decoders_in_blocks_are_those_at_once(at_once, monkeypatch):
    monkeypatch.setattr(matching, "LOGITS_AT_ONCE", at_once * ROWS * VOCAB // 10)
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    ours, theirs = ((draw(ROWS, LENGTH, width), draw(VOCAB, width), draw(VOCAB)) for width in WIDTHS)
    tokens = Tokens(jnp.asarray(SEGMENTS), jnp.asarray(rng.random((ROWS, LENGTH)), jnp.float32), causal=True)
    match = Match(temperature=2.0)

    def in_blocks(ours):
        return total(match, Side(factors=ours), Side(factors=theirs), tokens, match.temperature, None)

    def at_once_of(ours):
        logits = [(x @ table.T + bias).reshape(-1, VOCAB) for x, table, bias in (ours, theirs)]
        flat = tokens._replace(weights=tokens.weights.reshape(-1))
        return total(match, *(Side(logits=one) for one in logits), flat, match.temperature, None)

    found, wanted = (jax.jit(jax.value_and_grad(loss))(ours) for loss in (in_blocks, at_once_of))
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5), found, wanted)


def test_stored_soft_targets_count_all_other_tokens_as_one(monkeypatch):
    """The loss and its gradients are torch's, also in blocks beside the loss of tokens, with factors."""
    monkeypatch.setattr(blocked_softmax, "LOGITS", 3 * VOCAB)
    rng, k, own, factor = np.random.default_rng(0), 4, 0.5, 3.0
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    theirs, hidden, table, bias = draw(ROWS * LENGTH, VOCAB), draw(ROWS, LENGTH, 6), draw(VOCAB, 6), draw(VOCAB)
    theirs[:, -1] = bias[-1] = -np.inf  # padding of the vocabulary
    targets, weights = rng.integers(0, VOCAB - 1, (ROWS, LENGTH)), rng.random((ROWS, LENGTH)).astype(np.float32)
    ids, logs = largest(theirs, k)
    stored = (np.asarray(x).reshape(ROWS, LENGTH, -1) for x in (ids, logs))
    soft = Soft(*map(jnp.asarray, stored), 1.0, own, factor)

    def total(hidden, table, soft):
        sums = softmax_sums(hidden, table, bias, targets, weights[None], soft=soft)
        return own * sums.nats[0] + factor * sums.soft[0]

    def in_torch(hidden, table, temperature):
        logits = (hidden @ table.T + torch.tensor(bias)).reshape(-1, VOCAB)
        p, q = torch.tensor(theirs).softmax(-1), logits.softmax(-1)
        chosen = p.topk(k).indices
        parts = lambda x: torch.cat([x.gather(1, chosen), 1 - x.gather(1, chosen).sum(1, keepdim=True)], 1)
        tempered = lambda x: (parts(x).log() / temperature).log_softmax(-1)
        each = functional.kl_div(tempered(q), tempered(p), reduction="none", log_target=True).sum(1)
        own_each = functional.cross_entropy(logits, torch.tensor(targets).reshape(-1), reduction="none")
        weigh = lambda losses: (losses * torch.tensor(weights).reshape(-1)).sum()
        return own * weigh(own_each) + factor * temperature**2 * weigh(each)

    differentiated = jax.jit(jax.value_and_grad(total, argnums=(0, 1)))
    for temperature in (1.0, 2.5):
        found, gradients = differentiated(hidden, table, soft._replace(temperature=temperature))
        leaves = [torch.tensor(x, requires_grad=True) for x in (hidden, table)]
        wanted = in_torch(*leaves, temperature)
        wanted.backward()
        np.testing.assert_allclose(found, wanted.item(), rtol=1e-5)
        for ours, leaf in zip(gradients, leaves, strict=True):
            np.testing.assert_allclose(ours, leaf.grad.numpy(), rtol=1e-4, atol=2e-5)
    np.testing.assert_allclose(jax.jit(total)(hidden, table, soft._replace(temperature=2.5)), found, rtol=1e-6)


def test_a_decoders_tokens_are_compared_with_earlier_ones_alone():
    causal = Tokens(jnp.asarray(SEGMENTS[:1]), jnp.asarray(WEIGHTS), causal=True)
    assert denominator(Match("scores", "mse"), causal) == 6 + 6 and not causal.seen[0, 0, 0, 1]


def test_layers_are_paired_by_name_or_by_number():
    assert Match("hidden", "mse").pairs(4, 12) == [(1, 3), (2, 6), (3, 9), (4, 12)]  # TinyBERT's g(i) = 3i
    assert teacher_layers("first", 2, 4) == [1, 2] and teacher_layers("last", 2, 4) == [3, 4]
    assert Match("hidden", "mse", "top").pairs(2, 5) == [(2, 5)]
    with pytest.raises(ValueError, match="skip: 5 layers are not a multiple of 2; give their numbers"):
        teacher_layers("skip", 2, 5)
    with pytest.raises(ValueError, match="pairs layer 1 with 6; the student has 2 layers, the teacher 5"):
        Match("hidden", "mse", "1:6").pairs(2, 5)
    for wrong in ("1", "1 6", "1 a"):
        with pytest.raises(ValueError, match="does not name 2 of the teacher's 5 layers; use skip, first, last"):
            teacher_layers(wrong, 2, 5)


def test_weights_and_temperatures_move_to_their_ends():
    match = Match(weight=2.0, weight_end=0.0, temperature=8.0, temperature_end=1.0, steps=10)
    assert [float(match.weight_at(step)) for step in (0, 5, 10, 99)] == [2.0, 1.0, 0.0, 0.0]
    assert [float(match.temperature_at(step)) for step in (0, 10)] == [8.0, 1.0]


MODERNBERT = ModernBertConfig(
    vocab_size=195,
    positions=32,
    width=32,
    depth=4,
    heads=2,
    feed_forward=48,
    pattern=Pattern("longformer", windows=(4,)),
)


@pytest.mark.parametrize("program", [Program(depth="unroll"), Program(remat="full"), Program(remat="dots")])
@pytest.mark.parametrize(
    "config", [dataclasses.replace(tiny.BERT, depth=2), MODERNBERT], ids=lambda config: type(config).__name__
)
def test_a_model_records_the_same_however_it_is_compiled_and_learns_as_before(config, program):
    batch = reference.random_batch(config, 0, rows=2, length=8, slots=2)
    model = family_of(config).module(config, program)
    inputs, row = inputs_of(model, batch), {name: Feature(x.shape[1:], x.dtype) for name, x in batch.items()}
    params = initialise(jax.random.key(0), model, row)

    def run(module, params):
        hidden, found = module.apply({"params": params}, inputs, method="encode", mutable=[HIDDEN, PROJECTED])
        return (hidden**2).sum(), (hidden, of_layers(found, HIDDEN), of_layers(found, PROJECTED))

    plain = model.clone(program=Program(depth="unroll"))
    taped = jax.jit(jax.value_and_grad(run, argnums=1, has_aux=True), static_argnums=0)
    ((_, (hidden, states, projected)), gradients), wanted = taped(model, params), taped(plain, params)
    assert states.shape == (1 + config.depth, 2, 8, config.width) and projected[2].shape == (config.depth, 2, 8, 2, 16)
    unrecorded = jax.jit(lambda params: model.apply({"params": params}, inputs, method="encode"))(params)
    np.testing.assert_allclose(hidden, unrecorded, rtol=1e-5, atol=1e-6)
    alike = lambda one, other: np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-4)
    jax.tree.map(alike, ((hidden, states, projected), gradients), (wanted[0][1], wanted[1]))
    shares = attention_shares(plain, params, batch)[0]  # of a layer that sees whole segments
    q, k, _ = (array[0] for array in projected)
    scores = np.where((batch["segments"][:, :, None] == batch["segments"][:, None])[:, None], _scores(q, k, 0), -np.inf)
    alike(jax.nn.softmax(scores, -1), shares)


def test_the_z_loss_counts_as_the_own_loss_whose_gradient_has_its_own():
    usual = {"lm": 1.0, "z": 0.1}
    for own in (1.0, 0.5, 0.0):
        objective = CausalDistillation(own=own, z_loss=0.1)
        found = objective.coefficients(0)
        assert found.pop(objective.losses[0].name) == 1.0
        assert found == ({name: own * factor for name, factor in usual.items()} if own else {})
