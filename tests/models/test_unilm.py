"""In rows of UniLM's four tasks nothing reaches a token but what it may see."""

import dataclasses

import jax
import numpy as np
import pytest

from models.core.program import Program
from models.families.registry import FAMILIES
from tests.contract import cases

CASE = cases.CASES["unilm"]


def test_no_token_has_a_gradient_in_what_it_must_not_see_and_all_have_one_in_the_rest():
    batch, params = cases.batch(CASE), cases.params(CASE)
    model = FAMILIES["unilm"].module(CASE.model, Program(), ("predictions",))
    shown = np.eye(128, dtype=np.float32)[batch["tokens"]]  # as distributions, so that there are gradients
    probe = np.random.default_rng(0).normal(size=CASE.model.width).astype(np.float32)

    @jax.jit
    def reached(shown):
        """How much the hidden state of each token depends on each token: f32[queries, rows, keys]."""

        def hidden(shown):
            inputs = {name: batch[name] for name in ("types", "segments", "ranks")} | {"tokens": shown}
            return (model.apply({"params": params}, inputs, method="encode") @ probe).swapaxes(0, 1)

        _, pull = jax.vjp(hidden, shown)
        one_each = np.eye(cases.LENGTH, dtype=np.float32)[:, :, None] * np.ones(cases.ROWS, np.float32)
        return jax.vmap(lambda of_one: abs(pull(of_one)[0]).max(-1))(one_each)

    found = np.asarray(reached(shown)).swapaxes(0, 1)
    for task, (row, real) in enumerate(zip(found, batch["segments"], strict=True)):
        n, source = real.sum(), cases.LENGTH // 2
        lower, of_source = np.tri(n, dtype=bool), np.arange(n) < source
        seen = [np.ones((n, n), bool), of_source | (lower & ~of_source[:, None]), lower, lower.T][task]
        assert ((row[:n, :n] > 0) == seen).all() and not row[:n, n:].any(), task


def test_types_are_those_of_the_tasks_and_attention_is_whole():
    with pytest.raises(ValueError, match="model.types=2: UniLM's tasks have 6; leave it out"):
        dataclasses.replace(CASE.model, types=2)
    with pytest.raises(ValueError, match="model.pattern.name=bigbird: UniLM has no sparse attention; leave it out"):
        dataclasses.replace(CASE.model, pattern=dataclasses.replace(CASE.model.pattern, name="bigbird"))
