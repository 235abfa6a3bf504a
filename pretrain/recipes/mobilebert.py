"""MobileBERT and its teacher IB-BERT: BERT's objective by thin layers, without a teacher.

Sun et al. 2020 (arXiv:2004.02984), section 4.1, and the authors' code: length 512, 500k steps of LAMB with rate 1.5e-3
after 10k steps of warm-up, batch 2048; IB-BERT with batch 4096, for which no rate is given. Original hardware: 256 TPU
v3 chips. Expect, learned from IB-BERT: GLUE 77.7, SQuAD 1.1 90.0 (F1; abstract).

    python -m pretrain run mobilebert-base --corpus CORPUS --workdir RUN
"""

from models.families.mobilebert import FAMILY
from pretrain.objectives.masked_language_model import MaskedLanguageModel
from pretrain.objectives.objective import Phase
from pretrain.optimizers import Optimizer
from pretrain.recipes.paper import MINUTES, Paper
from pretrain.schedules import Schedule

_PAPER = Paper("mobilebert", "Sun et al. 2020", FAMILY, MaskedLanguageModel(), Optimizer("lamb"))
_SCHEDULE, _STEPS = Schedule(peak=1.5e-3, warmup=0.02), 500_000

RECIPES = [
    _PAPER.recipe("tiny", MINUTES, 3000, Phase(1.0, 128, 32), optimizer=Optimizer()),
    *(_PAPER.recipe(size, _SCHEDULE, _STEPS, Phase(1.0, 512, 2048)) for size in ("small", "base")),
    _PAPER.recipe("ib-bert", _SCHEDULE, _STEPS, Phase(1.0, 512, 4096)),
]
