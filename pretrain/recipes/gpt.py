"""GPT: next tokens of books.

Radford et al. 2018, section 4.1: BooksCorpus, 100 epochs, batch 64 at length 512, Adam with rate 2.5e-4, 2,000 updates
of warm-up, cosine to 0, decay 0.01, 40,000 merges of lower-cased text. The number of tokens per epoch is not
published; the steps here cover 118 billion tokens, which corresponds to its published 0.96 petaflop/s-days. Original
hardware: 8 P600, a month. In the paper no token ends a document; here GPT-2's does, the last of the vocabulary.

    python -m data_pipelines prepare --source SOURCE --tokenizer character-bpe --vocab-size 40478 --out CORPUS
    python -m pretrain run gpt-base --corpus CORPUS --workdir RUN
"""

from models.families.gpt import FAMILY
from pretrain.objectives.next_token_prediction import NextTokenPrediction
from pretrain.objectives.objective import Phase
from pretrain.optimizers import Optimizer
from pretrain.recipes.paper import COSINE_MINUTES, Paper
from pretrain.schedules import Schedule

_PAPER = Paper("gpt", "Radford et al. 2018", FAMILY, NextTokenPrediction(), Optimizer(epsilon=1e-8))
_SCHEDULE = Schedule("cosine", peak=2.5e-4, warmup=2000 / 3_600_000)

RECIPES = [
    _PAPER.recipe("tiny", COSINE_MINUTES, 3000, Phase(1.0, 128, 32)),
    _PAPER.recipe("base", _SCHEDULE, 3_600_000, Phase(1.0, 512, 64)),
]
