"""A spiece.model read without protobuf, whose versions differ between environments: what of it a tokenizer needs.

The wire format is https://protobuf.dev/programming-guides/encoding, the fields are those of sentencepiece_model.proto.
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple

UNIGRAM = 1  # TrainerSpec.ModelType
NORMAL, USER_DEFINED = 1, 4  # ModelProto.SentencePiece.Type
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


class Piece(NamedTuple):
    piece: str
    score: float
    type: int


class Model(NamedTuple):
    pieces: list[Piece]
    model_type: int
    precompiled_charsmap: bytes


def parse(content: bytes) -> Model:
    """ValueError where this is no spiece.model."""
    pieces, trainer, normalizer = [], {}, {}
    try:
        for number, value in _fields(content):
            if number == 1:
                said = dict(_fields(value))
                score = struct.unpack("<f", said.get(2, bytes(4)))[0]
                pieces.append(Piece(said[1].decode("utf-8"), score, said.get(3, NORMAL)))
            elif number == 2:
                trainer = dict(_fields(value))
            elif number == 3:
                normalizer = dict(_fields(value))
    except (IndexError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ValueError("it is no SentencePiece model") from error
    if not pieces:
        raise ValueError("it has no pieces")
    return Model(pieces, trainer.get(3, UNIGRAM), normalizer.get(2, b""))


def _fields(content: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of the fields of a message: an int, or the bytes of what is longer."""
    at = 0
    while at < len(content):
        key, at = _varint(content, at)
        number, kind = key >> 3, key & 7
        if kind == VARINT:
            value, at = _varint(content, at)
            yield number, value
            continue
        if kind == BYTES:
            size, at = _varint(content, at)
        elif kind in (FIXED32, FIXED64):
            size = 4 if kind == FIXED32 else 8
        else:
            raise ValueError("it is no SentencePiece model")
        if at + size > len(content):
            raise ValueError("it ends too early")
        yield number, content[at : at + size]
        at += size


def _varint(content: bytes, at: int) -> tuple[int, int]:
    """An int of seven bits a byte, and where it ends."""
    value = shift = 0
    while True:
        value |= (content[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if content[at - 1] < 128:
            return value, at
