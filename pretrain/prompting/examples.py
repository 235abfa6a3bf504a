"""Questions with their answers, from JSON lines."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from data_pipelines.errors import UserError

LONGEST_LINE = 4 << 20  # bytes


class Example(NamedTuple):
    """choices: the texts of which one follows the input, the target alone where nothing is to be chosen.
    answer: which of them is right.   where: it stands, as messages name it."""

    where: str
    input: str
    choices: tuple[str, ...]
    answer: int

    @property
    def target(self) -> str:
        return self.choices[self.answer]


def read(path: Path) -> list[Example]:
    """The examples of a file, of which each line is {"input", "target"} or {"input", "choices", "answer"}: the right
    choice or its number from 0 on. Other keys are not read. UserError naming file and line for anything else."""
    return [_example(record, where) for record, where in objects(path)]


def objects(path: Path) -> Iterator[tuple[dict, str]]:
    """(the JSON object, how messages name it) of every line that is not blank.

    UserError where there is none, or one that is no object.
    """
    number, none = 0, True
    try:
        with open(path, "rb") as file:
            while line := file.readline(LONGEST_LINE + 1):
                number += 1
                where = f"--examples {path}, line {number}"
                if len(line) > LONGEST_LINE:
                    raise UserError(f"{where}: is longer than {LONGEST_LINE >> 20} MiB; shorten it")
                if line.strip():
                    none = False
                    yield _object(line, where), where
    except OSError as error:
        raise UserError(f"--examples {path}: cannot be read ({error.strerror}); give a file of JSON lines") from None
    if none:
        raise UserError(f"--examples {path}: holds no example; give one a line")


def _object(line: bytes, where: str) -> dict:
    """The JSON object that a line holds; UserError where it holds none or text that is not Unicode."""
    try:
        record = json.loads(line.decode())
        json.dumps(record, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: is not JSON in UTF-8 ({error}); mend the line") from None
    if not isinstance(record, dict):
        raise UserError(f"{where}: is not an object; write {{...}}")
    return record


def text_of(record: Mapping, key: str, where: str) -> str:
    """The text of a key; UserError where there is none."""
    if key not in record:
        raise UserError(f"{where}: has no {key!r} but {', '.join(map(repr, record))[:200] or 'nothing'}; add it")
    if not isinstance(record[key], str):
        raise UserError(f"{where}: {key!r} is {_short(record[key])}; give text")
    return record[key]


def _example(record: Mapping, where: str) -> Example:
    asked, several = text_of(record, "input", where), "choices" in record
    if several and "target" in record:
        raise UserError(f"{where}: has 'choices' and 'target'; keep one, beside 'choices' give 'answer'")
    key, choices = ("choices", record["choices"]) if several else ("target", [text_of(record, "target", where)])
    if not isinstance(choices, list) or len(choices) < 1 + several or not all(isinstance(one, str) for one in choices):
        raise UserError(f"{where}: 'choices' is {_short(choices)}; give a list of two texts or more")
    for one in choices:
        if not one.strip():
            raise UserError(f"{where}: {key!r} has an empty text, of which no model says how likely it is; fill it")
        if choices.count(one) > 1:
            raise UserError(f"{where}: 'choices' has {_short(one)} twice; make them differ")
    return Example(where, asked, tuple(choices), _answer(record, choices, where) if several else 0)


def _answer(record: Mapping, choices: list[str], where: str) -> int:
    if "answer" not in record:
        raise UserError(f"{where}: has 'choices' and no 'answer'; add it, a choice or its number from 0 on")
    answer = record["answer"]
    if isinstance(answer, str) and answer in choices:
        return choices.index(answer)
    if type(answer) is int and 0 <= answer < len(choices):
        return answer
    raise UserError(f"{where}: 'answer' is {_short(answer)}; give one of the choices or its number from 0 on")


def _short(value) -> str:
    said = json.dumps(value, ensure_ascii=False)
    return said if len(said) <= 80 else f"{said[:80]}..."
