"""GPT-2: next tokens of text packed across documents.

Radford et al. 2019: WebText (40 GB), batch 512 at length 1024; learning rates and the number of steps are not
published. The learning rates here are those of GPT-3's models of the same sizes (Brown et al. 2020, table 2.1), with
its Adam, clipping, decay and cosine to a tenth.

    python -m data_pipelines prepare --source SOURCE --tokenizer bpe --specials gpt2 --vocab-size 50257 --out CORPUS
    python -m pretrain run gpt2-small --corpus CORPUS --workdir RUN
"""

from models.families.gpt2 import FAMILY
from pretrain.objectives.next_token_prediction import NextTokenPrediction
from pretrain.objectives.objective import Phase
from pretrain.optimizers import Optimizer
from pretrain.recipes.paper import COSINE_MINUTES, Paper
from pretrain.schedules import Schedule

_ADAM = Optimizer(b2=0.95, epsilon=1e-8, decay=0.1, clip=1.0)
_PAPER = Paper("gpt2", "Radford et al. 2019", FAMILY, NextTokenPrediction(), _ADAM)

RECIPES = [
    _PAPER.recipe("tiny", COSINE_MINUTES, 3000, Phase(1.0, 128, 32)),
    _PAPER.recipe("mini", COSINE_MINUTES, 3000, Phase(1.0, 256, 16)),
    *(
        _PAPER.recipe(size, Schedule("cosine", peak, warmup=0.01, final=0.1), 200_000, Phase(1.0, 1024, 512))
        for size, peak in (("small", 6e-4), ("medium", 3e-4), ("large", 2.5e-4), ("xl", 2e-4))
    ),
]
