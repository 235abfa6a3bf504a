"""T5: sentinels replace spans of the input, and the targets are these spans.

Raffel et al. 2020, sections 3.1 and 3.7: C4, 2,048 rows of 512 tokens for a million steps; Adafactor, with a learning
rate of 0.01 for 10,000 steps that then falls with the inverse square root of the step. T5 1.1 (Shazeer 2020) has no
dropout in pretraining. mT5 and ByT5 use 1,024 rows of 1,024 tokens, ByT5 bytes in spans of 20 (Xue et al. 2021, section
3.2; Xue et al. 2022, section 3.2).

    python -m data_pipelines prepare --source SOURCE --tokenizer sentencepiece-unigram --specials t5 \\
        --vocab-size 32000 --out CORPUS
    python -m pretrain run t5-base --corpus CORPUS --workdir RUN
"""

from data_pipelines.examples.span_corruption import Corruption
from models.families.t5 import FAMILY, MT5
from pretrain.objectives.sequence_to_sequence import PhaseWithTargets, SequenceToSequence
from pretrain.optimizers import Optimizer
from pretrain.recipe import Recipe
from pretrain.recipes.paper import Paper
from pretrain.schedules import Schedule

_ADAFACTOR = Optimizer("adafactor", decay=0.0, clip=0.0)
_MINUTES = Schedule("flat-inverse-sqrt", peak=1e-2, warmup=0.1)
_SPANS, _BYTES = SequenceToSequence(), SequenceToSequence(corruption=Corruption(span=20.0))


def _published(paper: Paper, size: str, length: int, target_length: int, rows: int) -> Recipe:
    phase = PhaseWithTargets(1.0, length, rows, target_length=target_length)
    falling = Schedule("flat-inverse-sqrt", peak=1e-2, warmup=0.01)
    name = f"{paper.name}-{size}"
    model = paper.family.sizes[name if name in paper.family.sizes else size]
    return paper.recipe(size, falling, 1_000_000, phase, model=model)


_T5 = Paper("t5", "Raffel et al. 2020", FAMILY, _SPANS, _ADAFACTOR)
_BYT5 = Paper("byt5", "Xue et al. 2022", FAMILY, _BYTES, _ADAFACTOR)
_MT5 = Paper("mt5", "Xue et al. 2021", MT5, _SPANS, _ADAFACTOR)
_SIZES = ("small", "base", "large", "xl", "xxl")
_OF_T5 = ("small", "base", "large", "3b", "11b", *(f"1.1-{size}" for size in _SIZES))

RECIPES = [
    _T5.recipe("tiny", _MINUTES, 3000, PhaseWithTargets(1.0, 128, 32, target_length=29)),
    *(_published(_T5, size, 512, 114, 2048) for size in _OF_T5),
    *(_published(_BYT5, size, 1024, 189, 1024) for size in _SIZES),
    *(_published(_MT5, size, 1024, 229, 1024) for size in _SIZES),
]
