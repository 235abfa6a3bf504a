"""Distillation: a student learns from teachers what they predict and compute, beside its own loss.

DistilBERT (Sanh et al. 2019, arXiv:1910.01108), TinyBERT, MiniLM and other students differ in their `losses`, which
`matching.py` defines, and in their models.
"""

import dataclasses
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
from jax import Array

from data_pipelines.errors import UserError
from models.attention.patterns.pattern import DENSE
from models.blocks.heads import TOKENS
from models.blocks.positions import gather_positions
from models.core.inside import HIDDEN, PROJECTED, of_layers
from models.families.registry import family_of
from pretrain.objectives.masked_language_model import MaskedLanguageModel
from pretrain.objectives.matching import LOGITS, Match, Side, Tokens, denominator, total
from pretrain.objectives.objective import Bound, Term, inputs_of
from pretrain.objectives.protocols import Encoder

PROJECTIONS = "projections"  # path of the matrices from the student's width to its teachers'
MEAN, DRAWN = "mean", "drawn"


@dataclasses.dataclass(frozen=True)
class Distillation(MaskedLanguageModel):
    """Masked tokens, as far as `own` says, and what the teachers make of the same rows."""

    next_sentence: bool = False
    losses: tuple[Match, ...] = (Match(),)  # between the student and its teachers
    own: float = 1.0  # factor of the student's own loss
    taught_by: tuple[str, ...] = ("teacher",)  # names of teachers of the recipe
    several: str = MEAN  # with several teachers: the mean of their losses, or those of one, drawn in each step

    def __post_init__(self):
        super().__post_init__()
        names = [match.name for match in self.losses]
        if not names or len({*names}) < len(names):
            raise ValueError(f"objective.losses={names}: must be one or more, each once; change them")
        if not self.taught_by or len({*self.taught_by}) < len(self.taught_by):
            raise ValueError(f"objective.taught_by={[*self.taught_by]}: must be one or more names, each once")
        if self.several not in (MEAN, DRAWN):
            raise ValueError(f"objective.several={self.several!r}: use {MEAN} or {DRAWN}")
        if self.own < 0:
            raise ValueError(
                f"objective.own={self.own}: must not be negative; use 0 to leave out the student's own loss"
            )

    @property
    def teachers(self):
        asks = (Encoder, TOKENS) if self._soft else (Encoder,)
        return MappingProxyType(dict.fromkeys(self.taught_by, asks))

    @property
    def _soft(self) -> bool:
        return any(match.of == LOGITS for match in self.losses)

    @property
    def _asked(self) -> list[str]:
        """What the models must record."""
        return sorted({match.collection for match in self.losses} - {None})

    def projections(self, model_config, teachers):
        made = {}
        for name in self.taught_by:
            for match in self.losses:
                _check(match, model_config, teachers[name])
                widths = model_config.width, teachers[name].width
                if match.projects and len({*widths}) > 1:
                    made[f"{PROJECTIONS}/{name}/{match.of}"] = widths
        return made

    def weights(self, batch):
        tokens = _tokens(batch)
        return super().weights(batch) | {match.name: denominator(match, tokens) for match in self.losses}

    def coefficients(self, step):
        ours = {term: self.own * factor for term, factor in super().coefficients(step).items()}
        return ours | {match.name: match.weight_at(step) for match in self.losses}

    def loss(self, model, params, batch, carry, moment):
        apply = partial(model.apply, {"params": params})
        hidden, ours = self._side(apply, inputs_of(model, batch), moment.noise, batch)
        terms, logits = self.terms(apply, hidden, batch)
        ours, tokens = ours._replace(logits=logits), _tokens(batch)
        matrices = params.get(PROJECTIONS, {})

        def taught(teacher: Bound) -> list[Array]:
            hidden, theirs = self._side(teacher.apply, inputs_of(teacher.module, batch), None, batch)
            if self._soft:
                masked = hidden[:, int(self.label is not None) :]
                theirs = theirs._replace(logits=teacher.apply(TOKENS, masked, method="apply_head"))
            matrix = lambda match: matrices.get(teacher.name, {}).get(match.of) if match.projects else None
            temperatures = [match.temperature_at(moment.step) for match in self.losses]
            return [
                total(match, ours, theirs, tokens, temperature, matrix(match))
                for match, temperature in zip(self.losses, temperatures, strict=True)
            ]

        teachers = [moment.teachers[name] for name in self.taught_by]
        if self.several == DRAWN and moment.train:
            drawn = jax.random.randint(jax.random.fold_in(jax.random.key(0), moment.step), (), 0, len(teachers))
            sums = jax.lax.switch(drawn, [partial(taught, teacher) for teacher in teachers])
        else:
            sums = jax.tree.map(lambda *parts: sum(parts) / len(parts), *map(taught, teachers))
        terms |= {match.name: Term(found) for match, found in zip(self.losses, sums, strict=True)}
        return terms, carry, {} if moment.train else self.counts(logits, batch)

    def _side(self, apply, inputs, noise, batch) -> tuple[Array, Side]:
        """Run a model -> (hidden at `slots`, what it recorded). Where losses compare what is inside, all positions are
        computed, else only the slots."""
        slots, asked = self.slots(batch), self._asked
        if not asked:
            return apply(inputs, noise, slots, method="encode"), Side(None, None, None)
        hidden, found = apply(inputs, noise, method="encode", mutable=asked)
        return gather_positions(hidden, slots), Side(None, of_layers(found, HIDDEN), of_layers(found, PROJECTED))


def _tokens(batch) -> Tokens:
    return Tokens(batch["segments"], batch["prediction_weights"].reshape(-1), causal=False)


def _check(match: Match, student: Any, teacher: Any) -> None:
    """Raise UserError if a loss cannot compare these models."""
    setting = f"objective.losses: {match.name}"
    if match.of != LOGITS:
        try:
            match.pairs(student.depth, teacher.depth)
        except ValueError as error:
            raise UserError(f"{setting}: {error}") from None
    if match.collection != PROJECTED:
        return
    for config in (student, teacher):
        pattern = getattr(config, "pattern", None)
        if family_of(config).attention != "self" or pattern is not None and pattern.name != DENSE:
            raise UserError(
                f"{setting}: {type(config).__name__} has another attention than scaled products of all tokens; leave this "
                "loss out, or use another model"
            )
    wanted = match.relation_heads
    heads = {config.width % wanted if wanted else config.heads for config in (student, teacher)}
    if heads != {0} and (wanted or len(heads) > 1):
        raise UserError(
            f"{setting}: "
            + (f"relation_heads={wanted} does not divide the widths" if wanted else "the models differ in heads")
            + f" (model.width={student.width} and {teacher.width}, heads={student.heads} and {teacher.heads}); change them"
        )
