"""SpanBERT: masked spans of words, and their tokens again from the two beside the span, in rows of one document.

Joshi et al. 2020 (arXiv:1907.10529), sections 3 and 4.2: spans of 1 to 10 words, their lengths geometric with p = 0.2,
with 15% of the tokens; 80% of the spans are masked, 10% random, 10% kept; 256 rows of 512, 2.4M steps, Adam with rate
1e-4, epsilon 1e-8, decay 0.1, 10k steps of warm-up, linear decay; BERT's large size, cased, and its text.
Original hardware: 32 V100, 15 days. Expect on SQuAD 1.1 and 2.0 (F1 on the test sets) 94.6 and 88.7 (table 1).

    python -m data_pipelines prepare --source SOURCE --cased --out CORPUS
    python -m pretrain run spanbert-base --corpus CORPUS --workdir RUN
"""

from models.families.bert import FAMILY
from pretrain.objectives.objective import Phase
from pretrain.objectives.span_boundary import SpanBoundaryObjective
from pretrain.optimizers import Optimizer
from pretrain.recipes.paper import MINUTES, Paper
from pretrain.schedules import Schedule

_OPTIMIZER = Optimizer(epsilon=1e-8, decay=0.1)
_PAPER = Paper("spanbert", "Joshi et al. 2020", FAMILY, SpanBoundaryObjective(), _OPTIMIZER)
_SCHEDULE = Schedule(peak=1e-4, warmup=10 / 2400)

RECIPES = [
    _PAPER.recipe("tiny", MINUTES, 3000, Phase(1.0, 128, 32)),
    *(_PAPER.recipe(size, _SCHEDULE, 2_400_000, Phase(1.0, 512, 256)) for size in ("base", "large")),
]
