"""What all rows with masked tokens have."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

import numpy as np

from data_pipelines.errors import UserError
from data_pipelines.examples import masking
from data_pipelines.examples.layout import Feature, RowLayout
from data_pipelines.examples.masking import TOKEN, Masking, SpecialTokens, predictions


@dataclass(frozen=True)
class MaskedRows(RowLayout):
    """Base of such layouts. A batch holds tokens, types, segments, the prediction arrays of `masking.mask` and, with
    global_tokens, `globals`: of so many, which a sparse pattern lets see all and be seen by all, the positions.

    Raises UserError for more global tokens than the row has tokens.
    """

    streams = masking.STREAMS

    masks: Masking = masking.BERT
    _: KW_ONLY
    global_tokens: int = 0

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.global_tokens <= self.length:
            raise UserError(
                f"globals={self.global_tokens}: must be from 0, for none, to the row's length={self.length}"
            )

    @property
    def spec(self) -> dict[str, Feature]:
        slots = predictions(self.length, self.masks.rate)
        whole = dict.fromkeys(("tokens", "types", "segments"), Feature((self.length,)))
        predicted = dict.fromkeys(("prediction_positions", "prediction_targets"), Feature((slots,)))
        of_globals = {"globals": Feature((self.global_tokens,))} if self.global_tokens else {}
        return whole | predicted | {"prediction_weights": Feature((slots,), np.float32)} | of_globals

    @property
    def copies(self):
        return self.masks.copies

    def check(self, corpus):
        SpecialTokens.of(corpus)
        fields = {name: field for name, field in corpus.fields.items() if field.per == "token" and not field.shape}
        units = [TOKEN, *(name for name, field in fields.items() if field.dtype == "bool")]
        if self.masks.unit not in units:
            raise UserError(
                f"objective.masking.unit={self.masks.unit!r}: corpus {corpus.path} has no field by token that says "
                f"where such units begin; use one of {', '.join(units)}"
            )

    def masked(
        self,
        tokens: np.ndarray,
        special: SpecialTokens,
        keys: np.ndarray,
        maskable: np.ndarray,
        available: np.ndarray,
        starts: Callable[[str], np.ndarray],
    ) -> dict[str, np.ndarray]:
        """Mask rows of tokens (int32 [n, length]) in place -> the arrays of a batch beside tokens, types and segments.
        starts: the field that says where units begin -> its values, and True at special tokens, bool [n, length]. The
        others: see `masking.mask`."""
        begins = None if self.masks.unit == TOKEN else starts(self.masks.unit)
        made = masking.mask(self.masks, special, keys, tokens, maskable, available, begins)
        if self.global_tokens:
            made["globals"] = global_positions(tokens, special.sep, self.global_tokens)
        return made


def global_positions(tokens: np.ndarray, sep: int, number: int) -> np.ndarray:
    """i32[rows, number]: the position of each row's first token, then those of its separators in order, -1 where there
    are no more."""
    is_global = tokens == sep
    is_global[:, 0] = True
    row, position = np.nonzero(is_global)
    rank = (np.cumsum(is_global, axis=1) - 1)[row, position]  # 0, 1, .. within each row
    within = rank < number
    named = np.full((len(is_global), number), -1, np.int32)
    named[row[within], rank[within]] = position[within]
    return named
