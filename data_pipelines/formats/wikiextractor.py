"""`wikiextractor:` files in which an article is a line <doc ...>, the title, the text, and a line </doc>."""

import functools
import html
import re
from collections.abc import Iterator

from data_pipelines.document import Document
from data_pipelines.formats import files
from data_pipelines.formats.cutting import documents, readable
from data_pipelines.formats.problems import MALFORMED
from data_pipelines.formats.source import Decoding, Format, Range, Source

SUFFIXES = ("", ".txt")  # the files are wiki_00 and so on
VALUES = ("id", "url", "title", "revid")
VALUE = re.compile(r'(\w+)="(.*?)"')


def _read(source: Source, part: Range, problems) -> Iterator[Document]:
    for begin, article in _articles(part, problems):
        values = {name: html.unescape(value) for name, value in VALUE.findall(begin)}
        if (text := readable(article, source, part.path, problems)) is not None:
            yield from (document._replace(values=values) for document in documents(source, [html.unescape(text)]))


def _articles(part: Range, problems) -> Iterator[tuple[str, bytes | None]]:
    """Yield the <doc> line and the inside of each block, None if too long. A block without its end is malformed."""
    inside, begin, article = False, "", files.Record(b"\n")
    for line in files.lines(files.range_blocks(part)):
        if line is not None and line.startswith((b"<doc ", b"<doc>")):
            if inside:
                problems.note(MALFORMED, f"{part.path}: <doc> inside <doc>")
            inside, begin = True, line.decode("utf-8", "replace")
            article.take()
        elif line is not None and line.startswith(b"</doc>"):
            if inside:
                yield begin, article.take()
            else:
                problems.note(MALFORMED, f"{part.path}: </doc> without <doc>")
            inside = False
        elif inside:
            article.add(line)
        elif line is None or line.strip():
            problems.note(MALFORMED, f"{part.path}: text outside <doc>")
    if inside:
        problems.note(MALFORMED, f"{part.path}: <doc> without </doc>")


_cut = functools.partial(files.after_lines, lambda line: line.startswith(b"</doc>"))
FORMAT = Format(Decoding, files.of_files(_cut, SUFFIXES), _read, values=VALUES)
