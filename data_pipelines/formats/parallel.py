"""`parallel:` sentences and their translations: two files (or patterns, or folders) whose lines belong together,
`parallel:a.en,a.zh`; or files with both sides in a line, separated by a tab."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from data_pipelines.document import Document
from data_pipelines.errors import UserError
from data_pipelines.formats import files
from data_pipelines.formats.cutting import documents, readable
from data_pipelines.formats.listing import Found, find, is_compressed
from data_pipelines.formats.problems import HALF, MALFORMED, TOO_LONG, Problems, printable
from data_pipelines.formats.source import Decoding, Format, Other, Range, Source

NAMES = ("source", "target")
SUFFIXES = (".tsv", ".txt")  # files with tabs
ENDED = object()  # stands for the lines after a file's last


def _ranges(source: Source, problems: Problems, exclude: Sequence[str]) -> Iterator[Range]:
    sides = source.location.split(",")
    if len(sides) == 1:
        return files.of_files(files.at_lines, SUFFIXES)(source, problems, exclude)
    if len(sides) > 2 or not all(sides):
        raise UserError(f"--source {source}: write parallel:FILE,FILE or parallel:FILE.tsv")
    first, second = (find(replace(source, location=side), problems, exclude) for side in sides)
    if len(first) != len(second):
        raise UserError(
            f"--source {source}: {len(first)} files on one side and {len(second)} on the other; give as many on "
            "both sides, which belong together in the order of their names"
        )
    return files.each(zip(first, second, strict=True), _aligned, source)


def _aligned(source: Source, pair: tuple[Found, Found]) -> Iterator[Range]:
    """Yield ranges of two files, long ones cut at the same lines. Raises UserError if one has more lines."""
    first, second = pair
    size = first.text_size + second.text_size
    whole = files.uncut(first)._replace(size=size, other=Other(second.path, 0, None, second.version))
    if any(is_compressed(file.path) or file.size is None for file in pair) or size <= source.shard:
        yield whole
        return
    cuts, others, count, other_count = [(0, 0)], [0], 0, 0  # (lines before it, byte) of the first, byte of the second
    for before, ends in _line_ends(first):
        count = before + len(ends)
        while (at := int(np.searchsorted(ends, cuts[-1][1] + source.shard // 2, "right"))) < len(ends):
            cuts.append((before + at + 1, int(ends[at])))
    if cuts[-1][1] < first.size:
        cuts.append((count, first.size))
    for before, ends in _line_ends(second):
        other_count = before + len(ends)
        others += [int(ends[line - before - 1]) for line, _ in cuts[len(others) :] if line <= other_count]
    if count != other_count:
        raise _unequal(source, whole, f"{count:,} and {other_count:,}")
    for ((_, start), (_, end)), (start2, end2) in zip(
        itertools.pairwise(cuts), itertools.pairwise(others), strict=True
    ):
        other = Other(second.path, start2, end2, second.version)
        yield whole._replace(start=start, end=end, size=end - start + end2 - start2, other=other)


def _unequal(source: Source, part: Range, counts: str) -> UserError:
    return UserError(
        f"--source {source}: {printable(part.path)} and {printable(part.other.path)} have not as many lines as each "
        f"other ({counts}), so that they do not belong together line by line; give files that do"
    )


def _line_ends(found: Found) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (number of lines before, bytes at which lines end: int64 [n]), for some lines at a time."""
    lines = place = 0
    for block in files.blocks(found.path):
        ends = place + 1 + np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))
        place += len(block)
        if place == found.size and not block.endswith(b"\n"):
            ends = np.append(ends, place)
        yield lines, ends
        lines += len(ends)


def _read(source: Source, part: Range, problems: Problems) -> Iterator[Document]:
    for number, pair in enumerate(_pairs(source, part), 1):
        where = f"{part.path}, line {number}" + (f" after byte {part.start}" if part.start else "")
        if None in pair:
            problems.note(TOO_LONG, where)
        elif len(pair) < 2:
            problems.note(MALFORMED, f"{where}: no tab")
        elif not all(side.strip() for side in pair):
            problems.note(HALF, where)
        else:
            texts = [readable(side.rstrip(b"\r"), source, where, problems) for side in pair]
            if None not in texts:
                yield from documents(source, texts, NAMES)


def _pairs(source: Source, part: Range) -> Iterator[tuple[bytes | None, ...]]:
    """Yield the two sides of each line: None for a side that is too long, and a single side if there is no tab."""
    lines = files.lines(files.range_blocks(part))
    if part.other is None:
        yield from ((None,) if line is None else tuple(line.split(b"\t")[:2]) for line in lines)
        return
    others = files.lines(files.blocks(part.other.path, part.other.start, part.other.end))
    for number, pair in enumerate(itertools.zip_longest(lines, others, fillvalue=ENDED)):
        if ENDED in pair:
            raise _unequal(source, part, f"one ends after {number:,}")
        yield pair


FORMAT = Format(Decoding, _ranges, _read, "FILE,FILE", lambda options: NAMES)
