"""SpanBERT's objective against transformers' BERT with the boundary head written in torch."""

import jax
import numpy as np
import pytest
import torch
from torch.nn import functional

from models.core.parameters import leaves
from models.families.registry import FAMILIES
from pretrain.objectives.objective import Moment, Phase
from pretrain.objectives.span_boundary import SpanBoundaryObjective, ends
from pretrain.training.assembly import made_heads
from tests.contract import cases, torch_reference
from tests.contract.cases import Case
from tests.pretrain import reference

CASE = Case(cases.CASES["bert"].model, SpanBoundaryObjective())
SPANS = [[(1, 3), (6, 6)], [(1, 1), (3, 5)], [(2, 2), (4, 4), (6, 6)], [(8, 11)]]  # first and last of each row


def batch():
    """The contract's rows with these spans, which lie in their shortest row."""
    made, rng = dict(cases.batch(CASE)), np.random.default_rng(3)
    positions = [[at for first, last in row for at in range(first, last + 1)] for row in SPANS]
    made["prediction_positions"] = np.array([row + [0] * (5 - len(row)) for row in positions], np.int32)
    made["prediction_weights"] = np.array([[1] * len(row) + [0] * (5 - len(row)) for row in positions], np.float32)
    targets = rng.integers(5, CASE.model.vocab_size, (4, 5))
    return made | {"prediction_targets": (targets * made["prediction_weights"]).astype(np.int32)}


def boundary_logits(params, hidden, table):
    """Those of all predicted tokens, row by row and span by span."""
    head, found = params["boundary"], []
    for row, spans in enumerate(SPANS):
        for first, last in spans:
            for at in range(first, last + 1):
                y = torch.cat([hidden[row, first - 1], hidden[row, last + 1], head["positions"][at - first]])
                for name in ("first", "second"):
                    y = functional.gelu(y @ head[name]["kernel"] + head[name]["bias"])
                    norm = head[f"{name}_norm"]
                    y = functional.layer_norm(y, y.shape, norm["scale"], norm["bias"], CASE.model.norm_epsilon)
                found.append(y @ table.T + head["bias"][: len(table)])
    return torch.stack(found)


def test_both_losses_and_every_gradient_are_the_independent_statement_s():
    made, params = batch(), cases.params(CASE)
    heads = made_heads(CASE.model, CASE.objective.asks)
    model = FAMILIES["bert"].module(CASE.model, reference.FLOAT32, heads)

    def loss(params):
        terms = CASE.objective.loss(model, params, made, {}, Moment(None, False))[0]
        return sum(term.sum for term in terms.values()), terms

    (_, terms), gradients = jax.value_and_grad(loss, has_aux=True)(params)
    theirs = torch_reference.with_parameters(CASE, "model")
    mine = jax.tree.map(lambda x: torch.from_numpy(np.array(x)).requires_grad_(), params)
    inputs = reference.torch_inputs(made, types=CASE.model.types)
    output = theirs(**inputs, labels=reference.token_labels(made), output_hidden_states=True)
    targets = torch.from_numpy(made["prediction_targets"][made["prediction_weights"] > 0]).long()
    table = theirs.bert.embeddings.word_embeddings.weight
    of_boundary = boundary_logits(mine, output.hidden_states[-1], table)
    sbo = functional.cross_entropy(of_boundary, targets, reduction="sum")
    mlm = output.loss * len(targets)
    (mlm + sbo).backward()
    assert float(terms["mlm"].sum) == pytest.approx(mlm.item(), rel=1e-5)
    assert float(terms["sbo"].sum) == pytest.approx(sbo.item(), rel=1e-5)
    expected = torch_reference.our_gradients(CASE, {"model": theirs})
    expected |= {f"boundary/{path}": np.array(leaf.grad) for path, leaf in leaves(mine["boundary"])}
    for path, gradient in leaves(gradients):
        np.testing.assert_allclose(gradient, expected[path], atol=2e-5, rtol=2e-5, err_msg=path)


def test_ends_are_those_of_runs_of_neighbours_among_the_tokens_that_are_used():
    positions = np.array([[2, 3, 5, 6, 7, 0], [4, 5, 6, 7, 8, 9], [3, 0, 0, 0, 0, 0], [0, 1, 2, 0, 0, 0]], np.int32)
    used = np.array([[1, 1, 1, 1, 1, 0], [1] * 6, [1, 0, 0, 0, 0, 0], [0] * 6], bool)
    first, last = ends(positions, used)
    assert first.tolist() == [[2, 2, 5, 5, 5, 0], [4] * 6, [3, 0, 0, 0, 0, 0], [0, 1, 2, 0, 0, 0]]
    assert last.tolist() == [[3, 3, 7, 7, 7, 0], [9] * 6, [3, 0, 0, 0, 0, 0], [0, 1, 2, 0, 0, 0]]


def test_spans_have_the_paper_s_lengths():
    masks = SpanBoundaryObjective().rows(Phase(1.0, 512, 8)).masks
    lengths = np.arange(1, 11) * masks.ngrams
    assert sum(lengths) / sum(masks.ngrams) == pytest.approx(3.8, abs=0.01)
    assert (masks.unit, masks.fate, masks.rate) == ("word_starts", "span", 0.15)
