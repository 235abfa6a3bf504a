"""MiniLM: a small BERT of any width and depth learns the attention of its teacher's last layer.

Wang et al. 2020 (arXiv:2002.10957), sections 3 and 4.1: attention probabilities and relations of values, by KL, of the
last layer alone (equations 5 to 8). Batch 1,024, 400,000 steps, rate 5e-4, 4,000 steps of warm-up, linear decay, rows
of 512 tokens; the teacher is BERT-base. Expect on dev sets with 6 layers of width 768: MNLI 84.0, SST-2 92.0, SQuAD
2.0 76.4 (F1).

    python -m pretrain run minilm-6-384 --teacher BERT --corpus CORPUS --workdir RUN
"""

from models.families.bert import FAMILY, BertConfig
from pretrain.objectives.distillation import Distillation
from pretrain.objectives.matching import Match
from pretrain.objectives.objective import Phase, Teacher
from pretrain.recipes.paper import MINUTES, Paper
from pretrain.schedules import Schedule

_LAST = Match("attention", "kl", layers="top"), Match("values", "kl", layers="top")
_MINILM = Paper("minilm", "Wang et al. 2020", FAMILY, Distillation(losses=_LAST, own=0.0))
_BASE = (Teacher("teacher", "", FAMILY.sizes["base"]),)
_MINI = (Teacher("teacher", "", FAMILY.sizes["mini"]),)
_SCHEDULE, _ROWS = Schedule(peak=5e-4, warmup=0.01), Phase(1.0, 512, 1024)


def _student(depth: int, width: int, heads: int = 12) -> BertConfig:
    return BertConfig(width=width, depth=depth, heads=heads, feed_forward=4 * width)


RECIPES = [
    _MINILM.recipe("tiny", MINUTES, 3000, Phase(1.0, 128, 32), model=_student(2, 128, 4), teachers=_MINI),
    _MINILM.recipe("6-768", _SCHEDULE, 400_000, _ROWS, model=_student(6, 768), teachers=_BASE),
    _MINILM.recipe("6-384", _SCHEDULE, 400_000, _ROWS, model=_student(6, 384), teachers=_BASE),
    _MINILM.recipe("12-384", _SCHEDULE, 400_000, _ROWS, model=_student(12, 384), teachers=_BASE),
]
