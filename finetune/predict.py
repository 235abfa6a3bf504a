"""Computes a finetuned model's outputs for rows, in batches of rows of similar length."""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from finetune.patterns import shortest
from finetune.rows import Rows, TaskRows, buckets
from finetune.task import FinetuningTask
from models.core.parameters import Params
from pretrain.lora import merged
from pretrain.objectives.objective import Moment, Sums
from pretrain.training.assembly import Assembly, merge
from pretrain.training.placement import EVALUATED_TOKENS, jit_on
from tpu.batches import host_rows, place_rows
from tpu.mesh import mesh_shape
from tpu.rules import replicated
from tpu.xla import small_product_options

AHEAD = 2  # number of batches to compute while the host reads an earlier one


class Predictions(NamedTuple):
    """outputs: name of `FinetuningTask.scores` -> an array for each row; per-token arrays have the bucket's length.
    sums: totals over all rows."""

    outputs: dict[str, list[np.ndarray]]
    sums: Sums


class Predictor:
    """A task's model on a mesh, compiled once for each row length up to `length`."""

    def __init__(self, task: FinetuningTask, assembly: Assembly, mesh: Mesh, length: int):
        self.task, self.model, self.mesh, self.length = task, assembly.model, mesh, length
        self.shortest = shortest(assembly.recipe.model, length)

        def compute(params: Params, frozen: Params, batch):
            whole = merged(merge(params, frozen))
            outputs, terms = task.forward(assembly.model, whole, batch, Moment((), train=False))
            return outputs, Sums(terms, task.weights(batch))

        options = small_product_options(mesh, looped=assembly.model.program.depth == "scan")
        self.run = jit_on(mesh, assembly, compute, options, out_shardings=replicated(mesh))

    def __call__(self, params: Params, frozen: Params, rows: Rows, tell: Callable[[int], Any]) -> Predictions:
        """Return the outputs for all rows.   tell: called with the number of further rows done."""
        outputs: dict[str, list] = {}
        sums, waiting = [], deque()

        def take() -> None:
            part, (of_part, of_sums) = jax.device_get(waiting.popleft())
            sums.append(of_sums)
            for name, array in of_part.items():
                whole = outputs.setdefault(name, [None] * len(rows))
                for row, of_row in zip(part, array, strict=False):  # the rest of a batch is padding
                    whole[row] = of_row
            tell(len(part))

        lengths, above = rows.lengths, 0
        for length in buckets(np.maximum(lengths, self.shortest), longest=self.length):
            which = np.flatnonzero((lengths > above) & (lengths <= length))
            layout = self.task.layout(above, length)
            size, above = self._rows_together(len(which), layout.tokens), length
            for first in range(0, len(which), size):
                part = which[first : first + size]
                waiting.append((part, self.run(params, frozen, self._placed(layout, rows, part, size))))
                if len(waiting) > AHEAD:
                    take()
        while waiting:
            take()
        return Predictions(outputs, jax.tree.map(lambda *parts: np.sum(parts, axis=0), *sums))

    def _rows_together(self, number: int, tokens: int) -> int:
        """Return the number of rows in a batch such that the last one needs few padding rows."""
        parts = mesh_shape(self.mesh).batch_parts
        most = parts * max(1, EVALUATED_TOKENS // tokens)
        equal = -(-number // -(-number // most))
        return -(-equal // parts) * parts

    def _placed(self, layout: TaskRows, rows: Rows, part: np.ndarray, size: int) -> Mapping[str, jax.Array]:
        batch, spec = layout.padded(rows, part), layout.spec
        whole = {name: np.concatenate([array, spec[name].blank(size - len(part))]) for name, array in batch.items()}
        mine = host_rows(self.mesh, size)
        return place_rows({name: array[mine] for name, array in whole.items()}, mine, size, self.mesh)
