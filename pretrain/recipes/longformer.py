"""Longformer: RoBERTa continued on masked tokens in rows of 4,096, each token attending to 512 around it.

Beltagy et al. 2020 (arXiv:2004.05150), section 5 and appendix C: 64 rows of 4,096 (2^18 tokens), 65k steps, rate 3e-5
with 500 steps of warm-up, then a polynomial decay of power 3, RoBERTa's optimizer, starting from RoBERTa's weights with
repeated positions and with copies of its projections for global tokens. Expect a loss of 1.705 bits per masked token
(base; RoBERTa in rows of 512: 1.846), 1.358 (large; 1.496), table 5. Original hardware: unnamed. The paper has no
global token in pretraining; here each row's first token is one, so that their projections are trained (turn it off with
`--objective.globals 0`).

    python -m data_pipelines prepare --source SOURCE --tokenizer ROBERTA --out CORPUS
    python -m pretrain run longformer-base --corpus CORPUS --workdir RUN --init-from ROBERTA

ROBERTA is a Hugging Face folder, or a run's export; `--init-from` also takes the run. Rows are packed across documents:
shorter documents share a row and attend to each other, as in RoBERTa; longer ones are split.
"""

from models.families.longformer import FAMILY
from pretrain.objectives.masked_language_model import PACKED_ACROSS, MaskedLanguageModel
from pretrain.objectives.objective import Phase
from pretrain.optimizers import Optimizer
from pretrain.recipes.paper import MINUTES, Paper
from pretrain.schedules import Schedule

_OBJECTIVE = MaskedLanguageModel(layout=PACKED_ACROSS, next_sentence=False, globals=1)
_PAPER = Paper("longformer", "Beltagy et al. 2020", FAMILY, _OBJECTIVE, Optimizer(b2=0.98, clip=0.0))
_SCHEDULE = Schedule("polynomial", peak=3e-5, warmup=500 / 65_000, power=3.0)

RECIPES = [
    _PAPER.recipe("tiny", MINUTES, 3000, Phase(1.0, 512, 8)),  # from random weights
    *(_PAPER.recipe(size, _SCHEDULE, 65_000, Phase(1.0, 4096, 64)) for size in ("base", "large")),
]
