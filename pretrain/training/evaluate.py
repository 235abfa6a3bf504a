"""Held-out evaluation on a fixed set: the same rows with the same corruption at every call."""

import operator
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh

from data_pipelines.corpus import Corpus
from data_pipelines.examples.evaluation import evaluation_batches
from models.core.parameters import Params
from pretrain.training.assembly import Assembly
from pretrain.training.placement import jit_evaluation_step, jit_first_carry
from tpu.batches import place_rows

EVALUATION_SEED = 20_181_011  # the same held-out rows and noise for every run, whatever its own seed


class Evaluator:
    """The fixed held-out set of one phase, and the step: given, or jitted here."""

    def __init__(
        self,
        assembly: Assembly,
        corpus: Corpus,
        phase: int,
        examples: int,
        mesh: Mesh,
        step: Callable | None = None,
    ):
        self.assembly, self.corpus, self.mesh = assembly, corpus, mesh
        self._step = step or jit_evaluation_step(assembly, phase, EVALUATION_SEED, mesh)
        self._first_carry = jit_first_carry(assembly, phase, mesh, train=False)
        recipe = assembly.recipe
        held_out = recipe.objective.examples(corpus, "heldout", recipe.phases[phase], EVALUATION_SEED)
        self.batches = list(evaluation_batches(held_out, examples))

    def __call__(self, params: Params, frozen: Params) -> dict[str, float]:
        """loss, each term in nats per prediction, and the objective's report."""
        objective = self.assembly.recipe.objective
        carry, total = self._first_carry(), None
        for index, batch in enumerate(self.batches):
            size = len(next(iter(batch.values())))
            placed = place_rows(batch, np.arange(size), size, self.mesh)
            part, carry = self._step(params, frozen, placed, np.int32(index), carry)
            total = part if total is None else jax.tree.map(operator.add, total, part)
        sums, weights, counts = jax.device_get(total)
        terms = {term: float(sums[term] / weights[term]) for term in sums if weights[term] > 0}
        factors = objective.coefficients(0)
        loss = sum(float(factors[term]) * value for term, value in terms.items())
        return {"loss": loss, **{f"{term}_loss": value for term, value in terms.items()}, **objective.report(counts)}

    def baselines(self) -> dict[str, float]:
        """What needs no model, under the names of the figures that it stands beside."""
        return self.assembly.recipe.objective.baselines(self.batches, self.corpus)


