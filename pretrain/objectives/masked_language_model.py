"""Masked language modelling, alone, with next-sentence prediction (Devlin et al. 2019, section 3.1) or with
sentence-order prediction (Lan et al. 2019, section 3.1)."""

import dataclasses
from types import MappingProxyType

import jax.numpy as jnp

from data_pipelines.errors import UserError
from data_pipelines.examples.masking import Masking
from data_pipelines.examples.segment_pairs import NEXT_SENTENCE, SENTENCE_ORDER
from models.attention.patterns.pattern import DENSE
from models.blocks.heads import PAIR, TOKENS
from models.families.registry import family_of
from pretrain.objectives import layouts
from pretrain.objectives.cross_entropy import cross_entropy
from pretrain.objectives.inputs import inputs_of
from pretrain.objectives.objective import Objective, Term
from pretrain.objectives.protocols import Encoder


@dataclasses.dataclass(frozen=True)
class MaskedLanguageModel(Objective):
    """The label of pairs is read at position 0."""

    predictions = MappingProxyType({"mlm": layouts.PREDICTIONS})

    # How rows are made: segment-pairs, sentence-pairs, packed-sentences, packed-across-documents, document-sentences
    layout: str = layouts.PAIRS
    next_sentence: bool = True  # also classify whether B follows A or is random
    sentence_order: bool = False  # also classify whether B follows A or A follows B; instead of next_sentence
    masking: Masking = Masking()
    globals: int = 0  # tokens of a row that see all and that all see, whatever the pattern: its first, then separators

    def __post_init__(self):
        if self.next_sentence and self.sentence_order:
            raise ValueError(
                "objective.next_sentence=True and objective.sentence_order=True: a pair has one label; "
                "set one of them to False"
            )
        layouts.check_layout(self.layout, self.label)

    @property
    def label(self) -> str | None:
        """What pairs are labelled with: the name of the field above, of the batch's array and of the loss's term."""
        return NEXT_SENTENCE if self.next_sentence else SENTENCE_ORDER if self.sentence_order else None

    @property
    def asks(self):
        return (Encoder, TOKENS, PAIR) if self.label else (Encoder, TOKENS)

    def check(self, model_config, corpus, phase):
        if not self.globals:
            return
        family, setting = family_of(model_config), f"objective.globals={self.globals}"
        if "globals" not in family.inputs:
            raise UserError(f"{setting}: {type(model_config).__name__} takes no global tokens; set it to 0")
        if model_config.pattern.name == DENSE and not getattr(model_config, "global_projections", False):
            raise UserError(f"{setting}: model.pattern.name=dense lets all tokens see all; set it to 0")

    def rows(self, phase):
        rows = layouts.LAYOUTS[self.layout].layout(phase.length, self.masking, self.label)
        try:
            return dataclasses.replace(rows, global_tokens=self.globals)
        except UserError as error:
            raise UserError(f"objective.{error}") from None

    def weights(self, batch):
        labelled = {self.label: (batch[self.label] >= 0).sum().astype(jnp.float32)} if self.label else {}
        return super().weights(batch) | labelled

    def coefficients(self, step):
        return super().coefficients(step) | ({self.label: 1.0} if self.label else {})

    def loss(self, model, params, batch, carry, moment):
        variables, first = {"params": params}, int(self.label is not None)
        slots = jnp.pad(batch["prediction_positions"], ((0, 0), (first, 0)))  # with position 0 before them
        inputs = (inputs_of(model, batch), moment.noise, slots)
        hidden = model.apply(variables, *inputs, method="encode")
        head = lambda name, hidden: model.apply(variables, name, hidden, method="apply_head")
        pair_logits = head(PAIR, hidden[:, 0]) if self.label else None
        logits = head(TOKENS, hidden[:, first:])
        losses, hits = cross_entropy(logits, batch["prediction_targets"].reshape(-1))
        weights = batch["prediction_weights"].reshape(-1)
        terms = {"mlm": Term(jnp.sum(losses * weights), jnp.sum(hits * weights))}
        if self.label:
            labels = batch[self.label]
            labelled = (labels >= 0).astype(jnp.float32)
            losses, hits = cross_entropy(pair_logits, labels)
            terms[self.label] = Term(jnp.sum(losses * labelled), jnp.sum(hits * labelled))
        return terms, carry, {}
