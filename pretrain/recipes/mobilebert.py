"""MobileBERT and its teacher IB-BERT: BERT's objective by thin layers, alone or layer by layer from the teacher.

Sun et al. 2020 (arXiv:2004.02984), section 4.1, and the authors' code: length 512, 500k steps of LAMB with rate 1.5e-3
after 10k steps of warm-up, batch 2048; IB-BERT with batch 4096, for which no rate is given. Original hardware: 256 TPU
v3 chips. Expect, learned from IB-BERT: GLUE 77.7, SQuAD 1.1 90.0 (F1; abstract).

Progressive knowledge transfer (sections 3.5 and 3.6): the student's embeddings and classifier begin as the teacher's;
then each layer in turn learns the hidden states and attention of the teacher's layer, while all others are frozen, 10k
steps each; at last the whole model learns masked tokens and the teacher's probabilities of them, half and half, and
next sentences. The teacher is IB-BERT, with as many layers.

    python -m pretrain run mobilebert-ib-bert --corpus CORPUS --workdir TEACHER
    python -m pretrain run mobilebert-progressive --teacher TEACHER --corpus CORPUS --workdir RUN
"""

import dataclasses

from models.families.mobilebert import FAMILY
from pretrain.objectives.distillation import Distillation
from pretrain.objectives.masked_language_model import MaskedLanguageModel
from pretrain.objectives.matching import Match
from pretrain.objectives.objective import Phase, Teacher
from pretrain.optimizers import Optimizer
from pretrain.recipe import Recipe
from pretrain.recipes.paper import MINUTES, Paper
from pretrain.schedules import Schedule

_PAPER = Paper("mobilebert", "Sun et al. 2020", FAMILY, MaskedLanguageModel(), Optimizer("lamb"))
_SCHEDULE, _STEPS, _EACH = Schedule(peak=1.5e-3, warmup=0.02), 500_000, 10_000
_PUBLISHED = Phase(1.0, 512, 2048)


def _progressive(name: str, size: str, teacher: str, each: int, last: int, whole: Phase, schedule: Schedule) -> Recipe:
    """Make the recipe of a student.   each: steps of a layer.   last: steps of the whole model.   whole: its phase."""
    model, phases = FAMILY.sizes[size], []
    steps = model.depth * each + last
    for layer in range(model.depth):
        pair = f"{layer + 1}:{layer + 1}"
        losses = Match("hidden", "mse", pair), Match("attention", "kl", pair)
        others = [f"layers[{first}:{end}]" for first, end in ((0, layer), (layer + 1, model.depth)) if first < end]
        objective = Distillation(losses=losses, own=0.0)
        fields = {"share": each / steps, "objective": objective, "frozen": ("embeddings", *others)}
        phases.append(dataclasses.replace(whole, **fields))
    objective = Distillation(losses=(Match(weight=0.5),), own=0.5, next_sentence=True)
    phases.append(dataclasses.replace(whole, share=last / steps, schedule=schedule))
    taught = (Teacher("teacher", "", FAMILY.sizes[teacher], copied="embeddings"),)
    of_layers = dataclasses.replace(schedule, name="constant", warmup=0.0)
    return _PAPER.recipe(name, of_layers, steps, *phases, model=model, objective=objective, teachers=taught)


RECIPES = [
    _PAPER.recipe("tiny", MINUTES, 3000, Phase(1.0, 128, 32), optimizer=Optimizer()),
    *(_PAPER.recipe(size, _SCHEDULE, _STEPS, _PUBLISHED) for size in ("small", "base")),
    _PAPER.recipe("ib-bert-tiny", MINUTES, 3000, Phase(1.0, 128, 32), optimizer=Optimizer()),
    _PAPER.recipe("ib-bert", _SCHEDULE, _STEPS, Phase(1.0, 512, 4096)),
    _progressive("progressive-tiny", "tiny", "ib-bert-tiny", 500, 3000, Phase(1.0, 128, 32), MINUTES),
    _progressive("progressive", "base", "ib-bert", _EACH, _STEPS, _PUBLISHED, _SCHEDULE),
]
