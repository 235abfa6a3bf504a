"""Masked language modelling, with or without next-sentence prediction (Devlin et al. 2019, section 3.1)."""

import dataclasses

import jax.numpy as jnp

from data_pipelines.errors import UserError
from data_pipelines.examples.masking import Masking
from pretrain.objectives import baselines, layouts
from pretrain.objectives.cross_entropy import cross_entropy
from pretrain.objectives.initialise import initialise
from pretrain.objectives.objective import Objective


@dataclasses.dataclass(frozen=True)
class MaskedLanguageModel(Objective):
    """The model gives token logits and, for next_sentence, pair logits, as `models.bert.Bert` does."""

    layout: str = layouts.PAIRS  # how rows are made: segment-pairs, packed-sentences or packed-across-documents
    next_sentence: bool = True  # also classify whether B follows A
    masking: Masking = Masking()

    def __post_init__(self):
        layouts.check_layout(self.layout, self.next_sentence)

    def check(self, model_config, corpus, phases):
        layouts.check_corpus(corpus)
        if self.next_sentence != model_config.pair_head:
            raise UserError(
                f"objective.next_sentence={self.next_sentence} but model.pair_head={model_config.pair_head}: "
                "set both to True or both to False"
            )

    def spec(self, length):
        return layouts.spec(self.layout, length, self.masking, self.next_sentence)

    def examples(self, corpus, split, length, batch_size, seed):
        return layouts.examples(
            self.layout, corpus, split, length, batch_size, seed, self.masking, self.next_sentence
        )

    def init(self, key, model, spec):
        return initialise(key, model, spec, ("tokens", "types", "segments", "prediction_positions"))

    def weights(self, batch):
        weights = {"mlm": batch["prediction_weights"].sum()}
        if self.next_sentence:
            weights["next_sentence"] = (batch["next_sentence"] >= 0).sum().astype(jnp.float32)
        return weights

    def coefficients(self, step):
        return {"mlm": 1.0, "next_sentence": 1.0} if self.next_sentence else {"mlm": 1.0}

    def loss(self, model, params, batch, carry, keys, train):
        inputs = (batch["tokens"], batch["types"], batch["segments"], batch["prediction_positions"])
        logits, pair_logits = model.apply({"params": params}, *inputs, keys if train else None)
        losses, hits = cross_entropy(logits, batch["prediction_targets"].reshape(-1))
        weights = batch["prediction_weights"].reshape(-1)
        sums = {"mlm": jnp.sum(losses * weights)}
        counts = {"mlm_hits": jnp.sum(hits * weights), "mlm_total": weights.sum()}
        if self.next_sentence:
            labels = batch["next_sentence"]
            labelled = (labels >= 0).astype(jnp.float32)
            losses, hits = cross_entropy(pair_logits, labels)
            sums["next_sentence"] = jnp.sum(losses * labelled)
            counts |= {"next_sentence_hits": jnp.sum(hits * labelled), "next_sentence_total": labelled.sum()}
        return sums, carry, counts

    def predictions(self, length):
        return layouts.predictions(length, self.masking)

    def baselines(self, batches, corpus):
        loss, accuracy = baselines.unigram(layouts.targets(batches), corpus)
        return {"mlm_loss": loss, "mlm_accuracy": accuracy}

    def report(self, counts):
        names = ("mlm", "next_sentence") if self.next_sentence else ("mlm",)
        return {f"{name}_accuracy": float(counts[f"{name}_hits"] / max(counts[f"{name}_total"], 1)) for name in names}
