"""`parallel:` sentences and their translations: two files (or patterns, or folders), of which each line of one belongs
to the same line of the other, `parallel:a.en,a.zh`; or files of which each line has both, with a tab between. A pair is
a document with the segments source and target."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from data_pipelines.document import Document
from data_pipelines.errors import UserError
from data_pipelines.formats import files
from data_pipelines.formats.cutting import readable, together
from data_pipelines.formats.listing import Found, find, is_compressed
from data_pipelines.formats.problems import HALF, MALFORMED, TOO_LONG, Problems, printable
from data_pipelines.formats.source import Decoding, Format, Other, Range, Source

NAMES = ("source", "target")
SUFFIXES = (".tsv", ".txt")  # of files with tabs
ENDED = object()  # of a file whose lines are all read


def _ranges(source: Source, problems: Problems, exclude: Sequence[str]) -> Iterator[Range]:
    sides = source.location.split(",")
    if len(sides) == 1:
        return files.of_files(files.at_lines, SUFFIXES)(source, problems, exclude)
    if len(sides) > 2 or not all(sides):
        raise UserError(f"--source {source}: write parallel:FILE,FILE or parallel:FILE.tsv")
    first, second = (find(replace(source, location=side), problems, exclude) for side in sides)
    if len(first) != len(second):
        raise UserError(
            f"--source {source}: {len(first)} files on one side and {len(second)} on the other; give as many, which "
            "belong together in the order of their names"
        )
    return files.each(zip(first, second, strict=True), _aligned, source)


def _aligned(source: Source, pair: tuple[Found, Found]) -> Iterator[Range]:
    """Two files that belong together, long ones cut at the same lines. UserError where they have not as many."""
    first, second = pair
    size = first.text_size + second.text_size
    whole = files.uncut(first)._replace(size=size, other=Other(second.path, 0, None, second.version))
    if any(is_compressed(one.path) or one.size is None for one in pair) or size <= source.shard:
        yield whole
        return
    cuts, count = _cuts(first, source.shard // 2)
    others, other_count = _places(second, [line for line, _ in cuts])
    if count != other_count:
        raise _unequal(source, whole, f"{count:,} and {other_count:,}")
    begins = [(0, 0), *((place, other) for (_, place), other in zip(cuts, others, strict=True))]
    for (start, start2), (end, end2) in zip(begins, [*begins[1:], (first.size, second.size)], strict=True):
        other = Other(second.path, start2, end2, second.version)
        yield whole._replace(start=start, end=end, size=end - start + end2 - start2, other=other)


def _unequal(source: Source, part: Range, counts: str) -> UserError:
    return UserError(
        f"--source {source}: {printable(part.path)} and {printable(part.other.path)} have not as many lines as each "
        f"other ({counts}), so that they do not belong together line by line; give files that do"
    )


def _cuts(found: Found, apart: int) -> tuple[list[tuple[int, int]], int]:
    """[(lines before it, byte)] where lines begin, about `apart` bytes; and how many lines there are."""
    cuts, lines, place, wanted, last = [], 0, 0, apart, b"\n"
    for block in files.blocks(found.path):
        at = block.find(b"\n", max(wanted - place, 0))
        while at >= 0 and place + at + 1 < found.size:
            cuts.append((lines + block.count(b"\n", 0, at + 1), place + at + 1))
            wanted = place + at + 1 + apart
            at = block.find(b"\n", wanted - place)
        lines, place, last = lines + block.count(b"\n"), place + len(block), block[-1:]
    return cuts, lines + (last != b"\n")


def _places(found: Found, wanted: list[int]) -> tuple[list[int], int]:
    """The bytes at which lines of these numbers begin (the end for those that are not there); how many there are."""
    places, lines, place, last = [], 0, 0, b"\n"
    for block in files.blocks(found.path):
        count = block.count(b"\n")
        if len(places) < len(wanted) and wanted[len(places)] <= lines + count:
            ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))
            here = [number for number in wanted[len(places) :] if number <= lines + count]
            places += [place + int(ends[number - lines - 1]) + 1 for number in here]
        lines, place, last = lines + count, place + len(block), block[-1:]
    return places + [found.size] * (len(wanted) - len(places)), lines + (last != b"\n")


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
                yield from together(source, NAMES, texts)


def _pairs(source: Source, part: Range) -> Iterator[tuple[bytes | None, ...]]:
    """The two sides of each line; None for one that is too long, one side where there is no tab."""
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
