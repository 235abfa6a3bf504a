"""Classification and regression of a text or a pair of texts, from the hidden state of one token of the row (Devlin et
al. 2019, section 4.1; Radford et al. 2018, section 3.3)."""

import contextlib
import dataclasses
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from data_pipelines.command_line import unknown
from data_pipelines.errors import UserError
from data_pipelines.examples.layout import Feature
from finetune import metrics
from finetune.files import Record, as_text, records
from finetune.rows import joined
from finetune.task import apply_head, hidden_states
from finetune.teaching import Taught
from finetune.texts import encoded, in_windows
from models.blocks.heads import CLASSIFIER
from models.blocks.positions import gather_positions
from models.core.noise import site
from models.core.parameters import Noise, Params
from models.core.ranges import COUNT_OR_NONE, NOT_NEGATIVE, SHARE, check_ranges
from pretrain.objectives.blocked_softmax import softmax_sums
from pretrain.objectives.objective import Term

NONE = -1  # the class of a row without label
WINDOWS = "mean", "vote"


class Labelled(NamedTuple):
    """label: None if the file has no label for it."""

    where: str
    texts: tuple[str, ...]
    label: str | float | None


@dataclasses.dataclass(frozen=True)
class Classify(Taught):
    """A head predicts one of several classes, or with `regression` a number.

    With `windows`, a text longer than a row is split into overlapping windows. Each window is trained on the text's
    label, and their predictions are combined.
    With r_drop, the loss is half of equation 4 of Wu et al. 2021 (arXiv:2106.14448); with auxiliary, equation 5 of
    Radford et al. 2018, with both losses as means: over rows, and over all tokens after the first.
    """

    asks: ClassVar[tuple[str, ...]] = (CLASSIFIER,)
    term: ClassVar[str] = "label"

    text: tuple[str, ...] = ("text",)  # column of the text, or two columns of a pair of texts
    label: str = "label"  # column of the label
    regression: bool = False  # whether the label is a number
    # Metric that selects the best checkpoint: accuracy (the default), f1 (with two labels, that of the second by name,
    # else the mean over all) or matthews; for regression pearson (the default), spearman or error
    metric: str = ""
    label_smoothing: float = 0.0  # share of the target spread over all classes (Szegedy et al. 2016, section 7)
    class_weights: tuple[float, ...] = ()  # weight of each class in the loss, in the order of the class names
    r_drop: float = 0.0  # weight of the R-Drop loss between two passes over each row (Wu et al. 2021)
    auxiliary: float = 0.0  # weight of the language-modeling loss; only for models that read from left to right
    windows: str = ""  # how to combine predictions of a long text's windows: mean or vote; by default the text is cut
    stride: int = 0  # tokens between the starts of two windows; 0: half of a window's text tokens

    def __post_init__(self):
        super().__post_init__()
        ranges = {"label_smoothing": SHARE, "r_drop": NOT_NEGATIVE, "auxiliary": NOT_NEGATIVE, "stride": COUNT_OR_NONE}
        check_ranges(self, ranges, "--")
        self._check_windows()
        if self.auxiliary and self.r_drop:
            raise ValueError("--auxiliary: cannot be combined with --r-drop; leave one out")
        if len(self.text) not in (1, 2):
            raise ValueError(f"--text {' '.join(self.text)}: a row has one text or two; give one column or two")
        known = metrics.OF_NUMBERS if self.regression else metrics.OF_CLASSES
        if self.metric and self.metric not in known:
            raise ValueError(unknown("--metric: unknown metric", self.metric, known))
        for name, unset in {"label_smoothing": 0.0, "class_weights": (), "r_drop": 0.0, "temperature": 1.0}.items():
            if self.regression and getattr(self, name) != unset:
                raise ValueError(f"--{name.replace('_', '-')}: --regression has no classes; leave it out")

    def _check_windows(self):
        if self.windows and self.windows not in WINDOWS:
            raise ValueError(unknown("--windows: unknown value", self.windows, WINDOWS))
        if self.windows and len(self.text) > 1:
            raise ValueError(f"--windows {self.windows}: needs rows of one text; give --text one column")
        if self.windows == "vote" and self.regression:
            raise ValueError("--windows vote: --regression has no classes to vote for; give --windows mean")
        if self.stride and not self.windows:
            raise ValueError(f"--stride {self.stride}: needs --windows; give --windows mean or vote, or leave it out")

    @property
    def columns(self):
        label = Feature((), np.float32, np.nan) if self.regression else Feature((), np.int32, NONE)
        of_globals = {"globals": Feature((1,), np.int32, -1)} if self.marks_globals else {}
        return {"place": Feature(()), "labels": label} | of_globals

    def suited(self, model_config):
        task = super().suited(model_config)
        if self.auxiliary and not task.causal:
            raise UserError(f"--auxiliary {self.auxiliary}: is for models that read from left to right; leave it out")
        return task

    def read(self, file, is_labelled=True):
        columns = dict.fromkeys(self.text, "--text") | ({self.label: "--label"} if is_labelled else {})
        return [self._example(record) for record in records(file, columns)]

    def _example(self, record: Record) -> Labelled:
        texts = tuple(as_text(record, name, record.fields[name]) for name in self.text)
        label = record.fields.get(self.label)
        if isinstance(label, str) and not label.strip():
            raise UserError(f"{record.where}: {self.label} is empty; give it a value, or leave the whole column out")
        if self.regression and label is not None:
            label = self._number(record, label)
        elif label is not None:
            label = as_text(record, self.label, label).strip()
        return Labelled(record.where, texts, label)

    def _number(self, record: Record, label: Any) -> float:
        with contextlib.suppress(TypeError, ValueError):
            if np.isfinite(number := float(label)):
                return number
        raise UserError(f"{record.where}: {self.label}={label!r} is not a number; correct it")

    def labels_of(self, examples):
        if self.regression:
            return (self.label,)
        found = sorted({example.label for example in examples})
        if len(found) < 2:
            raise UserError(f"--train: all rows have {self.label}={found[0]!r}; give rows of at least two classes")
        if self.class_weights and len(self.class_weights) != len(found):
            classes = f"{len(found)} classes, {', '.join(found)}"
            raise UserError(f"--class-weights: there are {classes}; give one weight for each")
        return tuple(found)

    def encode(self, examples, made, labels, length):
        texts = made, [one.texts for one in examples], [one.where for one in examples], length, self.at_end
        found = in_windows(*texts, self.stride) if self.windows else [[row] for row in encoded(*texts)]
        number = {label: index for index, label in enumerate(labels)}
        values = []
        for example in examples:
            if self.regression:
                values.append(np.nan if example.label is None else example.label)
            elif example.label is None:
                values.append(NONE)
            elif example.label not in number:
                raise UserError(f"{example.where}: " + unknown("--train has no label", example.label, labels))
            else:
                values.append(number[example.label])
        rows, text = [row for windows in found for row in windows], np.repeat(np.arange(len(found)), [*map(len, found)])
        places = np.array([row.place for row in rows], np.int32)
        columns = {"place": places, "labels": np.array(values, self.columns["labels"].dtype)[text], "text": text}
        # The token that the head reads is global (Beltagy et al. 2020, section 3.1).
        columns |= {"globals": places[:, None]} if self.marks_globals else {}
        return joined(rows, columns)

    def scores(self, model, params, batch, noise=None):
        return self._logits(model, params, hidden_states(model, params, batch, noise, batch["place"][:, None]), noise)

    def _logits(self, model: nn.Module, params: Params, hidden: Array, noise: Noise) -> dict[str, Array]:
        """hidden: [rows, 1, width], at the token of each row that the head reads."""
        logits, (begin, end) = apply_head(model, params, self.asks[0], hidden[:, 0], noise), self.part
        return {"logits": logits[:, begin:end] if end else logits}

    def loss(self, model, params, batch, carry, moment):
        if not moment.train or not (self.r_drop or self.auxiliary):
            return super().loss(model, params, batch, carry, moment)
        if self.auxiliary:
            hidden = hidden_states(model, params, batch, moment.noise)
            factors = model.apply({"params": params}, hidden, method="softmax")
            nats, hits, *_ = softmax_sums(*factors, _next(batch["tokens"]), _next(batch["segments"] > 0)[None] * 1.0)
            outputs = self._logits(model, params, gather_positions(hidden, batch["place"][:, None]), moment.noise)
            terms = self.terms(outputs, batch) | self.soft_terms(batch, moment, outputs)
            return terms | {"text": Term(nats[0], hits[0])}, carry, {}
        twice = [self.scores(model, params, batch, site(moment.noise, time)) for time in range(2)]
        one, other = (self.terms(outputs, batch)["label"] for outputs in twice)
        logs = [jax.nn.log_softmax(outputs["logits"]) for outputs in twice]
        apart = ((jnp.exp(logs[0]) - jnp.exp(logs[1])) * (logs[0] - logs[1])).sum(1)  # KL divergence in both directions
        label = Term((one.sum + other.sum) / 2, (one.hits + other.hits) / 2)
        terms = {"label": label, "r_drop": Term(jnp.sum(self.loss_weights(batch) * apart) / 4)}
        return terms | self.soft_terms(batch, moment, *twice), carry, {}

    def weights(self, batch):
        of_terms = super().weights(batch)
        of_terms |= {"r_drop": of_terms["label"]} if self.r_drop else {}
        return of_terms | ({"text": _next(batch["segments"] > 0).sum()} if self.auxiliary else {})

    def loss_weights(self, batch):
        labels = batch["labels"]
        if self.regression:
            return jnp.isfinite(labels).astype(jnp.float32)
        of_class = jnp.asarray(self.class_weights)[labels] if self.class_weights else 1.0
        return jnp.where(labels >= 0, of_class, 0.0).astype(jnp.float32)

    def coefficients(self, step):
        further = {"r_drop": self.r_drop, "text": self.auxiliary}
        return super().coefficients(step) | {term: factor for term, factor in further.items() if factor}

    def terms(self, outputs, batch):
        logits, labels, weights = outputs["logits"], batch["labels"], self.loss_weights(batch)
        if self.regression:
            return {"label": Term(jnp.sum(weights * jnp.square(logits[:, 0] - jnp.nan_to_num(labels))))}
        log = jax.nn.log_softmax(logits)
        likely = jnp.take_along_axis(log, jnp.maximum(labels, 0)[:, None], axis=1)[:, 0]
        nats = -(1 - self.label_smoothing) * likely - self.label_smoothing * log.mean(1)
        return {"label": Term(jnp.sum(weights * nats), jnp.sum(weights * (logits.argmax(1) == labels)))}

    def answers(self, examples, rows, outputs, labels):
        logits, text = np.stack(outputs["logits"]), rows.columns["text"]
        if self.regression:
            return [{"label": float(value)} for value in _means(logits[:, :1], text)[:, 0]]
        shares = np.exp(logits - logits.max(1, keepdims=True))
        shares /= shares.sum(1, keepdims=True)
        votes = shares >= shares.max(1, keepdims=True)
        means = _means(shares, text)
        scores = _means(votes, text) if self.windows == "vote" else means
        best = np.where(scores >= scores.max(1, keepdims=True), means, -1).argmax(1)  # the likeliest class if votes tie
        return [
            {"label": labels[index], "scores": dict(zip(labels, map(float, of_text), strict=True))}
            for index, of_text in zip(best, scores, strict=True)
        ]

    def figures(self, examples, answers, labels):
        right, given = [one.label for one in examples], [one["label"] for one in answers]
        found = metrics.of_numbers(right, given) if self.regression else metrics.of_classes(right, given, labels)
        return metrics.with_score(found, self.metric)


def _next(array: Array) -> Array:
    """Shift rows [rows, length] left by one token, with zeros at the end."""
    return jnp.pad(array[:, 1:], ((0, 0), (0, 1)))


def _means(values: np.ndarray, text: np.ndarray) -> np.ndarray:
    """Return means f64[texts, n] of window outputs [rows, n].   text: the index of each window's text."""
    sums = np.stack([np.bincount(text, of_class) for of_class in values.T], axis=1)
    return sums / np.bincount(text)[:, None]
