"""Rows of a source and a target for UniLM (Dong et al. 2019, arXiv:1905.03197, section 2.5): a share of the target's
tokens is masked, and predicted from the source and the tokens before. The end token may be masked, too."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from data_pipelines import noise
from data_pipelines.examples.layout import Chosen, Feature
from data_pipelines.examples.masking import Masking, SpecialTokens, mask, predictions
from data_pipelines.examples.unified_pairs import FIRST_TYPES, SEQUENCE
from data_pipelines.tokenizers.made import cloze_tokens
from finetune.rows import Row, Rows, TaskRows, joined

MASKING = Masking(rate=0.7, mask=1.0, random=0.0)  # as in the authors' code for its tasks, but each becomes [MASK]
SOURCE = int(FIRST_TYPES[SEQUENCE])


@dataclass(frozen=True)
class ClozeRows(TaskRows):
    """A batch also has the prediction arrays of `MaskedRows`; training draws masked tokens anew in each epoch.
    target_length: most tokens of a target."""

    target_length: int = 0

    @property
    def spec(self):
        slots = Feature((predictions(min(self.target_length, self.length), MASKING.rate),))
        predicted = dict.fromkeys(("prediction_positions", "prediction_targets"), slots)
        return super().spec | predicted | {"prediction_weights": slots._replace(dtype=np.float32)}

    def build(self, chosen: Chosen, keys: np.ndarray) -> dict[str, np.ndarray]:
        (plan,) = chosen.plans
        return self._masked(plan.all, plan.rows[chosen.example], keys)

    def padded(self, rows: Rows, which: np.ndarray) -> dict[str, np.ndarray]:
        return self._masked(rows, which, noise.key("cloze", which))  # the same in each evaluation

    def _masked(self, rows, which, keys):
        batch = super().padded(rows, which)
        is_target = batch["types"] > SOURCE
        special = SpecialTokens(0, 0, 0, int(rows.columns["mask"][0]), np.zeros(0, np.int32))
        made = mask(MASKING, special, keys, batch["tokens"], is_target, is_target.sum(axis=1), None)
        return batch | {name: array[:, : self.spec[name].shape[0]] for name, array in made.items()}


def cloze_rows(
    sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], is_known: np.ndarray, special: dict[str, int]
) -> Rows:
    """Return rows [CLS] source [SEP] target, where a target ends with its end token, or is left out if not known.
    Columns: `inputs`, the number of tokens before the target, and `mask`, the token."""
    cls, sep, mask_token = cloze_tokens(special, "--from")
    sources = [np.concatenate([[cls], source, [sep]]) for source in sources]
    sizes = np.array([len(source) for source in sources])
    targets = [target if known else target[:0] for target, known in zip(targets, is_known, strict=True)]
    tokens = [np.concatenate(pair) for pair in zip(sources, targets, strict=True)]
    places = [np.arange(len(row)) for row in tokens]
    in_target = [place >= size for place, size in zip(places, sizes, strict=True)]
    ranks = [place * within for place, within in zip(places, in_target, strict=True)]
    columns = {"inputs": sizes, "mask": np.full(len(sizes), mask_token)}
    rows = [Row(row, SOURCE + within) for row, within in zip(tokens, in_target, strict=True)]
    return joined(rows, columns, {"ranks": ranks})
