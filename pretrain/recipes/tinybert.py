"""TinyBERT: a small BERT learns what each of its layers should compute from a layer of BERT-base.

Jiao et al. 2020 (arXiv:1909.10351), sections 3 and 4.2: students of 4 layers (width 312) and of 6 (768); layer i learns
from the teacher's layer g(i) = 3i or 2i its hidden states and attention scores, the embeddings from the embeddings, by
mean squared errors (equations 7 to 9); general distillation has no loss of predictions. Rows of 128 tokens, 3 epochs
of English Wikipedia; batch 256 and rate 1e-4 are BERT's, as the paper says, and the number of steps is BERT's too. Then
task distillation. Expect on the GLUE test set: 4 layers 77.0, 6 layers 79.4, BERT-base 79.5 (table 1).

    python -m pretrain run tinybert-4 --teacher BERT --corpus CORPUS --workdir RUN
"""

from models.families.bert import FAMILY, BertConfig
from pretrain.objectives.distillation import Distillation
from pretrain.objectives.matching import Match
from pretrain.objectives.objective import Phase, Teacher
from pretrain.recipes.paper import MINUTES, Paper
from pretrain.schedules import Schedule

_INSIDE = Match("embeddings", "mse"), Match("hidden", "mse"), Match("scores", "mse")
_TINYBERT = Paper("tinybert", "Jiao et al. 2020", FAMILY, Distillation(losses=_INSIDE, own=0.0))
_BASE = (Teacher("teacher", "", FAMILY.sizes["base"]),)
_MINI = (Teacher("teacher", "", FAMILY.sizes["mini"]),)
_SCHEDULE, _ROWS = Schedule(peak=1e-4, warmup=0.01), Phase(1.0, 128, 256)
_TWO = BertConfig(width=128, depth=2, heads=4, feed_forward=512)
_FOUR = BertConfig(width=312, depth=4, heads=12, feed_forward=1200)
_SIX = BertConfig(width=768, depth=6, heads=12, feed_forward=3072)

RECIPES = [
    _TINYBERT.recipe("tiny", MINUTES, 3000, Phase(1.0, 128, 32), model=_TWO, teachers=_MINI),
    _TINYBERT.recipe("4", _SCHEDULE, 1_000_000, _ROWS, model=_FOUR, teachers=_BASE),
    _TINYBERT.recipe("6", _SCHEDULE, 1_000_000, _ROWS, model=_SIX, teachers=_BASE),
]
