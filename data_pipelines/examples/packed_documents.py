"""Documents packed to full length for models that predict the next token: no padding, every token once in an epoch."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from data_pipelines.examples.document_stream import DocumentStream, NextTokens, prefix_tokens
from data_pipelines.examples.layout import Chosen, Piece, RowLayout


class Plan(NamedTuple):
    """The documents of a part one after the other, in an order of the seed; rows are cut from them."""

    stream: DocumentStream
    number: int  # examples per epoch


@dataclass(frozen=True)
class PackedDocuments(NextTokens, RowLayout):
    """Rows of `length` tokens of a part's documents, each of which ends with the corpus's end token.

    A batch holds tokens, targets (the next token, also at the row's end), weights (1; 0 behind the last document of a
    part) and segments. separate: whether segments number the documents in the row, from 1 on, so that attention stays
    within one; else they are all 1. restart: whether there are `positions` that begin with 0 in every document.

    Of a corpus with control codes (or years) each document begins with its code, and so does each row that goes on with
    one, whose first target is then predicted from the code alone (Keskar et al. 2019). A code is predicted like any
    other token, but for those that begin a row; of the other tokens each is a target once.
    """

    separate: bool = False
    restart: bool = False

    def plan(self, part, split: str, seed: int) -> Plan:
        documents = len(part.documents(split)) - 1
        whole = Piece(part, 0, int(part.sentences(split)[-1]) + documents)
        prefixes = prefix_tokens(part, split)
        stream = DocumentStream([whole], split, seed, 0, prefixes=prefixes)
        targets = max(stream.total - (prefixes is None), 0)
        return Plan(stream, -(-targets // self.length))

    def build(self, chosen: Chosen, keys: np.ndarray) -> dict[str, np.ndarray]:
        window, document = chosen.gather(self._read)
        real, starts = document[:, 1:] >= 0, np.zeros(document.shape, bool)
        starts[:, 1:] = document[:, 1:] != document[:, :-1]
        starts = starts[:, :-1]
        segments = real.astype(np.int32)
        if self.separate:
            segments *= 1 + np.cumsum(starts, axis=1, dtype=np.int32)
        arrays = {"tokens": window[:, :-1] * real, "targets": window[:, 1:], "segments": segments}
        if self.restart:
            column = np.arange(self.length, dtype=np.int32)
            arrays["positions"] = column - np.maximum.accumulate(np.where(starts, column, 0), axis=1)
        return arrays | {"weights": real.astype(np.float32)}

    def _read(self, plan: Plan, _, example: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As `DocumentStream.rows`, with the code before what goes on with its document."""
        window, document = plan.stream.rows(example, self.length)
        if plan.stream.prefixes is None:
            return window, document
        # A row that begins with its code has one target less: the token after it is the next row's first
        begins = plan.stream.begins(example * self.length)
        document[begins, -1] = -1
        lead = plan.stream.prefixes[document[:, 0]]
        window = np.where(begins[:, None], window, np.insert(window[:, :-1], 0, lead, 1))
        document = np.where(begins[:, None], document, np.insert(document[:, :-1], 0, document[:, 0], 1))
        return window, document
