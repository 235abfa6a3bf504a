"""One line per family: the small model, objective and batch by which the contract is checked.

`torch_reference.py` has how the independent implementation computes the same; a new family adds a line in each.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from data_pipelines.examples.permutations import Permuting
from data_pipelines.examples.span_corruption import Corruption, sizes_of
from data_pipelines.examples.unified_pairs import TASKS, of_tasks
from finetune.tasks.classify import Classify
from models.attention.patterns.pattern import Pattern
from models.blocks.memory import Memory
from models.core.parameters import leaves, nest
from models.families.registry import FAMILIES
from pretrain.objectives.causal_language_model import CausalLanguageModel
from pretrain.objectives.masked_language_model import MaskedLanguageModel, MaskedWithGlobals
from pretrain.objectives.next_token_prediction import NextTokenPrediction
from pretrain.objectives.objective import Objective, Phase
from pretrain.objectives.permutation_language_model import PermutationLanguageModel
from pretrain.objectives.replaced_token_detection import ReplacedTokenDetection
from pretrain.objectives.sequence_to_sequence import SequenceToSequence
from pretrain.objectives.unified_language_model import UnifiedLanguageModel
from pretrain.training.assembly import made_heads
from tests.models.shapes import parameter_shapes

ROWS, LENGTH, GLOBALS = 4, 24, 6
SIZES = {"vocab_size": 100, "dropout": 0.0, "attention_dropout": 0.0}
WIDE = {"width": 16, "depth": 2, "heads": 2, "feed_forward": 32}


class Case(NamedTuple):
    """model: a config without dropout.   memory: positions before a row.   padded: whether rows are of any length.
    phase: length -> what a phase has besides its share, length and batch size.
    globals: whether rows name global tokens: one or two that are predicted, since a last layer's others are not read.
    """

    model: object
    objective: Objective
    memory: int = 0
    padded: bool = True
    phase: Callable[[int], Mapping] = lambda length: {}
    globals: bool = False

    def of(self, length: int, rows: int) -> Phase:
        """A phase of such rows."""
        return self.objective.phase(1.0, length, rows, **self.phase(length))


def _config(family: str, **changes):
    return dataclasses.replace(FAMILIES[family].sizes["tiny"], **SIZES, **changes)


def _targets(length: int) -> dict[str, int]:
    return {"target_length": sizes_of(length, Corruption()).target}


def _electra():
    tower = type(FAMILIES["electra"].sizes["tiny"].generator)
    towers = {"discriminator": tower(**WIDE), "generator": tower(**WIDE | {"width": 8, "heads": 1})}
    return _config("electra", positions=32, embedding=16, **towers)


PERMUTING = Permuting(reuse_len=8, perm_size=8, k=4)
MASKED = MaskedLanguageModel(next_sentence=False)
FEW = Pattern("bigbird", block=2, random=1)
NEAR = Pattern("longformer", block=2, windows=(8,))
AROUND = Pattern("longformer", block=4, windows=(6,))
ORDER = MaskedLanguageModel(next_sentence=False, sentence_order=True)
OF_DEBERTA = WIDE | {"positions": 32, "buckets": 8, "furthest": 20}
OF_MOBILE = WIDE | {"embedding": 8, "bottleneck": 12, "stacked": 3}
OF_BART = WIDE | {"decoder_depth": 1, "positions": 32}
OF_T5 = WIDE | {"decoder_depth": 1, "head_dim": 6, "buckets": 8, "furthest": 10}
CASES = {
    "albert": Case(_config("albert", positions=32, embedding=8, groups=2, **WIDE | {"depth": 4}), ORDER),
    "bart": Case(_config("bart", **OF_BART), SequenceToSequence(), phase=_targets),
    "bart-translation": Case(
        _config("bart-translation", source_depth=1, **OF_BART), SequenceToSequence(), phase=_targets
    ),
    "bert": Case(_config("bert", positions=32, **WIDE), MaskedLanguageModel()),
    "bigbird": Case(_config("bigbird", positions=32, pattern=FEW, **WIDE), MaskedLanguageModel()),
    "bigbird-etc": Case(
        _config("bigbird-etc", block=2, distance=3, **WIDE),
        MaskedWithGlobals(),
        phase=lambda length: {"globals": GLOBALS},
    ),
    "ctrl": Case(_config("ctrl", positions=32, **WIDE), NextTokenPrediction()),
    "deberta-v2": Case(_config("deberta-v2", **OF_DEBERTA), MASKED),
    "deberta-v3": Case(_config("deberta-v3", generator_depth=1, **OF_DEBERTA), ReplacedTokenDetection()),
    "distilbert": Case(_config("distilbert", positions=32, **WIDE), MASKED),
    "electra": Case(_electra(), ReplacedTokenDetection()),
    "electra-encoder": Case(_electra().encoder("discriminator"), Classify()),
    "ernie": Case(_config("ernie", positions=32, **WIDE), MaskedLanguageModel()),
    "gpt": Case(_config("gpt", positions=32, **WIDE | {"feed_forward": 64}), NextTokenPrediction()),
    "gpt2": Case(_config("gpt2", positions=32, **WIDE), NextTokenPrediction()),
    "longformer": Case(_config("longformer", positions=32, pattern=NEAR, **WIDE), MASKED, globals=True),
    "mobilebert": Case(_config("mobilebert", positions=32, **OF_MOBILE), MaskedLanguageModel()),
    "modernbert": Case(_config("modernbert", pattern=AROUND, **WIDE | {"depth": 4}), MASKED),
    "modernbert-decoder": Case(
        _config("modernbert-decoder", pattern=AROUND, **WIDE | {"depth": 4}), NextTokenPrediction()
    ),
    "mt5": Case(_config("mt5", **OF_T5), SequenceToSequence(), phase=_targets),
    "roberta": Case(_config("roberta", positions=32, **WIDE), MASKED),
    "t5": Case(_config("t5", **OF_T5), SequenceToSequence(), phase=_targets),
    "transformer": Case(_config("transformer", **OF_BART), SequenceToSequence(), phase=_targets),
    "transformer-xl": Case(_config("transformer-xl", memory=8, **WIDE), CausalLanguageModel(), 8, padded=False),
    "unilm": Case(_config("unilm", positions=32, **WIDE), UnifiedLanguageModel()),
    "xlnet": Case(_config("xlnet", memory=8, **WIDE), PermutationLanguageModel(PERMUTING), 8),
}


def params(case: Case) -> dict:
    """Parameters that nothing has made special: no bias is 0 and no scale 1; the vocabulary's padding rows are 0."""
    rng = np.random.default_rng(0)
    drawn = {}
    # What no token reads comes last: it changes nothing of the others
    shapes = parameter_shapes(case.model, made_heads(case.model, case.objective.asks))
    for path, leaf in sorted(leaves(shapes), key=lambda of: of[0].endswith("padding_positions")):
        drawn[path] = rng.normal(float(path.endswith("scale")), 0.1, leaf.shape).astype(np.float32)
        if path.endswith(("tokens", "predictions/bias", "cluster_0/bias")) or path == "bias":
            drawn[path][case.model.vocab_size :] = 0
    return nest(drawn)


def batch(case: Case) -> dict[str, np.ndarray]:
    """One batch with everything that any of the objectives reads."""
    rng = np.random.default_rng(1)
    vocab, slots, column = case.model.vocab_size, 5, np.arange(LENGTH)
    shortest = LENGTH // 2 if case.padded else LENGTH
    real = (column < rng.integers(shortest, LENGTH + 1, ROWS)[:, None]).astype(np.int32)
    ranks = np.argsort(rng.random((ROWS, LENGTH)), axis=1).astype(np.int32)
    ranks[np.arange(ROWS), np.where(real, ranks, LENGTH).argmin(1)] = -1  # sees itself, and is never predicted
    thresholds = ranks + 1
    positions, weights = np.zeros((ROWS, slots), np.int32), np.zeros((ROWS, slots), np.float32)
    for row in range(ROWS):
        number = rng.integers(1, slots + 1)
        candidates = np.flatnonzero((real[row] > 0) & (ranks[row] >= 0))
        positions[row, :number] = np.sort(rng.choice(candidates, number, replace=False))
        weights[row, :number] = 1
        chosen = positions[row, :number]
        thresholds[row, chosen] = ranks[row, chosen]
    tokens = rng.integers(5, vocab, (ROWS, LENGTH)).astype(np.int32)
    predicted = case.phase(LENGTH).get("target_length", LENGTH)
    pair = np.array([-1, 0, 1, 1], np.int32)
    types = np.where(column >= LENGTH // 2, real, 0).astype(np.int32)
    if isinstance(case.objective, UnifiedLanguageModel):  # a row of each task
        types, ranks = of_tasks(np.array(TASKS), types, real)
    return {
        "tokens": tokens, "types": types, "segments": real,
        "ranks": ranks, "thresholds": thresholds.astype(np.int32), "reversed": np.zeros(ROWS, np.int32),
        "prediction_positions": positions, "prediction_weights": weights,
        "prediction_targets": (rng.integers(5, vocab, (ROWS, slots)) * weights).astype(np.int32),
        "next_sentence": pair, "sentence_order": pair,
        "global_of": np.where(real > 0, column // 5, -1).astype(np.int32),
        "global_segments": (np.arange(GLOBALS) < 1 + (real.sum(1)[:, None] - 1) // 5).astype(np.int32),
        "targets": np.roll(tokens, -1, 1)[:, :predicted], "weights": real[:, :predicted].astype(np.float32),
        "decoder_tokens": tokens[::-1, :predicted], "decoder_segments": real[:, :predicted],
        "place": np.zeros(ROWS, np.int32), "labels": np.array([-1, 0, 1, 1], np.int32),
        **({"globals": np.where(weights, positions, -1)[:, :2]} if case.globals else {}),
    }  # fmt: skip


def noise(rows: int) -> np.ndarray:
    """Noise keys, one per row: ELECTRA samples by them."""
    return np.arange(2 * rows, dtype=np.uint32).reshape(-1, 2)


def memory(case: Case) -> Memory | None:
    """What is remembered of earlier tokens."""
    if not case.memory:
        return None
    hidden = np.random.default_rng(2).normal(size=(case.model.depth, ROWS, case.memory, case.model.width))
    return Memory(hidden.astype(np.float32), np.ones((ROWS, case.memory), np.int32))
