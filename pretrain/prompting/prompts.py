"""Prompts: a question of a file of JSON lines after others that are answered, as the tokens that a model reads."""

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_pipelines.errors import UserError
from data_pipelines.text.encoding import Encoder
from data_pipelines.tokenizers.made import Made, text_end

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


@dataclasses.dataclass(frozen=True)
class Template:
    """How examples become text: INPUT separator TARGET each, `between` between them; \\n and \\t are written so."""

    separator: str = " "
    """Between an input and its target, unless the input is empty."""
    between: str = "\\n\\n"
    """Between examples."""

    def prompt(self, shots: Sequence[Example], asked: Example) -> str:
        """The text before the target of `asked`."""
        answered = [f"{self._asked(shot)}{shot.target}{unescaped(self.between)}" for shot in shots]
        return "".join([*answered, self._asked(asked)])

    def _asked(self, example: Example) -> str:
        return example.input and example.input + unescaped(self.separator)


def unescaped(written: str) -> str:
    """\\n and \\t as what they mean."""
    return written.replace("\\n", "\n").replace("\\t", "\t")


class Tokens(NamedTuple):
    """A text.   tokens: i32[tokens].   first: the first of its target's; all for a prompt alone."""

    tokens: np.ndarray
    first: int


class Prompt(NamedTuple):
    """What a model is asked of one example.   left_out: how many shots found no room.   texts: for each choice the
    prompt with it, or the prompt alone."""

    example: Example
    left_out: int
    texts: tuple[Tokens, ...]


class Prompter:
    """Makes the prompts of some examples with the tokenizer in a folder, of at most `room` tokens that a model reads.

    A text is encoded whole, prompt and target together, as a model that learned from whole texts expects it; special
    tokens that it spells are plain text, as in a corpus. The target's tokens are those that do not end within the
    prompt: of byte-level BPE the first one has the prompt's last blank. Only where a prompt has no token of its own,
    the token that ends documents stands before the target.

    delimiter: the token that stands between, where a model's rows are an input and its target; then these are encoded
    apart, as there, and no example stands before another.
    """

    def __init__(
        self, examples: Sequence[Example], made: Made, template: Template, room: int, delimiter: int | None = None
    ):
        self.tokenizer, self.encoder, self.delimiter = made.tokenizer, Encoder(made.tokenizer), delimiter
        self.end = text_end(made.special)
        self.examples, self.template, self.room = examples, template, room

    def __call__(self, shots: int, seed: int, with_target: bool) -> list[Prompt]:
        """The prompt of each example after so many others, drawn by the seed. Of those that do not fit, the first are
        left out, alike for all choices.   with_target: whether choices follow.

        UserError where examples are too few, or where one does not fit alone.
        """
        if shots and self.delimiter is not None:
            raise UserError(f"--shots {shots}: the run's rows are one input and its target each; give --shots 0")
        if shots >= len(self.examples):
            raise UserError(
                f"--shots {shots}: beside the one asked --examples has {len(self.examples) - 1}; "
                "give fewer shots or more examples"
            )
        if shots and not self.keeps(unescaped(self.template.between)):
            raise UserError(
                f"--between '{self.template.between}': the run's tokenizer loses it, examples would not be told apart; "
                "give another, as in --between ' . '"
            )
        used = [drawn(len(self.examples), index, shots, seed) for index in range(len(self.examples))]
        made, waiting = {}, range(len(self.examples))
        while waiting:
            texts = self._texts([(self.examples[index], used[index]) for index in waiting], with_target)
            made |= dict(zip(waiting, texts, strict=True))
            # A target's last token is read by nothing.
            needs = {index: max(len(text.tokens) for text in made[index]) - with_target for index in waiting}
            waiting = [index for index in waiting if needs[index] > self.room]
            for index in waiting:
                if not used[index]:
                    needed = f"takes {needs[index]} tokens without any shot, there is room for {self.room}; shorten it"
                    raise UserError(f"{self.examples[index].where}: {needed}")
                used[index] = used[index][1:]
        return [Prompt(example, shots - len(used[index]), made[index]) for index, example in enumerate(self.examples)]

    def keeps(self, text: str) -> bool:
        """Whether the tokenizer gives a text back that it has cut; white space, say, it may not."""
        around = [before + text + after for before in ("", "a") for after in ("", "a")]
        tokens = [one.tolist() for one in self.encoder.tokens(around)]
        return any(text in decoded for decoded in self.tokenizer.decode_batch(tokens))

    def _texts(self, asked: list[tuple[Example, list[int]]], with_target: bool) -> list[tuple[Tokens, ...]]:
        texts = []
        for example, used in asked:
            if self.delimiter is not None:
                before = example.input
            else:
                before = self.template.prompt([self.examples[shot] for shot in used], example)
                before = before if with_target else before.rstrip(" ")  # it belongs to the word that is asked for
            texts += [(example, before, target) for target in (example.choices if with_target else ("",))]
        befores, targets = ([text[part] for text in texts] for part in (1, 2))
        if self.delimiter is not None:
            begun = [np.append(tokens, self.delimiter) for tokens in self.encoder.tokens(befores)]
            tokens = list(map(np.append, begun, self.encoder.tokens(targets)))
            firsts = list(map(len, begun))
        else:
            places = [np.array([len(before)]) for before in befores]
            encoded = self.encoder.encode(list(map(str.__add__, befores, targets)), places)
            tokens, firsts = np.split(encoded.tokens, np.cumsum(encoded.lengths)[:-1]), encoded.ended.tolist()
        made = map(self._begun, tokens, firsts, (example for example, *_ in texts), targets)
        return [tuple(itertools.islice(made, len(one.choices) if with_target else 1)) for one, _ in asked]

    def _begun(self, tokens: np.ndarray, first: int, example: Example, choice: str) -> Tokens:
        """With a token before the target."""
        if choice and first == len(tokens):
            raise UserError(f"{example.where}: its {choice!r} has no token of the run's tokenizer; change it")
        if first == 0:
            if self.end is None:
                raise UserError(f"{example.where}: its prompt has no token and nothing else can begin a text")
            tokens, first = np.append(self.end, tokens), 1
        return Tokens(tokens.astype(np.int32), first)


def drawn(examples: int, index: int, shots: int, seed: int) -> list[int]:
    """Which of so many examples stand before the one with this index: never itself, none twice. Fewer shots are the
    last of more, so that figures differ by what is added."""
    rng, found = np.random.default_rng([seed, index]), {}
    while len(found) < shots:
        other = int(rng.integers(examples - 1))
        found[other + (other >= index)] = None
    return [*found][::-1]
