"""`conll:` files with a token and its columns per line, and a blank line between sentences: CoNLL-2003 and the like, or
CoNLL-U of Universal Dependencies. Tokens are joined to text, one sentence per line; labels become annotations.

In CoNLL-2003 the first column is the token and the last one its label. In CoNLL-U (ten columns) these are FORM and
UPOS; a word that is written together with the next one has SpaceAfter=No, and a range such as 1-2 is one token with the
labels of its words. `-DOCSTART-` and `# newdoc` begin a document, and so does a file.
"""

import functools
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

from data_pipelines.document import Annotation, Document, Segment
from data_pipelines.errors import UserError
from data_pipelines.formats import cutting, files
from data_pipelines.formats.problems import MALFORMED, Problems
from data_pipelines.formats.source import Decoding, Format, Range, Source
from data_pipelines.store.fields import Field

# .train to .testb are those of CoNLL-2003. Not .txt: a treebank's folder also has its plain text, in .txt files
SUFFIXES = (".conllu", ".conll", ".iob", ".iob2", ".bio", ".bioes", ".bmes", ".train", ".dev", ".test", ".testa",
            ".testb")  # fmt: skip
BORDERS = (b"-DOCSTART-", b"# newdoc")
NUMBER = re.compile(r"(\d+)(?:-(\d+))?$")  # a word of CoNLL-U, or a range of words; a word like 8.1 is not written
UNSPACED = ("zh", "ja")  # languages written without spaces between words


@dataclass(frozen=True)
class Options(Decoding):
    """Which columns are read, counted from 1."""

    token_column: int | None = None  # None: the first; in CoNLL-U the second
    label_column: int | None = None  # None: the last; in CoNLL-U the fourth, UPOS. 0: no labels

    def __post_init__(self):
        for name, column, least in (("token", self.token_column, 1), ("label", self.label_column, 0)):
            if column is not None and column < least:
                raise UserError(f"--{name}-column {column}: columns are counted from 1; give at least {least}")


class Token(NamedTuple):
    """A written token."""

    text: str
    label: str | None
    before: str  # the text between this token and the one before


def _to_document(file: BinaryIO, place: int) -> None:
    """Go to the first border of documents after a place, or to the end."""
    files.to_line(file, place)
    begin = file.tell()
    while (line := files.skip_line(file)) and not line.startswith(BORDERS):
        begin = file.tell()
    file.seek(begin)


def _read(source: Source, part: Range, problems: Problems) -> Iterator[Document]:
    """Yield documents; long ones come in pieces that end with a sentence."""
    held: list[Token] = []
    size, continues, name = 0, False, ""
    read = _universal if _is_universal(part) else _plain
    for token in read(_lines(source, part, problems), source, problems):
        begins = isinstance(token, str)
        if held and (begins or size > cutting.WINDOW and (token.before[:1] == "\n" or size > 2 * cutting.WINDOW)):
            yield _document(held, continues, name)
            held, size, continues = [], 0, True
        if begins:
            continues, name = False, token
        else:
            held.append(token)
            size += len(token.before) + len(token.text)
    if held:
        yield _document(held, continues, name)


def _document(tokens: list[Token], continues: bool, name: str) -> Document:
    """Join tokens to a document, with an annotation for each label."""
    if not continues:
        tokens[0] = tokens[0]._replace(before="")
    ends = list(itertools.accumulate(len(token.before) + len(token.text) for token in tokens))
    labelled = ((token, end) for token, end in zip(tokens, ends, strict=True) if token.label)
    annotations = (Annotation("labels", 0, end - len(token.text), end, token.label) for token, end in labelled)
    text = "".join(token.before + token.text for token in tokens)
    return Document((Segment("text", text),), tuple(annotations), continues, {"id": name})


def _is_universal(part: Range) -> bool:
    """Return whether the first lines of a range are CoNLL-U."""
    columns = (line.split(b"\t") for line in itertools.islice(files.lines(files.range_blocks(part)), 200) if line)
    return any(len(found) == 10 and NUMBER.match(found[0].decode("utf-8", "replace")) for found in columns)


def _lines(source: Source, part: Range, problems: Problems) -> Iterator[tuple[str | None, str]]:
    """Yield (line, its location): '' between sentences, and (None, document id) where a document begins."""
    for number, line in enumerate(files.lines(files.range_blocks(part)), 1):
        where = f"{part.path}, line {number}" + (f" after byte {part.start}" if part.start else "")
        if line is not None and line.startswith(BORDERS):
            yield None, line.partition(b" id = ")[2].decode("utf-8", "replace").strip()
        elif (text := cutting.readable(line, source, where, problems)) is not None:
            yield text.rstrip("\r") if text.strip() else "", where


def _plain(lines: Iterator[tuple[str | None, str]], source: Source, problems: Problems) -> Iterator[Token | str]:
    """Yield the tokens of lines in the style of CoNLL-2003, and a document's id ("" if it has none) where it begins."""
    token_column, label_column = source.options.token_column or 1, source.options.label_column
    space, before = _space(source), ""
    for line, where in lines:
        if not line:
            before = "\n"
            if line is None:
                yield where
            continue
        columns = line.split("\t") if "\t" in line else line.split()
        if len(columns) < max(token_column, label_column or 1) or not columns[token_column - 1].strip():
            problems.note(MALFORMED, f"{where}: {len(columns)} columns")
            continue
        column = len(columns) if label_column is None else label_column
        label = columns[column - 1] if column and (label_column or column > token_column) else None
        yield Token(columns[token_column - 1], label, before)
        before = space


def _universal(lines: Iterator[tuple[str | None, str]], source: Source, problems: Problems) -> Iterator[Token | str]:
    """Yield the same for CoNLL-U."""
    token_column = source.options.token_column or 2
    label_column = 4 if source.options.label_column is None else source.options.label_column
    space, before = _space(source), ""
    last, span, labels = 0, ("", ""), []  # a range of words: last number, (text, space after), labels so far
    for line, where in lines:
        if not line:
            before, last = "\n", 0
            if line is None:
                yield where
            continue
        if line.startswith("#"):
            before = "\n\n" if line.startswith("# newpar") else before
            continue
        columns = line.split("\t")
        number = NUMBER.match(columns[0])
        if len(columns) < 10 or not number:
            if "." not in columns[0]:
                problems.note(MALFORMED, f"{where}: not a line of CoNLL-U")
            continue
        written = columns[token_column - 1], "" if "SpaceAfter=No" in columns[9].split("|") else space
        if number[2]:
            last, span, labels = int(number[2]), written, []
            continue
        label = columns[label_column - 1] if label_column else None
        labels.append(None if label == "_" else label)
        if int(number[1]) >= last:
            text, after = span if int(number[1]) == last else written
            yield Token(text, "+".join(filter(None, labels)), before)
            before, labels = after, []


def _space(source: Source) -> str:
    return "" if source.language.partition("-")[0] in UNSPACED else " "


_cut = functools.partial(files.cut_at, _to_document)
_annotations = lambda options: {} if options.label_column == 0 else {"labels": Field("uint16", values=())}
FORMAT = Format(Options, files.of_files(_cut, SUFFIXES), _read, annotations=_annotations, values=("id",))
