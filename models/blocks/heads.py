"""What reads hidden states: named heads, such as that of masked tokens; logits over tied embeddings."""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from models.blocks.activations import ACTIVATIONS
from models.blocks.crf import Crf, crf_head
from models.blocks.dense import Dense
from models.blocks.embeddings import padded_vocab
from models.blocks.norm import Norm
from models.blocks.products import table_scores
from models.blocks.tables import dense_parameters, token_head_parameters
from models.core.family import Head
from models.core.noise import dropout, site
from models.core.parameters import Noise, parameter
from models.core.program import Program
from models.core.sharding import constrain

TOKENS, POOLER, PAIR = "predictions", "pooler", "pair"  # names of heads
CLASSIFIER, TAGGER, SPANS, CHOICE = TASK_HEADS = "classifier", "token_classifier", "spans", "choice"


class WithHeads(nn.Module):
    """Base of trunks that heads read; `embeddings.tokens` is a trunk's table of tokens."""

    config: Any
    program: Program
    heads: tuple[Head, ...] = ()

    def setup(self):
        for head in self.heads:
            setattr(self, head.name, head.module(self.config, self.program))

    def apply_head(self, name: str, hidden: Array, noise: Noise = None) -> Array:
        """What the head of this name gives for hidden [rows, n, width], or [rows, width] of one position.

        noise: u32[rows, 2], switches the dropout of heads for tasks on.
        """
        read = {head.name: head.reads for head in self.heads}
        if name not in read:
            raise ValueError(f"there is no head {name!r}: this model has {', '.join(read) or 'none'}")
        hidden = self.apply_head(read[name], hidden) if read[name] else hidden
        head = getattr(self, name)
        return head(hidden, noise) if isinstance(head, TaskHead | Crf) else head(hidden, self.embeddings.tokens)

    def token_logits(self, hidden: Array) -> Array:
        """hidden [rows, n, width] -> f32[rows * n, padded vocab]."""
        return self.apply_head(TOKENS, hidden)

    def apply_heads(self, hidden: Array) -> list[Array]:
        """What each head gives for hidden [rows, length, width], for initialisation."""
        return [self.apply_head(head.name, hidden[:, :1]) for head in self.heads]


class TokenHead(nn.Module):
    """The masked-token head up to the tied decoder: dense, activation, norm; and the decoder's bias."""

    width: int
    vocab_size: int
    activation: str
    norm_epsilon: float
    init_std: float
    dtype: jnp.dtype

    def setup(self):
        self.dense = Dense(self.width, self.init_std, self.dtype)
        self.norm = Norm(self.norm_epsilon, self.dtype)
        self.bias = parameter(self, "bias", nn.initializers.zeros, (padded_vocab(self.vocab_size),))

    def __call__(self, hidden: Array, table: Array) -> Array:
        """hidden [rows, n, width of the layers], table f32[padded vocab, width] -> f32[rows * n, padded vocab]."""
        hidden = constrain(hidden.reshape(-1, hidden.shape[-1]), "batch", None)
        y = self.norm(ACTIVATIONS[self.activation](self.dense(hidden)))
        return tied_logits(y, table, self.bias, self.vocab_size)


class Classifier(Dense):
    """Scores of classes."""

    def __call__(self, hidden: Array, table: Array) -> Array:
        """hidden [..., width] -> [..., features]."""
        return super().__call__(hidden)


class Pooler(Classifier):
    """What classifiers of rows read of the hidden states at position 0."""

    def __call__(self, hidden: Array, table: Array) -> Array:
        """hidden [..., width] -> the same."""
        return jnp.tanh(super().__call__(hidden, table))


class TaskHead(nn.Module):
    """Scores for a task: dropout and a product, or two with an activation between them and dropout before each.

    between: the activation, '' for one product.   biased: whether the scores have a bias.
    first_dropout: before the first product, `dropout` before the second.
    """

    features: int
    between: str
    biased: bool
    first_dropout: float
    dropout: float
    init_std: float
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, hidden: Array, noise: Noise = None) -> Array:
        """hidden [..., width] -> f32[..., features]; noise u32[rows, 2] switches dropout on."""
        hidden = dropout(hidden, self.first_dropout, site(noise, 0))
        if self.between:
            dense = Dense(hidden.shape[-1], self.init_std, self.dtype, name="dense")(hidden)
            activate = jnp.tanh if self.between == "tanh" else ACTIVATIONS[self.between]
            hidden = dropout(activate(dense), self.dropout, site(noise, 1))
        return Dense(self.features, self.init_std, jnp.float32, self.biased, name="scores")(hidden)


def token_head(
    hf: str, dense: str = "transform.dense", norm: str = "transform.LayerNorm", activation: str | None = None
) -> Head:
    """The masked-token head.   hf: its prefix in Hugging Face, and what follows it there, by default as in BERT.
    activation: None for that of the layers."""

    def module(c: Any, program: Program) -> TokenHead:
        of_head = c.embedding, c.vocab_size, activation or c.activation, c.norm_epsilon, c.init_std
        return TokenHead(*of_head, program.compute)

    return Head(TOKENS, module, tuple(token_head_parameters(TOKENS, f"{hf}.{dense}", f"{hf}.{norm}", f"{hf}.bias")))


def pooler(hf: str) -> Head:
    """What classifiers of rows read."""
    rows = dense_parameters(POOLER, ("width", None), {"model": hf})
    return Head(POOLER, lambda c, program: Pooler(c.width, c.init_std, program.compute), tuple(rows))


def pair_head(hf: str) -> Head:
    """What tells of two segments, by what is pooled, whether they belong together."""
    rows = dense_parameters(PAIR, ("width", None), {"model": hf})
    return Head(PAIR, lambda c, program: Classifier(2, c.init_std, jnp.float32), tuple(rows), reads=POOLER)


def task_head(
    name: str,
    hf: str,
    dense: str = "",
    between: str | None = "",
    features: int | None = None,
    reads: str = "",
    biased: bool = True,
    drops: bool = True,
    summary: bool = False,
    part: str = "model",
) -> Head:
    """A head for a task, with one score for each of the model's labels unless `features` says how many.

    hf: the name of its last product in Hugging Face.   dense, between: of the one before, if there is one, and the
    activation between them; None for that of the layers.   drops: whether there is dropout.   summary: whether the
    first of two products has none before it, as in what Hugging Face names a summary.
    """

    def module(c: Any, program: Program) -> TaskHead:
        activation, rate = c.activation if between is None else between, c.dropout if drops else 0.0
        rates = 0.0 if summary else rate, rate
        return TaskHead(features or len(c.labels) or 2, activation, biased, *rates, c.init_std, program.compute)

    rows = dense_parameters(f"{name}/dense", ("width", None), {part: dense}) if dense else []
    of_score = "label" if features is None else None
    scores = dense_parameters(f"{name}/scores", ("width", of_score), {part: hf})
    return Head(name, module, (*rows, *scores[: 1 + biased]), reads)


# What BERT and most of its descendants have to tell of words
WORD_HEADS = (
    task_head(TAGGER, "classifier"),
    crf_head(),
    task_head(SPANS, "qa_outputs", features=2, drops=False),
)


def pooled_choice() -> Head:
    """What scores a choice by what is pooled."""
    return task_head(CHOICE, "classifier", features=1, reads=POOLER)


def task_classes(hf: str, *classifier: str) -> dict[str, tuple[str, ...]]:
    """The Hugging Face classes of heads for tasks, whose names begin so.   classifier: the heads of that of rows."""
    return {
        f"{hf}ForSequenceClassification": classifier,
        f"{hf}ForTokenClassification": (TAGGER,),
        f"{hf}ForQuestionAnswering": (SPANS,),
        f"{hf}ForMultipleChoice": (POOLER, CHOICE),
    }


def tied_logits(hidden: Array, table: Array, bias: Array, vocab_size: int) -> Array:
    """hidden [n, width], embedding table f32[padded, width], bias f32[padded] -> logits f32[n, padded].

    The padding rows get -inf, so that they carry no probability and no gradient.
    """
    logits = constrain(table_scores(hidden, table, bias), "batch", "vocab")
    if table.shape[0] == vocab_size:
        return logits
    return jnp.where(jnp.arange(table.shape[0]) < vocab_size, logits, -jnp.inf)
