"""UniLM: one encoder for four cloze tasks: bidirectional, sequence to sequence, from left to right, from right to left.

Dong et al. 2019 (arXiv:1905.03197), section 2.4: large begins with BERT-large, then 770k steps of 330 rows of 512
tokens, Adam with rate 3e-5, 40k steps of warm-up, linear decay, decay 0.01, dropout 0.1. Original hardware: 8 V100, 7
hours for 10k steps. Base was published with the code; its numbers here are large's. Expect of large: 80.8 on GLUE test,
ROUGE-L 40.5 for summaries of CNN/DailyMail.

    python -m pretrain run unilm-large --corpus CORPUS --workdir RUN --init-from BERT-LARGE --init-heads-anew
"""

from models.families.unilm import FAMILY
from pretrain.objectives.objective import Phase
from pretrain.objectives.unified_language_model import UnifiedLanguageModel
from pretrain.recipes.paper import MINUTES, Paper
from pretrain.schedules import Schedule

_PAPER = Paper("unilm", "Dong et al. 2019", FAMILY, UnifiedLanguageModel())
_SCHEDULE, _PHASE = Schedule(peak=3e-5, warmup=0.052), Phase(1.0, 512, 330)

RECIPES = [
    _PAPER.recipe("tiny", MINUTES, 3000, Phase(1.0, 128, 32)),
    *(_PAPER.recipe(size, _SCHEDULE, 770_000, _PHASE) for size in ("base", "large")),
]
