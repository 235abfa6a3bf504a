"""Multiple choice and ranking: the model reads each choice with its question, and a softmax spans all choices (Radford
et al. 2018, section 3.3; Devlin et al. 2019, section 4.4; for lists Cao et al. 2007, ICML, section 4)."""

import dataclasses
import string
from typing import Annotated, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from tyro.conf import Suppress

from data_pipelines.errors import UserError
from data_pipelines.examples.layout import Feature
from finetune import metrics
from finetune.files import Record, as_text, records
from finetune.rows import joined
from finetune.task import FinetuningTask, apply_head, hidden_states
from finetune.texts import encoded
from models.blocks.heads import CHOICE
from models.core.noise import fold
from models.core.parameters import Noise
from pretrain.objectives.objective import Term

INPUTS = "tokens", "types", "segments"
FEWEST = 2  # smallest number of choices of an example


class Choices(NamedTuple):
    """texts: the question and a choice, for each choice.   label: indices of the right choices, None if the file has no
    label."""

    where: str
    texts: tuple[tuple[str, str], ...]
    label: tuple[int, ...] | None


@dataclasses.dataclass(frozen=True)
class Choose(FinetuningTask):
    """A head scores each choice of an example. With `ranking`, an example may have several right choices."""

    asks: ClassVar[tuple[str, ...]] = (CHOICE,)

    text: tuple[str, ...] = ("text",)  # column of the question; texts of further columns are put before each choice
    choices: tuple[str, ...] = ("choices",)  # columns of the choices, or one column with a list of them
    label: str = "label"  # column of the right choice: its number from 0, its letter, or a list of these
    ranking: bool = False  # allow several right choices; the score is the reciprocal rank of the first
    texts: Annotated[int, Suppress] = FEWEST  # largest number of choices of an example

    @property
    def columns(self):
        return {"places": Feature((self.texts,)), "right": Feature((self.texts,), np.float32)}

    @property
    def of_tokens(self):
        return {f"choice_{name}": Feature((self.texts,)) for name in INPUTS}

    def fitted(self, examples):
        return dataclasses.replace(self, texts=max(len(example.texts) for example in examples))

    def read(self, file, is_labelled=True):
        columns = dict.fromkeys(self.text, "--text") | dict.fromkeys(self.choices, "--choices")
        columns |= {self.label: "--label"} if is_labelled else {}
        return [self._example(record) for record in records(file, columns)]

    def _example(self, record: Record) -> Choices:
        asked, *before = (as_text(record, name, record.fields[name]) for name in self.text)
        choices = [record.fields[name] for name in self.choices]
        choices = choices[0] if len(self.choices) == 1 and isinstance(choices[0], list) else choices
        if len(choices) < FEWEST:
            cure = f"give {FEWEST} or more, in the columns of --choices or as one list"
            raise UserError(f"{record.where}: has {len(choices)} choice; {cure}")
        texts = tuple((asked, " ".join([*before, as_text(record, self.choices[0], choice)])) for choice in choices)
        return Choices(record.where, texts, self._right(record, len(choices)))

    def _right(self, record: Record, number: int) -> tuple[int, ...] | None:
        given = record.fields.get(self.label)
        if given is None:
            return None
        several = given if isinstance(given, list) else [given]
        found = tuple(sorted({_number(one) for one in several}))
        if not found or (len(found) > 1 and not self.ranking):
            cure = "give one, or add --ranking" if found else "give one"
            raise UserError(f"{record.where}: {self.label}={given!r} names {len(found)} right choices; {cure}")
        if not 0 <= found[0] <= found[-1] < number:
            choices = f"the choices, 0 or A to {number - 1} or {string.ascii_uppercase[(number - 1) % 26]}"
            raise UserError(f"{record.where}: {self.label}={given!r} is not one of {choices}; correct it")
        return found

    def encode(self, examples, made, labels, length):
        texts = [pair for one in examples for pair in one.texts]
        wheres = [one.where for one in examples for _ in one.texts]
        rows = iter(encoded(made, texts, wheres, length, self.at_end))
        longest, of_tokens = [], {f"choice_{name}": [] for name in INPUTS}
        columns = {name: np.zeros((len(examples), self.texts), one.dtype) for name, one in self.columns.items()}
        for index, one in enumerate(examples):
            of_example = [next(rows) for _ in one.texts]
            longest.append(max(of_example, key=lambda row: len(row.tokens)))
            arrays = np.zeros((len(INPUTS), len(longest[-1].tokens), self.texts), np.int32)
            for choice, row in enumerate(of_example):
                arrays[:, : len(row.tokens), choice] = row.tokens, row.types, np.ones(len(row.tokens), np.int32)
                columns["places"][index, choice] = row.place
            for arrays_of_all, array in zip(of_tokens.values(), arrays, strict=True):
                arrays_of_all.append(array)
            if one.label:
                columns["right"][index, list(one.label)] = 1 / len(one.label)
        return joined(longest, columns, of_tokens)

    def scores(self, model, params, batch, noise=None):
        inputs = {name: _apart(batch[f"choice_{name}"]) for name in INPUTS}  # [rows * choices, length]
        noise, places = _of_choices(noise, self.texts), batch["places"].reshape(-1, 1)
        inputs |= {"globals": places} if self.marks_globals else {}  # the token that the head reads
        hidden = hidden_states(model, params, inputs, noise, places)[:, 0]
        scores = apply_head(model, params, CHOICE, hidden, noise).reshape(-1, self.texts)
        is_choice = batch["choice_segments"].any(1)
        return {"scores": jnp.where(is_choice, scores, jnp.finfo(jnp.float32).min)}

    def weights(self, batch):
        return {"choice": batch["right"].any(1).sum().astype(jnp.float32)}

    def coefficients(self, step):
        return {"choice": 1.0}

    def terms(self, outputs, batch):
        scores, right = outputs["scores"], batch["right"]
        log = jnp.where(right > 0, jax.nn.log_softmax(scores), 0.0)
        hits = jnp.take_along_axis(right, scores.argmax(1)[:, None], axis=1) > 0
        return {"choice": Term(-jnp.sum(right * log), hits.sum().astype(jnp.float32))}

    def answers(self, examples, rows, outputs, labels):
        found = []
        for one, scores in zip(examples, outputs["scores"], strict=True):
            scores = scores[: len(one.texts)]
            order = np.argsort(-scores, kind="stable").tolist()
            answer = {"order": order} if self.ranking else {"choice": order[0]}
            found.append(answer | {"scores": scores.tolist()})
        return found

    def figures(self, examples, answers, labels):
        if not self.ranking:
            right = [one["choice"] in example.label for example, one in zip(examples, answers, strict=True)]
            return metrics.with_score({"accuracy": float(np.mean(right))})
        first = [
            next(place for place, choice in enumerate(one["order"], 1) if choice in example.label)
            for example, one in zip(examples, answers, strict=True)
        ]
        reciprocal, is_first = 1 / np.array(first), np.array(first) == 1
        return metrics.with_score({"reciprocal_rank": float(reciprocal.mean()), "first": float(is_first.mean())})


def _number(label: Any) -> int:
    """Return the index of a choice from its number or letter; -1 if it is neither."""
    text = str(label).strip()
    if len(text) == 1 and text.upper() in string.ascii_uppercase:
        return string.ascii_uppercase.index(text.upper())
    return int(text) if text.isdecimal() else -1


def _apart(array: Array) -> Array:
    """Reshape [rows, length, choices] to [rows * choices, length]."""
    return array.swapaxes(1, 2).reshape(-1, array.shape[1])


def _of_choices(noise: Noise, choices: int) -> Noise:
    """Return noise for each choice: u32[rows, 2] -> u32[rows * choices, 2]."""
    return None if noise is None else fold(noise[:, None], jnp.arange(choices)).reshape(-1, 2)
