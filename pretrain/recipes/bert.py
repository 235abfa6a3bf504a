"""BERT: masked tokens and next-sentence prediction on segment pairs.

Devlin et al. 2019 (arXiv:1810.04805), appendix A.2: batch 256, 1M steps, 90% at length 128 and 10% at 512, Adam
with rate 1e-4, decay 0.01, 10k steps of warm-up, linear decay. Original hardware: 16 TPU v2 chips (base), 64 (large),
4 days each. Smaller sizes: Turc et al. 2019 (arXiv:1908.08962). Expect on GLUE dev: base 82.2, large 84.0
(Clark et al. 2020, table 1).

    python -m pretrain run bert-base --corpus CORPUS --workdir RUN
"""

from models.families.bert import FAMILY
from pretrain.objectives.masked_language_model import MaskedLanguageModel
from pretrain.objectives.objective import Phase
from pretrain.recipes.paper import MINUTES, Paper
from pretrain.schedules import Schedule

_BERT = Paper("bert", "Devlin et al. 2019", FAMILY, MaskedLanguageModel())
_SMALLER = _BERT._replace(source="Turc et al. 2019")
_SCHEDULE, _PHASES = Schedule(peak=1e-4, warmup=0.01), (Phase(0.9, 128, 256), Phase(0.1, 512, 256))

RECIPES = [
    *(_SMALLER.recipe(size, MINUTES, 3000, Phase(1.0, 128, 32)) for size in ("tiny", "mini")),
    *(_SMALLER.recipe(size, _SCHEDULE, 1_000_000, *_PHASES) for size in ("small", "medium")),
    *(_BERT.recipe(size, _SCHEDULE, 1_000_000, *_PHASES) for size in ("base", "large")),
]
