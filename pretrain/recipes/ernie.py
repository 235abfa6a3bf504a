"""ERNIE 1.0: BERT's training with masks of single tokens, then of whole phrases, then of whole entities.

Sun et al. 2019 (arXiv:1904.09223), section 4: a base model, 12 layers of width 768, for Chinese, on Wikipedia, Baidu's
encyclopedia, news and a forum. The paper gives no batch size, steps, rates or lengths of its stages: those here are
BERT's, in three equal stages, with BERT's next-sentence prediction.

    python -m data_pipelines prepare --source SOURCE --language zh --units phrase=forward:FILE entity=forward:FILE \
        --vocab-size 17964 --out CORPUS
    python -m pretrain run ernie-base --corpus CORPUS --workdir RUN

Dialogues, section 4.3: a task of the layout `dialogues`, see docs/families/ernie.md.
"""

from data_pipelines.examples.masking import TOKEN
from models.families.ernie import FAMILY
from pretrain.objectives.masked_language_model import MaskedUnits, UnitPhase
from pretrain.recipes.paper import MINUTES, Paper
from pretrain.schedules import Schedule

_PAPER = Paper("ernie", "Sun et al. 2019", FAMILY, MaskedUnits())


def _stages(length: int, rows: int) -> list[UnitPhase]:
    return [UnitPhase(1 / 3, length, rows, unit=unit) for unit in (TOKEN, "phrase_starts", "entity_starts")]


RECIPES = [
    _PAPER.recipe("tiny", MINUTES, 3000, *_stages(128, 32)),
    _PAPER.recipe("base", Schedule(peak=1e-4, warmup=0.01), 1_000_000, *_stages(512, 256)),
]
