"""Families and objectives that only the tests know, made to press on every seam: registered, never built in."""

import dataclasses
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from data_pipelines.examples.layout import Feature, StreamLayout, spread
from models.core.family import Family, Input
from models.core.parameters import Parameter, parameter
from models.families.registry import FAMILIES
from pretrain.objectives.objective import Objective, Term, inputs_of
from pretrain.optimizers import Optimizer
from pretrain.recipe import OBJECTIVES, Phase, Recipe
from pretrain.schedules import Schedule
from tests.data_pipelines.two_lengths import TwoWindows


@dataclasses.dataclass(frozen=True)
class BagConfig:
    """A bag of words: no layers, no positions, no Hugging Face form."""

    vocab_size: int = 195
    width: int = 8


class Bag(nn.Module):
    """Logits f32[rows, vocab] from the mean embedding."""

    config: BagConfig
    program: object

    @nn.compact
    def __call__(self, inputs):
        normal = nn.initializers.normal(0.5)
        words = self.param("words", normal, (self.config.vocab_size, self.config.width))
        out = self.param("out", normal, (self.config.width, self.config.vocab_size))
        bias = self.param("bias", nn.initializers.zeros, (self.config.vocab_size,))
        return words[inputs["tokens"]].mean(axis=1) @ out + bias


def _parameters(config):
    return [
        Parameter("words", ("vocab", "width"), {}),
        Parameter("out", ("width", "vocab"), {}),
        Parameter("bias", ("vocab",), {}),
    ]


FAMILY = Family(
    config=BagConfig,
    sizes={},
    inputs={"tokens": Input(("length",))},
    trunk=Bag,
    table=_parameters,
    hf={},
)


class Windows(StreamLayout):
    """Rows of `length` tokens from the corpus: row b of step t + 1 goes on where row b of step t ended."""

    @property
    def spec(self):
        return {"tokens": Feature((self.length,))}

    def number(self, total):
        return total // self.length

    def fixed(self, total, limit, batch_size):
        return spread(self.number(total), limit, batch_size)

    def plan(self, pieces, split, key, epoch, first=0):
        return partial(pieces[0].part.read, split, "tokens")

    def build(self, plan, example, keys):
        return {"tokens": plan(example * self.length, self.length).astype(np.int32)}


@dataclasses.dataclass(frozen=True)
class NextWord(Objective):
    """Predict each window's last token from the others, the row's own past and a running mean over all rows.

    Two terms with different denominators (rows, and tokens above 100), a carry leaf with rows (the row's last logits)
    and one without (sum and number of the logits seen).   feedback: how much that mean changes the logits.
    explodes: the loss is not finite once so many rows are seen, 0 for never.
    """

    feedback: float = 0.1
    explodes: int = 0

    def rows(self, phase):
        return Windows(phase.length)

    def carry(self, model, phase, train):
        memory = jnp.zeros((model.config.width, phase.batch_size))
        return {"memory": memory, "seen": jnp.zeros(2)}, {"memory": (None, "batch"), "seen": (None,)}

    def weights(self, batch):
        return {"next": jnp.float32(len(batch["tokens"])), "rare": (batch["tokens"] > 100).sum().astype(jnp.float32)}

    def coefficients(self, step):
        return {"next": 1.0, "rare": 0.5}

    def loss(self, model, params, batch, carry, moment):
        tokens, size = batch["tokens"], model.config.width
        total, number = carry["seen"]
        logits = model.apply({"params": params}, {"tokens": tokens[:, :-1]})
        logits = logits.at[:, :size].add(0.5 * jnp.tanh(carry["memory"].T))
        nats = -jax.nn.log_softmax(logits.at[:, 0].add(self.feedback * total / jnp.maximum(number, 1)))
        if self.explodes:
            nats = jnp.where(number >= self.explodes, jnp.nan, nats)
        rare = (tokens > 100).astype(jnp.float32)
        hits = (jnp.argmin(nats, axis=1) == tokens[:, -1]).sum().astype(jnp.float32)
        next_word, of_rare = _at(nats, tokens[:, -1:]).sum(), (_at(nats, tokens) * rare).sum()
        kept, rows = jax.lax.stop_gradient(logits), jnp.float32(len(tokens))
        carry = {"memory": kept[:, :size].T, "seen": carry["seen"] + jnp.stack([kept[:, 1].sum(), rows])}
        return {"next": Term(next_word, hits), "rare": Term(of_rare)}, carry, {}


@dataclasses.dataclass(frozen=True)
class TwoLengths(Phase):
    """A phase of rows with an input and a target."""

    target_length: int


@dataclasses.dataclass(frozen=True)
class WhatFollows(Objective):
    """Predict all words that follow a window of `length` tokens, `target_length` of them, in any order."""

    phase = TwoLengths

    def rows(self, phase):
        return TwoWindows(phase.length, phase.target_length)

    def weights(self, batch):
        return {"words": jnp.float32(batch["targets"].size)}

    def coefficients(self, step):
        return {"words": 1.0}

    def loss(self, model, params, batch, carry, moment):
        nats = -jax.nn.log_softmax(model.apply({"params": params}, inputs_of(model, batch)))
        labelled = (batch["even"] >= 0).sum().astype(jnp.float32)
        return {"words": Term(_at(nats, batch["targets"]).sum())}, carry, {"labelled": labelled}

    def report(self, counts):
        return {"labelled": float(counts["labelled"])}


@dataclasses.dataclass(frozen=True)
class InBatch(WhatFollows):
    """Find what follows a window among what follows all windows of the batch: no row stands alone."""

    rowwise = False
    per_example = ("ranks",)

    def weights(self, batch):
        return {"pairs": jnp.float32(len(batch["tokens"]))}

    def coefficients(self, step):
        return {"pairs": 1.0}

    def loss(self, model, params, batch, carry, moment):
        ours, theirs = (model.apply({"params": params}, {"tokens": batch[name]}) for name in ("tokens", "targets"))
        scores = ours @ theirs.T
        own = jnp.diag(scores)
        counts = {"step": jnp.float32(moment.step), "batches": jnp.float32(1)}
        if not moment.train:
            counts["ranks"] = (scores > own[:, None]).sum(axis=1)
        return {"pairs": Term((jax.nn.logsumexp(scores, axis=1) - own).sum())}, carry, counts

    def report(self, counts):
        ranks = counts.get("ranks")
        ranked = {} if ranks is None else {"mean_rank": float(np.mean(ranks)), "ranked": float(len(ranks))}
        return {"at_step": float(counts["step"] / counts["batches"])} | ranked


@dataclasses.dataclass(frozen=True)
class GramsConfig:
    """A bag of words and bigrams.   buckets: rows of the bigrams' table.   sparse: whether a step touches only the rows
    of both tables that it reads."""

    vocab_size: int = 195
    buckets: int = 1 << 20
    width: int = 8
    sparse: bool = True


class Grams(nn.Module):
    """Logits f32[rows, vocab] from the mean embeddings, of bigrams and trigrams where there are any."""

    config: GramsConfig
    program: object

    @nn.compact
    def __call__(self, inputs):
        config, normal = self.config, nn.initializers.normal(0.5)
        words = parameter(self, "words", normal, (config.vocab_size, config.width))
        bigrams = parameter(self, "bigrams", normal, (config.buckets, config.width))
        out = parameter(self, "out", normal, (config.width, config.vocab_size))
        read = words[inputs["tokens"]].mean(axis=1)
        for name in ("bigrams", "trigrams"):
            if name in inputs:
                read += bigrams[inputs[name]].mean(axis=1)
        return read @ out


def _grams(config):
    words, bigrams = (("tokens",), ("bigrams", "trigrams")) if config.sparse else ((), ())
    return [
        Parameter("words", ("vocab", "embedding"), {}, words),
        Parameter("bigrams", ("vocab", "embedding"), {}, bigrams),
        Parameter("out", ("embedding", "vocab"), {}),
    ]


GRAMS = Family(
    config=GramsConfig,
    sizes={},
    inputs={"tokens": Input(("length",)), "bigrams": Input(("pairs",), required=False)},
    trunk=Grams,
    table=_grams,
    hf={},
)


class Bigrams(Windows):
    """Windows and, of each two tokens in a row, a number below 2^20."""

    @property
    def spec(self):
        return super().spec | {"bigrams": Feature((self.length - 1,))}

    def build(self, plan, example, keys):
        rows = super().build(plan, example, keys)
        tokens = rows["tokens"].astype(np.int64)
        return rows | {"bigrams": ((tokens[:, :-1] * 65_599 + tokens[:, 1:]) % (1 << 20)).astype(np.int32)}


@dataclasses.dataclass(frozen=True)
class NextOfGrams(Objective):
    """Predict each window's last token from the words and, where they are asked for, bigrams before it."""

    bigrams: bool = True

    def rows(self, phase):
        return Bigrams(phase.length) if self.bigrams else Windows(phase.length)

    def weights(self, batch):
        return {"next": jnp.float32(len(batch["tokens"]))}

    def coefficients(self, step):
        return {"next": 1.0}

    def loss(self, model, params, batch, carry, moment):
        read = {name: array[:, :-1] for name, array in batch.items()}
        nats = -jax.nn.log_softmax(model.apply({"params": params}, read))
        return {"next": Term(_at(nats, batch["tokens"][:, -1:]).sum())}, carry, {}


def _at(nats, tokens):
    return jnp.take_along_axis(nats, tokens, axis=1)


def register(monkeypatch) -> None:
    """Make the toys known, as a built-in family and objective are."""
    monkeypatch.setitem(FAMILIES, "bag", FAMILY)
    monkeypatch.setitem(FAMILIES, "grams", GRAMS)
    monkeypatch.setitem(OBJECTIVES, "next-word", NextWord)
    monkeypatch.setitem(OBJECTIVES, "what-follows", WhatFollows)
    monkeypatch.setitem(OBJECTIVES, "in-batch", InBatch)
    monkeypatch.setitem(OBJECTIVES, "next-of-grams", NextOfGrams)


def recipe(**changes) -> Recipe:
    fields = {
        "name": "toy",
        "source": "test",
        "model": BagConfig(),
        "objective": NextWord(),
        "optimizer": Optimizer(),
        "schedule": Schedule("constant", peak=1e-2, warmup=0.0),
        "phases": (Phase(1.0, 16, 8),),
        "steps": 20,
    }
    return Recipe(**fields | changes)
