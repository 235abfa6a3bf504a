"""Turn texts, bytes or str, into Documents: decode them and cut long ones, by one rule for all formats.

A text is cut once in every WINDOW of its UTF-8: after the window's last newline, else after its last white space, else
between characters. So a piece has at most two windows, and a text the same pieces wherever its reader began.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import pyarrow

from data_pipelines.document import Document, Segment
from data_pipelines.formats import files
from data_pipelines.formats.problems import EMPTY, HALF, NOT_TEXT, REPLACED, SKIPPED, TOO_LONG, Problems

WINDOW = 1 << 19  # bytes


def cut_of(window: bytes, following: bytes) -> int:
    """Return where a text is cut in a window that is followed by `following`: a place in [1, len(window)]."""
    if space := window.rfind(b"\n") + 1 or max(window.rfind(b" "), window.rfind(b"\t")) + 1:
        return space
    data, end = window + following[:1], len(window)
    begins = (end - back for back in range(4) if back < end and data[end - back] & 0xC0 != 0x80)  # a UTF-8 character
    return next(begins, end)


def pieces(blocks: Iterable[bytes], start: int = 0) -> Iterator[bytes]:
    """Yield the same bytes in pieces. start: 0, or the cut in the document at which the bytes begin."""
    held = b""
    border = -(-start // WINDOW) * WINDOW + WINDOW - start  # in `held`; the cut at `start` belongs to the border before
    for block in blocks:
        held += block
        while len(held) > border:
            begin = border - WINDOW
            cut = begin + cut_of(held[begin:border], held[border : border + 1])
            yield held[:cut]
            held = held[cut:]
            border += WINDOW - cut
    if held:
        yield held


def decode(data: bytes, undecodable: str) -> str | None:
    """Decode UTF-8 and drop a byte order mark. Invalid bytes become U+FFFD or, with 'skip', the result is None."""
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError:
        return data.decode("utf-8", "replace") if undecodable == "replace" else None


def readable(data: bytes | str | None, source, where: str, problems: Problems) -> str | None:
    """Return text that can be encoded as UTF-8, or None, with a problem noted. data: None for a record that was too
    long; a str may hold lone surrogates, which JSON can escape and which count as undecodable."""
    if data is None:
        problems.note(TOO_LONG, where)
        return None
    if isinstance(data, str):
        try:
            for at in range(0, len(data), WINDOW):  # avoids a second copy of a long text
                data[at : at + WINDOW].encode()
            return data.removeprefix("\ufeff")
        except UnicodeEncodeError:
            data = data.encode("utf-8", "surrogatepass")
    text = decode(data, "skip")
    if text is not None:
        return text
    problems.note(SKIPPED if source.options.undecodable == "skip" else REPLACED, where)
    return decode(data, source.options.undecodable)


def document_of(record: Mapping, source, where: str, problems: Problems) -> Iterator[Document]:
    """Yield the document of a record, which has the source's fields. A single field is its text, several are its
    segments; of two, an input and its target, neither may be empty."""
    texts, of_pairs = [], len(source.options.fields) == 2
    for name in source.options.fields:
        value = record[name]
        if not isinstance(value, str | bytes) or len(value) > files.LARGEST_RECORD:
            problem, absent = TOO_LONG if isinstance(value, str | bytes) else NOT_TEXT, HALF if of_pairs else EMPTY
            problems.note(absent if value is None else problem, where)
            return
        text = readable(value, source, where, problems)
        if text is None:
            return
        texts.append(text)
    if of_pairs and not all(map(str.strip, texts)):
        problems.note(HALF, where)
        return
    for document in documents(source, texts, segments_of(source.options)):
        yield document._replace(values=record)


def documents_of(batch: pyarrow.RecordBatch, source, part, problems: Problems) -> Iterator[Document]:
    """Yield the documents of a record batch's rows."""
    for row in range(batch.num_rows):
        record = {name: _value(batch[name][row]) for name in source.columns}
        yield from document_of(record, source, part.path, problems)


def _value(cell: pyarrow.Scalar) -> object:
    """Return a cell's value; a string that is not UTF-8, which Arrow and Parquet do not check, as bytes."""
    try:
        return cell.as_py()
    except UnicodeDecodeError:
        held = getattr(cell, "value", cell)  # a dictionary's cell holds another one
        return held.as_buffer().to_pybytes() if isinstance(held, pyarrow.BinaryScalar) else held  # or no text


def segments_of(options) -> tuple[str, ...]:
    """Return the names of the segments that `document_of` makes."""
    return options.fields if len(options.fields) > 1 else ("text",)


def documents(source, texts: Sequence[str], names: Sequence[str] = ("text",)) -> Iterator[Document]:
    """Yield a document of texts in memory, which become its segments; the source's task prefix is put before the first.
    A long document comes in pieces of one segment each."""
    texts = [source.task_prefix + texts[0], *texts[1:]]
    languages = source.language.split(",") if "," in source.language else [""] * len(names)
    segments = tuple(map(Segment, names, texts, languages))
    if sum(map(len, texts)) <= WINDOW // 4:
        yield Document(segments)
        return
    parts = (segment._replace(text=piece) for segment in segments for piece in _pieces(segment.text))
    for index, segment in enumerate(parts):
        yield Document((segment,), (), index > 0)


def _pieces(text: str) -> Iterator[str]:
    if len(text) <= WINDOW // 4:  # a character has at most four bytes
        yield text
        return
    blocks = (text[at : at + WINDOW].encode() for at in range(0, len(text), WINDOW))
    yield from (piece.decode() for piece in pieces(blocks))
