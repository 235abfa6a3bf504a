"""DistilBERT: masked tokens, and what BERT makes of them, by half of its layers.

Sanh et al. 2019 (arXiv:1910.01108), sections 2 and 3: the student begins with every other layer of BERT-base and learns
from the masked tokens, the teacher's probabilities and the direction of its hidden states. Batches of up to 4,000
rows, masks drawn anew each time, no next-sentence prediction, BERT's text. The plain sum of the three losses and the
temperature of 8 are those of a textbook (Che et al. 2021, section 8.3.1); an example of the authors' code has weights
2, 5 and 1 and a temperature of 2. Defaults of that code: Adam with rate 5e-4, epsilon 1e-6 and no decay, gradients
clipped at 5, 5% of the steps as warm-up, linear decay, three epochs, here of BERT's 3.3 billion words in rows of 512.
Original hardware: 8 V100 of 16 GB, 90 hours. Expect on GLUE dev: 77.0, of BERT-base's 79.5.

    python -m pretrain run distilbert-base --teacher BERT --corpus CORPUS --workdir RUN
"""

import dataclasses

from models.families import bert
from models.families.distilbert import FAMILY
from pretrain.objectives.distillation import Distillation
from pretrain.objectives.masked_language_model import PACKED_ACROSS
from pretrain.objectives.matching import Match
from pretrain.objectives.objective import Phase, Teacher
from pretrain.optimizers import Optimizer
from pretrain.recipes.paper import MINUTES, Paper
from pretrain.schedules import Schedule

_LOSSES = Match("logits", "kl", temperature=8.0), Match("hidden", "cosine", "top")
_OBJECTIVE = Distillation(layout=PACKED_ACROSS, losses=_LOSSES)
_PAPER = Paper("distilbert", "Sanh et al. 2019", FAMILY, _OBJECTIVE, Optimizer(decay=0.0, clip=5.0))
_OF_BASE = Teacher("teacher", "", bert.FAMILY.sizes["base"], copied="1 3 5 8 10 12")  # as in the authors' code
_OF_TINY = Teacher("teacher", "", dataclasses.replace(bert.FAMILY.sizes["tiny"], depth=4), copied="skip")

RECIPES = [
    _PAPER.recipe("tiny", MINUTES, 3000, Phase(1.0, 128, 32), teachers=(_OF_TINY,)),
    _PAPER.recipe("base", Schedule(peak=5e-4, warmup=0.05), 5_000, Phase(1.0, 512, 4000), teachers=(_OF_BASE,)),
]
