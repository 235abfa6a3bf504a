"""GPT-3: next tokens of 300 billion, in rows of 2,048 packed across documents.

Brown et al. 2020 (arXiv:2005.14165), table 2.1 and appendix B: Adam with b2 0.95 and epsilon 1e-8, gradients clipped at
1, decay 0.1, 375 million tokens of warm-up, cosine to a tenth. In the paper the cosine ends at 260 billion tokens,
and batches grow from 32 thousand tokens during the first 4 to 12 billion; here the cosine spans all tokens, and batches
have their full size from the start. Hardware: V100s, their number is not published. Expect on LAMBADA, zero-shot: 42.7,
54.3, 60.4, 63.6, 67.1, 70.3, 72.5, 76.2 by size (table H.1), on its 570 GB of text.

    python -m data_pipelines prepare --source SOURCE --tokenizer bpe --specials gpt2 --vocab-size 50257 --out CORPUS
    python -m pretrain run gpt3-small --corpus CORPUS --workdir RUN
"""

from models.families.gpt2 import FAMILY
from pretrain.objectives.next_token_prediction import NextTokenPrediction
from pretrain.objectives.objective import Phase
from pretrain.optimizers import Optimizer
from pretrain.recipe import Recipe
from pretrain.recipes.paper import Paper
from pretrain.schedules import Schedule

LENGTH, TOKENS, WARM_UP = 2048, 300e9, 375e6

_ADAM = Optimizer(b2=0.95, epsilon=1e-8, decay=0.1, clip=1.0)
_PAPER = Paper("gpt3", "Brown et al. 2020", FAMILY, NextTokenPrediction(), _ADAM)


def _recipe(size: str, rows: int, peak: float) -> Recipe:
    schedule = Schedule("cosine", peak=peak, warmup=WARM_UP / TOKENS, final=0.1)
    steps, model = round(TOKENS / (LENGTH * rows)), FAMILY.sizes[f"gpt3-{size}"]
    return _PAPER.recipe(size, schedule, steps, Phase(1.0, LENGTH, rows), model=model)


RECIPES = [
    _recipe("small", 256, 6e-4),  # batches of 0.5 million tokens
    _recipe("medium", 256, 3e-4),
    _recipe("large", 256, 2.5e-4),
    _recipe("xl", 512, 2e-4),
    _recipe("2.7b", 512, 1.6e-4),
    _recipe("6.7b", 1024, 1.2e-4),
    _recipe("13b", 1024, 1e-4),
    _recipe("175b", 1536, 0.6e-4),  # 3.1 million tokens; the paper has 3.2
]
