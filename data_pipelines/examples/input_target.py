"""Documents of two segments, an input and its target, as texts that a decoder goes on with: translation, summaries.

Radford et al. 2018 (section 3.3) put a delimiter between two texts; a summary learnt so is a text that goes on.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from data_pipelines.errors import UserError
from data_pipelines.examples.document_stream import NextTokens, end_token, prefix_tokens
from data_pipelines.examples.layout import Chosen, Feature, RowLayout


class Plan(NamedTuple):
    """The documents of a part.

    input_begins, target_begins, inputs, targets: int64 [documents], where its segments begin, and their tokens.
    prefixes: int32 [documents], of each the token of a value; None where there are none.
    """

    part: Any
    split: str
    input_begins: np.ndarray
    target_begins: np.ndarray
    inputs: np.ndarray
    targets: np.ndarray
    prefixes: np.ndarray | None

    @property
    def number(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True)
class InputTarget(NextTokens, RowLayout):
    """Rows of one document each: its control code, or another value's token, where it has one, input, delimiter, target
    and end token, padded.

    The input is the segment that the corpus names first, the target the other one. The delimiter is the corpus's 'sep',
    where 'eod' ends documents; else it is the end token too. Of what does not fit the end of the input is cut, then the
    end of the target. A batch holds tokens, targets (the next token), segments (1; 0 in padding), weights (1 where a
    token of the document, or of its target alone, is predicted) and, with `auxiliary`, auxiliary_weights (1 where the
    other ones are).
    """

    least = 2

    target_alone: bool
    auxiliary: bool

    @property
    def spec(self) -> dict[str, Feature]:
        spec = super().spec
        return spec | ({"auxiliary_weights": spec["weights"]} if self.auxiliary else {})

    def check(self, corpus):
        super().check(corpus)
        segments = corpus.fields["segments"].values if "segments" in corpus.fields else ("text",)
        if len(segments) != 2:
            raise UserError(
                f"corpus {corpus.path} has documents of {', '.join(segments)}, where rows of input and target need two "
                "segments: prepare it with --field INPUT --field TARGET, or of a parallel: source"
            )

    def plan(self, part, split: str, seed: int) -> Plan:
        sentences, documents = part.sentences(split), part.documents(split)
        is_target = part.column(split, "segments") == 1
        before = np.append(0, np.cumsum(np.diff(sentences) * is_target))[documents]
        offsets, targets = sentences[documents], np.diff(before)
        begins, inputs = offsets[:-1], np.diff(offsets) - targets
        turned = is_target[documents[:-1]]  # a source added later may name its fields in another order
        places = begins + np.where(turned, targets, 0), begins + np.where(turned, 0, inputs)
        return Plan(part, split, *places, inputs, targets, prefix_tokens(part, split))

    def build(self, chosen: Chosen, keys: np.ndarray) -> dict[str, np.ndarray]:
        row, real, of_target = chosen.gather(self._read)
        segments = real.astype(np.int32)
        arrays = {"tokens": row[:, :-1] * segments, "targets": row[:, 1:] * segments, "segments": segments}
        predicted = real & of_target if self.target_alone else real
        arrays["weights"] = predicted.astype(np.float32)
        if self.auxiliary:
            arrays["auxiliary_weights"] = (real & ~predicted).astype(np.float32)
        return arrays

    def _read(self, plan: Plan, _, example: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows and the token after them int32 [n, length + 1]; which next tokens there are, and which are of the target
        or end it: bool [n, length]."""
        place, end = np.arange(self.length + 1), end_token(plan.part.corpus)
        inputs, targets = plan.inputs[example], plan.targets[example]
        lead = int(plan.prefixes is not None)
        kept = np.clip(self.length - 1 - lead - targets, 0, inputs)
        delimiter = (lead + kept)[:, None]
        of_input = plan.input_begins[example][:, None] + place - lead
        of_target = plan.target_begins[example][:, None] + place - delimiter - 1
        index = np.where(place < delimiter, of_input, of_target)
        row = plan.part.read(plan.split, "tokens", index.ravel(), 1)[:, 0].reshape(index.shape).astype(np.int32)
        last = delimiter + 1 + targets[:, None]
        row[place == delimiter] = delimiter_token(plan.part.corpus.special)
        row[place == last] = end
        if lead:
            row[:, 0] = plan.prefixes[example]
        return row, place[1:] <= last, place[1:] > delimiter


def delimiter_token(special: Mapping[str, int]) -> int:
    """The token between an input and its target, of a vocabulary in which one ends documents."""
    return special["sep" if "sep" in special else "eod"]
