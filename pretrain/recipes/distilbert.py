"""DistilBERT: masked tokens alone, by half the layers of BERT.

Sanh et al. 2019 (arXiv:1910.01108), section 3: batches of up to 4,000 rows, masks drawn anew each time, no
next-sentence prediction, BERT's text. The paper gives no more; defaults of its code: Adam with rate 5e-4, epsilon 1e-6
and no decay, gradients clipped at 5, 5% of the steps as warm-up, linear decay, three epochs, here of BERT's 3.3 billion
words in rows of 512. Original hardware: 8 V100 of 16 GB, 90 hours. Expect on GLUE dev, learned from BERT: 77.0.

    python -m pretrain run distilbert-base --corpus CORPUS --workdir RUN
"""

from models.families.distilbert import FAMILY
from pretrain.objectives.masked_language_model import PACKED_ACROSS, MaskedLanguageModel
from pretrain.objectives.objective import Phase
from pretrain.optimizers import Optimizer
from pretrain.recipes.paper import MINUTES, Paper
from pretrain.schedules import Schedule

_OBJECTIVE = MaskedLanguageModel(layout=PACKED_ACROSS, next_sentence=False)
_PAPER = Paper("distilbert", "Sanh et al. 2019", FAMILY, _OBJECTIVE, Optimizer(decay=0.0, clip=5.0))

RECIPES = [
    _PAPER.recipe("tiny", MINUTES, 3000, Phase(1.0, 128, 32)),
    _PAPER.recipe("base", Schedule(peak=5e-4, warmup=0.05), 5_000, Phase(1.0, 512, 4000)),
]
