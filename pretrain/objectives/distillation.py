"""Distillation: a student learns from teachers what they predict and compute, beside its own loss.

DistilBERT (Sanh et al. 2019, arXiv:1910.01108), TinyBERT, MiniLM and other students differ in their `losses`, which
`matching.py` defines, and in their models. Soft targets that are stored need no teacher in the step.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from tyro.conf import Suppress

from data_pipelines.errors import UserError
from data_pipelines.examples.layout import Feature
from data_pipelines.soft_targets import IDS, LOGS, places
from models.attention.patterns.pattern import DENSE
from models.blocks.heads import TOKENS
from models.blocks.layer import layer_sizes
from models.blocks.positions import gather_positions
from models.blocks.products import table_scores
from models.core.inside import HIDDEN, PROJECTED, of_layers, states
from models.core.ranges import COUNT_OR_NONE, NOT_NEGATIVE, check_ranges
from models.families.registry import family_of
from pretrain.objectives.blocked_softmax import Soft
from pretrain.objectives.cross_entropy import cross_entropy
from pretrain.objectives.masked_language_model import MaskedLanguageModel
from pretrain.objectives.matching import (
    ATTENTION,
    EMBEDDINGS,
    LOGITS,
    SCORES,
    Match,
    Side,
    Tokens,
    denominator,
    soft_of_stored,
    total,
)
from pretrain.objectives.next_token_prediction import NextTokenPrediction, softmax_terms
from pretrain.objectives.objective import Batch, Bound, Moment, Objective, Term, inputs_of
from pretrain.objectives.protocols import CausalDecoder, Encoder

PROJECTIONS = "projections"  # path of the matrices from the student's width to its teachers'
MEAN, DRAWN = "mean", "drawn"


@dataclasses.dataclass(frozen=True)
class Taught(Objective):
    """Base of objectives that add what teachers make of the same rows to the loss of the class beside it.   reads: what
    a teacher needs, like `Objective.asks`.   reads_logits: what else where its logits are compared."""

    reads: ClassVar[tuple[type | str, ...]] = ()
    reads_logits: ClassVar[tuple[type | str, ...]] = ()

    losses: tuple[Match, ...] = (Match(),)  # between the student and its teachers
    own: float = 1.0  # factor of the student's own loss of tokens
    taught_by: tuple[str, ...] = ("teacher",)  # names of teachers of the recipe
    # With several teachers: the mean of their losses, or those of one, drawn in each step, alike for all seeds
    several: str = MEAN
    stored: Annotated[int, Suppress] = 0  # number of soft targets of a place, in place of teachers; 0: none
    soft_targets: Annotated[str, Suppress] = ""  # digest of their folder

    def __post_init__(self):
        super().__post_init__()
        names = [match.name for match in self.losses]
        if not names or len({*names}) < len(names):
            raise ValueError(f"objective.losses={names}: must be one or more, each once; change them")
        if not self.taught_by or len({*self.taught_by}) < len(self.taught_by):
            raise ValueError(f"objective.taught_by={[*self.taught_by]}: must be one or more names, each once")
        if self.several not in (MEAN, DRAWN):
            raise ValueError(f"objective.several={self.several!r}: use {MEAN} or {DRAWN}")
        check_ranges(self, {"own": NOT_NEGATIVE, "stored": COUNT_OR_NONE}, "objective.")

    @property
    def soft(self) -> bool:
        """Whether a loss compares logits."""
        return any(match.of == LOGITS for match in self.losses)

    @property
    def recorded(self) -> list[str]:
        """What the models must record."""
        return sorted({match.collection for match in self.losses} - {None})

    @property
    def teachers(self):
        names = () if self.stored else self.taught_by
        return MappingProxyType(dict.fromkeys(names, self.reads + self.reads_logits * self.soft))

    def spec(self, phase):
        row, k = places(self.rows(phase)), self.stored
        beside = {IDS: Feature((row, k)), LOGS: Feature((row, k + 1), np.float16)} if k else {}
        return super().spec(phase) | beside

    def projections(self, model_config, teachers):
        made = {}
        for name in self.teachers:
            for match in self.losses:
                _check(match, model_config, teachers[name])
                if match.projects and (widths := (model_config.width, teachers[name].width))[0] != widths[1]:
                    made[f"{PROJECTIONS}/{name}/{match.of}"] = widths
        return made

    def weights(self, batch):
        tokens = self.tokens(batch)
        return super().weights(batch) | {match.name: denominator(match, tokens) for match in self.losses}

    def coefficients(self, step):
        # Without the own loss, a head that no other loss reads keeps its weights, also under weight decay. The gradient
        # of the z-loss is in that of the own loss.
        usual, tokens = super().coefficients(step), {*self.predictions, "z"}
        ours = {term: factor * (self.own if term in tokens else 1.0) for term, factor in usual.items()}
        ours = {term: factor for term, factor in ours.items() if self.own or term not in tokens}
        return ours | {match.name: match.weight_at(step) for match in self.losses}

    def tokens(self, batch: Batch) -> Tokens:
        """Return what tokens the losses count."""
        raise NotImplementedError

    def taught(
        self, params, batch: Batch, moment: Moment, ours: Side, side_of: Callable[[Bound], Side]
    ) -> dict[str, Term]:
        """Return the terms of all losses.   side_of: computes a teacher's side."""
        matrices, tokens = params.get(PROJECTIONS, {}), self.tokens(batch)

        def sums(teacher: Bound) -> list[Array]:
            theirs, found = side_of(teacher), matrices.get(teacher.name, {})
            return [
                total(match, ours, theirs, tokens, match.temperature_at(moment.step), found.get(match.of))
                for match in self.losses
            ]

        teachers = [moment.teachers[name] for name in self.taught_by]
        if self.several == DRAWN and moment.train:
            drawn = jax.random.randint(jax.random.fold_in(jax.random.key(0), moment.step), (), 0, len(teachers))
            found = jax.lax.switch(drawn, [partial(sums, teacher) for teacher in teachers])
        else:
            found = jax.tree.map(lambda *parts: sum(parts) / len(parts), *map(sums, teachers))
        return {match.name: Term(of_match) for match, of_match in zip(self.losses, found, strict=True)}


@dataclasses.dataclass(frozen=True)
class Distillation(Taught, MaskedLanguageModel):
    """A masked language model and its teachers, whose logits are those of the masked tokens."""

    reads, reads_logits = (Encoder,), (TOKENS,)
    next_sentence: bool = False

    def tokens(self, batch):
        return Tokens(batch["segments"], batch["prediction_weights"].reshape(-1), causal=False)

    def loss(self, model, params, batch, carry, moment):
        apply = partial(model.apply, {"params": params})
        hidden, ours = self._read(apply, inputs_of(model, batch), moment.noise, batch)
        terms, logits = self.terms(apply, hidden, batch)
        if IDS in batch:
            (match,), (ids, logs) = self.losses, (batch[name].reshape(len(logits), -1) for name in (IDS, LOGS))
            of_ids = jnp.take_along_axis(logits, ids, -1)
            # XLA has this form of the sum over the vocabulary, and of its gradient, from the student's own loss
            whole = cross_entropy(logits, ids[:, 0])[0] + of_ids[:, 0]
            losses = soft_of_stored(of_ids, whole, logs, match.temperature_at(moment.step))
            terms[match.name] = Term(jnp.sum(losses * self.tokens(batch).weights))
        if self.stored:
            return terms, carry, {} if moment.train else self.counts(logits, batch)

        def side_of(teacher: Bound) -> Side:
            hidden, theirs = self._read(teacher.apply, inputs_of(teacher.module, batch), None, batch)
            if not self.soft:
                return theirs
            masked = hidden[:, int(self.label is not None) :]
            return theirs._replace(logits=teacher.apply(TOKENS, masked, method="apply_head"))

        terms |= self.taught(params, batch, moment, ours._replace(logits=logits), side_of)
        return terms, carry, {} if moment.train else self.counts(logits, batch)

    def logits(self, teacher: Bound, batch: Batch) -> Array:
        """Return a teacher's logits of masked tokens, f32[rows * slots, vocab]."""
        hidden = teacher.apply(inputs_of(teacher.module, batch), None, self.slots(batch), method="encode")
        return teacher.apply(TOKENS, hidden[:, int(self.label is not None) :], method="apply_head")

    def _read(self, apply: Callable, inputs, noise, batch) -> tuple[Array, Side]:
        """Run a model -> (hidden at `slots`, what it recorded). Without recording, only the slots are computed."""
        if not self.recorded:
            return apply(inputs, noise, self.slots(batch), method="encode"), Side()
        hidden, side = read_side(apply, inputs, noise, "encode", self.recorded)
        return gather_positions(hidden, self.slots(batch)), side


@dataclasses.dataclass(frozen=True)
class CausalDistillation(Taught, NextTokenPrediction):
    """A decoder and its teachers, whose logits are those of all next tokens."""

    reads, reads_logits = (CausalDecoder,), ()

    def tokens(self, batch):
        return Tokens(batch["segments"], batch["weights"], causal=True)

    def loss(self, model, params, batch, carry, moment):
        def read(apply: Callable, module, noise) -> Side:
            hidden, side = read_side(apply, inputs_of(module, batch), noise, "decode", self.recorded)
            return side._replace(factors=apply(hidden, method="softmax"))

        ours = read(partial(model.apply, {"params": params}), model, moment.noise)
        soft, match = None, self.losses[0]
        if IDS in batch:
            temperature, weight = match.temperature_at(moment.step), match.weight_at(moment.step)
            soft = Soft(batch[IDS], batch[LOGS], temperature, self.own, weight)
        terms = softmax_terms(ours.factors, batch, self.predictions, self.z_loss, soft=(match.name, soft))
        if self.stored:
            return terms, carry, {}
        side_of = lambda teacher: read(teacher.apply, teacher.module, None)
        return terms | self.taught(params, batch, moment, ours, side_of), carry, {}

    def logits(self, teacher: Bound, batch: Batch) -> Array:
        """Return a teacher's logits of next tokens, f32[rows * length, vocab]."""
        hidden = teacher.apply(inputs_of(teacher.module, batch), None, method="decode")
        hidden, *table = teacher.apply(hidden, method="softmax")
        return table_scores(hidden.reshape(-1, hidden.shape[-1]), *table)


def read_side(apply: Callable, inputs, noise, method: str, asked: list[str]) -> tuple[Array, Side]:
    """Run a model -> (its last hidden states, what it recorded).   asked: collections to record."""
    hidden, found = apply(inputs, noise, method=method, mutable=asked)
    return hidden, Side(states(found, hidden) if HIDDEN in asked else None, of_layers(found, PROJECTED))


def _check(match: Match, student: Any, teacher: Any) -> None:
    """Raise UserError if a loss cannot compare these models."""
    setting = f"objective.losses: {match.name}"
    for config in (student, teacher):
        if match.of != LOGITS and not (hasattr(config, "depth") and hasattr(config, "width")):
            raise UserError(f"{setting}: {type(config).__name__} has several encoders; use the folder of one")
    if match.of not in (LOGITS, EMBEDDINGS):
        try:
            match.pairs(student.depth, teacher.depth)
        except ValueError as error:
            raise UserError(f"{setting}: {error}") from None
    if match.collection != PROJECTED:
        return
    for config in (student, teacher):
        pattern = getattr(config, "pattern", None)
        # Distances are a part of T5's scores that is not recorded.
        biased = match.of in (SCORES, ATTENTION) and hasattr(config, "buckets")
        if family_of(config).attention != "self" or biased or pattern is not None and pattern.name != DENSE:
            raise UserError(
                f"{setting}: {type(config).__name__} attends otherwise than by scaled products of all tokens; leave "
                "this loss out, or use another model"
            )
    wanted = match.relation_heads
    widths = [layer_sizes(config).heads_width for config in (student, teacher)]
    if wanted and any(width % wanted for width in widths):
        raise UserError(f"{setting}: relation_heads={wanted} must divide the widths of all heads, {widths}; change it")
    if not wanted and student.heads != teacher.heads:
        both = f"the student has {student.heads}, the teacher {teacher.heads}"
        raise UserError(f"{setting}: needs as many heads in both, {both}; set model.heads")
