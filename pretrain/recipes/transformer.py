"""The Transformer: translation, one row for each sentence.

Vaswani et al. 2017 (arXiv:1706.03762), section 5: WMT 2014, some 25,000 tokens of each language a batch (here rows of
one length: 384 of 64), 100k steps (base) or 300k (big); Adam with b2 0.98 and epsilon 1e-9, no decay; a rate of
width**-0.5 * step**-0.5 after 4,000 steps of warm-up; label smoothing 0.1; a vocabulary of 37,000 of both languages.
8 P100 GPUs, 12 hours (base), 3.5 days (big). Expect 27.3 BLEU of English-German (base), 28.4 (big), with the mean of
the last 5 (base) or 20 checkpoints (big), 4 beams and a length penalty of 0.6 (section 6.1).

    python -m data_pipelines prepare --source parallel:SOURCE,TARGET --tokenizer sentencepiece-bpe --specials t5 \\
        --vocab-size 37000 --out CORPUS
    python -m pretrain run transformer-base --corpus CORPUS --workdir RUN
"""

from models.families.transformer import FAMILY
from pretrain.objectives.next_token_prediction import INPUT_TARGET
from pretrain.objectives.sequence_to_sequence import PhaseWithTargets, SequenceToSequence
from pretrain.optimizers import Optimizer
from pretrain.recipes.paper import Paper
from pretrain.schedules import Schedule

_OBJECTIVE = SequenceToSequence(INPUT_TARGET, label_smoothing=0.1)
_ADAM = Optimizer(b2=0.98, epsilon=1e-9, decay=0.0, clip=0.0)
_PAPER = Paper("transformer", "Vaswani et al. 2017", FAMILY, _OBJECTIVE, _ADAM)
_WARMUP = 4000


def _published(size: str, steps: int):
    peak = (FAMILY.sizes[size].width * _WARMUP) ** -0.5
    schedule = Schedule("inverse-sqrt", peak=peak, warmup=_WARMUP / steps)
    return _PAPER.recipe(size, schedule, steps, PhaseWithTargets(1.0, 64, 384, target_length=64))


RECIPES = [
    _PAPER.recipe(
        "tiny", Schedule("inverse-sqrt", peak=2e-3, warmup=0.1), 3000, PhaseWithTargets(1.0, 48, 64, target_length=48)
    ),
    _published("base", 100_000),
    _published("big", 300_000),
]
