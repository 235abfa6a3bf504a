"""Reads tagged sentences from files with one word a line, CoNLL-U and records with lists; splits words into pieces."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Encoding

from data_pipelines.errors import UserError
from data_pipelines.formats.conll import NUMBER, Options
from data_pipelines.tokenizers.made import Made
from finetune.files import FORMS, as_text, records, text_lines, with_errors

NONE = -1  # stands for no word or no tag


class Sentence(NamedTuple):
    """label: the tags, None if the file has none.   lines: line numbers of the words."""

    file: Path
    lines: tuple[int, ...]
    words: tuple[str, ...]
    label: tuple[str, ...] | None

    @property
    def where(self) -> str:
        return self.where_of(0)

    def where_of(self, word: int) -> str:
        """Return the file and line of a word, the beginning of an error message."""
        return f"{self.file}, line {self.lines[word]}"


OF_SENTENCES = "text_a\tlabel"  # header of a .tsv with one sentence a line (tasks of ERNIE, Sun et al. 2019)
BETWEEN = "\2"  # separates words, and tags, in such a file


class Word(NamedTuple):
    """tag: None if the line has none."""

    line: int
    text: str
    tag: str | None


def sentences(file: Path, options: Options, columns: tuple[str, str], is_labelled: bool = True) -> list[Sentence]:
    """Return the sentences of a file: .jsonl or .parquet with columns of words and of tags, .tsv with one sentence a
    line, or else one word a line with blank lines between sentences. There the first column is the word and the last
    its tag unless options say otherwise. For CoNLL-U, words are the syntactic words, each of which has a tag.

    is_labelled: if false, whole sentences may lack tags.   UserError with file and line if malformed.
    """
    if FORMS.get(file.suffix) in ("json", "parquet"):
        found = _of_records(file, columns, is_labelled)
    else:
        found = [_sentence(file, words) for words in with_errors(file, _of_lines(file, options))]
    if not found:
        raise UserError(f"{file}: has no sentences; give another file")
    for sentence in found:
        if is_labelled and sentence.label is None:
            raise UserError(f"{sentence.where}: {sentence.words[0]!r} has no tag; give each word a tag")
    return found


def _sentence(file: Path, words: Sequence[Word]) -> Sentence:
    lines, texts, tags = zip(*words, strict=True)
    lacking = [word for word in words if word.tag is None]
    if lacking and len(lacking) < len(words):
        raise UserError(f"{file}, line {lacking[0].line}: {lacking[0].text!r} has no tag; give each word a tag")
    return Sentence(file, lines, texts, None if lacking else tuple(tag.strip() for tag in tags))


def _of_records(file: Path, columns: tuple[str, str], is_labelled: bool) -> list[Sentence]:
    found = []
    for record in records(file, dict([*zip(columns, ("--words", "--tags"), strict=True)][: 1 + is_labelled])):
        where, lists = record.where, []
        for name in columns:
            value = record.fields.get(name)
            if not isinstance(value, list | None) or value == []:
                raise UserError(f"{where}: {name}={value!r} is not a non-empty list; give one")
            lists.append(None if value is None else tuple(as_text(record, name, text) for text in value))
        words, tags = lists
        _check_numbers(where, words, words if tags is None else tags)
        lines = (int(where.rpartition(" ")[2]),) * len(words)
        found.append(Sentence(file, lines, words, tags and tuple(tag.strip() for tag in tags)))
    return found


def _check_numbers(where: str, words: Sequence, tags: Sequence) -> None:
    if len(words) != len(tags):
        raise UserError(f"{where}: has {len(words)} words and {len(tags)} tags; give each word a tag")


def _of_lines(file: Path, options: Options) -> Iterator[list[Word]]:
    """Yield the words of each sentence."""
    lines = [*text_lines(file)]
    if lines[:1] == [OF_SENTENCES]:
        yield from (_of_line(f"{file}, line {at}", at, line) for at, line in enumerate(lines[1:], 2) if line)
        return
    universal = any(len(cells := _cut(line)) == 10 and NUMBER.match(cells[0]) for line in lines[:200])
    words, expected = [], 0
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("-DOCSTART-"):
            if words:
                yield words
            words = []
        elif not (universal and line.startswith("#")):
            columns, where = _cut(line), f"{file}, line {number}"
            expected = expected or len(columns)
            if len(columns) != expected:
                raise UserError(f"{where}: has {len(columns)} columns, but earlier lines have {expected}; correct it")
            if not universal or columns[0].isdecimal():  # else a multiword token or an empty node
                words.append(_word(where, number, columns, options, universal))
    if words:
        yield words


def _word(where: str, number: int, columns: Sequence[str], options: Options, universal: bool) -> Word:
    token, tag = (2, 4) if universal else (1, len(columns))
    token, tag = options.token_column or token, tag if options.label_column is None else options.label_column
    if max(token, tag) > len(columns) or not columns[token - 1]:
        raise UserError(f"{where}: needs a word in column {token} and its tag in column {tag}; correct it")
    has_tag = tag and (options.label_column or tag > token) and not (universal and columns[tag - 1] == "_")
    return Word(number, columns[token - 1], columns[tag - 1] if has_tag else None)


def _of_line(where: str, number: int, line: str) -> list[Word]:
    words, *tags = (column.split(BETWEEN) for column in line.split("\t"))
    if len(tags) > 1:
        raise UserError(f"{where}: has {1 + len(tags)} columns; give two, words and tags")
    tags = tags[0] if tags else [None] * len(words)
    _check_numbers(where, words, tags)
    return [Word(number, word, tag) for word, tag in zip(words, tags, strict=True)]


def _cut(line: str) -> list[str]:
    return line.split("\t") if "\t" in line else line.split()


class Pieces(NamedTuple):
    """A row of a sentence, i32[length] each.   words: index of the word at its first piece, NONE at other tokens.
    owners: index of the word at all of its pieces."""

    tokens: np.ndarray
    types: np.ndarray
    words: np.ndarray
    owners: np.ndarray


def rows_of(made: Made, words: Sequence[Sequence[str]], length: int) -> list[list[Pieces]]:
    """Encode each sentence as rows of at most `length` tokens, with the tokenizer's special tokens around them.
    Words are joined by spaces. A longer sentence is split greedily between words into rows. A word longer than a row
    keeps its first pieces. Words without pieces are in no row."""
    made.tokenizer.no_truncation()
    encodings = made.tokenizer.encode_batch([" ".join(sentence) for sentence in words])
    return [_rows(encoding, sentence, length) for encoding, sentence in zip(encodings, words, strict=True)]


def _rows(encoding: Encoding, words: Sequence[str], length: int) -> list[Pieces]:
    text = np.flatnonzero(np.equal(encoding.special_tokens_mask, 0))
    if not len(text):
        return []
    of_character = np.concatenate([[*[number] * len(word), NONE] for number, word in enumerate(words)])
    begins, ends = np.array(encoding.offsets).T
    owners = np.where(ends > begins, of_character[ends - 1], NONE)
    before, after = np.arange(text[0]), np.arange(text[-1] + 1, len(owners))
    owners[before], owners[after] = NONE, NONE
    found, first = np.unique(owners, return_index=True)
    firsts = np.full_like(owners, NONE)
    firsts[first] = found
    room = length - len(before) - len(after)
    if room < 1:
        raise UserError(f"--length {length}: leaves no room for words beside special tokens; raise it")
    of_token = np.array(encoding.ids), np.array(encoding.type_ids), firsts, owners
    rows = []
    for begin, end in _parts(first[found != NONE], text[0], text[-1] + 1, room):
        row = np.concatenate([before, np.arange(begin, end), after])
        rows.append(Pieces(*(array[row] for array in of_token)))
    return rows


def _parts(first: np.ndarray, begin: int, end: int, room: int) -> Iterator[tuple[int, int]]:
    """Yield begin and end of parts of at most `room` tokens that start at the first pieces of words."""
    while end - begin > room:
        fitting, later = first[(first > begin) & (first <= begin + room)], first[first > begin + room]
        if len(fitting):
            yield begin, fitting[-1]
            begin = fitting[-1]
        else:  # drop the rest of a word longer than the room
            yield begin, begin + room
            begin = later[0] if len(later) else end
    if begin < end:
        yield begin, end
