"""Heads, which read hidden states: for masked tokens, for pairs of segments, for tasks; logits over tied embeddings."""

from collections.abc import Collection
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
from models.core.family import Head, Inputs
from models.core.noise import dropout, site
from models.core.parameters import Noise, parameter
from models.core.program import Program
from models.core.sharding import constrain

TOKENS, POOLER, PAIR = "predictions", "pooler", "pair"  # names of heads
CLASSIFIER, TAGGER, SPANS, CHOICE = TASK_HEADS = "classifier", "token_classifier", "spans", "choice"
# Head -> end of the name of its class in Hugging Face
CLASSES = {
    TOKENS: "MaskedLM",
    PAIR: "PreTraining",
    CLASSIFIER: "SequenceClassification",
    TAGGER: "TokenClassification",
    SPANS: "QuestionAnswering",
    CHOICE: "MultipleChoice",
}


class WithHeads(nn.Module):
    """Base class of trunks with heads; `embeddings.tokens` is a trunk's table of token embeddings."""

    config: Any
    program: Program
    heads: tuple[Head, ...] = ()

    def setup(self):
        for head in self.heads:
            setattr(self, head.name, head.module(self.config, self.program))

    def apply_head(self, name: str, hidden: Array, noise: Noise = None, **beside: Array) -> Array:
        """Apply the head of this name to hidden [rows, n, width], or [rows, width] of one position.
        noise: u32[rows, 2], switches the dropout of task heads on.   beside: what else the head reads."""
        read = {head.name: head.reads for head in self.heads}
        if name not in read:
            raise ValueError(f"there is no head {name!r}: this model has {', '.join(read) or 'none'}")
        hidden = self.apply_head(read[name], hidden) if read[name] else hidden
        head = getattr(self, name)
        if isinstance(head, TaskHead | Crf):
            return head(hidden, noise)
        return head(hidden, self.embeddings.tokens, **beside)

    def token_logits(self, hidden: Array) -> Array:
        """Return the logits f32[rows * n, padded vocab] of the masked-token head for hidden [rows, n, width]."""
        return self.apply_head(TOKENS, hidden)

    def apply_heads(self, hidden: Array) -> list[Array]:
        """Apply each head to hidden [rows, length, width], for initialisation."""
        return [self.apply_head(head.name, hidden[:, :1]) for head in self.heads]

    def __call__(self, inputs: Inputs):
        """Run every part once, for initialisation."""
        return self.apply_heads(self.encode(inputs))


class TokenHead(nn.Module):
    """The masked-token head: dense, activation, norm, then logits over the tied embeddings with a bias of its own."""

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
        """Return logits f32[rows * n, padded] for hidden [rows, n, layers' width] and table f32[padded, width]."""
        hidden = constrain(hidden.reshape(-1, hidden.shape[-1]), "batch", None)
        y = self.norm(ACTIVATIONS[self.activation](self.dense(hidden)))
        return tied_logits(y, table, self.bias, self.vocab_size)


class Classifier(Dense):
    """A dense layer that scores classes."""

    def __call__(self, hidden: Array, table: Array) -> Array:
        """hidden [..., width] -> [..., features]."""
        return super().__call__(hidden)


class Pooler(Classifier):
    """The pooler of BERT: tanh of a dense layer, for the hidden state at position 0, read by classifiers of rows."""

    def __call__(self, hidden: Array, table: Array) -> Array:
        """hidden [..., width] -> the same."""
        return jnp.tanh(super().__call__(hidden, table))


class TaskHead(nn.Module):
    """Scores for a task: dropout and a dense layer, or two with an activation between them and dropout before each.

    between: the activation; '' for a single dense layer.   biased: whether the scores have a bias.
    first_dropout, dropout: rates before the first and the second dense layer.
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
    """Return the masked-token head.   hf: its prefix in Hugging Face.   dense, norm: names after this prefix, by
    default BERT's.   activation: None for that of the layers."""

    def module(c: Any, program: Program) -> TokenHead:
        of_head = c.embedding, c.vocab_size, activation or c.activation, c.norm_epsilon, c.init_std
        return TokenHead(*of_head, program.compute)

    return Head(TOKENS, module, tuple(token_head_parameters(TOKENS, f"{hf}.{dense}", f"{hf}.{norm}", f"{hf}.bias")))


def pooler(hf: str) -> Head:
    """Return the pooler, which classifiers of rows read.   hf: its name in Hugging Face."""
    rows = dense_parameters(POOLER, ("width", None), {"model": hf})
    return Head(POOLER, lambda c, program: Pooler(c.width, c.init_std, program.compute), tuple(rows))


def pair_head(hf: str) -> Head:
    """Return the head that tells from the pooler's output whether two segments belong together."""
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
    """Return a task head with one score for each of the model's labels, or with `features` scores.

    hf: Hugging Face's name of its last dense layer, '' if no class has it.   dense: of the dense layer before, ''
    without one.   between: the activation between them; None for that of the layers.   reads: as in `Head`.
    drops: whether there is dropout.
    summary: whether there is none before the first of two dense layers, as in what Hugging Face calls a summary.
    """

    def module(c: Any, program: Program) -> TaskHead:
        activation, rate = c.activation if between is None else between, c.dropout if drops else 0.0
        rates = 0.0 if summary else rate, rate
        return TaskHead(features or len(c.labels) or 2, activation, biased, *rates, c.init_std, program.compute)

    rows = dense_parameters(f"{name}/dense", ("width", None), {part: dense}) if dense else []
    of_score = "label" if features is None else None
    scores = dense_parameters(f"{name}/scores", ("width", of_score), {part: hf} if hf else {})
    return Head(name, module, (*rows, *scores[: 1 + biased]), reads)


# The task heads on words that BERT and most of its descendants have
WORD_HEADS = (task_head(TAGGER, "classifier"), crf_head(), task_head(SPANS, "qa_outputs", features=2, drops=False))


def bert_heads(
    pooled: str, *more: Head, tokens: Head | None = None, classifier: Head | None = None, spans: Head | None = None
) -> tuple[Head, ...]:
    """Return the heads of BERT and its descendants.   pooled: the pooler's name in Hugging Face.   more: heads between
    the pooler and those of tasks.   tokens, classifier, spans: by default BERT's."""
    return (
        tokens or token_head("cls.predictions"),
        pooler(pooled),
        *more,
        classifier or task_head(CLASSIFIER, "classifier", reads=POOLER),
        *WORD_HEADS[:-1],
        spans or WORD_HEADS[-1],
        task_head(CHOICE, "classifier", features=1, reads=POOLER),
    )


def roberta_heads(names: str, *more: Head) -> tuple[Head, ...]:
    """Return the heads of RoBERTa and its descendants.   names: the prefix of the trunk's tensors."""
    tokens = token_head("lm_head", "dense", "layer_norm", activation="gelu")  # whatever the layers' activation
    classifier = task_head(CLASSIFIER, "classifier.out_proj", "classifier.dense", "tanh")
    return bert_heads(f"{names}.pooler.dense", *more, tokens=tokens, classifier=classifier)


def usual_classes(hf: str, heads: Collection[Head]) -> dict[str, tuple[str, ...]]:
    """Return the Hugging Face classes with these heads and their usual names, each with its head and what that reads.
    hf: how their names begin."""
    before = lambda head: (TOKENS,) * (head.name == PAIR) + (head.reads,) * bool(head.reads)
    usual = (head for head in heads if head.name in CLASSES and not head.is_nameless)
    return {f"{hf}For{CLASSES[head.name]}": (*before(head), head.name) for head in usual}


def tied_logits(hidden: Array, table: Array, bias: Array, vocab_size: int) -> Array:
    """Return logits f32[n, padded] for hidden [n, width], embedding table f32[padded, width] and bias f32[padded].
    Padding rows get -inf, so that they have no probability and no gradient."""
    logits = constrain(table_scores(hidden, table, bias), "batch", "vocab")
    if table.shape[0] == vocab_size:
        return logits
    return jnp.where(jnp.arange(table.shape[0]) < vocab_size, logits, -jnp.inf)
