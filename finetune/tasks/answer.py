"""Extractive question answering, also with unanswerable questions (Rajpurkar et al. 2016; 2018; Devlin et al. 2019,
sections 4.2 and 4.3)."""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tyro.conf import Suppress

from data_pipelines.errors import UserError
from data_pipelines.examples.layout import Feature
from finetune import metrics
from finetune.files import Told, tell, with_errors
from finetune.rows import joined
from finetune.task import FinetuningTask, apply_head, hidden_states
from finetune.windows import Frame, Text, frame_of, framed, texts_of, windows
from models.blocks.heads import SPANS
from models.core.ranges import COUNT, COUNT_OR_NONE, check_ranges
from pretrain import metrics as texts
from pretrain.objectives.objective import Term

NONE = -1  # the token index of a row without target
NOTHING = ("",)  # the right answer to an unanswerable question


class Question(NamedTuple):
    """span: begin and end of the first answer in the passage, in characters; None if it has none.
    label: the right answers, NOTHING if the passage has none, None if the file has no label."""

    where: str
    name: str
    text: str
    passage: str
    span: tuple[int, int] | None
    label: tuple[str, ...] | None


class Window(NamedTuple):
    """A row of a question.

    tokens, types: i32[n].   offsets: i32[n, 2], begin and end of passage tokens in the passage, NONE for other tokens.
    example: index of the question.   place: the token that stands for no answer.   start, end: first and last token of
    the answer, NONE if unknown.   asked: positions of the question's tokens.
    """

    tokens: np.ndarray
    types: np.ndarray
    offsets: np.ndarray
    example: int
    place: int
    start: int
    end: int
    asked: np.ndarray


OF_ROWS = "example", "place", "start", "end"


@dataclasses.dataclass(frozen=True)
class Answer(FinetuningTask):
    """A head scores each token as the start and the end of the answer in a passage.

    Files are in SQuAD's JSON format. Passages longer than a row are split into overlapping windows. A window that does
    not contain the whole answer has the row's `cls` token, or for causal models the last one, as its target.
    """

    asks: ClassVar[tuple[str, ...]] = (SPANS,)

    stride: int = 0  # tokens between the starts of two windows; 0: half of a window's passage tokens
    max_question_tokens: int = 64  # longer questions are cut
    max_answer_tokens: int = 30  # maximum number of tokens in a predicted answer
    threshold: float | None = None  # predict no answer if it outscores the span by more; default: best on --dev
    top: Annotated[int, Suppress] = 1  # number of best spans to return

    def __post_init__(self):
        ranges = {"stride": COUNT_OR_NONE, "max_question_tokens": COUNT, "max_answer_tokens": COUNT}
        check_ranges(self, ranges, "--")

    @property
    def columns(self):
        # Global tokens: the one for no answer and those of the question (Beltagy et al. 2020, section 3.1)
        of_globals = {"globals": Feature((1 + self.max_question_tokens,), np.int32, NONE)} if self.marks_globals else {}
        return dict.fromkeys(("start", "end"), Feature((), np.int32, NONE)) | of_globals

    def chosen(self, figures):
        by_dev = figures.get("threshold", np.inf)  # all questions of --dev have answers
        return dataclasses.replace(self, threshold=by_dev if self.threshold is None else self.threshold)

    def read(self, file, is_labelled=True):
        ((_, content),) = with_errors(file, _content(file))
        told = Told(list)
        found = [_question(*fields, is_labelled, told) for fields in _questions(file, content)]
        if not found:
            raise UserError(f"{file}: has no questions; give another file")
        tell(told)
        return found

    def encode(self, examples, made, labels, length):
        frame, told = frame_of(made), Told(list)
        known = texts_of(made, [text for one in examples for text in (one.text, one.passage)])
        rows = [row for one in enumerate(examples) for row in self._rows(*one, known, frame, length, told)]
        tell(told)
        columns = {name: np.array([getattr(row, name) for row in rows], np.int32) for name in OF_ROWS}
        if self.marks_globals:
            columns["globals"] = np.full((len(rows), 1 + self.max_question_tokens), NONE, np.int32)
            for of_row, row in zip(columns["globals"], rows, strict=True):
                of_row[: 1 + len(row.asked)] = row.place, *row.asked
        return joined(rows, columns, {"offsets": [row.offsets for row in rows]})

    def _rows(
        self, example: int, one: Question, known: Mapping[str, Text], frame: Frame, length: int, told: Told
    ) -> list[Window]:
        """Return the windows of one question."""
        question, passage, found = known[one.text].tokens, known[one.passage], []
        if len(question) > self.max_question_tokens:
            told["questions longer than --max-question-tokens, which are cut"].append(one.where)
            question = question[: self.max_question_tokens]
        asked = len(frame.before) + np.arange(len(question))
        first = len(frame.before) + len(question) + len(frame.between)
        span = None if one.span is None else _tokens_of(one, passage)
        for begin, end in self._windows(one, passage, length - frame.size - len(question), length):
            row = framed(frame, question, passage.tokens[begin:end])
            offsets = np.full((len(row[0]), 2), NONE, np.int32)
            offsets[first : first + end - begin] = passage.offsets[begin:end]
            place = frame.place % len(row[0])
            is_whole = span is not None and begin <= span[0] and span[1] < end
            targets = [at - begin + first for at in span] if is_whole else [place, place]
            known_targets = targets if one.label else [NONE, NONE]
            found.append(Window(*row, offsets, example, place, *known_targets, asked))
        if span is not None and all(row.start == row.place for row in found):
            told["answers that no window contains whole, which count as no answer in the loss"].append(one.where)
        return found

    def _windows(self, one: Question, passage: Text, room: int, length: int) -> list[tuple[int, int]]:
        if room < 2:
            raise UserError(f"--length {length}: leaves no room for the passage of {one.where}; raise it")
        if self.stride > room:
            skips = f"skips tokens of the passage of {one.where}, of which a row of {length} holds {room}"
            raise UserError(f"--stride {self.stride}: {skips}; lower it")
        if not len(passage.tokens):
            raise UserError(f"{one.where}: its context has no tokens; correct it")
        return windows(len(passage.tokens), room, self.stride or room // 2)

    def scores(self, model, params, batch, noise=None):
        hidden = hidden_states(model, params, batch, noise)
        scores = apply_head(model, params, SPANS, hidden, noise)  # [rows, length, 2]
        return {"start": scores[..., 0], "end": scores[..., 1]}

    def weights(self, batch):
        return {"span": (batch["start"] != NONE).sum().astype(jnp.float32)}

    def coefficients(self, step):
        return {"span": 1.0}

    def terms(self, outputs, batch):
        has_target = batch["start"] != NONE
        nats, hits = 0.0, has_target
        for name in ("start", "end"):
            scores = jnp.where(batch["segments"] > 0, outputs[name], jnp.finfo(jnp.float32).min)
            target = jnp.maximum(batch[name], 0)
            nats -= jnp.take_along_axis(jax.nn.log_softmax(scores), target[:, None], axis=1)[:, 0] / 2
            hits &= scores.argmax(1) == target
        return {"span": Term(jnp.sum(jnp.where(has_target, nats, 0.0)), hits.sum().astype(jnp.float32))}

    def answers(self, examples, rows, outputs, labels):
        spans, nothing = [[] for _ in examples], [np.inf] * len(examples)
        for row, (index, place) in enumerate(zip(rows.columns["example"], rows.columns["place"], strict=True)):
            offsets = rows.of_tokens["offsets"][rows.starts[row] : rows.starts[row + 1]]
            start, end = (outputs[name][row][: len(offsets)] for name in ("start", "end"))
            for score, first, last in best_spans(start, end, offsets[:, 0] != NONE, self.max_answer_tokens, self.top):
                spans[index].append((score, examples[index].passage[offsets[first, 0] : offsets[last, 1]].strip()))
            nothing[index] = min(nothing[index], float(start[place] + end[place]))
        found = []
        for one, spans_of_it, none in zip(examples, spans, nothing, strict=True):
            scores: dict[str, float] = {}  # text -> score of its best span, best first
            for score, text in sorted(spans_of_it, key=lambda span: -span[0]):
                scores.setdefault(text, score)
            (text, score), *_ = scores.items()
            told = {
                "id": one.name,
                "text": self._decided(text, none - score),
                "score": score,
                "no_answer": none - score,
            }
            best = [{"text": text, "score": score} for text, score in [*scores.items()][: self.top]]
            found.append(told | ({"best": best} if self.top > 1 else {}))
        return found

    def _decided(self, text: str, above: float) -> str:
        return "" if self.threshold is not None and above > self.threshold else text

    def figures(self, examples, answers, labels):
        given, right, found = [one["text"] for one in answers], [one.label for one in examples], {}
        is_none = np.array([label == NOTHING for label in right])
        if is_none.any() and self.threshold is None:
            above = np.array([one["no_answer"] for one in answers])
            found["threshold"] = best_threshold(above, np.array(_f1(given, right)), is_none)
            given = ["" if score > found["threshold"] else text for score, text in zip(above, given, strict=True)]
        f1 = np.array(_f1(given, right))
        if 0 < is_none.sum() < len(is_none):
            found |= {"answered_f1": float(f1[~is_none].mean()), "unanswered_f1": float(f1[is_none].mean())}
        exact = texts.exact_match(given, right) / 100
        return metrics.with_score({"f1": float(f1.mean()), "exact_match": exact} | found)

    def written(self, answers, suffix):
        if suffix != ".json":
            return super().written(answers, suffix)
        if len(by_name := {one["id"]: one["text"] for one in answers}) < len(answers):
            raise UserError("--predictions: several questions have the same id; give a file that ends in .jsonl")
        return json.dumps(by_name, ensure_ascii=False) + "\n"


def best_spans(
    start: np.ndarray, end: np.ndarray, allowed: np.ndarray, most: int, top: int
) -> list[tuple[float, int, int]]:
    """Return the `top` best spans of at most `most` tokens as (start + end score f32[n], first token, last token)."""
    start, end = (np.where(allowed, scores, -np.inf) for scores in (start, end))
    ends = np.lib.stride_tricks.sliding_window_view(np.append(end, [-np.inf] * (most - 1)), most)  # [n, most]
    sums = (start[:, None] + ends).ravel()
    top = min(top, int((sums > -np.inf).sum()))
    least = sums.max() if top == 1 else np.partition(sums, -top)[-top]
    best = np.flatnonzero(sums >= least)
    best = best[np.argsort(-sums[best], kind="stable")][:top].tolist()
    return [(float(sums[at]), at // most, at // most + at % most) for at in best]


def best_threshold(above: np.ndarray, f1: np.ndarray, is_none: np.ndarray) -> float:
    """Return the threshold with the best F1, as SQuAD 2.0's script finds it: no answer is predicted above it.

    above: f64[n], score of no answer minus the span's.   f1: of the spans.   is_none: whether no answer is right."""
    order = np.argsort(above)
    gained = np.append(0, np.cumsum((f1 - is_none)[order]))  # F1 gained by answering the first n questions
    ascending = np.concatenate([[above[order[0]] - 2], above[order], [above[order[-1]] + 2]])
    between = (ascending[1:] + ascending[:-1]) / 2
    gained = np.where(ascending[1:] > ascending[:-1], gained, -np.inf)  # equal scores get the same decision
    return float(between[gained.argmax()])


def _f1(given: Sequence[str], right: Sequence[Sequence[str]]) -> list[float]:
    return [texts.f1([text], [targets]) / 100 for text, targets in zip(given, right, strict=True)]


def _content(file: Path) -> Iterator[tuple[int, Any]]:
    try:
        yield 1, json.loads(file.read_text("utf-8-sig"))
    except json.JSONDecodeError as error:
        where = f"{file}, line {error.lineno}"
        raise UserError(f"{where}: is not JSON ({error.msg}); give a file in SQuAD's format") from None


def _questions(file: Path, content: Any) -> Iterator[tuple[str, str, Mapping]]:
    """Yield the place, passage and fields of each question."""
    for at, article in _list(str(file), content, "data"):
        for at_passage, paragraph in _list(at, article, "paragraphs"):
            passage = _text(at_passage, paragraph, "context")
            for at_question, fields in _list(at_passage, paragraph, "qas"):
                yield f"{file}, question {_text(at_question, fields, 'id')}", passage, fields


def _list(where: str, holder: Any, name: str) -> Iterator[tuple[str, Any]]:
    found = holder.get(name) if isinstance(holder, dict) else None
    if not isinstance(found, list):
        raise UserError(f"{where}: has no list {name!r}; give data, paragraphs, context, qas as SQuAD's files do")
    between = ", " if where.endswith((".json", ".jsonl")) else "."
    return ((f"{where}{between}{name}[{index}]", one) for index, one in enumerate(found))


def _text(where: str, holder: Any, name: str) -> str:
    found = holder.get(name) if isinstance(holder, dict) else None
    if not isinstance(found, str) or not found.strip():
        raise UserError(f"{where}: has no text {name!r}; add one")
    return found


def _question(where: str, passage: str, fields: Mapping, is_labelled: bool, told: Told) -> Question:
    name, text = fields["id"], _text(where, fields, "question")
    if fields.get("is_impossible"):
        return Question(where, name, text, passage, None, NOTHING)
    given = [(begin, answer) for begin, answer in _answers(where, fields) if answer]
    if not given and is_labelled:
        raise UserError(f"{where}: has no answer; give `answers`, or is_impossible: true")
    spans = []
    for begin, answer in given:
        place = nearest(passage, answer, begin)
        if place is None:
            told["answers not in their passages, skipped as the question has others"].append(where)
            continue
        if place != begin:
            told["answers not at their answer_start, which move to the nearest match"].append(where)
        spans.append((place, place + len(answer)))
    if given and not spans:
        raise UserError(f"{where}: its answer {given[0][1]!r} does not occur in its context; correct it")
    label = tuple(answer for _, answer in given) or None
    return Question(where, name, text, passage, spans[0] if spans else None, label)


def _answers(where: str, fields: Mapping) -> Iterator[tuple[int, str]]:
    answers = fields.get("answers", [])
    if not isinstance(answers, list):
        raise UserError(f"{where}: answers is not a list; give one")
    for one in answers:
        begin, text = (one.get(name) for name in ("answer_start", "text")) if isinstance(one, dict) else (None, None)
        if not isinstance(begin, int) or not isinstance(text, str):
            raise UserError(f"{where}: has an answer without a number answer_start and a text; give both")
        yield begin, text


def nearest(passage: str, answer: str, begin: int) -> int | None:
    """Return the place of an answer in a passage that is nearest to `begin`; None if it does not occur."""
    before, after = passage.rfind(answer, 0, max(begin, 0) + len(answer)), passage.find(answer, max(begin, 0))
    found = [place for place in (before, after) if place >= 0]
    return min(found, key=lambda place: abs(place - begin), default=None)


def _tokens_of(one: Question, passage: Text) -> tuple[int, int]:
    """Return the first and last token of a question's answer."""
    begin, end = one.span
    found = np.flatnonzero((passage.offsets[:, 1] > begin) & (passage.offsets[:, 0] < end))
    if not len(found):
        raise UserError(f"{one.where}: its answer {one.passage[begin:end]!r} has no tokens; correct it")
    return int(found[0]), int(found[-1])
