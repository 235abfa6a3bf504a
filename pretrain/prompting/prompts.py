"""Make prompts: the tokens of a question from a JSON Lines file after other questions with their answers (shots)."""

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
    """where: file and line.   choices: possible targets of the input, or only one.   answer: the right one's index."""

    where: str
    input: str
    choices: tuple[str, ...]
    answer: int

    @property
    def target(self) -> str:
        return self.choices[self.answer]


def read(path: Path) -> list[Example]:
    """Read examples from a file whose lines are {"input", "target"} or {"input", "choices", "answer"}, the answer being
    the right choice or its index from 0. Other keys are ignored. UserError naming file and line otherwise."""
    return [_example(record, where) for record, where in objects(path)]


def objects(path: Path) -> Iterator[tuple[dict, str]]:
    """Yield (JSON object, its file and line) of each line but blank ones; UserError if one is none, or without any."""
    number, empty = 0, True
    try:
        with open(path, "rb") as file:
            while line := file.readline(LONGEST_LINE + 1):
                number += 1
                where = f"--examples {path}, line {number}"
                if len(line) > LONGEST_LINE:
                    raise UserError(f"{where}: is longer than {LONGEST_LINE >> 20} MiB; shorten it")
                if line.strip():
                    empty = False
                    yield _object(line, where), where
    except OSError as error:
        raise UserError(f"--examples {path}: cannot be read ({error.strerror}); give a JSON Lines file") from None
    if empty:
        raise UserError(f"--examples {path}: has no examples; write one per line")


def _object(line: bytes, where: str) -> dict:
    """Parse a line as a JSON object; UserError if it is none or not Unicode."""
    try:
        record = json.loads(line.decode())
        json.dumps(record, ensure_ascii=False).encode()  # fails for half a surrogate pair
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: is not JSON in UTF-8 ({error}); correct the line") from None
    if not isinstance(record, dict):
        raise UserError(f"{where}: is not a JSON object; write {{...}}")
    return record


def text_of(record: Mapping, key: str, where: str) -> str:
    """Return the text under a key; UserError if there is none."""
    if key not in record:
        raise UserError(f"{where}: {key!r} is missing (keys: {', '.join(map(repr, record))[:200] or 'none'}); add it")
    if not isinstance(record[key], str):
        raise UserError(f"{where}: {key!r} is {_short(record[key])}; give a string")
    return record[key]


def _example(record: Mapping, where: str) -> Example:
    question, several = text_of(record, "input", where), "choices" in record
    if several and "target" in record:
        raise UserError(f"{where}: has both 'choices' and 'target'; keep one, and give 'answer' with 'choices'")
    key, choices = ("choices", record["choices"]) if several else ("target", [text_of(record, "target", where)])
    if not isinstance(choices, list) or len(choices) < 1 + several or not all(isinstance(c, str) for c in choices):
        raise UserError(f"{where}: 'choices' is {_short(choices)}; give a list of two strings or more")
    for choice in choices:
        if not choice.strip():
            raise UserError(f"{where}: {key!r} has an empty text, which has no likelihood; fill it in")
        if choices.count(choice) > 1:
            raise UserError(f"{where}: 'choices' has {_short(choice)} twice; make them differ")
    return Example(where, question, tuple(choices), _answer(record, choices, where) if several else 0)


def _answer(record: Mapping, choices: list[str], where: str) -> int:
    if "answer" not in record:
        raise UserError(f"{where}: has 'choices' but no 'answer'; add the right choice or its index from 0")
    answer = record["answer"]
    if isinstance(answer, str) and answer in choices:
        return choices.index(answer)
    if type(answer) is int and 0 <= answer < len(choices):
        return answer
    raise UserError(f"{where}: 'answer' is {_short(answer)}; give one of the choices or its index from 0")


def _short(value) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:80]}..."


@dataclasses.dataclass(frozen=True)
class Template:
    """Format of a prompt: INPUT separator TARGET for each example, `between` between them; \\n and \\t are escapes."""

    separator: str = " "
    """Text between an input and its target, unless the input is empty."""
    between: str = "\\n\\n"
    """Text between examples."""

    def prompt(self, shots: Sequence[Example], example: Example) -> str:
        """Format the text before the target of an example."""
        answered = [f"{self._question(shot)}{shot.target}{unescaped(self.between)}" for shot in shots]
        return "".join([*answered, self._question(example)])

    def _question(self, example: Example) -> str:
        return example.input and example.input + unescaped(self.separator)


def unescaped(written: str) -> str:
    """Replace the escapes \\n and \\t by the characters."""
    return written.replace("\\n", "\n").replace("\\t", "\t")


class Tokens(NamedTuple):
    """A text.   tokens: i32[tokens].   first: index of the target's first token; len(tokens) without a target."""

    tokens: np.ndarray
    first: int


class Prompt(NamedTuple):
    """A prompt.   left_out: number of shots that did not fit.   texts: the prompt, followed by each choice if any."""

    example: Example
    left_out: int
    texts: tuple[Tokens, ...]


class Prompter:
    """Makes the prompts of examples, of which a model reads at most `room` tokens.

    Prompt and target are encoded together, as in training on whole texts; special tokens spelled out in a text are
    plain text. The target's tokens are those that do not end within the prompt; with byte-level BPE, the first one
    includes the prompt's last blank. If a prompt has no token, the end-of-document token precedes the target.

    delimiter: token between input and target in rows that a model is trained on; then there are no shots.
    """

    def __init__(
        self, examples: Sequence[Example], made: Made, template: Template, room: int, delimiter: int | None = None
    ):
        self.tokenizer, self.encoder, self.delimiter = made.tokenizer, Encoder(made.tokenizer), delimiter
        self.end = text_end(made.special)
        self.examples, self.template, self.room = examples, template, room

    def __call__(self, shots: int, seed: int, with_target: bool) -> list[Prompt]:
        """Make each example's prompt, with shots drawn by the seed, without the first ones if it does not fit.
        with_target: whether choices follow. UserError for too few examples, or one that does not fit without shots."""
        if shots and self.delimiter is not None:
            raise UserError(f"--shots {shots}: the run was trained on rows of one input and its target; give --shots 0")
        if shots >= len(self.examples):
            raise UserError(f"--shots {shots}: besides the question there are {len(self.examples) - 1}; give fewer")
        if shots and not self.keeps(unescaped(self.template.between)):
            raise UserError(
                f"--between '{self.template.between}': the run's tokenizer drops it, nothing would separate examples; "
                "give another, as in --between ' . '"
            )
        used = [drawn(len(self.examples), index, shots, seed) for index in range(len(self.examples))]
        made, waiting = {}, range(len(self.examples))
        while waiting:
            texts = self._texts([(self.examples[index], used[index]) for index in waiting], with_target)
            made |= dict(zip(waiting, texts, strict=True))
            # The model does not read a target's last token.
            needs = {index: max(len(text.tokens) for text in made[index]) - with_target for index in waiting}
            waiting = [index for index in waiting if needs[index] > self.room]
            for index in waiting:
                if not used[index]:
                    reason = f"takes {needs[index]} tokens without any shot, but only {self.room} fit; shorten it"
                    raise UserError(f"{self.examples[index].where}: {reason}")
                used[index] = used[index][1:]
        return [Prompt(example, shots - len(used[index]), made[index]) for index, example in enumerate(self.examples)]

    def keeps(self, text: str) -> bool:
        """Return whether the tokenizer preserves a text; some drop white space, for example."""
        around = [before + text + after for before in ("", "a") for after in ("", "a")]
        tokens = [one.tolist() for one in self.encoder.tokens(around)]
        return any(text in decoded for decoded in self.tokenizer.decode_batch(tokens))

    def _texts(self, chosen: list[tuple[Example, list[int]]], with_target: bool) -> list[tuple[Tokens, ...]]:
        """Encode the texts of each (example, its shots)."""
        texts = []
        for example, used in chosen:
            if self.delimiter is not None:
                before = example.input
            else:
                before = self.template.prompt([self.examples[shot] for shot in used], example)
                before = before if with_target else before.rstrip(" ")  # the blank belongs to the next word
            texts += [(example, before, target) for target in (example.choices if with_target else ("",))]
        befores, targets = ([text[part] for text in texts] for part in (1, 2))
        if self.delimiter is not None:
            inputs = [np.append(tokens, self.delimiter) for tokens in self.encoder.tokens(befores)]
            tokens = list(map(np.append, inputs, self.encoder.tokens(targets)))
            firsts = list(map(len, inputs))
        else:
            places = [np.array([len(before)]) for before in befores]
            encoded = self.encoder.encode(list(map(str.__add__, befores, targets)), places)
            tokens, firsts = np.split(encoded.tokens, np.cumsum(encoded.lengths)[:-1]), encoded.ended.tolist()
        made = map(self._with_context, tokens, firsts, (example for example, *_ in texts), targets)
        return [tuple(itertools.islice(made, len(example.choices) if with_target else 1)) for example, _ in chosen]

    def _with_context(self, tokens: np.ndarray, first: int, example: Example, choice: str) -> Tokens:
        """Return a text with at least one token before its target."""
        if choice and first == len(tokens):
            raise UserError(f"{example.where}: the run's tokenizer has no tokens for {choice!r}; change it")
        if first == 0:
            if self.end is None:
                raise UserError(f"{example.where}: its prompt has no tokens to predict the target from; fill its input")
            tokens, first = np.append(self.end, tokens), 1
        return Tokens(tokens.astype(np.int32), first)


def drawn(examples: int, index: int, shots: int, seed: int) -> list[int]:
    """Draw distinct shots for the example at `index` from the others. Fewer shots are the last ones of more."""
    rng, shots_drawn = np.random.default_rng([seed, index]), {}
    while len(shots_drawn) < shots:
        other = int(rng.integers(examples - 1))
        shots_drawn[other + (other >= index)] = None
    return [*shots_drawn][::-1]
